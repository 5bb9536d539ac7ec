# SPDX-License-Identifier: Apache-2.0
"""The window-attention regression of vLLM issue 15122, on real photographs.

Window layers of Qwen2.5-VL were given the full layers' lengths. A photograph of a single window
came out right, because there both are the same, and only large ones were misread. Here photographs
go through graphs and are held against two references: upstream's eager ``embed_multimodal``, and
transformers' tower with the same weights, which shares no code with vLLM's. A large photograph is
also followed layer by layer. Negative controls plant the fault, and its signature must show.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import hf_tower
import managers
import pytest
import torch
from hf_tower import twins

from vllm.vit_cudagraph.geometry import Rows, offset_rows
from vllm.vit_cudagraph.manager import EncoderGraphManager
from vllm.vit_cudagraph.testing.photos import panning_frames, photo

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
WINDOWED = "qwen2_5_vl"

BUDGETS = (64, 800)
LARGE_BUDGET = BUDGETS[-1]

# Of the reference's largest value. In float32 outputs and hidden states of the towers differ by at
# most 2e-6 of it (sums in another order). One patch of 2,500 that attends in its neighbour's window
# moves the output by 8e-4, 80 times the tolerance: see `test_the_tolerance_is_tight`.
TOLERANCE = 1e-5

# name -> photograph and its size in pixels; a merged token of Qwen2.5-VL is 28 x 28 pixels, a
# window is 4 x 4 tokens.
PHOTOGRAPHS: dict[str, tuple[str, tuple[int, int] | None]] = {
    "single window": ("coffee", (112, 112)),
    "small": ("chelsea", (224, 168)),
    "strip": ("rocket", (1120, 56)),
    "large": ("retina", None),  # 25 x 25 tokens: the last windows of a row are one token wide
    "large, whole windows": ("hubble", (672, 448)),
}

BATCHES = {
    "large photograph": ("large",),
    "large photograph of whole windows": ("large, whole windows",),
    "photographs of different shapes": ("single window", "strip", "large", "small"),
}


@cache
def manager(family: str) -> EncoderGraphManager:
    return new_manager(family, BUDGETS)


def new_manager(family: str, budgets: Sequence[int]) -> EncoderGraphManager:
    """A manager over the model that carries the checkpoint's weights."""
    both = twins(family)
    return managers.make_manager(family, budgets=budgets, of=both.model, base=both.config)


