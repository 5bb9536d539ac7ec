# SPDX-License-Identifier: Apache-2.0
"""What the strategies draw is what they promise, reaches every kind, and shrinks to what can be
read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl import image_processing_qwen2_vl

from vllm.vit_cudagraph.geometry import (
    Capacity,
    Grid,
    Limits,
    NotCapturable,
    Usage,
    ViTGeometry,
    offset_rows,
    window_rows,
)
from vllm.vit_cudagraph.testing import strategies
from vllm.vit_cudagraph.testing.edges import edges, named_edges
from vllm.vit_cudagraph.testing.strategies import (
    Batch,
    GraphSettings,
    batches,
    graph_settings,
    grids,
    images,
    processed_grids,
    same_totals,
    videos,
    vision_configs,
)

_SEQUENCES = offset_rows("sequences", "cu_seqlens", "max_seqlen")
_WINDOWS = _SEQUENCES | window_rows("order", "inverse") | offset_rows("windows", "cu_w", "max_w")

GEOMETRIES = {
    "qwen2.5": ViTGeometry(14, 2, _WINDOWS, temporal_patch_size=2, window_side=4),
    "no windows": ViTGeometry(14, 2, _SEQUENCES, temporal_patch_size=2),
    "merge 3, side 1": ViTGeometry(8, 3, _WINDOWS, window_side=1),
    "item": ViTGeometry(14, 2, _SEQUENCES, sequences="item", modalities=("image",)),
    "item, windows": ViTGeometry(14, 1, _WINDOWS, window_side=3, sequences="item"),
    "halve": ViTGeometry(14, 2, _SEQUENCES, temporal_merge="halve", output_rows="patches"),
    "pairs": ViTGeometry(
        14, 2, _SEQUENCES, temporal_merge="halve", frame_step=2, output_rows="patches"
    ),
    "pool": ViTGeometry(14, 2, _SEQUENCES, sequences="item", temporal_merge="pool"),
    "videos only": ViTGeometry(14, 2, _SEQUENCES, modalities=("video",)),
    "another modality": ViTGeometry(14, 2, _SEQUENCES, modalities=("vision_chunk",)),
}
QWEN = GEOMETRIES["qwen2.5"]
BUDGETS_AND_LIMITS = {
    "few items": ((64, 16), Limits(items=5)),
    "few frames": ((13, 60), Limits(items=2, frames=2)),
    "one item": ((1, 2, 7), Limits(items=1)),
    "many items": ((12, 30), Limits(items=64)),
    "one token a frame": ((9, 32), Limits(items=3, tokens_per_sequence=1)),
}

every_geometry = pytest.mark.parametrize("name", GEOMETRIES)
every_limit = pytest.mark.parametrize("limits", BUDGETS_AND_LIMITS)
FIXED = settings(derandomize=True, database=None, deadline=None)


def capacities_of(geometry: ViTGeometry, limits: str) -> list[Capacity]:
    budgets, given_limits = BUDGETS_AND_LIMITS[limits]
    return [geometry.capacity(budget, given_limits) for budget in budgets]


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """``count`` examples or so, the same ones in each run."""
    kept: list[Any] = []

    @settings(FIXED, max_examples=count, phases=[Phase.generate])
    @given(strategy)
    def keep(value: Any) -> None:
        kept.append(value)

    keep()
    return kept


def simplest(strategy: st.SearchStrategy[Any], wanted: Callable[[Any], bool]) -> Any:
    return find(strategy, wanted, settings=settings(FIXED, max_examples=2000))


def tokens(geometry: ViTGeometry, grid: Grid) -> int:
    """Merged tokens of all frames, before any are merged."""
    return grid[0] * geometry.frame_tokens(grid)


# -- grids -----------------------------------------------------------------------------------------


@every_geometry
@pytest.mark.parametrize("most_tokens", [1, 2, 17, 120])
@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("strategy", [grids, processed_grids])
def test_grids_are_valid_and_within_limits(
    strategy: Any, frames: int, most_tokens: int, name: str
) -> None:
    geometry = GEOMETRIES[name]
    for grid in drawn(strategy(geometry, most_tokens=most_tokens, frames=frames), 30):
        geometry.check_grid(grid)
        assert type(grid) is tuple
        assert grid[0] <= frames
        assert tokens(geometry, grid) <= most_tokens


@pytest.mark.parametrize("wrong", [(1, 3, 2), (0, 2, 2), (2, 2)])
def test_an_invalid_grid_would_be_noticed(wrong: Any) -> None:
    with pytest.raises(NotCapturable):
        QWEN.check_grid(wrong)


@pytest.mark.parametrize("limits", [{"most_tokens": 0}, {"frames": 0}])
@pytest.mark.parametrize("strategy", [grids, processed_grids, videos])
def test_a_limit_that_allows_nothing_is_refused(strategy: Any, limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(limits))}=0 .* set it to 1 or more"):
        strategy(QWEN, **limits)


SHAPES: dict[str, Callable[[int, int], bool]] = {
    "the single merged token": lambda rows, cols: rows == cols == 1,
    "a wide strip": lambda rows, cols: rows == 1 and cols > 30,
    "a tall strip": lambda rows, cols: cols == 1 and rows > 30,
    "a square": lambda rows, cols: rows == cols > 4,
    "a rectangle": lambda rows, cols: min(rows, cols) > 4 and rows != cols,
    "whole windows": lambda rows, cols: rows % 4 == cols % 4 == 0,
    "one past whole windows": lambda rows, cols: rows % 4 == cols % 4 == 1 and rows > 1 < cols,
    "one short of whole windows": lambda rows, cols: rows % 4 == cols % 4 == 3,
    "the most tokens": lambda rows, cols: rows * cols == 120,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_shape_is_drawn(shape: str) -> None:
    found = simplest(grids(QWEN), lambda grid: SHAPES[shape](grid[1] // 2, grid[2] // 2))
    assert found[0] == 1


def test_strips_and_whole_windows_are_drawn_more_often_than_by_chance() -> None:
    seen = [(h // 2, w // 2) for _, h, w in drawn(grids(QWEN), 600)]
    # Without kinds of their own these were 24 and 29 of 600.
    assert sum(min(shape) == 1 and max(shape) > 30 for shape in seen) > 32
    assert sum(rows % 4 == cols % 4 == 0 for rows, cols in seen) > 38


@pytest.mark.parametrize("past", [-1, 0, 1])
def test_sides_near_windows(past: int) -> None:
    near = strategies._on_windows(4, past)
    for length in range(1, 30):
        side, _ = near(length, 1)
        assert length - 4 < side <= length
        assert side == length < 4 or side % 4 == past % 4


# -- processed grids -------------------------------------------------------------------------------


def real_grid(height: int, width: int, most_tokens: int) -> Grid:
    """What the real image processor makes of a picture of so many pixels."""
    processor = image_processing_qwen2_vl.Qwen2VLImageProcessor(
        patch_size=14,
        merge_size=2,
        size={"shortest_edge": 28**2, "longest_edge": most_tokens * 28**2},
    )
    picture = torch.zeros(3, height, width, dtype=torch.uint8)
    t, h, w = processor(images=[picture], return_tensors="pt")["image_grid_thw"][0].tolist()
    return t, h, w


@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (224, 224), (300, 451), (640, 480), (20, 1400), (1330, 12)]
)
def test_sizes_in_pixels_become_the_real_processors_grids(height: int, width: int) -> None:
    resize = image_processing_qwen2_vl.smart_resize
    rows, cols = strategies._processed_shape(resize, height, width, 28, 120)
    assert (1, 2 * rows, 2 * cols) == real_grid(height, width, most_tokens=120)


def test_processed_grids_are_the_real_processors() -> None:
    """For the size in pixels that each drawn grid was made from."""
    calls: list[tuple[int, int, int]] = []
    resize = image_processing_qwen2_vl.smart_resize

    def recorded(height: int, width: int, **limits: int) -> tuple[int, int]:
        calls.append((height, width, limits["max_pixels"] // 28**2))
        return resize(height, width, **limits)

    made: dict[tuple[int, int, int], Grid] = {}
    with mock.patch.object(image_processing_qwen2_vl, "smart_resize", recorded):
        strategy = processed_grids(QWEN)
    for_each = strategy.map(lambda grid: made.setdefault(calls[-1], grid))
    drawn(for_each, 150)
    small = {size: grid for size, grid in made.items() if size[0] * size[1] < 400_000}
    assert len(small) > 30
    assert any(max(size) / min(size) > 50 for size in small)
    for size, grid in small.items():
        assert real_grid(*size) == grid


@pytest.mark.parametrize("most_tokens", [30, 120])
def test_aspect_ratios_reach_what_is_accepted_and_never_pass_it(most_tokens: int) -> None:
    """Also for strips that pass the processor's own limit, which has to come down for them."""
    ratios: list[float] = []
    large: list[bool] = []
    resize = image_processing_qwen2_vl.smart_resize

    def recorded(height: int, width: int, **limits: int) -> tuple[int, int]:
        ratios.append(width / height)
        large.append(min(height, width) > 28)
        return resize(height, width, **limits)

    with mock.patch.object(image_processing_qwen2_vl, "smart_resize", recorded):
        strategy = processed_grids(QWEN, most_tokens=most_tokens)
    of_grids = drawn(strategy.map(lambda grid: ratios[-1] if large[-1] else 1), 800)
    assert 150 < max(of_grids) <= max(ratios) <= 200
    assert 1 / 200 <= min(ratios) <= min(of_grids) < 1 / 150
    with pytest.raises(ValueError, match="aspect ratio"):
        resize(1, 201)


