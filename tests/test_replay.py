# SPDX-License-Identifier: Apache-2.0
"""Graph output equals eager output, whatever the grids: batches of images and videos, captured and
replayed on the CPU twin, against upstream's own ``embed_multimodal``."""

from typing import Any
from unittest import mock

import managers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.vit_cudagraph.manager import EncoderGraphManager

EXAMPLES = 40
_MANAGERS: dict[str, EncoderGraphManager] = {}


def shared(family: str) -> EncoderGraphManager:
    """One manager for all examples of a family, so that they follow each other in its buffers."""
    if family not in _MANAGERS:
        _MANAGERS[family] = managers.make_manager(family, budgets=[16, 64, 150, 400])
    return _MANAGERS[family]


def poison(manager: EncoderGraphManager) -> None:
    """NaN in every output and in what a graph owns, the largest number in unused pixel rows."""
    for captured in manager.captured.values():
        captured.output.fill_(float("nan"))
        for owned in captured.graph.pool_tensors():
            if owned.is_floating_point():
                owned.fill_(float("nan"))
        pixels = captured.buffers["pixel_values"]
        pixels.fill_(255 if pixels.dtype == torch.uint8 else 1e4)


def check(manager: EncoderGraphManager, grids: managers.Grids, modality: str, seed: int) -> None:
    """One batch: replayed where it fits, equal to eager, and every item accounted for."""
    model = manager.model
    kwargs = managers.batch(model, grids, modality, seed)
    replayed, eager_items = manager.statistics.replayed, manager.statistics.eager.total()
    with torch.inference_mode():
        poison(manager)
    outputs = managers.run(manager, kwargs)
    managers.assert_same(outputs, managers.eager(model, kwargs))
    largest = manager.captured[max(manager.captured)].capacity
    fits = [largest.holds(1, model.vit_declared.usage(tuple(grid))) for grid in grids]
    assert manager.statistics.replayed - replayed == sum(fits)
    assert manager.statistics.eager.total() - eager_items == len(fits) - sum(fits)


@pytest.mark.parametrize("family", managers.FAMILIES)
@given(grids=st.lists(managers.grids_of(), min_size=1, max_size=8), seed=st.integers(0, 2**16))
@settings(max_examples=EXAMPLES)
def test_images(family: str, grids: list[list[int]], seed: int) -> None:
    check(shared(family), grids, "image", seed)


@pytest.mark.parametrize("family", managers.FAMILIES)
@given(
    grids=st.lists(managers.grids_of(side=8, frames=6), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=EXAMPLES)
def test_videos(family: str, grids: list[list[int]], seed: int) -> None:
    check(shared(family), grids, "video", seed)


EDGES = {
    "one merged token": [[1, 2, 2]],
    "many smallest items": [[1, 2, 2]] * 40,
    "one item fills the budget": [[1, 40, 40]],
    "one row over every budget": [[1, 2, 802]],
    "a strip that reaches the window bound": [[1, 2, 800]],
    "a strip the other way": [[1, 800, 2]],
    "divisible by the window": [[1, 16, 24], [1, 8, 8]],
    "not divisible by the window": [[1, 18, 26], [1, 10, 6]],
    "single windows": [[1, 8, 8]] * 5,
    "two partitions of one total, first": [[1, 8, 8], [1, 16, 16]],
    "two partitions of one total, second": [[1, 4, 16], [1, 8, 32]],
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("family", managers.FAMILIES)
def test_edges(family: str, name: str) -> None:
    check(shared(family), EDGES[name], "image", seed=7)


@pytest.mark.parametrize("family", managers.FAMILIES)
def test_long_and_tiny_videos(family: str) -> None:
    """Frames of one token: far more sequences than the default slots of the small budgets."""
    check(shared(family), [[60, 2, 2]], "video", seed=1)
    check(shared(family), [[48, 2, 4], [2, 8, 8]], "video", seed=2)
    check(shared(family), [[300, 2, 2]], "video", seed=3)


@pytest.mark.parametrize("family", managers.FAMILIES)
def test_outputs_outlive_later_replays(family: str) -> None:
    """What was handed out stays, bit for bit, through later batches; a repeat gives the same."""
    manager = shared(family)
    kwargs = managers.batch(manager.model, [[1, 8, 8], [1, 4, 20]], seed=1)
    first = managers.run(manager, kwargs)
    kept = [out.clone() for out in first]
    for grids in ([[1, 2, 2]], [[1, 8, 8], [1, 4, 20]], [[1, 36, 36]]):
        managers.run(manager, managers.batch(manager.model, grids, seed=2))
    again = managers.run(manager, kwargs)
    for out, bits, repeat in zip(first, kept, again, strict=True):
        assert torch.equal(out, bits) and torch.equal(repeat, bits)


@pytest.mark.parametrize("family", managers.FAMILIES)
def test_order_out_is_order_in(family: str) -> None:
    manager = shared(family)
    grids = [[1, 30, 30], [1, 2, 2], [1, 20, 8], [1, 4, 4], [1, 36, 36], [1, 2, 6]]
    kwargs = managers.batch(manager.model, grids, seed=5)
    tokens = [manager.model.vit_declared.output_tokens(tuple(grid)) for grid in grids]
    outputs = managers.run(manager, kwargs)
    assert [len(out) for out in outputs] == tokens
    managers.assert_same(outputs, managers.eager(manager.model, kwargs))


SABOTAGE = {
    "stale offsets": "cu_seqlens",
    "stale window offsets": "cu_window_seqlens",
    "stale positions": "rotary_pos_emb_cos",
    "stale window order": "window_index",
    "stale learned positions": "pos_embeds",
    "stale pixels": "pixel_values",
}


@pytest.mark.parametrize("fault", SABOTAGE)
def test_the_comparison_catches(fault: str) -> None:
    """Negative control: one buffer that is not refreshed, and the comparison must fail."""
    family = "qwen3_vl" if SABOTAGE[fault] == "pos_embeds" else "qwen2_5_vl"
    manager = managers.make_manager(family, budgets=[64])
    check(manager, [[1, 8, 8], [1, 4, 12]], "image", 1)
    (captured,) = manager.captured.values()
    load = captured.load

    def stale(values: Any, padding: Any) -> None:
        kept = captured.buffers[SABOTAGE[fault]].clone()
        load(values, padding)
        captured.buffers[SABOTAGE[fault]].copy_(kept)

    with mock.patch.object(captured, "load", stale), pytest.raises(AssertionError):
        check(manager, [[1, 4, 20], [1, 6, 10]], "image", 2)


def test_a_dropped_row_is_caught() -> None:
    """The tolerance is tight: the last patch of one item left out of attention breaks it."""
    manager = managers.make_manager("qwen2_vl", budgets=[64])
    with manager_offsets_shortened(manager), pytest.raises(AssertionError):
        check(manager, [[1, 8, 8], [1, 12, 12]], "image", 3)


def manager_offsets_shortened(manager: EncoderGraphManager) -> Any:
    builder = manager.model._vit_builder
    exact = builder._offsets

    def shortened(row: Any, grids: Any) -> Any:
        offsets = exact(row, grids)
        offsets[-1] -= 1
        return offsets

    return mock.patch.object(builder, "_offsets", shortened)
