# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of grids and its bounds, against brute force over single patches and tokens."""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph import geometry as geometry_module
from vllm.vit_cudagraph.geometry import (
    MALFORMED,
    Capacity,
    Grid,
    Limits,
    NotCapturable,
    Rows,
    Usage,
    ViTGeometry,
    learned_rows,
    offset_rows,
    position_rows,
    window_rows,
)
from vllm.vit_cudagraph.metadata import MetadataBuilder
from vllm.vit_cudagraph.testing.profiles import examples

SIDES = range(1, 9)
MERGES = range(1, 5)
FULL_ROWS = offset_rows("sequences", "cu_seqlens", "max_seqlen", "lengths")
WINDOW_ROWS = window_rows("order", "inverse") | offset_rows(
    "windows", "cu_window_seqlens", "max_window_seqlen", "window_lengths"
)


def make_geometry(merge: int = 2, side: int | None = None, **declared: Any) -> ViTGeometry:
    """A tower with every kind of row that it can have."""
    rows = position_rows("rotary") | FULL_ROWS | (WINDOW_ROWS if side else {})
    return ViTGeometry(patch_size=14, merge_size=merge, rows=rows, window_side=side, **declared)


geometries = st.builds(
    make_geometry,
    merge=st.sampled_from(MERGES),
    side=st.none() | st.sampled_from(SIDES),
    temporal_merge=st.sampled_from(["none", "halve", "pool"]),
    sequences=st.sampled_from(["frame", "item"]),
    output_rows=st.sampled_from(["tokens", "patches"]),
)


@st.composite
def grids_of(
    draw: st.DrawFn,
    geometry: ViTGeometry,
    frames: int = 5,
    side: int = 10,
    capturable: bool = False,
) -> Grid:
    """One item: a rectangle up to ``side`` merged tokens, or a strip, of several frames.

    ``capturable`` keeps to one frame where a tower pools frames, as such a tower does.
    """
    strips = [(1, 4 * side), (4 * side, 1), (2, 2 * side)]
    most = draw(st.sampled_from([(side, side), *strips]))
    rows, cols = (draw(st.integers(1, n)) for n in most)
    pooled = capturable and geometry.temporal_merge == "pool"
    t = 1 if pooled else draw(st.integers(1, frames))
    return (t, rows * geometry.merge_size, cols * geometry.merge_size)


@st.composite
def geometry_and_grid(draw: st.DrawFn, windowed: bool = False) -> tuple[ViTGeometry, Grid]:
    geometry = draw(geometries)
    assume(not windowed or geometry.window_side is not None)
    return geometry, draw(grids_of(geometry))


# -- brute force, from the definitions -------------------------------------------------------------


@dataclass
class Counted:
    """What a loop over the patches of one item finds."""

    patches: int
    tower_tokens: int  # merged tokens before frames are merged
    output_tokens: int
    sequences: list[int]  # patches in each, in order
    windows: list[list[int]]  # numbers of the tokens in each, in order; empty without windows


