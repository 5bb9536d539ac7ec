# SPDX-License-Identifier: Apache-2.0
"""A model without the mixin keeps upstream's manager; only its failures become eager runs."""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import towers
from stock import plant_graphs

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.models import qwen2_vl
from vllm.vit_cudagraph.capturing import CapturingManager
from vllm.vit_cudagraph.manager import EncoderGraphManager
from vllm.vit_cudagraph.stock_safety import EncoderCudaGraphManager, StockSafety

CPU = torch.device("cpu")
GRIDS = [[1, 4, 8], [1, 6, 4]]  # two items, as many as the graphs' slots: no empty sequence
BUDGETS = [16, 32]
Records = list[logging.LogRecord]
Execute = Callable[[Any, dict[str, Any]], list[torch.Tensor] | None]


class StockQwen2VL(qwen2_vl.Qwen2VLForConditionalGeneration):
    """Upstream's class; it fails where a test asks it to."""

    failure: Exception | None = None

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> Any:
        if self.failure is not None:
            raise self.failure
        return super().get_encoder_cudagraph_item_specs(mm_kwargs)

    def prepare_encoder_cudagraph_capture_inputs(self, *args: Any, **kwargs: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        return super().prepare_encoder_cudagraph_capture_inputs(*args, **kwargs)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    settings = {
        "cudagraph_mm_encoder": True,
        "encoder_cudagraph_token_budgets": BUDGETS,
        "encoder_cudagraph_max_vision_items_per_batch": 2,
        "encoder_cudagraph_max_frames_per_batch": 2,
    }
    return towers.make_config("qwen2_vl", compilation_config=settings)


@pytest.fixture(scope="module")
def built(config: VllmConfig) -> StockQwen2VL:
    return towers.build_model("qwen2_vl", config=config, model_class=StockQwen2VL)


@pytest.fixture
def model(built: StockQwen2VL) -> Iterator[StockQwen2VL]:
    yield built
    built.failure = None


def make_manager(
    config: VllmConfig,
    model: StockQwen2VL,
    kind: type[EncoderCudaGraphManager] = EncoderGraphManager,
    device: torch.device = CPU,
) -> Any:
    with set_current_vllm_config(config):
        return kind(config, device, torch.float32, model)


def batch(model: StockQwen2VL) -> dict[str, Any]:
    pixels = towers.random_pixels(model, GRIDS)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(GRIDS)}


def warnings(records: Records) -> list[str]:
    return [r.message for r in records if r.levelno >= logging.WARNING]


# -- service ---------------------------------------------------------------------------------------