# -- references --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one way through a tower gave: an embedding [T, width] an item, and the hidden states
    [N, C] of all items after each block, in window order where there are windows."""

    outputs: list[torch.Tensor]
    layers: list[torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """Some photographs, or one video, with both references."""

    modality: str
    kwargs: dict[str, Any]
    items: int
    eager: Run
    oracle: Run


@cache
def photographs(family: str, *names: str) -> Batch:
    return referenced(family, "image", [photo(*PHOTOGRAPHS[name]) for name in names])


def referenced(family: str, modality: str, data: Sequence[Any]) -> Batch:
    both = twins(family)
    kwargs = both.runner_kwargs(modality, data)
    assert kwargs[hf_tower.PIXELS[modality]].dtype == torch.uint8
    with hf_tower.block_outputs(both.model.visual) as layers:
        eager = Run(managers.eager(both.model, kwargs), layers)
    with hf_tower.block_outputs(both.tower) as layers:
        oracle = Run(both.oracle(modality, data), layers)
    return Batch(modality, kwargs, len(data), eager, oracle)


def replay(graphs: EncoderGraphManager, batch: Batch) -> list[torch.Tensor]:
    """Outputs of a batch of which every item went through a graph."""
    replayed, eager = graphs.statistics.replayed, graphs.statistics.eager.total()
    outputs = managers.run(graphs, batch.kwargs)
    assert graphs.statistics.replayed == replayed + batch.items
    assert graphs.statistics.eager.total() == eager
    return outputs


def replay_and_look(graphs: EncoderGraphManager, batch: Batch) -> Run:
    """One replay, and the hidden states of the batch's own rows in the padded buffers it read.

    A graph shows nothing of its inside. So the tower is run once more on the tensors that the graph
    has just read, and its output must be the graph's, bit for bit.
    """
    model, captured = graphs.model, graphs.captured[LARGE_BUDGET]
    replays = graphs.statistics.replays[LARGE_BUDGET]
    outputs = replay(graphs, batch)
    assert graphs.statistics.replays[LARGE_BUDGET] == replays + 1
    with torch.inference_mode(), hf_tower.block_outputs(model.visual) as layers:
        again = model.encoder_cudagraph_forward(dict(captured.buffers))
    rows = len(batch.kwargs[hf_tower.PIXELS[batch.modality]])
    assert all(len(layer) == captured.capacity.patches > rows for layer in layers)
    # NaN stands where a planted fault leaves rows unwritten.
    ours = again[: rows // model.vit_declared.merge_unit]
    torch.testing.assert_close(ours, torch.cat(outputs), rtol=0, atol=0, equal_nan=True)
    return Run(outputs, [layer[:rows] for layer in layers])


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest value; NaN, which no comparison passes, where rows were
    not written."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def assert_close(
    what: str, actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    errors = [error(*pair) for pair in zip(actual, expected, strict=True)]
    assert all(e <= TOLERANCE for e in errors), f"{what}: errors are {errors}"


def check(outputs: Sequence[torch.Tensor], batch: Batch) -> None:
    """Graph output equals both references, item by item."""
    assert len(outputs) == batch.items
    assert_close("graph against eager", outputs, batch.eager.outputs)
    assert_close("graph against transformers", outputs, batch.oracle.outputs)


@pytest.mark.parametrize("shapes", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_photographs(family: str, shapes: str) -> None:
    batch = photographs(family, *BATCHES[shapes])
    assert_close("eager against transformers", batch.eager.outputs, batch.oracle.outputs)
    check(replay(manager(family), batch), batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_video(family: str) -> None:
    batch = referenced(family, "video", [panning_frames("motorcycle", num_frames=8)])
    assert batch.kwargs["video_grid_thw"][0, 0] > 1
    assert_close("eager against transformers", batch.eager.outputs, batch.oracle.outputs)
    check(replay(manager(family), batch), batch)


# -- layer by layer ----------------------------------------------------------------------------


def layer_names() -> list[str]:
    tower = twins(WINDOWED).model.visual
    full = set(tower.fullatt_block_indexes)
    return [f"{'full' if i in full else 'window'} layer {i}" for i in range(len(tower.blocks))]


@pytest.mark.parametrize("shapes", BATCHES)
def test_every_layer(shapes: str) -> None:
    """Window layers and full layers each equal those of both references."""
    names = layer_names()
    assert {name.split()[0] for name in names} == {"window", "full"}
    batch = photographs(WINDOWED, *BATCHES[shapes])
    graph = replay_and_look(manager(WINDOWED), batch)
    layers = zip(names, graph.layers, batch.eager.layers, batch.oracle.layers, strict=True)
    for name, ours, eager, oracle in layers:
        assert_close(f"{name}, eager against transformers", [eager], [oracle])
        assert_close(f"{name}, graph against eager", [ours], [eager])
        assert_close(f"{name}, graph against transformers", [ours], [oracle])


# -- negative controls -------------------------------------------------------------------------

WINDOW_TENSORS = ("cu_window_seqlens", "max_seqlen_window", "sequence_lengths_window")
FULL_TENSORS = ("cu_seqlens", "max_seqlen_full", "sequence_lengths_full")


@contextmanager
def declared(model: Any, **rows: Rows) -> Iterator[None]:
    """While open the model declares some of its tensors otherwise, which captures bake in."""
    right = model.vit_declared
    wrong = replace(right, rows={**right.rows, **rows})
    with mock.patch.dict(vars(model), vit_declared=wrong):
        vars(model).pop("_vit_builder", None)  # it holds the geometry; made anew when asked for
        yield


@contextmanager
def metadata(model: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """While open some of the metadata that replays load is another."""
    exact = model.vit_metadata

    def changed(grids: Any, device: torch.device) -> dict[str, Any]:
        built = exact(grids, device)
        return {**built, **change(built)}

    with mock.patch.object(model, "vit_metadata", changed):
        yield


# name -> (the fault, the kind of layer that goes wrong)
FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "window layers have the full layers' offsets and lengths": (
        lambda model: declared(model, **offset_rows("sequences", *WINDOW_TENSORS)),
        "window",
    ),
    "window layers have the full layers' offsets": (
        lambda model: metadata(model, lambda built: {"cu_window_seqlens": built["cu_seqlens"]}),
        "window",
    ),
    "full layers have the window layers' offsets and lengths": (
        lambda model: declared(model, **offset_rows("windows", *FULL_TENSORS)),
        "full",
    ),
    "full layers have the window layers' longest length": (
        lambda model: declared(
            model, max_seqlen_full=Rows("longest", "longest", covers="cu_window_seqlens")
        ),
        "full",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_catches(fault: str) -> None:
    """With the fault planted, large photographs are misread from the first layer of the kind on,
    and a photograph of a single window is not: what made the regression so hard to see."""
    plant, kind = FAULTS[fault]
    first = [name.split()[0] for name in layer_names()].index(kind)
    single = photographs(WINDOWED, "single window")
    with plant(twins(WINDOWED).model):
        faulty = new_manager(WINDOWED, [LARGE_BUDGET])
        check(replay_and_look(faulty, single).outputs, single)
        for name in ("large", "large, whole windows"):
            large = photographs(WINDOWED, name)
            graph = replay_and_look(faulty, large)
            for reference in (large.eager, large.oracle):
                with pytest.raises(AssertionError, match=name):
                    assert_close(name, graph.outputs, reference.outputs)
                pairs = zip(graph.layers, reference.layers, strict=True)
                right = [error(*pair) <= TOLERANCE for pair in pairs]
                assert right == [i < first for i in range(len(right))]


def test_transformers_catches_it_in_eager() -> None:
    """The regression as it was, in upstream's own eager metadata: only transformers can tell."""
    model = twins(WINDOWED).model
    exact = model.visual.prepare_encoder_metadata

    def faulty(*args: Any, **kwargs: Any) -> dict[str, Any]:
        built = exact(*args, **kwargs)
        return {**built, **{w: built[f] for w, f in zip(WINDOW_TENSORS, FULL_TENSORS, strict=True)}}

    with mock.patch.object(model.visual, "prepare_encoder_metadata", faulty):
        for name, right in (("single window", True), ("large", False)):
            batch = photographs(WINDOWED, name)
            (ours,) = managers.eager(model, batch.kwargs)
            assert (error(ours, batch.oracle.outputs[0]) <= TOLERANCE) == right, name


def test_the_tolerance_is_tight() -> None:
    """One patch of 2,500 in its neighbour's window, and the comparison fails by far."""

    def shifted(built: dict[str, Any]) -> dict[str, Any]:
        offsets = built["cu_window_seqlens"].clone()
        offsets[-2] -= 1
        return {"cu_window_seqlens": offsets}

    large = photographs(WINDOWED, "large")
    with metadata(twins(WINDOWED).model, shifted):
        (ours,) = replay(manager(WINDOWED), large)
    assert error(ours, large.oracle.outputs[0]) > 30 * TOLERANCE
