# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own encoder graphs do with the batches that this package is tested with.

The same comparison as everywhere here, graph output against ``embed_multimodal``, for upstream's
classes and upstream's manager. What works is an ordinary test. What fails is an expected failure
with the fault as its reason, and strict: when upstream mends it, the test fails as ``XPASS`` and
its mark can go. Each mark names the exception and its message, so that another failure in the same
place is not taken for the expected one.

Not shown here, because it takes several ranks, a GPU, or adapters: collectives inside a captured
forward, dynamic FP8 scales, kernels that return wrong values where the reference attention raises,
LoRA on the tower, speed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import managers
import numpy as np
import pytest
import stock
import torch
import towers
from hypothesis import Phase, given, settings

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.encoder_cudagraph import BudgetGraphMetadata
from vllm.vit_cudagraph.geometry import ViTGeometry, window_rows
from vllm.vit_cudagraph.graphs import GraphCaptureError
from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings, images, videos

QWEN2, QWEN2_5, QWEN3 = stock.FAMILIES
AUTOMATIC = GraphSettings(())


@dataclass(frozen=True)
class Fault:
    """A fault of vLLM's own graphs, and the exception by which it shows."""

    reason: str
    raises: Any

    @property
    def mark(self) -> pytest.MarkDecorator:
        return pytest.mark.xfail(strict=True, raises=self.raises, reason=self.reason)


def error(kind: type[Exception], match: str) -> Any:
    return pytest.RaisesExc(kind, match=match)


FRAMES_OVERFLOW = Fault(
    "packing counts tokens and items, never frames: more frames than cu_seqlens has slots, and "
    "the copy into it ends the engine",
    error(RuntimeError, r"size of tensor a \(\d+\) must match the size of tensor b \(\d+\)"),
)
ZERO_TAIL = Fault(
    "slots of cu_seqlens after the last offset are zeroed, so an offset decreases; a GPU kernel "
    "returns wrong values instead of an error",
    error(ValueError, r"cu_seqlens decreases from \d+ to 0"),
)
ROWS_ABOVE_BUDGET = Fault(
    "buffers are sized by a dummy grid of items x frames, which may hold far more rows than the "
    "budget: each replay computes them all",
    error(AssertionError, "rows beyond the budget"),
)
ROPE_OVERRUN = Fault(
    "the dummy grid is a strip as long as an item may be, longer than the table of rotary "
    "positions: the engine does not start",
    error(IndexError, r"out of bounds for dimension 0"),
)
SECTIONS_AS_ONE = Fault(
    "the two sections that FlashInfer reads from cu_seqlens are padded as one list",
    error(AssertionError, "sections are not what FlashInfer reads"),
)
FRAMES_OF_ONE = Fault(
    "frames of a video are worked out for 999 videos at once, the default limit: one frame each",
    error(AssertionError, "frames of one video"),
)
EMBEDS_AS_PIXELS = Fault(
    "precomputed embeddings are sent down the path for pixels", error(KeyError, "pixel_values")
)
BARE_ASSERTION = Fault(
    "a graph that was not captured ends in a bare assertion, which ends the engine",
    pytest.RaisesExc(AssertionError, check=lambda raised: str(raised) == ""),
)
UNGUARDED_CAPTURE = Fault(
    "graphs are planned where no batch can use them", error(AssertionError, "graphs are planned")
)
HOST_ATTENTION = Fault(
    "TORCH_SDPA reads offsets on the host, which no graph can; the capture is tried regardless",
    error(GraphCaptureError, "torch_sdpa_wrapper"),
)


def families(
    fault: Fault | None = None, failing: tuple[str, ...] = stock.FAMILIES
) -> pytest.MarkDecorator:
    """Parametrises by family, those in ``failing`` with the mark of ``fault``."""
    marks = dict.fromkeys(failing, fault.mark) if fault else {}
    return pytest.mark.parametrize(
        "family", [pytest.param(name, marks=marks.get(name, ())) for name in stock.FAMILIES]
    )


def test_what_is_driven_here_is_upstreams() -> None:
    assert stock.EncoderCudaGraphManager.__module__ == "vllm.v1.worker.encoder_cudagraph"
    for family in stock.FAMILIES:
        assert type(stock.model(family, None)) is stock.CLASSES[family]
        assert type(stock.model(family, None)).__module__ == f"vllm.model_executor.models.{family}"


