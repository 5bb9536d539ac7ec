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
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import hf_tower
import managers
import pytest
import torch
from hf_tower import Twins, twins

from vllm.vit_cudagraph.geometry import Rows, offset_rows
from vllm.vit_cudagraph.manager import EncoderGraphManager
from vllm.vit_cudagraph.testing.photos import panning_frames, photo

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
WINDOWED = "qwen2_5_vl"

BUDGETS = (64, 800)
LARGE_BUDGET = BUDGETS[-1]

# Of the largest value of the reference. The two float32 towers differ by 1e-6 of it (sums in
# another order), so ten times that is allowed; the mildest fault that windows can have, one patch
# of 2,500 attending in its neighbour's window, moves the output by MEASURED, see
# `test_the_tolerance_is_tight`.
TOLERANCE = 1e-5

# name -> photograph and its size in pixels; merged tokens are 28 x 28 pixels (32 x 32 for
# Qwen3-VL), a window is 4 x 4 of them.
PHOTOGRAPHS: dict[str, tuple[str, tuple[int, int] | None]] = {
    "single window": ("coffee", (112, 112)),
    "small": ("chelsea", (224, 168)),
    "strip": ("rocket", (1120, 56)),
    "large": ("retina", None),  # 25 x 25 tokens: the last windows of a row are one token wide
    "large, whole windows": ("hubble", (896, 448)),  # 32 x 16 tokens
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


def pictures(*names: str) -> list[Any]:
    return [photo(*PHOTOGRAPHS[name]) for name in names]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest value; NaN, which no comparison passes, where rows were
    not written."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def assert_close(
    what: str, actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    assert len(actual) == len(expected), what
    errors = [error(*pair) for pair in zip(actual, expected, strict=True)]
    assert all(e <= TOLERANCE for e in errors), f"{what}: errors of {errors} an item"


def replay(graphs: EncoderGraphManager, kwargs: dict[str, Any], items: int) -> list[torch.Tensor]:
    """Outputs of a batch of which every item went through a graph."""
    replayed, eager = graphs.statistics.replayed, graphs.statistics.eager.total()
    outputs = managers.run(graphs, kwargs)
    assert graphs.statistics.replayed == replayed + items
    assert graphs.statistics.eager.total() == eager
    return outputs


def check(graphs: EncoderGraphManager, both: Twins, modality: str, data: Sequence[Any]) -> None:
    """Graph output equals both references, and so do they each other."""
    kwargs = both.runner_kwargs(modality, data)
    assert kwargs[hf_tower.PIXELS[modality]].dtype == torch.uint8
    outputs = replay(graphs, kwargs, len(data))
    eager, oracle = managers.eager(both.model, kwargs), both.oracle(modality, data)
    assert_close("eager against transformers", eager, oracle)
    assert_close("graph against eager", outputs, eager)
    assert_close("graph against transformers", outputs, oracle)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_photographs(family: str, batch: str) -> None:
    check(manager(family), twins(family), "image", pictures(*BATCHES[batch]))


@pytest.mark.parametrize("family", FAMILIES)
def test_video(family: str) -> None:
    check(manager(family), twins(family), "video", [panning_frames("motorcycle", num_frames=8)])


# -- layer by layer ----------------------------------------------------------------------------


def layer_names(tower: Any) -> list[str]:
    full = set(tower.fullatt_block_indexes)
    return [f"{'full' if i in full else 'window'} layer {i}" for i in range(len(tower.blocks))]


def eager_layers(both: Twins, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Hidden states [N, C] after each block of upstream's eager run."""
    with hf_tower.block_outputs(both.model.visual) as states:
        managers.eager(both.model, kwargs)
    return states


def oracle_layers(both: Twins, data: Sequence[Any]) -> list[torch.Tensor]:
    """The same of transformers, whose tower too keeps its rows in window order."""
    with hf_tower.block_outputs(both.tower) as states:
        both.oracle("image", data)
    return states


def graph_layers(
    graphs: EncoderGraphManager, both: Twins, kwargs: dict[str, Any], items: int
) -> list[torch.Tensor]:
    """Hidden states of a batch's own rows after each block, in the padded buffers of its graph.

    A graph shows nothing of its inside. So the tower is run once more on the tensors that the graph
    has just read, and its output must be the graph's, bit for bit.
    """
    rows, captured = len(kwargs["pixel_values"]), graphs.captured[LARGE_BUDGET]
    replays = graphs.statistics.replays[LARGE_BUDGET]
    replay(graphs, kwargs, items)
    assert graphs.statistics.replays[LARGE_BUDGET] == replays + 1
    with torch.inference_mode(), hf_tower.block_outputs(both.model.visual) as states:
        output = both.model.encoder_cudagraph_forward(dict(captured.buffers))
    tokens = rows // both.model.vit_declared.merge_unit
    ours, replayed = output[:tokens], captured.output[:tokens]
    torch.testing.assert_close(ours, replayed, rtol=0, atol=0, equal_nan=True)
    assert all(len(state) == captured.capacity.patches > rows for state in states)
    return [state[:rows] for state in states]


@pytest.mark.parametrize("batch", BATCHES)
def test_every_layer(batch: str) -> None:
    """Window layers and full layers each equal those of both references."""
    both, data = twins(WINDOWED), pictures(*BATCHES[batch])
    kwargs = both.runner_kwargs("image", data)
    names = layer_names(both.model.visual)
    assert {name.split()[0] for name in names} == {"window", "full"}
    graph = graph_layers(manager(WINDOWED), both, kwargs, len(data))
    eager, oracle = eager_layers(both, kwargs), oracle_layers(both, data)
    assert len(graph) == len(eager) == len(oracle) == len(names)
    for name, ours, upstream, theirs in zip(names, graph, eager, oracle, strict=True):
        assert_close(f"{name}: eager against transformers", [upstream], [theirs])
        assert_close(f"{name}: graph against eager", [ours], [upstream])
        assert_close(f"{name}: graph against transformers", [ours], [theirs])


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
    both = twins(WINDOWED)
    with plant(both.model):
        faulty = new_manager(WINDOWED, [LARGE_BUDGET])
        check(faulty, both, "image", pictures("single window"))
        for name in ("large", "large, whole windows"):
            data = pictures(name)
            kwargs = both.runner_kwargs("image", data)
            outputs = replay(faulty, kwargs, 1)
            for reference in (managers.eager(both.model, kwargs), both.oracle("image", data)):
                with pytest.raises(AssertionError, match="planted"):
                    assert_close("planted", outputs, reference)
            ours, theirs = graph_layers(faulty, both, kwargs, 1), oracle_layers(both, data)
            errors = [error(*pair) for pair in zip(ours, theirs, strict=True)]
            wrong = [not e <= TOLERANCE for e in errors]
            first = [name.startswith(kind) for name in layer_names(both.model.visual)].index(True)
            assert wrong == [i >= first for i in range(len(wrong))], errors
    check(manager(WINDOWED), both, "image", pictures("large"))  # nothing of the fault stays


def test_transformers_catches_it_in_eager() -> None:
    """The regression as it was, in upstream's own eager metadata: only transformers can tell."""
    both = twins(WINDOWED)
    exact = both.model.visual.prepare_encoder_metadata

    def faulty(*args: Any, **kwargs: Any) -> dict[str, Any]:
        built = exact(*args, **kwargs)
        return {**built, **{w: built[f] for w, f in zip(WINDOW_TENSORS, FULL_TENSORS, strict=True)}}

    with mock.patch.object(both.model.visual, "prepare_encoder_metadata", faulty):
        for name, right in (("single window", True), ("large", False)):
            data = pictures(name)
            eager = managers.eager(both.model, both.runner_kwargs("image", data))
            (ours,), (theirs,) = eager, both.oracle("image", data)
            assert (error(ours, theirs) <= TOLERANCE) == right, name


def test_the_tolerance_is_tight() -> None:
    """One patch of 2,500 in its neighbour's window, and the comparison fails by far."""
    both, data = twins(WINDOWED), pictures("large")
    kwargs = both.runner_kwargs("image", data)

    def shifted(built: dict[str, Any]) -> dict[str, Any]:
        offsets = built["cu_window_seqlens"].clone()
        offsets[-2] -= 1
        return {"cu_window_seqlens": offsets}

    with metadata(both.model, shifted):
        (ours,) = replay(manager(WINDOWED), kwargs, 1)
    (theirs,) = both.oracle("image", data)
    print("tight", error(ours, theirs))
    assert error(ours, theirs) > 100 * TOLERANCE