# -- batches ---------------------------------------------------------------------------------------


@every_geometry
def test_batches_are_of_the_modalities_and_within_limits(name: str) -> None:
    geometry = GEOMETRIES[name]
    limits = {"most_items": 3, "most_tokens": 20, "most_videos": 2, "most_video_tokens": 30}
    seen = drawn(batches(geometry, frames=4, **limits), 150)
    assert {batch.modality for batch in seen} == set(geometry.modalities)
    for batch in seen:
        video = batch.modality == "video"
        assert 1 <= len(batch.grids) <= (2 if video else 3)
        for grid in batch.grids:
            geometry.check_grid(grid)
            assert grid[0] <= (4 if video else 1)
            assert tokens(geometry, grid) <= (30 if video else 20)
    for modality in geometry.modalities:
        of_one = [batch for batch in seen if batch.modality == modality]
        assert max(len(batch.grids) for batch in of_one) == (2 if modality == "video" else 3)


@pytest.mark.parametrize(
    ("strategy", "name"), [(images, "videos only"), (videos, "item"), (images, "another modality")]
)
def test_a_modality_that_the_model_has_not_is_refused(strategy: Any, name: str) -> None:
    with pytest.raises(ValueError, match="not one of the geometry's modalities"):
        strategy(GEOMETRIES[name])