# -- batches ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Settings, the limit on videos of a prompt, a batch, and what fails for which family."""

    batch: Batch
    settings: GraphSettings = AUTOMATIC
    videos: int | None = None
    faults: Mapping[str, Fault] = field(default_factory=dict)


def image(*grids: tuple[int, int, int]) -> Batch:
    return Batch("image", grids, seed=3)


def video(*grids: tuple[int, int, int]) -> Batch:
    return Batch("video", grids, seed=3)


PHOTOS = image((1, 16, 16), (1, 8, 24), (1, 2, 2))
OVERFLOWS = dict.fromkeys(stock.FAMILIES, FRAMES_OVERFLOW)
ZEROES = {QWEN2: ZERO_TAIL, QWEN3: ZERO_TAIL}

CASES = {
    # Frames are not counted when a batch is packed.
    "a clip longer than the slots": Case(video((17, 2, 4)), faults=OVERFLOWS),
    "clips that fit one by one but not together": Case(video(*[(9, 4, 4)] * 2), faults=OVERFLOWS),
    "a clip above the user's limit on frames": Case(
        video((6, 4, 4)), GraphSettings((64,), items=2, frames=4), faults=OVERFLOWS
    ),
    "a clip where the user's limit on frames is 0": Case(
        video((3, 4, 4)), GraphSettings((64,), items=2, frames=0), faults=OVERFLOWS
    ),
    "a clip that takes every slot": Case(video((16, 2, 4))),
    "clips within the slots of a video limit": Case(video(*[(8, 8, 8)] * 3), videos=1),
    # More slots than a replay fills.
    "images under a video limit": Case(PHOTOS, videos=1, faults=ZEROES),
    "an image beside slots for frames": Case(
        image((1, 8, 8)), GraphSettings((64,), items=2, frames=16), faults=ZEROES
    ),
    "a clip where frames are fewer than items": Case(
        video((2, 4, 4)), GraphSettings((64,), items=8, frames=4), faults=ZEROES
    ),
    "images alone": Case(PHOTOS, videos=0),
    "images without a video limit": Case(PHOTOS),
    # Lengths baked at capture.
    "one item fills the budget": Case(image((1, 16, 16)), GraphSettings((64,), items=4), videos=0),
    "whole windows": Case(image(*[(1, 8, 8)] * 4), GraphSettings((64,), items=4), videos=0),
    # Sizes from the dummy grid.
    "a strip fills the budget": Case(image((1, 2, 128)), GraphSettings((64,), items=4), videos=0),
    "strips with the most windows": Case(
        image((1, 34, 2), (1, 26, 2), (1, 34, 2), (1, 2, 34)),
        GraphSettings((64,), items=4),
        videos=0,
    ),
    "a budget that items do not divide": Case(
        image((1, 2, 134)), GraphSettings((67,), items=8), videos=0
    ),
    "a dummy grid of many frames": Case(
        video((4, 4, 4)), GraphSettings((64,), items=1, frames=1024)
    ),
    # Rows past the end are unwritten: NaN stands in all memory that the graph owns.
    "one token, NaN in every other row": Case(
        image((1, 2, 2)), GraphSettings((64,), items=4), videos=0
    ),
    # What runs eagerly is finished as what is replayed.
    "an item above every budget among others": Case(
        image((1, 4, 4), (1, 30, 30), (1, 6, 4)), GraphSettings((16, 64), items=4), videos=0
    ),
    "order out is order in": Case(
        image((1, 12, 12), (1, 2, 2), (1, 8, 8), (1, 4, 4), (1, 2, 6)),
        GraphSettings((16, 64), items=4),
        videos=0,
    ),
}


def _cases() -> list[Any]:
    params = []
    for name, case in CASES.items():
        for family in stock.FAMILIES:
            fault = case.faults.get(family)
            marks = fault.mark if fault else ()
            params.append(pytest.param(family, case, id=f"{family}-{name}", marks=marks))
    return params


@pytest.mark.parametrize(("family", "case"), _cases())
def test_case(family: str, case: Case) -> None:
    manager = stock.manager_of(family, case.settings, case.videos)
    stock.check(manager, case.batch, replayed=family not in case.faults)


