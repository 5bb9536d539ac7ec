# SPDX-License-Identifier: Apache-2.0
"""What is said where the model runner will not even make a manager."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import towers

from vllm.config import CUDAGraphMode
from vllm.vit_cudagraph import mixin
from vllm.vit_cudagraph.eligibility import runner_refusal


def settings(
    asked: bool = True, device: str = "cuda", mode: Any = CUDAGraphMode.NONE, v2: bool = False
) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mm_encoder=asked, cudagraph_mode=mode),
        device_config=SimpleNamespace(device_type=device),
        use_v2_model_runner=v2,
    )


def test_v1_without_graphs_makes_no_manager_and_the_reason_names_what_works() -> None:
    refusal = str(runner_refusal(settings()))
    assert "cudagraph_mode=FULL_DECODE_ONLY" in refusal
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in refusal


@pytest.mark.parametrize(
    "other",
    [
        {"asked": False},
        {"device": "cpu"},  # there the twin's worker makes the manager
        {"mode": CUDAGraphMode.FULL_DECODE_ONLY},
        {"v2": True},
    ],
)
def test_otherwise_nothing_is_said(other: dict[str, Any]) -> None:
    assert runner_refusal(settings(**other)) is None


def test_it_is_said_once_where_the_model_is_built(request: pytest.FixtureRequest) -> None:
    config = towers.make_config("qwen2_vl")  # drops the handlers of loggers
    vllm_log = request.getfixturevalue("vllm_log")
    with mock.patch.object(mixin, "runner_refusal", side_effect=lambda given: f"{given is config}"):
        towers.build_model("qwen2_vl", config=config)
    said = [r.message for r in vllm_log if r.message.startswith("Encoder CUDA graphs are off")]
    assert said == ["Encoder CUDA graphs are off: True"]