def output_frame(geometry: ViTGeometry, frames: int, frame: int) -> int:
    """The frame of the output that a frame of the input goes into."""
    if geometry.temporal_merge == "pool":
        return 0
    if geometry.temporal_merge == "halve":
        # Pairs; an odd frame at the end joins the last pair.
        return min(frame // 2, max(0, frames // 2 - 1))
    return frame


def count(geometry: ViTGeometry, grid: Grid) -> Counted:
    merge, side = geometry.merge_size, geometry.window_side
    tokens: dict[tuple[int, int, int], int] = {}
    outputs, patches = set(), 0
    sequences: dict[int, int] = defaultdict(int)
    windows: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for f, row, col in product(*map(range, grid)):
        patches += 1
        sequences[f if geometry.sequences == "frame" else 0] += 1
        at = (f, row // merge, col // merge)
        tokens[at] = 0
        outputs.add((output_frame(geometry, grid[0], f), *at[1:]))
    for number, (f, row, col) in enumerate(sorted(tokens)):
        if side is not None:
            windows[f, row // side, col // side].append(number)
    return Counted(
        patches=patches,
        tower_tokens=len(tokens),
        output_tokens=len(outputs),
        sequences=[sequences[key] for key in sorted(sequences)],
        windows=[windows[key] for key in sorted(windows)],
    )


def batch_counts(geometry: ViTGeometry, batch: Iterable[Grid]) -> Counted:
    """Of a whole batch; window members are not renumbered."""
    total = Counted(0, 0, 0, [], [])
    for grid in batch:
        one = count(geometry, grid)
        total = Counted(*(a + b for a, b in zip(astuple(total), astuple(one), strict=True)))
    return total


# -- one grid --------------------------------------------------------------------------------------


@given(geometry_and_grid())
@pytest.mark.fuzz
@examples(150)
def test_counts_equal_brute_force(drawn: tuple[ViTGeometry, Grid]) -> None:
    geometry, grid = drawn
    counted = count(geometry, grid)
    assert geometry.patches(grid) == counted.patches
    assert geometry.output_tokens(grid) == counted.output_tokens
    assert geometry.frame_tokens(grid) * grid[0] == counted.tower_tokens
    assert geometry.sequence_lengths(grid) == counted.sequences
    assert geometry.windows(grid) == len(counted.windows)
    assert geometry.usage(grid) == Usage(
        patches=counted.patches,
        tokens=counted.output_tokens,
        sequences=len(counted.sequences),
        windows=len(counted.windows),
        frames=grid[0],
    )
    rows = counted.patches if geometry.output_rows == "patches" else counted.output_tokens
    assert geometry.tower_rows([grid]) == rows
    assert geometry.tower_rows([grid, grid]) == 2 * rows
    assert geometry.tower_rows([]) == 0
    geometry.check_grid(grid)


@given(geometry_and_grid(windowed=True))
@pytest.mark.fuzz
@examples(150)
@example((make_geometry(merge=2, side=4), (1, 2, 34)))
@example((make_geometry(merge=1, side=8), (3, 1, 1)))
@example((make_geometry(merge=4, side=1), (2, 8, 12)))
def test_windows_equal_brute_force(drawn: tuple[ViTGeometry, Grid]) -> None:
    geometry, grid = drawn
    windows = count(geometry, grid).windows
    order = geometry.window_order(grid)
    lengths = geometry.window_lengths(grid)
    assert order.tolist() == [token for window in windows for token in window]
    assert lengths.tolist() == [len(window) * geometry.merge_unit for window in windows]
    assert (order.dtype, lengths.dtype) == (np.int64, np.int64)


@given(geometry_and_grid(windowed=True))
@pytest.mark.fuzz
@examples(100)
def test_window_order_is_a_permutation_grouped_by_window_frame_by_frame(
    drawn: tuple[ViTGeometry, Grid],
) -> None:
    """What attention relies on, said without looking at how windows are numbered."""
    geometry, grid = drawn
    order = geometry.window_order(grid)
    per_frame, cols = geometry.frame_tokens(grid), grid[2] // geometry.merge_size
    assert sorted(order.tolist()) == list(range(len(order)))
    frames = order // per_frame
    assert (np.diff(frames) >= 0).all()
    seen, start = set(), 0
    for length in geometry.window_lengths(grid) // geometry.merge_unit:
        window = order[start : start + length]
        start += length
        rows_of, cols_of = window % per_frame // cols, window % cols
        side = geometry.window_side
        assert length >= 1
        keys = {*zip(window // per_frame, rows_of // side, cols_of // side, strict=True)}
        assert len(keys) == 1, "one window holds tokens of two"
        assert not keys & seen, "a window stands in two places"
        seen |= keys
        assert (np.diff(window) > 0).all(), "tokens of a window run row by row"
    assert start == len(order)


@given(geometry_and_grid(windowed=True))
@pytest.mark.fuzz
@examples(60)
def test_counts_of_one_window_frame_are_independent_of_its_neighbours(
    drawn: tuple[ViTGeometry, Grid],
) -> None:
    """A video's windows are those of its frames, one after the other."""
    geometry, (t, h, w) = drawn
    frame, tokens = (1, h, w), geometry.frame_tokens((1, h, w))
    lengths, order = geometry.window_lengths(frame), geometry.window_order(frame)
    assert geometry.window_lengths((t, h, w)).tolist() == lengths.tolist() * t
    whole = np.concatenate([order + f * tokens for f in range(t)])
    assert geometry.window_order((t, h, w)).tolist() == whole.tolist()


@given(st.data())
@pytest.mark.fuzz
@examples(60)
def test_order_and_inverse_of_a_batch(data: st.DataObject) -> None:
    """Over several items: no window spans two, and the inverse undoes the order."""
    geometry = data.draw(geometries.filter(lambda g: g.window_side is not None))
    batch = data.draw(st.lists(grids_of(geometry, frames=3), min_size=1, max_size=4))
    tower = SimpleNamespace(attn_backend=AttentionBackendEnum.FLASH_ATTN)
    builder = MetadataBuilder(
        geometry,
        tower,
        position_rows=lambda grid: {"rotary": torch.zeros(geometry.patches(grid), 1)},
        learned_rows=lambda grids: {},
    )
    metadata = builder.build(batch, torch.device("cpu"))
    order, inverse = metadata["order"], metadata["inverse"]
    assert order is not None and inverse is not None
    expected, first = [], 0
    for grid in batch:
        counted = count(geometry, grid)
        expected += [first + token for window in counted.windows for token in window]
        first += counted.tower_tokens
    assert order.tolist() == expected
    rows = torch.arange(first)
    assert torch.equal(rows[order][inverse], rows)
    assert torch.equal(rows[inverse][order], rows)


def test_window_questions_need_windows() -> None:
    plain = make_geometry()
    assert plain.windows((2, 8, 8)) == 0
    for question in (plain.window_order, plain.window_lengths):
        with pytest.raises(ValueError, match="declares no windows"):
            question((1, 4, 4))


# -- bounds ----------------------------------------------------------------------------------------


@st.composite
def limits_for(draw: st.DrawFn, items: int, sequences: int) -> Limits:
    """Any limits, most of which let so many items and sequences through."""
    frames = st.none() | st.integers(0, 2) | st.integers(sequences, sequences + 5)
    return Limits(
        items=draw(st.integers(items, items + 4) | st.integers(1, 3)),
        frames=draw(frames),
        tokens_per_sequence=draw(st.sampled_from([1, 1, 2, 8])),
    )


@st.composite
def step_within_a_budget(draw: st.DrawFn) -> tuple[ViTGeometry, list[Grid], Limits, Capacity]:
    """A step as a planner may send it: within tokens, items and sequences."""
    geometry = draw(geometries)
    grids = grids_of(geometry, capturable=True)
    batch = draw(st.lists(grids, min_size=1, max_size=6))
    counted = batch_counts(geometry, batch)
    limits = draw(limits_for(len(batch), len(counted.sequences)))
    budget = counted.output_tokens + draw(st.sampled_from([0, 0, 1, 7, 200]))
    capacity = geometry.capacity(budget, limits)
    assume(len(batch) <= capacity.items and len(counted.sequences) <= capacity.sequences)
    return geometry, batch, limits, capacity


@given(step_within_a_budget())
@pytest.mark.fuzz
@examples(200)
def test_no_count_exceeds_its_capacity(
    drawn: tuple[ViTGeometry, list[Grid], Limits, Capacity],
) -> None:
    geometry, batch, _, capacity = drawn
    counted = batch_counts(geometry, batch)
    usages = [astuple(geometry.usage(grid)) for grid in batch]
    total = Usage(*(sum(each) for each in zip(*usages, strict=True)))
    assert counted.patches <= capacity.patches
    assert len(counted.windows) <= capacity.windows
    assert capacity.holds(len(batch), total)
    rows = {kind: geometry.rows_capacity(kind, capacity) for kind in ("patches", "tokens")}
    assert counted.patches <= rows["patches"]
    assert counted.tower_tokens <= rows["tokens"]
    assert geometry.rows_capacity("sequences", capacity) == capacity.sequences
    assert geometry.rows_capacity("windows", capacity) == capacity.windows
    assert max(counted.sequences) <= geometry.longest_bound("max_seqlen", capacity)
    if geometry.window_side is not None:
        longest = max(map(len, counted.windows)) * geometry.merge_unit
        assert longest <= geometry.longest_bound("max_window_seqlen", capacity)
        assert longest <= geometry.longest_bound("window_lengths", capacity)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("side", SIDES)
def test_strips_reach_the_bound_on_windows(merge: int, side: int) -> None:
    geometry = make_geometry(merge, side)
    for k, frames, upright in product([0, 1, 2, 7], [1, 2, 5], [False, True]):
        long = merge * (side * k + 1)
        strip = (frames, long, merge) if upright else (frames, merge, long)
        limits = Limits(items=1, frames=frames)
        capacity = geometry.capacity(geometry.output_tokens(strip), limits)
        assert capacity.sequences == frames
        assert len(count(geometry, strip).windows) == capacity.windows == frames * (k + 1)


@pytest.mark.parametrize("side", SIDES)
def test_strips_of_halved_frames_reach_the_bounds(side: int) -> None:
    """Three frames become one: three times the patches, and windows of every one of them."""
    geometry = make_geometry(2, side, temporal_merge="halve")
    strip = (3, 2, 2 * (3 * side + 1))
    capacity = geometry.capacity(geometry.output_tokens(strip), Limits(items=1, frames=3))
    counted = count(geometry, strip)
    assert counted.patches == capacity.patches
    assert len(counted.windows) == capacity.windows
    assert counted.tower_tokens == geometry.rows_capacity("tokens", capacity)


@pytest.mark.parametrize("side", SIDES)
def test_frames_of_one_token_reach_the_bound_where_items_are_sequences(side: int) -> None:
    geometry = make_geometry(2, side, sequences="item")
    grid = (9, 2, 2)
    capacity = geometry.capacity(9, Limits(items=1))
    counted = count(geometry, grid)
    assert len(counted.windows) == capacity.windows == 9
    assert len(counted.sequences) == capacity.sequences == 1


@given(geometry=geometries, budget=st.integers(1, 80))
@pytest.mark.fuzz
@examples(60)
def test_longest_bounds_are_reached(geometry: ViTGeometry, budget: int) -> None:
    """A bound above what any step holds would make attention do needless work."""
    merge, side = geometry.merge_size, geometry.window_side
    t = 3 if geometry.temporal_merge == "halve" and geometry.sequences == "item" else 1
    capacity = geometry.capacity(budget, Limits(items=1))
    strip = (t, merge, merge * budget)
    assert geometry.output_tokens(strip) == budget
    longest = max(geometry.sequence_lengths(strip))
    bound = geometry.longest_bound("max_seqlen", capacity)
    assert longest == bound or (geometry.temporal_merge == "halve" and longest * 3 == bound)
    if side is not None and budget >= side**2:
        square = (1, merge * side, merge * side)
        assert max(geometry.window_lengths(square)) == geometry.longest_bound(
            "max_window_seqlen", capacity
        )


@given(
    geometry=geometries,
    limits=st.builds(
        Limits,
        items=st.integers(1, 40),
        frames=st.none() | st.integers(0, 60),
        tokens_per_sequence=st.integers(1, 16),
    ),
    budgets=st.lists(st.integers(1, 5000), min_size=2, max_size=6),
)
@pytest.mark.fuzz
@examples(150)
def test_capacity_grows_with_the_budget(
    geometry: ViTGeometry, limits: Limits, budgets: list[int]
) -> None:
    """Planning walks up the graphs and never looks back."""
    capacities = [geometry.capacity(budget, limits) for budget in sorted(budgets)]
    for smaller, larger in pairwise(capacities):
        for field in fields(Capacity):
            if field.name == "frames":  # the user's limit, which no budget changes
                assert smaller.frames is None and larger.frames is None
                continue
            assert getattr(smaller, field.name) <= getattr(larger, field.name), field.name
    smallest = geometry.usage(geometry.smallest_grid())
    for capacity in capacities:
        assert min(capacity.items, capacity.patches, capacity.sequences) >= 1
        assert capacity.holds(1, smallest), "the item that capture probes with must fit"
        assert capacity.items == min(limits.items, capacity.budget)
        if geometry.sequences == "frame" and limits.frames is not None:
            assert capacity.sequences <= max(1, limits.items, limits.frames)


@given(st.data())
@pytest.mark.fuzz
@examples(100)
def test_images_within_the_item_limit_always_have_sequence_slots(data: st.DataObject) -> None:
    """Whatever the limit on frames: an image is one sequence and has at least one token."""
    geometry = data.draw(geometries)
    batch = data.draw(st.lists(grids_of(geometry, frames=1), min_size=1, max_size=8))
    counted = batch_counts(geometry, batch)
    limits = data.draw(limits_for(len(batch), 0))
    assume(len(batch) <= limits.items)
    capacity = geometry.capacity(counted.output_tokens, limits)
    assert len(batch) <= capacity.items
    assert len(counted.sequences) <= capacity.sequences


@pytest.mark.parametrize("temporal_merge", ["none", "halve", "pool"])
@given(st.data())
@pytest.mark.fuzz
@examples(60)
def test_one_sequence_slot_a_token_cannot_overflow(
    temporal_merge: str, data: st.DataObject
) -> None:
    """``tokens_per_sequence=1``: what fits the budget fits the slots, with no planner to check."""
    sequences = data.draw(st.sampled_from(["frame", "item"]))
    geometry = make_geometry(temporal_merge=temporal_merge, sequences=sequences)
    grids = grids_of(geometry, side=2, capturable=True)
    batch = data.draw(st.lists(grids, min_size=1, max_size=6))
    counted = batch_counts(geometry, batch)
    limits = Limits(items=len(batch), tokens_per_sequence=1)
    capacity = geometry.capacity(counted.output_tokens, limits)
    assert len(counted.sequences) <= capacity.sequences


@pytest.mark.parametrize("temporal_merge", ["none", "halve"])
@given(st.data())
@pytest.mark.fuzz
@examples(60)
def test_videos_within_the_users_limit_have_sequence_slots(
    temporal_merge: str, data: st.DataObject
) -> None:
    geometry = make_geometry(temporal_merge=temporal_merge)
    batch = data.draw(st.lists(grids_of(geometry, side=2), min_size=1, max_size=6))
    counted = batch_counts(geometry, batch)
    limits = Limits(items=len(batch), frames=len(counted.sequences))
    capacity = geometry.capacity(counted.output_tokens, limits)
    assert len(counted.sequences) <= capacity.sequences


@pytest.mark.parametrize(
    ("limits", "budget", "sequences"),
    [
        (Limits(items=4), 64, 8),
        (Limits(items=4), 65, 9),
        (Limits(items=40), 64, 40),
        (Limits(items=100), 64, 64),
        (Limits(items=4, frames=0), 64, 4),
        (Limits(items=4, frames=30), 64, 30),
        (Limits(items=4, frames=300), 64, 64),
        (Limits(items=4, tokens_per_sequence=1), 64, 64),
        (Limits(items=1, frames=0), 1, 1),
    ],
)
def test_sequence_slots(limits: Limits, budget: int, sequences: int) -> None:
    assert limits.sequences(budget) == sequences


def test_holds_looks_at_every_kind() -> None:
    capacity = Capacity(budget=10, items=3, patches=40, sequences=5, windows=7)
    full = Usage(patches=40, tokens=10, sequences=5, windows=7)
    assert capacity.holds(3, full)
    assert not capacity.holds(4, full)
    for i in range(4):
        over = [n + (i == j) for j, n in enumerate(astuple(full))]
        assert not capacity.holds(3, Usage(*over))


# -- declarations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"patch_size": 0}, "patch_size must be at least 1, got 0"),
        ({"merge_size": 0}, "merge_size must be at least 1, got 0"),
        ({"merge_size": -2}, "merge_size must be at least 1, got -2"),
        ({"temporal_patch_size": 0}, "temporal_patch_size must be at least 1"),
        ({"in_channels": 0}, "in_channels must be at least 1"),
        ({"window_side": 0, "rows": WINDOW_ROWS}, "window_side must be at least 1 or None, got 0"),
        ({"window_side": -1, "rows": WINDOW_ROWS}, "window_side must be at least 1"),
        ({"window_side": 4}, "declare window_side together with window rows"),
        ({"rows": WINDOW_ROWS}, "declare window_side together with window rows"),
        ({"rows": window_rows("order", "inverse")}, "declare window_side together"),
        ({"rows": {"w": Rows("windows", "offsets")}}, "declare window_side together"),
        (
            {"rows": {"order": window_rows("order", "inverse")["order"]}, "window_side": 4},
            "declare window order and its inverse together, or neither",
        ),
        ({"temporal_merge": "mean"}, r"temporal_merge must be one of \('none', .*got 'mean'"),
        ({"sequences": "window"}, r"sequences must be one of \('frame', .*got 'window'"),
        ({"output_rows": "both"}, r"output_rows must be one of \('tokens', .*got 'both'"),
        ({"rows": {"m": Rows("longest", "longest")}}, "'m' must cover declared offsets, not None"),
        (
            {"rows": {"m": Rows("longest", "longest", covers="gone")}},
            "'m' must cover declared offsets, not 'gone'",
        ),
        (
            {"rows": {"l": Rows("sequences", "lengths", covers="l")}},
            "'l' must cover declared offsets, not 'l'",
        ),
        (
            {"rows": FULL_ROWS | {"m": Rows("longest", "longest", covers="max_seqlen")}},
            "'m' must cover declared offsets",
        ),
    ],
)
def test_invalid_geometries_are_refused(declared: dict[str, Any], message: str) -> None:
    sound = {"patch_size": 14, "merge_size": 2, "rows": FULL_ROWS}
    ViTGeometry(**sound)
    with pytest.raises(ValueError, match=message):
        ViTGeometry(**(sound | declared))


@pytest.mark.parametrize(
    "grid",
    [
        (),
        (1,),
        (1, 4),
        (1, 4, 4, 4),
        (0, 4, 4),
        (1, 0, 4),
        (1, 4, 0),
        (-1, 4, 4),
        (1, -4, -4),
        (1, 3, 4),
        (1, 4, 3),
        (1, 1, 1),
        (2, 5, 7),
    ],
)
def test_malformed_grids_are_refused(grid: tuple[int, ...]) -> None:
    with pytest.raises(NotCapturable) as refused:
        make_geometry(merge=2).check_grid(grid)
    assert refused.value.reason == MALFORMED
    assert str(grid) in str(refused.value), "the message shows what was found"


def test_long_items_are_several_sequences() -> None:
    geometry = make_geometry(sequences="item", sequence_frames=3)
    assert geometry.sequence_lengths((7, 4, 2)) == [24, 24, 8]
    assert [geometry.usage((t, 4, 2)).sequences for t in (1, 3, 4, 7)] == [1, 1, 2, 3]
    # A part may be a frame of one token.
    limits = Limits(items=2, tokens_per_sequence=1)
    assert geometry.capacity(9, limits).sequences == 9
    assert make_geometry(sequences="item").capacity(9, limits).sequences == 2
    with pytest.raises(ValueError, match="sequence_frames must be at least 1 or None"):
        make_geometry(sequences="item", sequence_frames=0)


def test_grids_that_passed_are_looked_up_and_others_never_pass() -> None:
    """However many kinds of grids a process sees."""
    geometry = make_geometry()
    with mock.patch.object(geometry_module, "_MOST_PASSED", 3):
        for side in (2, 4, 6, 8, 2, 10, 4):
            assert geometry.checked_patches((3, side, 4)) == 12 * side
            assert len(geometry._passed) <= 3
            for _ in range(2):
                with pytest.raises(NotCapturable, match="not a multiple of merge size 2"):
                    geometry.checked_patches((3, side, 5))
    with mock.patch.object(ViTGeometry, "check_grid", side_effect=AssertionError("looked up")):
        assert geometry.checked_patches((3, 4, 4)) == 48


def test_frames_come_in_multiples() -> None:
    """An item of one frame is an image and is always defined."""
    geometry = make_geometry(temporal_merge="halve", frame_step=2)
    for t in (1, 2, 8):
        geometry.check_grid((t, 4, 4))
    for t in (3, 7):
        with pytest.raises(NotCapturable, match=f"{t} frames are not a multiple of 2"):
            geometry.check_grid((t, 4, 4))
    with pytest.raises(ValueError, match="frame_step must be at least 1"):
        make_geometry(frame_step=0)


@pytest.mark.parametrize("side", SIDES)
def test_strips_of_pairs_of_frames_reach_the_bounds(side: int) -> None:
    """Where frames come in twos, no more than two of them become one."""
    geometry = make_geometry(2, side, temporal_merge="halve", frame_step=2)
    strip = (2, 2, 2 * (3 * side + 1))
    capacity = geometry.capacity(geometry.output_tokens(strip), Limits(items=1, frames=2))
    counted = count(geometry, strip)
    assert counted.patches == capacity.patches
    assert len(counted.windows) == capacity.windows


@given(geometry=geometries, grid=st.lists(st.integers(-2, 9), min_size=0, max_size=4))
@pytest.mark.fuzz
@examples(150)
@example(geometry=make_geometry(merge=1), grid=[1, 1, 1])
@example(geometry=make_geometry(merge=4), grid=[1, 4, 8])
@example(geometry=make_geometry(merge=4), grid=[1, 4, 6])
def test_a_grid_is_refused_exactly_if_the_tower_does_not_define_it(
    geometry: ViTGeometry, grid: Sequence[int]
) -> None:
    defined = (
        len(grid) == 3
        and all(n > 0 for n in grid)
        and all(n % geometry.merge_size == 0 for n in grid[1:])
    )
    if defined:
        geometry.check_grid(grid)
    else:
        with pytest.raises(NotCapturable):
            geometry.check_grid(grid)


def test_a_refusal_counts_under_its_reason_alone() -> None:
    assert NotCapturable("a reason", "1, 2").reason == "a reason"
    assert str(NotCapturable("a reason", "1, 2")) == "a reason (1, 2)"
    assert str(NotCapturable("a reason")) == "a reason"


def test_how_tails_are_padded() -> None:
    pads = {name: row.pad for name, row in (FULL_ROWS | WINDOW_ROWS | learned_rows("p")).items()}
    assert pads == {
        "cu_seqlens": "last",
        "max_seqlen": "bound",
        "lengths": "zero",
        "order": "identity",
        "inverse": "identity",
        "cu_window_seqlens": "last",
        "max_window_seqlen": "bound",
        "window_lengths": "zero",
        "p": "zero",
    }
    assert Rows("patches", "position", tail="last").pad == "last"
    assert "sequence_lengths" not in offset_rows("sequences", "cu_seqlens", "max_seqlen")


def test_sizes_are_read_off_a_tower() -> None:
    embed = SimpleNamespace(
        patch_size=14, temporal_patch_size=2, proj=SimpleNamespace(in_channels=3)
    )
    tower = SimpleNamespace(patch_embed=embed, spatial_merge_size=2)
    geometry = ViTGeometry.of_tower(tower, FULL_ROWS, WINDOW_ROWS, window_side=4)
    assert geometry.pixel_row == (3 * 2 * 14 * 14,)
    assert (geometry.merge_unit, geometry.window_side) == (4, 4)
    assert list(geometry.rows) == [*FULL_ROWS, *WINDOW_ROWS]
    assert geometry.smallest_grid() == (1, 2, 2)
    square = make_geometry(pixel_row_shape=(3, 14, 14))
    assert square.pixel_row == (3, 14, 14)


# -- dependencies ----------------------------------------------------------------------------------

LOAD_ALONE = """
import importlib.util, sys, types
for package in ("vllm", "vllm.vit_cudagraph"):
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = []  # empty: anything else of it cannot be imported
for name in ("geometry", "ladder", "costs", "packing", "planning"):
    path = f"{sys.argv[1]}/{name}.py"
    spec = importlib.util.spec_from_file_location(f"vllm.vit_cudagraph.{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
costs = sys.modules["vllm.vit_cudagraph.costs"].CostLines.modelled([])
assert module.Planner([], costs, None, None).plan([]).steps == ()
loaded = {name for name in sys.modules if name.partition(".")[0] in ("vllm", "torch")}
print(*sorted(loaded))
"""


def test_geometry_and_planning_import_neither_torch_nor_vllm() -> None:
    folder = str(Path(geometry_module.__file__).parent)
    ran = subprocess.run(
        [sys.executable, "-c", LOAD_ALONE, folder],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    names = ("costs", "geometry", "ladder", "packing", "planning")
    assert ran.stdout.split() == [
        "vllm",
        "vllm.vit_cudagraph",
        *(f"vllm.vit_cudagraph.{name}" for name in names),
    ]


def test_merge_order_puts_the_patches_of_a_token_side_by_side() -> None:
    geometry = ViTGeometry(patch_size=14, merge_size=2, rows={})
    frame = [0, 1, 4, 5, 2, 3, 6, 7]  # two tokens of a frame of 2 x 4 patches
    assert geometry.merge_order((1, 2, 4)).tolist() == frame
    assert geometry.merge_order((2, 2, 4)).tolist() == frame + [8 + patch for patch in frame]
    assert geometry.merge_order((1, 4, 2)).tolist() == list(range(8))