@families()
def test_outputs_outlive_later_replays(family: str) -> None:
    manager = stock.manager_of(family, GraphSettings((64,), items=4), 0)
    kwargs = managers.batch(manager.model, [(1, 8, 8), (1, 4, 12)], seed=1)
    with torch.inference_mode():
        first = manager.execute(kwargs)
        bits = [out.clone() for out in first]
        manager.execute(managers.batch(manager.model, [(1, 6, 6), (1, 2, 2)], seed=2))
        # Before the repeat, which would write the same bits again.
        assert all(torch.equal(out, kept) for out, kept in zip(first, bits, strict=True))
        again = manager.execute(kwargs)
    assert all(torch.equal(out, kept) for out, kept in zip(again, bits, strict=True))


# -- drawn batches ---------------------------------------------------------------------------------

# The same batches in every run and under every profile, so that an expected failure is found each
# time; it is not shrunk, because it is known.
SAME_EACH_TIME = settings(
    max_examples=25, derandomize=True, database=None, deadline=None, report_multiple_bugs=False
)
KNOWN = settings(SAME_EACH_TIME, phases=(Phase.explicit, Phase.generate))


# Of Qwen2.5-VL. All three families take the same grids, and shapes near a window do no harm.
GEOMETRY = ViTGeometry(
    patch_size=14,
    merge_size=2,
    window_side=4,
    rows=window_rows("window_index", "reverse_indices"),
)


@dataclass(frozen=True)
class Property:
    """Batches of one modality under a limit on videos, with automatic budgets and limits."""

    modality: str
    videos: int | None
    faults: Mapping[str, Fault] = field(default_factory=dict)

    @property
    def batches(self) -> Any:
        if self.modality == "image":
            return images(GEOMETRY, most_items=8, most_tokens=200)
        return videos(GEOMETRY, most_items=4, most_tokens=300, frames=24)


PROPERTIES = {
    "images, no videos": Property("image", 0),
    "images, any number of videos": Property("image", None),
    "images, one video": Property("image", 1, ZEROES),
    "videos, any number of videos": Property("video", None, OVERFLOWS),
    "videos, one video": Property("video", 1, OVERFLOWS),
}


def _properties() -> list[Any]:
    params = []
    for name, drawn in PROPERTIES.items():
        for family in stock.FAMILIES:
            fault = drawn.faults.get(family)
            marks = fault.mark if fault else ()
            params.append(pytest.param(family, drawn, id=f"{family}-{name}", marks=marks))
    return params


@pytest.mark.parametrize(("family", "drawn"), _properties())
def test_drawn_batches(family: str, drawn: Property) -> None:
    manager = stock.manager_of(family, AUTOMATIC, drawn.videos)

    @given(batch=drawn.batches)
    @(KNOWN if family in drawn.faults else SAME_EACH_TIME)
    def graph_equals_eager(batch: Batch) -> None:
        stock.check(manager, batch, replayed=family not in drawn.faults)

    graph_equals_eager()


# -- sizes and limits ------------------------------------------------------------------------------

SIZES = {
    "images alone": (AUTOMATIC, 0, None),
    "any number of videos": (AUTOMATIC, None, None),
    "one video": (AUTOMATIC, 1, None),
    "more frames than tokens": (GraphSettings((), frames=96), 1, ROWS_ABOVE_BUDGET),
    "many frames": (GraphSettings((64,), items=1, frames=1024), None, ROWS_ABOVE_BUDGET),
    "items that do not divide": (GraphSettings((65,), items=64), 0, ROWS_ABOVE_BUDGET),
}


@pytest.mark.parametrize("family", stock.FAMILIES)
@pytest.mark.parametrize(
    ("limits", "most_videos"),
    [
        pytest.param(limits, most_videos, id=name, marks=fault.mark if fault else ())
        for name, (limits, most_videos, fault) in SIZES.items()
    ],
)
def test_a_graph_computes_no_more_rows_than_its_budget(
    family: str, limits: GraphSettings, most_videos: int | None
) -> None:
    manager = _uncaptured(family, limits, most_videos)
    for budget in manager.token_budgets:
        assert _rows(manager, budget) <= 4 * budget, "rows beyond the budget"


@pytest.mark.parametrize("frames", [0, 3, 4, 7, 16])
@pytest.mark.parametrize("items", [1, 3, 8])
@families()
def test_a_graph_has_the_rows_of_its_budget(family: str, items: int, frames: int) -> None:
    manager = _uncaptured(family, GraphSettings((64, 67), items=items, frames=frames), 1)
    for budget in manager.token_budgets:
        assert _rows(manager, budget) >= 4 * budget


@families(ROPE_OVERRUN)
def test_a_large_budget_for_a_single_item(family: str) -> None:
    budget = 4200
    manager = _uncaptured(family, GraphSettings((budget,), items=1), 0)
    assert _rows(manager, budget) >= 4 * budget