@every_geometry
def test_same_totals(name: str) -> None:
    geometry = GEOMETRIES[name]
    numbers = set()
    for first, second in drawn(same_totals(geometry, most_items=3, most_tokens=12), 60):
        totals = {sum(tokens(geometry, grid) for grid in batch.grids) for batch in (first, second)}
        assert len(totals) == 1 and max(totals) <= 12
        assert first.grids != second.grids
        assert first.modality == second.modality in geometry.modalities
        numbers |= {len(first.grids), len(second.grids)}
    assert numbers == {1, 2, 3}
    with pytest.raises(ValueError, match="set it to 2 or more"):
        same_totals(geometry, most_tokens=1)


def test_a_batch_reads_as_code() -> None:
    batch = Batch("image", [[1, 4, 6], [1, 2, 2]], seed=3)  # type: ignore[arg-type]
    assert repr(batch) == "Batch('image', [(1, 4, 6), (1, 2, 2)], seed=3)"
    assert batch == Batch("image", ((1, 4, 6), (1, 2, 2)), 3)
    assert len({batch, eval(repr(batch))}) == 1
    many = Batch("video", ((2, 2, 2),) * 40)
    assert repr(many) == "Batch('video', [(2, 2, 2)] * 40, seed=0)"
    assert eval(repr(many)) == many


# -- edges -----------------------------------------------------------------------------------------

Check = Callable[[ViTGeometry, Capacity, Batch], bool]


def total(geometry: ViTGeometry, grids: Iterable[Grid]) -> Usage:
    uses = [geometry.usage(grid) for grid in grids]
    names = ("patches", "tokens", "sequences", "windows", "frames")
    return Usage(**{name: sum(getattr(use, name) for use in uses) for name in names})


