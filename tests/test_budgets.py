# SPDX-License-Identifier: Apache-2.0
"""vLLM's encoder settings, each alone and together, as they reach capture and upstream."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig
from vllm.vit_cudagraph.budgets import Settings
from vllm.vit_cudagraph.geometry import Limits
from vllm.vit_cudagraph.ladder import token_ladder
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin
from vllm.vit_cudagraph.stock_safety import EncoderCudaGraphManager
from vllm.vit_cudagraph.testing.profiles import examples


class Model:
    """As much of a model as settings ask for; the range of budgets is the mixin's own."""

    get_encoder_cudagraph_budget_range = (
        WindowedViTCudaGraphMixin.get_encoder_cudagraph_budget_range
    )

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=["image", "video"],
            buffer_keys=["pixel_values"],
            out_hidden_size=8,
            max_frames_per_video=2048,
        )


def make_config(
    budgets: list[int] | None = None,
    items: int = 0,
    frames: int | None = None,
    *,
    videos: int = 999,
    batched_tokens: int = 8192,
    max_model_len: int = 32768,
) -> Any:
    """The parts of a ``VllmConfig`` that settings are read from; vLLM's own defaults."""
    limits = {"image": 999, "video": videos}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            encoder_cudagraph_token_budgets=budgets or [],
            encoder_cudagraph_max_vision_items_per_batch=items,
            encoder_cudagraph_max_frames_per_batch=frames,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=batched_tokens),
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            multimodal_config=SimpleNamespace(
                get_limit_per_prompt=limits.__getitem__, mm_encoder_tp_mode="weights"
            ),
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def settings_of(*given_: Any, **more: Any) -> Settings:
    return Settings.of(make_config(*given_, **more), Model())


LADDER = tuple(token_ladder(64, 8192))


@pytest.mark.parametrize(
    ("user", "budgets", "limits"),
    [
        ({}, LADDER, Limits(items=128)),
        ({"budgets": [100, 200]}, (100, 200), Limits(items=3)),
        ({"items": 7}, LADDER, Limits(items=7)),
        ({"frames": 12}, LADDER, Limits(items=128, frames=12)),
        ({"budgets": [100, 200], "items": 7}, (100, 200), Limits(items=7)),
        ({"budgets": [100], "frames": 12}, (100,), Limits(items=1, frames=12)),
        ({"items": 7, "frames": 12}, LADDER, Limits(items=7, frames=12)),
        ({"budgets": [9, 30], "items": 7, "frames": 12}, (9, 30), Limits(items=7, frames=12)),
        # Frames that the user sets to none are not the same as frames left open.
        ({"frames": 0}, LADDER, Limits(items=128, frames=0)),
        # Not sorted, given twice.
        ({"budgets": [512, 64, 128]}, (64, 128, 512), Limits(items=8)),
        ({"budgets": [64, 64, 64]}, (64,), Limits(items=1)),
        ({"budgets": [300, 7, 300, 7]}, (7, 300), Limits(items=4)),
        # Budgets that the item limit does not divide, and an item limit above a budget.
        ({"budgets": [100, 333], "items": 7}, (100, 333), Limits(items=7)),
        ({"budgets": [2, 333], "items": 50}, (2, 333), Limits(items=50)),
        ({"budgets": [1], "items": 1}, (1,), Limits(items=1)),
        # A user's budget may exceed what one step schedules: it stands.
        ({"budgets": [100_000]}, (100_000,), Limits(items=1562)),
    ],
)
def test_users_settings_stand(
    user: dict[str, Any], budgets: tuple[int, ...], limits: Limits
) -> None:
    assert settings_of(**user) == Settings(budgets, limits)


@pytest.mark.parametrize("frames", [None, 0, 12])
def test_without_videos_no_frames_are_held(frames: int | None) -> None:
    """A prompt that may hold no video makes any limit on frames moot."""
    assert settings_of(frames=frames, videos=0).limits == Limits(items=128, frames=0)


@pytest.mark.parametrize(
    ("batched", "length", "budgets", "items"),
    [
        (2048, 32768, tuple(token_ladder(64, 2048)), 32),
        (32768, 2048, tuple(token_ladder(64, 2048)), 32),
        (5000, 32768, tuple(token_ladder(64, 5000)), 78),
        (65, 32768, (64, 65), 1),
        (64, 32768, (64,), 1),
        (63, 32768, (63,), 1),
        (8192, 40, (40,), 1),
        (1, 32768, (1,), 1),
    ],
)
def test_inferred_budgets_reach_what_a_step_schedules(
    batched: int, length: int, budgets: tuple[int, ...], items: int
) -> None:
    found = settings_of(batched_tokens=batched, max_model_len=length)
    assert found == Settings(budgets, Limits(items=items))


@pytest.mark.parametrize(
    ("user", "text"),
    [
        ({}, "one frame for 8 tokens"),
        ({"frames": 12}, "at most 12 video frames"),
        ({"frames": 0}, "at most 0 video frames"),
        ({"videos": 0}, "at most 0 video frames"),
    ],
)
def test_frames_as_the_log_says_them(user: dict[str, Any], text: str) -> None:
    assert settings_of(**user).frames_text == text


# vLLM itself refuses other values when it reads its configuration.
any_user = st.fixed_dictionaries(
    {
        "budgets": st.lists(st.integers(1, 9000), max_size=5),
        "items": st.sampled_from([0, 0, 1]) | st.integers(1, 500),
        "frames": st.none() | st.integers(0, 600),
        "videos": st.sampled_from([0, 1, 999]),
        "batched_tokens": st.integers(1, 20000),
        "max_model_len": st.integers(1, 40000),
    }
)


@given(any_user)
@pytest.mark.fuzz
@examples(150)
def test_any_settings_make_sense(user: dict[str, Any]) -> None:
    found = settings_of(**user)
    budgets, limits = found.token_budgets, found.limits
    assert budgets and list(budgets) == sorted(set(budgets)) and budgets[0] >= 1
    assert found.given == bool(user["budgets"])
    assert not found.given or set(budgets) == set(user["budgets"])
    assert limits.items >= 1
    assert not user["items"] or limits.items == user["items"]
    assert limits.frames == (0 if user["videos"] == 0 else user["frames"])


@given(any_user)
@pytest.mark.fuzz
@examples(150)
def test_upstream_accepts_what_it_is_shown(user: dict[str, Any]) -> None:
    """Upstream's manager refuses an item limit above the smallest budget, ours takes it; and the
    configuration that the rest of vLLM sees stays as the user wrote it."""
    config = make_config(**user)
    before = copy.deepcopy(vars(config.compilation_config))
    model = Model()
    found = Settings.of(config, model)
    shown = found.acceptable_upstream(config)
    upstream = EncoderCudaGraphManager(shown, torch.device("cpu"), torch.float32, model)
    assert upstream.token_budgets == list(found.token_budgets)
    assert 1 <= upstream.max_batch_size <= found.limits.items
    assert vars(config.compilation_config) == before
    assert shown.model_config is config.model_config


def test_upstream_alone_refuses_such_an_item_limit() -> None:
    """What the line above is there for."""
    config = make_config([2, 333], 50)
    with pytest.raises(ValueError, match="must be <= smallest token budget"):
        EncoderCudaGraphManager(config, torch.device("cpu"), torch.float32, Model())