def test_a_budget_at_the_end_of_the_rotary_table() -> None:
    """Half as long a strip fits: what fails above is the length, nothing else of so large a
    budget."""
    manager = _uncaptured(QWEN2, GraphSettings((4200,), items=2), 0)
    assert _rows(manager, 4200) == 4 * 4200


@families(FRAMES_OF_ONE)
def test_frames_of_a_video_without_a_limit(family: str) -> None:
    alone = stock.model(family, 1).get_encoder_cudagraph_config().max_frames_per_video
    assert alone > 1
    unlimited = stock.model(family, None).get_encoder_cudagraph_config().max_frames_per_video
    assert unlimited == alone, "fewer than the frames of one video"


def _uncaptured(family: str, limits: GraphSettings, most_videos: int | None) -> Any:
    served, base = stock.model(family, most_videos), stock.config(family, most_videos)
    return stock.make_manager(served, base, limits, capture=False)


def _rows(manager: Any, budget: int) -> int:
    """Pixel rows of the graph of ``budget`` tokens."""
    slots = (manager.max_batch_size, manager.max_frames_per_batch)
    inputs = manager.model.prepare_encoder_cudagraph_capture_inputs(
        budget, *slots, stock.CPU, torch.float32
    )
    return len(inputs.values["pixel_values"])


# -- FlashInfer ------------------------------------------------------------------------------------

# Qwen2-VL's tower hands no single lengths to attention, so it cannot run on FlashInfer at all.
FLASHINFER_FAMILIES = [QWEN2_5, pytest.param(QWEN3, marks=SECTIONS_AS_ONE.mark)]


@pytest.mark.parametrize("family", FLASHINFER_FAMILIES)
def test_sections_of_flashinfer(family: str) -> None:
    """No kernel runs: only what stands in the buffer when one would read it."""
    grids = ((1, 4, 8), (1, 8, 8), (1, 2, 6))
    offsets = _offsets_at_replay(family, GraphSettings((64,), items=4, frames=32), image(*grids))
    assert len(offsets) % 2 == 0
    slots = len(offsets) // 2
    width = stock.model(family, None).visual.hidden_size
    exact = np.cumsum([0, *(h * w for _, h, w in grids)]) * width
    section = np.append(exact, np.full(slots - len(exact), exact[-1]))
    wanted = [*section.tolist(), *(3 * section).tolist()]
    assert offsets == wanted, "the sections are not what FlashInfer reads"


def _offsets_at_replay(family: str, limits: GraphSettings, batch: Batch) -> list[int]:
    """``cu_seqlens`` as upstream's manager leaves it for the graph of the only budget."""
    served, (budget,) = stock.model(family, None), limits.budgets
    with managers.backend(served, AttentionBackendEnum.FLASHINFER):
        manager = _uncaptured(family, limits, None)
        slots = (manager.max_batch_size, manager.max_frames_per_batch)
        values = served.prepare_encoder_cudagraph_capture_inputs(
            budget, *slots, stock.CPU, torch.float32
        ).values
        graph: Any = SimpleNamespace(replay=lambda: None)
        manager._get_graph_set()[budget] = BudgetGraphMetadata(
            budget, *slots, graph, values, torch.empty(0)
        )
        kwargs = managers.batch(served, batch.grids, batch.modality)
        assert manager._run_budget_graph(kwargs, budget) is not None
    return values["cu_seqlens"].tolist()


# -- guards ----------------------------------------------------------------------------------------

ONE_GRAPH = GraphSettings((16,), items=2)


@families(EMBEDS_AS_PIXELS)
def test_precomputed_embeddings(family: str) -> None:
    manager = stock.manager_of(family, ONE_GRAPH, 0)
    rows = torch.randn(16, stock.model(family, 0).get_encoder_cudagraph_config().out_hidden_size)
    kwargs = {"image_embeds": rows, "image_grid_thw": torch.tensor([[1, 8, 8]])}
    (expected,) = managers.eager(manager.model, kwargs)
    assert torch.equal(expected, rows)
    stock.right_or_declined(manager, kwargs)


@families(BARE_ASSERTION)
def test_nothing_was_captured(family: str) -> None:
    """As where the decoder's cudagraph_mode is NONE: a manager is made, and never captures."""
    manager = _uncaptured(family, ONE_GRAPH, 0)
    stock.right_or_declined(manager, managers.batch(manager.model, [(1, 8, 8)]))