def fits(geometry: ViTGeometry, capacity: Capacity, batch: Batch) -> bool:
    """Whether one step can hold the whole batch."""
    return capacity.holds(len(batch.grids), total(geometry, batch.grids))


def each_fits(geometry: ViTGeometry, capacity: Capacity, batch: Batch) -> list[bool]:
    return [capacity.holds(1, geometry.usage(grid)) for grid in batch.grids]


def only_too_many(geometry: ViTGeometry, capacity: Capacity, batch: Batch, **room: int) -> bool:
    """Whether the batch fits with so much more room, and not as it is."""
    larger = replace(capacity, **{name: getattr(capacity, name) + n for name, n in room.items()})
    return not fits(geometry, capacity, batch) and fits(geometry, larger, batch)


def shapes(geometry: ViTGeometry, batch: Batch) -> list[tuple[int, int]]:
    merge = geometry.merge_size
    return [(h // merge, w // merge) for _, h, w in batch.grids]


def fills(g: ViTGeometry, c: Capacity, b: Batch) -> bool:
    return fits(g, c, b) and total(g, b.grids).tokens == c.budget


def is_strip(g: ViTGeometry, b: Batch) -> bool:
    return len(b.grids) == 1 and min(shapes(g, b)[0]) == 1


def has_most_windows(g: ViTGeometry, c: Capacity, b: Batch) -> bool:
    return fits(g, c, b) and total(g, b.grids).windows == c.windows


def frame_slots(g: ViTGeometry, c: Capacity) -> int:
    """Most video frames of a step: of the sequence slots and the user's limit the lower one."""
    limits = (c.frames, c.sequences if g.sequences == "frame" else None)
    return min(limit for limit in limits if limit is not None)


def fills_slots(g: ViTGeometry, c: Capacity, b: Batch) -> bool:
    """As many frames as there are slots, in whole multiples."""
    frames, slots = total(g, b.grids).frames, frame_slots(g, c)
    return b.modality == "video" and fits(g, c, b) and slots - g.frame_step < frames <= slots


def above_slots(g: ViTGeometry, c: Capacity, b: Batch) -> bool:
    # The bound on windows is made for so many frames, and grows with the slots.
    over = g.frame_step
    room = {"sequences": over, "windows": over} if frame_slots(g, c) == c.sequences else {}
    room |= {"frames": over} if frame_slots(g, c) == c.frames else {}
    return b.modality == "video" and only_too_many(g, c, b, **room)


def single_tokens(g: ViTGeometry, b: Batch) -> bool:
    return set(b.grids) == {g.smallest_grid()}


def whole_windows(g: ViTGeometry, b: Batch) -> bool:
    side = g.window_side or 0
    full = [side**2 * g.merge_unit]
    return all(g.window_lengths(grid).tolist() == full for grid in b.grids)


def alike(g: ViTGeometry, b: Batch) -> bool:
    sizes = [g.frame_tokens(grid) for grid in b.grids]
    return len(sizes) == 2 and abs(sizes[0] - sizes[1]) <= 1


CHECKS: dict[str, Check] = {
    "one merged token": lambda g, c, b: b.grids == (g.smallest_grid(),),
    "above every budget": lambda g, c, b: each_fits(g, c, b) == [False],
    "above every budget among others": lambda g, c, b: each_fits(g, c, b) == [True, False, True],
    "one item fills the budget": lambda g, c, b: len(b.grids) == 1 and fills(g, c, b),
    "one item fills the budget, turned": lambda g, c, b: (
        len(b.grids) == 1 and fills(g, c, b) and b.grids[0][1] > b.grids[0][2]
    ),
    "several items fill the budget": lambda g, c, b: len(b.grids) > 1 and fills(g, c, b),
    "two alike fill the budget": lambda g, c, b: alike(g, b) and fills(g, c, b),
    "one item one row over": lambda g, c, b: (
        len(b.grids) == 1 and total(g, b.grids).tokens == c.budget + 1 and not fits(g, c, b)
    ),
    "several items one row over": lambda g, c, b: (
        all(each_fits(g, c, b))
        and total(g, b.grids).tokens == c.budget + 1
        and len(b.grids) <= min(c.items, c.sequences)
    ),
    "smallest items up to the item limit": lambda g, c, b: (
        single_tokens(g, b) and fits(g, c, b) and len(b.grids) == c.items
    ),
    "smallest items one above the item limit": lambda g, c, b: (
        single_tokens(g, b) and not fits(g, c, b) and len(b.grids) == c.items + 1
    ),
    "a strip fills the budget": lambda g, c, b: is_strip(g, b) and fills(g, c, b),
    "a strip with the most windows": lambda g, c, b: (
        is_strip(g, b)
        and fits(g, c, b)
        and g.windows(b.grids[0]) == -(-c.budget // g.window_side) > 1  # type: ignore[operator]
    ),
    "images with the most windows": lambda g, c, b: (
        b.modality == "image" and has_most_windows(g, c, b)
    ),
    "single whole windows": lambda g, c, b: whole_windows(g, b) and fits(g, c, b),
    "one row and column past a window": lambda g, c, b: (
        [g.windows(grid) for grid in b.grids] == [4]
        and shapes(g, b) == [(g.window_side + 1,) * 2]  # type: ignore[operator]
        and fits(g, c, b)
    ),
    "one clip fills the budget": lambda g, c, b: (
        len(b.grids) == 1 and b.grids[0][0] > 1 and fills(g, c, b)
    ),
    "clips with the most windows": lambda g, c, b: (
        b.modality == "video" and has_most_windows(g, c, b)
    ),
    "one clip takes every frame slot": lambda g, c, b: len(b.grids) == 1 and fills_slots(g, c, b),
    "one clip one frame above the slots": lambda g, c, b: (
        len(b.grids) == 1 and above_slots(g, c, b)
    ),
    "several clips take every frame slot": lambda g, c, b: (
        len(b.grids) > 1 and fills_slots(g, c, b)
    ),
    "several clips one frame above the slots": lambda g, c, b: (
        len(b.grids) > 1 and all(each_fits(g, c, b)) and above_slots(g, c, b)
    ),
    "three frames make one": lambda g, c, b: (
        fills(g, c, b) and total(g, b.grids).patches == c.patches
    ),
}
"""What each edge is, from capacities alone."""

OF_WINDOWS = {
    "a strip with the most windows",
    "images with the most windows",
    "clips with the most windows",
    "single whole windows",
    "one row and column past a window",
}
OF_SLOTS = {
    "one clip takes every frame slot",
    "one clip one frame above the slots",
    "several clips take every frame slot",
    "several clips one frame above the slots",
}
NOT_HALVED = {"three frames make one"}
OF_CLIPS = OF_SLOTS | NOT_HALVED | {"one clip fills the budget", "clips with the most windows"}
MISSING = {
    "qwen2.5": NOT_HALVED,
    "no windows": NOT_HALVED | OF_WINDOWS,
    "merge 3, side 1": NOT_HALVED,
    "item": OF_WINDOWS | OF_CLIPS,
    "item, windows": NOT_HALVED | OF_SLOTS | {"images with the most windows"},
    "halve": OF_WINDOWS | {"one clip fills the budget"},
    "pairs": OF_WINDOWS | NOT_HALVED | {"one clip fills the budget"},
    "pool": OF_WINDOWS | OF_CLIPS,
    "videos only": NOT_HALVED | OF_WINDOWS,
    "another modality": OF_WINDOWS | OF_CLIPS,
}


def named(
    geometry: ViTGeometry, capacities: list[Capacity], frames: int | None = None
) -> Iterable[tuple[str, Capacity, Batch]]:
    """Kind, the capacity that it is about, and batch, of all named edges."""
    by_budget = {capacity.budget: capacity for capacity in capacities}
    for name, batch in named_edges(geometry, capacities, frames=frames).items():
        kind, _, budget = name.partition(" [")
        yield kind, by_budget[int(budget.rstrip("]") or max(by_budget))], batch


@every_geometry
@every_limit
def test_named_edges_are_what_they_are_called(name: str, limits: str) -> None:
    geometry = GEOMETRIES[name]
    capacities = capacities_of(geometry, limits)
    for kind, capacity, batch in named(geometry, capacities):
        assert CHECKS[kind](geometry, capacity, batch), (kind, capacity, batch)
        assert batch.modality in geometry.modalities
        assert batch.seed == 0
        for grid in batch.grids:
            geometry.check_grid(grid)


@every_geometry
def test_every_edge_that_exists_is_named(name: str) -> None:
    geometry = GEOMETRIES[name]
    kinds = {
        kind
        for limits in BUDGETS_AND_LIMITS
        for kind, _, _ in named(geometry, capacities_of(geometry, limits))
    }
    assert kinds == CHECKS.keys() - MISSING[name]


@every_geometry
@pytest.mark.parametrize("limits", ["few items", "one item"])
def test_drawn_edges_are_of_every_kind_and_no_other(name: str, limits: str) -> None:
    geometry = GEOMETRIES[name]
    capacities = capacities_of(geometry, limits)
    expected = {(kind, capacity) for kind, capacity, _ in named(geometry, capacities)}
    seen = set()
    for batch in drawn(edges(geometry, capacities), 12 * len(expected)):
        kinds = {key for key in expected if CHECKS[key[0]](geometry, key[1], batch)}
        assert kinds, batch
        seen |= kinds
    assert seen == expected


@pytest.mark.parametrize("kind", CHECKS)
def test_each_check_can_fail(kind: str) -> None:
    """No check is true of all edges, nor of its own edge at another graph or with more items."""
    checked = 0
    for geometry in GEOMETRIES.values():
        edges_here = list(named(geometry, capacities_of(geometry, "few items")))
        for own, capacity, batch in edges_here:
            if own != kind:
                continue
            others = [other for name, _, other in edges_here if name != kind]
            assert not all(CHECKS[kind](geometry, capacity, other) for other in others)
            more = Batch(batch.modality, (*batch.grids, (1, *batch.grids[-1][1:])) * 40)
            assert not CHECKS[kind](geometry, capacity, more)
            checked += 1
    assert checked


@every_geometry
@pytest.mark.parametrize("in_capacity", [False, True])
@pytest.mark.parametrize("frames", [0, 1, 3])
def test_edges_of_a_users_limit_on_frames(name: str, in_capacity: bool, frames: int) -> None:
    """Given beside the capacities, or in them, as the manager has it."""
    geometry = GEOMETRIES[name]
    capacities = capacities_of(geometry, "few items")
    limited = [replace(capacity, frames=frames) for capacity in capacities]
    kinds = set()
    beside = None if in_capacity else frames
    for kind, capacity, batch in named(geometry, limited if in_capacity else capacities, beside):
        if kind in OF_CLIPS:
            within = replace(capacity, frames=frames)
            assert kind == "clips with the most windows" or CHECKS[kind](geometry, within, batch)
            assert fits(geometry, within, batch) != ("above" in kind)
        else:
            assert CHECKS[kind](geometry, replace(capacity, frames=None), batch)
        kinds.add(kind)
    has_clips = "video" in geometry.modalities
    assert ("one clip one frame above the slots" in kinds) == has_clips
    assert ("one clip takes every frame slot" in kinds) == (
        has_clips and frames >= geometry.frame_step
    )
    assert ("several clips take every frame slot" in kinds) == (
        has_clips and frames >= 2 * geometry.frame_step
    )


def test_edges_of_nothing_are_refused() -> None:
    for strategy in (edges, named_edges):
        with pytest.raises(ValueError, match="at least one graph"):
            strategy(QWEN, [])


# -- shrinking -------------------------------------------------------------------------------------

FEW = capacities_of(QWEN, "few items")
ONE = Batch("image", ((1, 2, 2),))
SIMPLEST: list[tuple[Any, Callable[[Any], bool], Any]] = [
    (grids(QWEN), lambda g: True, (1, 2, 2)),
    (grids(QWEN), lambda g: tokens(QWEN, g) > 1, (1, 2, 4)),
    (grids(QWEN), lambda g: g[1] > g[2], (1, 4, 2)),
    (grids(QWEN, frames=4), lambda g: g[0] > 2, (3, 2, 2)),
    (grids(QWEN), lambda g: QWEN.windows(g) > 1, (1, 2, 10)),
    (processed_grids(QWEN), lambda g: True, (1, 2, 2)),
    (processed_grids(QWEN), lambda g: g[2] > g[1], (1, 2, 4)),
    (batches(QWEN), lambda b: True, ONE),
    (batches(QWEN), lambda b: len(b.grids) > 1, Batch("image", ((1, 2, 2),) * 2)),
    (batches(QWEN), lambda b: b.seed > 0, replace(ONE, seed=1)),
    (batches(QWEN), lambda b: b.modality == "video", Batch("video", ((1, 2, 2),))),
    (videos(QWEN), lambda b: max(g[0] for g in b.grids) > 1, Batch("video", ((2, 2, 2),))),
    (edges(QWEN, FEW), lambda b: True, ONE),
    (edges(QWEN, FEW), lambda b: total(QWEN, b.grids).tokens == 17, Batch("image", ((1, 2, 34),))),
    (graph_settings(), lambda s: True, GraphSettings((1,))),
    (graph_settings(), lambda s: s.items > s.budgets[0], GraphSettings((1,), items=2)),
    (graph_settings(), lambda s: len(s.budgets) == 3, GraphSettings((1, 2, 3))),
]


@pytest.mark.parametrize(("strategy", "wanted", "expected"), SIMPLEST)
def test_shrinks_to_what_can_be_read(strategy: Any, wanted: Any, expected: Any) -> None:
    assert simplest(strategy, wanted) == expected


# -- settings --------------------------------------------------------------------------------------


def test_graph_settings_are_valid_and_of_every_kind() -> None:
    seen = drawn(graph_settings(most_budget=50), 400)
    for one in seen:
        assert list(one.budgets) == sorted(set(one.budgets))
        assert 1 <= one.budgets[0] <= one.budgets[-1] <= 50
        assert one.items >= 0
        assert one.frames is None or one.frames >= 0
    assert {len(one.budgets) for one in seen} == {1, 2, 3}
    assert {0, 1, 2} < {one.items for one in seen}
    assert {None, 0, 1} < {one.frames for one in seen}
    assert any(one.budgets[0] == 1 for one in seen)
    assert any(one.items > one.budgets[0] > 8 for one in seen)
    with pytest.raises(ValueError, match="most_budget=0"):
        graph_settings(most_budget=0)


# -- configurations --------------------------------------------------------------------------------

VALUES: dict[str, dict[str, Callable[[dict[str, Any]], bool]]] = {
    "every family": {
        "one layer": lambda c: c["depth"] == 1,
        "four layers": lambda c: c["depth"] == 4,
        "one frame a patch": lambda c: c["temporal_patch_size"] == 1,
        "two heads": lambda c: c["num_heads"] == 2,
        "another patch": lambda c: c["patch_size"] == 8,
    },
    "qwen2_vl": {},
    "qwen2_5_vl": {
        "no full attention": lambda c: c["depth"] == 4 and not c["fullatt_block_indexes"],
        "full attention alone": lambda c: c["fullatt_block_indexes"] == [0, 1, 2, 3],
        "windows of one token": lambda c: window_side(c) == 1,
        "windows of five by five": lambda c: window_side(c) == 5,
        "tokens not merged": lambda c: c["spatial_merge_size"] == 1,
        "nine patches a token": lambda c: c["spatial_merge_size"] == 3,
    },
    "qwen3_vl": {
        "no deepstack": lambda c: c["depth"] == 4 and not c["deepstack_visual_indexes"],
        "deepstack of three": lambda c: len(c["deepstack_visual_indexes"]) == 3,
        "deepstack at the last layer": lambda c: c["deepstack_visual_indexes"] == [3],
        "one learned position": lambda c: c["num_position_embeddings"] == 1,
        "tokens not merged": lambda c: c["spatial_merge_size"] == 1,
        "nine patches a token": lambda c: c["spatial_merge_size"] == 3,
    },
}
VALUES["qwen3_vl_moe"] = VALUES["qwen3_vl"]

# Beside what is drawn, so that every value above is built whatever the draws are.
CORNERS: dict[str, list[dict[str, Any]]] = {
    "qwen2_vl": [
        {"depth": 1, "patch_size": 8, "temporal_patch_size": 1, "num_heads": 2},
        {"depth": 4, "patch_size": 16, "temporal_patch_size": 2, "num_heads": 4},
    ],
    "qwen2_5_vl": [
        {"depth": 4, "spatial_merge_size": 1, "fullatt_block_indexes": [], "window_size": 70},
        {
            "depth": 4,
            "patch_size": 8,
            "temporal_patch_size": 1,
            "num_heads": 2,
            "spatial_merge_size": 3,
            "fullatt_block_indexes": [0, 1, 2, 3],
            "window_size": 24,
        },
    ],
    "qwen3_vl": [
        {"depth": 4, "spatial_merge_size": 1, "deepstack_visual_indexes": []},
        {
            "depth": 4,
            "patch_size": 8,
            "temporal_patch_size": 1,
            "num_heads": 2,
            "spatial_merge_size": 3,
            "deepstack_visual_indexes": [1, 2, 3],
            "num_position_embeddings": 1,
        },
    ],
}
CORNERS["qwen3_vl_moe"] = CORNERS["qwen3_vl"]


def window_side(config: dict[str, Any]) -> int:
    return config["window_size"] // (config["spatial_merge_size"] * config["patch_size"])


@pytest.mark.parametrize("family", strategies.VISION_FAMILIES)
def test_every_kind_of_configuration_is_drawn(family: str) -> None:
    seen = drawn(vision_configs(family), 500)
    for name, has in {**VALUES["every family"], **VALUES[family]}.items():
        assert any(has(config) for config in seen), name
    for config in seen:
        layers = config.get("fullatt_block_indexes", []) + config.get(
            "deepstack_visual_indexes", []
        )
        assert layers == sorted(set(layers))
        assert all(0 <= layer < config["depth"] for layer in layers)
        assert "window_size" not in config or 1 <= window_side(config) <= 5


def test_families_are_those_of_the_checkpoints() -> None:
    from vllm.vit_cudagraph.testing import checkpoints

    assert set(strategies.VISION_FAMILIES) <= set(checkpoints.FAMILIES)
    with pytest.raises(ValueError, match="qwen2_5_vl"):
        vision_configs("llava")


def run_eagerly(family: str, vision: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """A tiny model with these overrides, and its outputs for an image of 1 and one of 15 tokens."""
    from vllm.vit_cudagraph.testing import models
    from vllm.vit_cudagraph.testing.subject import Subject

    config = models.make_config(family, vision=vision)
    subject = Subject(models.build_model(config), config)
    merge = subject.geometry.merge_size
    batch = Batch("image", ((1, merge, merge), (1, 3 * merge, 5 * merge)))
    return subject.model, subject.eager(subject.kwargs(batch))


def assert_shows(model: Any, vision: dict[str, Any]) -> None:
    """The model was built with these overrides, and its declaration follows them."""
    tower, declared = model.visual, model.vit_declared
    assert len(tower.blocks) == vision["depth"]
    for name, value in {
        "patch_size": declared.patch_size,
        "temporal_patch_size": declared.temporal_patch_size,
        "spatial_merge_size": declared.merge_size,
        "num_heads": tower.num_heads,
        "fullatt_block_indexes": getattr(tower, "fullatt_block_indexes", None),
        "deepstack_visual_indexes": getattr(tower, "deepstack_visual_indexes", None),
        "num_position_embeddings": getattr(tower, "num_position_embeddings", None),
    }.items():
        assert name not in vision or value == vision[name], name
    if "window_size" in vision:
        unit = declared.merge_size * declared.patch_size
        assert declared.window_side == vision["window_size"] // unit


@pytest.mark.slow
@pytest.mark.parametrize("family", strategies.VISION_FAMILIES)
def test_vllm_builds_and_runs_every_configuration(family: str) -> None:
    def builds(vision: dict[str, Any]) -> None:
        model, (small, large) = run_eagerly(family, vision)
        assert_shows(model, vision)
        assert (len(small), len(large)) == (1, 15)
        assert torch.isfinite(large).all()

    check = settings(FIXED, max_examples=2)(given(vision=vision_configs(family))(builds))
    for corner in CORNERS[family]:
        check = example(vision=corner)(check)
    check()


@pytest.mark.parametrize(
    ("family", "vision", "error"),
    [
        ("qwen2_vl", {"spatial_merge_size": 1}, "split_with_sizes"),
        ("qwen2_5_vl", {"window_size": 14}, "window_side must be at least 1"),
        ("qwen3_vl", {"in_channels": 1}, "not divisible by channel=3"),
    ],
)
def test_what_is_left_out_cannot_be_run(family: str, vision: dict[str, Any], error: str) -> None:
    with pytest.raises((RuntimeError, ValueError, AssertionError), match=error):
        run_eagerly(family, vision)