def run(manager: EncoderCudaGraphManager, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    with torch.inference_mode():
        outputs = manager.execute(kwargs)
    assert outputs is not None
    return outputs


@pytest.mark.parametrize("kind", [EncoderCudaGraphManager, EncoderGraphManager])
def test_stock_graphs_go_on_running(
    config: VllmConfig,
    model: StockQwen2VL,
    vllm_log: Records,
    kind: type[EncoderCudaGraphManager],
) -> None:
    """Under our manager a captured stock model replays its graphs, as under upstream's."""
    manager = make_manager(config, model, kind)
    plant_graphs(manager)
    assert manager.is_captured()
    kwargs = batch(model)
    outputs = run(manager, kwargs)
    with torch.inference_mode():
        expected = model.embed_multimodal(**kwargs)
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (manager.graph_hits, manager.graph_misses) == (len(GRIDS), 0)
    assert manager.get_cumulative_stats()["graph_hits"] == len(GRIDS)
    assert warnings(vllm_log) == []
    manager.clear()
    assert not manager.is_captured()


SURVIVED = [
    RuntimeError("The size of tensor a must match the size of tensor b"),
    torch.OutOfMemoryError("CUDA out of memory"),
    AssertionError(),
    KeyError("image_grid_thw"),
]
executes = pytest.mark.parametrize(
    ("kind", "execute"),
    [
        pytest.param(StockSafety, StockSafety.execute_stock, id="execute_stock"),
        pytest.param(EncoderGraphManager, EncoderGraphManager.execute, id="execute"),
    ],
)


@executes
@pytest.mark.parametrize("error", SURVIVED, ids=lambda error: type(error).__name__)
def test_an_error_in_execute_gives_none_and_one_warning(
    config: VllmConfig,
    model: StockQwen2VL,
    vllm_log: Records,
    kind: type[EncoderCudaGraphManager],
    execute: Execute,
    error: Exception,
) -> None:
    manager = make_manager(config, model, kind)
    manager.graph_pool = object()  # as after `capture`
    model.failure = error
    for _ in range(3):
        assert execute(manager, batch(model)) is None
    (said,) = warnings(vllm_log)
    assert said == (
        "Encoder CUDA graphs (vLLM's own): a batch runs eagerly after "
        f"{type(error).__name__} ({error})"
    )


@executes
def test_each_kind_of_error_is_said_once(
    config: VllmConfig,
    model: StockQwen2VL,
    vllm_log: Records,
    kind: type[EncoderCudaGraphManager],
    execute: Execute,
) -> None:
    manager = make_manager(config, model, kind)
    manager.graph_pool = object()  # as after `capture`
    for error in (ValueError("one"), ValueError("two"), IndexError("one"), ValueError("three")):
        model.failure = error
        assert execute(manager, batch(model)) is None
    assert [said.rpartition("after ")[2] for said in warnings(vllm_log)] == [
        "ValueError (one)",
        "IndexError (one)",
    ]


@executes
def test_an_error_that_loses_the_context_is_passed_on_unchanged(
    config: VllmConfig,
    model: StockQwen2VL,
    vllm_log: Records,
    kind: type[EncoderCudaGraphManager],
    execute: Execute,
) -> None:
    manager = make_manager(config, model, kind)
    manager.graph_pool = object()  # as after `capture`
    model.failure = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as passed:
        execute(manager, batch(model))
    assert passed.value is model.failure
    assert warnings(vllm_log) == []


@executes
def test_under_tensor_parallelism_errors_are_upstreams(
    config: VllmConfig,
    model: StockQwen2VL,
    kind: type[EncoderCudaGraphManager],
    execute: Execute,
) -> None:
    """The other ranks may wait in a collective: going on alone would leave them there."""
    manager = make_manager(config, model, kind)
    manager.graph_pool = object()  # as after `capture`
    model.failure = ValueError("of one rank")
    with (
        mock.patch.object(get_tp_group(), "world_size", 2),
        pytest.raises(ValueError, match="of one rank") as passed,
    ):
        execute(manager, batch(model))
    assert passed.value is model.failure


# -- capture ---------------------------------------------------------------------------------------


def test_on_the_cpu_nothing_is_captured_and_that_is_said_once(
    config: VllmConfig, model: StockQwen2VL, vllm_log: Records
) -> None:
    """A worker on the CPU captures, and then asks for every batch: upstream's runner never asks
    whether anything was captured."""
    manager = make_manager(config, model)
    for _ in range(2):
        manager.capture(object())
        assert not manager.is_captured()
        assert not any(manager.budget_graphs.values())
        assert manager.execute(batch(model)) is None
        manager.clear()
    assert warnings(vllm_log) == [
        "Encoder CUDA graphs (vLLM's own): the CPU twin captures only models on "
        "WindowedViTCudaGraphMixin"
    ]


def test_a_graph_that_cannot_be_captured_is_left_out(
    config: VllmConfig, model: StockQwen2VL, vllm_log: Records
) -> None:
    """On a GPU; the failure here comes before the first CUDA call. Each budget is said once."""
    manager = make_manager(config, model, device=torch.device("cuda"))
    model.failure = RuntimeError("no room")
    for _ in range(2):
        manager.capture(object())
        assert not any(manager.budget_graphs.values())
    assert warnings(vllm_log) == [
        f"Encoder CUDA graphs (vLLM's own): the graph of {budget} tokens is left out (no room)"
        for budget in sorted(BUDGETS, reverse=True)
    ]
    # What was not captured runs eagerly, nothing worse.
    model.failure = None
    assert manager.execute(batch(model)) is None


@pytest.mark.parametrize(
    ("error", "ranks"),
    [
        (RuntimeError("CUDA error: unspecified launch failure"), 1),
        (RuntimeError("no room on one rank"), 2),
    ],
)
def test_what_cannot_be_survived_ends_capture(
    config: VllmConfig, model: StockQwen2VL, error: Exception, ranks: int
) -> None:
    manager = make_manager(config, model, device=torch.device("cuda"))
    model.failure = error
    parallel = (
        mock.patch.object(get_tp_group(), "world_size", ranks) if ranks > 1 else nullcontext()
    )
    with parallel, pytest.raises(RuntimeError) as passed:
        manager.capture(object())
    assert passed.value is error


# -- what our manager replaces ---------------------------------------------------------------------

ASKS_FOR_THE_MIXIN = {
    "__init__",
    "is_captured",
    "clear",
    "capture",
    "execute",
    "get_cumulative_stats",
}
"""Methods of upstream that our manager overrides and that hand stock models back to upstream's."""


def methods(of: type) -> set[str]:
    return {name for name, value in vars(of).items() if callable(value)}


def test_only_methods_that_ask_for_the_mixin_replace_upstreams() -> None:
    """A helper of ours that has the name of one of upstream's would serve stock models too."""
    upstreams = methods(EncoderCudaGraphManager)
    ours = methods(CapturingManager) | methods(EncoderGraphManager)
    assert ours & upstreams == ASKS_FOR_THE_MIXIN
    assert methods(StockSafety) & upstreams == {"_capture_budget_graph"}