@families(BARE_ASSERTION)
def test_a_budget_that_was_not_captured(family: str) -> None:
    limits = GraphSettings((16, 64), items=2)
    manager = stock.make_manager(stock.model(family, 0), stock.config(family, 0), limits)
    del manager._get_graph_set()[16]
    stock.check(manager, image((1, 8, 12)))  # has another graph
    stock.right_or_declined(manager, managers.batch(manager.model, [(1, 8, 8)]))


@families(HOST_ATTENTION)
def test_attention_that_reads_on_the_host(family: str) -> None:
    base = towers.make_config(family, **stock.engine_settings(0))
    served = towers.build_model(family, config=base, model_class=stock.CLASSES[family], flash=False)
    assert served.visual.attn_backend == AttentionBackendEnum.TORCH_SDPA
    manager = stock.make_manager(served, base, ONE_GRAPH)
    stock.right_or_declined(manager, managers.batch(served, [(1, 8, 8)]))


PRUNING_FAMILIES = [QWEN2_5, QWEN3]  # Qwen2-VL has no pruning


@pytest.fixture(scope="module")
def pruned() -> dict[str, Any]:
    """Uncaptured managers of models with video pruning on."""
    made = {}
    for family in PRUNING_FAMILIES:
        base = towers.make_config(family, **stock.engine_settings(None), video_pruning_rate=0.5)
        served = towers.build_model(family, config=base, model_class=stock.CLASSES[family])
        made[family] = stock.make_manager(served, base, ONE_GRAPH, capture=False)
    return made


@pytest.mark.parametrize("family", PRUNING_FAMILIES)
def test_with_pruning_no_batch_reaches_the_graphs(family: str, pruned: dict[str, Any]) -> None:
    assert pruned[family].model.is_multimodal_pruning_enabled
    assert not pruned[family].supports_modality("image")
    assert not pruned[family].supports_modality("video")


@UNGUARDED_CAPTURE.mark
@pytest.mark.parametrize("family", PRUNING_FAMILIES)
def test_with_pruning_nothing_is_captured(family: str, pruned: dict[str, Any]) -> None:
    assert pruned[family].get_num_graphs_to_capture() == 0, "graphs are planned, none is used"


@families(UNGUARDED_CAPTURE)
def test_a_pipeline_rank_that_never_encodes_captures_nothing(family: str) -> None:
    stock.model(family, 0)  # makes the process group
    with _not_the_first_rank():
        manager = _uncaptured(family, ONE_GRAPH, 0)
        assert manager.get_num_graphs_to_capture() == 0, "graphs are planned, none is used"


@contextmanager
def _not_the_first_rank() -> Iterator[None]:
    group = get_pp_group()
    with mock.patch.object(group, "ranks", [group.rank + 1, group.rank]):
        assert not group.is_first_rank
        yield


# -- controls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pixel_values", "rotary_pos_emb_cos", "cu_seqlens"])
@families()
def test_the_comparison_notices_a_buffer_that_stays(family: str, name: str) -> None:
    """Without this, the passing tests above might compare nothing."""
    manager = stock.manager_of(family, GraphSettings((64,), items=2), 0)
    stock.check(manager, image((1, 8, 8), (1, 4, 12)))
    fresh = manager.model.prepare_encoder_cudagraph_replay_buffers

    def stale(*args: Any, **kwargs: Any) -> Any:
        buffers = fresh(*args, **kwargs)
        buffers.values[name] = None  # leaves the buffer as it is
        return buffers

    staying = mock.patch.object(manager.model, "prepare_encoder_cudagraph_replay_buffers", stale)
    with staying, pytest.raises(AssertionError, match="not close"):
        stock.check(manager, image((1, 4, 20), (1, 6, 10)))


@pytest.mark.parametrize("family", ZEROES)
def test_repeating_the_last_offset_is_all_that_images_miss(family: str) -> None:
    """The expected failure has the reason that it states, and would be noticed to pass."""

    def repeat(buffer: torch.Tensor, offsets: torch.Tensor) -> None:
        buffer.fill_(offsets[-1])
        buffer[: len(offsets)] = offsets

    case = CASES["an image beside slots for frames"]
    manager = stock.manager_of(family, case.settings, case.videos)
    with mock.patch.object(manager.config, "padding_logics", {"cu_seqlens": repeat}):
        stock.check(manager, case.batch)
