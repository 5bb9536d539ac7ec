# SPDX-License-Identifier: Apache-2.0
"""Batches at the edges of given graphs: what just fits, and what just does not.

Each edge makes a batch out of a geometry and a graph's capacity; its shapes are drawn by hypothesis
(:func:`edges`), or are the first that there are (:func:`named_edges`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from vllm.vit_cudagraph.geometry import Capacity, ViTGeometry
from vllm.vit_cudagraph.testing.strategies import (
    SEEDS,
    Batch,
    Pick,
    Shape,
    drawing,
    parts_of,
    shape_of,
    shapes_of,
    stills,
)

_MOST_PARTS = 8  # of a total that is drawn in parts: more are no clearer to read

T = TypeVar("T")

_Edge = Callable[[ViTGeometry, Capacity, Pick], Batch | None]


def edges(
    geometry: ViTGeometry, capacities: Sequence[Capacity], *, frames: int | None = None
) -> SearchStrategy[Batch]:
    """Batches at the edges of given graphs: the kinds of :func:`named_edges`, equally often.

    Shapes, partitions, numbers of items and seeds are drawn; :func:`named_edges` has one example of
    each.

    Args:
        capacities: Of the captured graphs, in any order; at least one.
        frames: The user's limit on video frames in a step (``Limits.frames``), where the
            capacities do not say it; it may be below the sequence slots, which images use too.

    Raises:
        ValueError: ``capacities`` is empty.
    """
    return _edges(geometry, tuple(_edges_that_exist(geometry, capacities, frames).values()))


def named_edges(
    geometry: ViTGeometry, capacities: Sequence[Capacity], *, frames: int | None = None
) -> dict[str, Batch]:
    """The edges of given graphs by name, one batch each.

    A name is a kind and, in brackets, the token budget of the graph that it is about:
    ``"one item fills the budget [64]"``. A kind that does not exist for a geometry or a capacity
    (windows without windows, frames without videos) has no entry.

    Args:
        capacities: Of the captured graphs, in any order; at least one.
        frames: The user's limit on video frames in a step (``Limits.frames``), where the
            capacities do not say it; it may be below the sequence slots, which images use too.

    Raises:
        ValueError: ``capacities`` is empty.
    """
    existing = _edges_that_exist(geometry, capacities, frames)
    found = {name: edge(geometry, capacity, _first) for name, (edge, capacity) in existing.items()}
    return {name: batch for name, batch in found.items() if batch is not None}


def _edges_that_exist(
    geometry: ViTGeometry, capacities: Sequence[Capacity], frames: int | None
) -> dict[str, tuple[_Edge, Capacity]]:
    if not capacities:
        raise ValueError("capacities is empty; give the capacity of at least one graph")
    ordered = sorted(capacities, key=lambda capacity: capacity.budget)
    chosen = {name: (edge, ordered[-1]) for name, edge in _EDGES_OF_LARGEST.items()}
    chosen |= {
        f"{name} [{capacity.budget}]": (edge, capacity)
        for name, edge in _EDGES.items()
        for capacity in ordered
    }
    if "video" in geometry.modalities:
        chosen |= {
            f"{name} [{capacity.budget}]": (edge, _for_videos(capacity, frames))
            for name, edge in _EDGES_OF_CLIPS.items()
            for capacity in ordered
        }
    return {
        name: (edge, capacity)
        for name, (edge, capacity) in chosen.items()
        if edge(geometry, capacity, _first) is not None
    }


def _for_videos(capacity: Capacity, frames: int | None) -> Capacity:
    """``capacity`` as far as videos may use it: the lower of two limits on frames, if any."""
    limits = [limit for limit in (capacity.frames, frames) if limit is not None]
    return replace(capacity, frames=min(limits, default=None))


@st.composite
def _edges(
    draw: st.DrawFn, geometry: ViTGeometry, existing: tuple[tuple[_Edge, Capacity], ...]
) -> Batch:
    edge, capacity = draw(st.sampled_from(existing))
    batch = edge(geometry, capacity, drawing(draw))
    assert batch is not None  # whether an edge exists never depends on what is picked
    return Batch(batch.modality, batch.grids, draw(SEEDS))


def _first(options: Sequence[T], /) -> T:
    return options[0]


def _clips(geometry: ViTGeometry, clips: Iterable[tuple[int, Shape]]) -> Batch:
    merge = geometry.merge_size
    items = tuple((t, rows * merge, cols * merge) for t, (rows, cols) in clips)
    return Batch("video", items)


def _most_parts(capacity: Capacity) -> int:
    """Most items of one frame in one step, as far as a person wants to read them."""
    return min(capacity.items, capacity.sequences, capacity.budget, _MOST_PARTS)


def _one_token(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    return stills(geometry, [(1, 1)])


def _one_fills(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    return stills(geometry, [shape_of(capacity.budget, pick)])


def _one_fills_turned(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    turned = [(rows, cols) for rows, cols in shapes_of(capacity.budget) if rows > cols]
    return stills(geometry, [pick(turned)]) if turned else None


def _one_row_over(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    return stills(geometry, [shape_of(capacity.budget + 1, pick)])


def _several_past_budget(past: int) -> _Edge:
    """Two or more items with as many tokens as the budget and ``past`` more."""

    def edge(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
        if _most_parts(capacity) < 2:
            return None
        count = pick(range(2, _most_parts(capacity) + 1))
        parts = parts_of(capacity.budget + past, count, pick)
        return stills(geometry, [shape_of(part, pick) for part in parts])

    return edge


def _two_alike(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    # From 4 tokens on this is another partition than 1 and the rest, with as many items.
    if _most_parts(capacity) < 2 or capacity.budget < 4:
        return None
    half = capacity.budget // 2
    return stills(geometry, [shape_of(half, pick), shape_of(capacity.budget - half, pick)])


def _items_past_limit(past: int) -> _Edge:
    """Smallest items, as many as a graph takes and ``past`` more."""

    def edge(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
        return stills(geometry, [(1, 1)] * (capacity.items + past))

    return edge


def _longest_strip(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    return stills(geometry, [pick(((1, capacity.budget), (capacity.budget, 1)))])


def _strip_of_windows(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    """The most windows that one frame can have: a last one of a single token."""
    side = geometry.window_side
    if side is None or capacity.budget <= side:
        return None
    length = (capacity.budget - 1) // side * side + 1
    return stills(geometry, [pick(((1, length), (length, 1)))])


def _full_strips(
    geometry: ViTGeometry, capacity: Capacity, frames: int | None
) -> tuple[int, int] | None:
    """Whole windows that the budget leaves beside one token a frame, as what each strip gets and
    how many get one more. Strips of so many windows and a token have the most windows that so many
    frames can have; where they take every sequence slot, they reach the bound."""
    plain = geometry.sequences == "frame" and geometry.temporal_merge == "none"
    if geometry.window_side is None or not plain or not frames:
        return None
    return divmod((capacity.budget - frames) // geometry.window_side, frames)


def _images_of_most_windows(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    full = _full_strips(geometry, capacity, capacity.sequences)
    if full is None or capacity.items < capacity.sequences:
        return None
    each, longer = full
    lengths = [
        (each + (index < longer)) * (geometry.window_side or 1) + 1
        for index in range(capacity.sequences)
    ]
    return stills(geometry, [pick(((1, length), (length, 1))) for length in lengths])


def _clips_of_most_windows(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    slots = _frame_slots(geometry, capacity)
    if geometry.window_side is not None and geometry.sequences == "item":
        # A token is a window of its own where it is a frame of its own.
        allowed = slots is None or slots >= capacity.budget
        if geometry.temporal_merge != "none" or not allowed:
            return None
        return _clips(geometry, [(capacity.budget, (1, 1))])
    full = _full_strips(geometry, capacity, slots)
    if full is None:
        return None
    each, longer = full
    clips = [
        (frames, pick(((1, length), (length, 1))))
        for frames, length in (
            (longer, (each + 1) * (geometry.window_side or 1) + 1),
            ((slots or 0) - longer, each * (geometry.window_side or 1) + 1),
        )
        if frames
    ]
    return _clips(geometry, clips) if len(clips) <= capacity.items else None


def _single_windows(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    side = geometry.window_side
    if side is None or capacity.budget < side**2:
        return None
    most = min(_most_parts(capacity), capacity.budget // side**2)
    return stills(geometry, [(side, side)] * pick(range(most, 0, -1)))


def _one_past_window(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    side = geometry.window_side
    if side is None or capacity.budget < (side + 1) ** 2:
        return None
    return stills(geometry, [(side + 1, side + 1)])


def _frame_slots(geometry: ViTGeometry, capacity: Capacity) -> int | None:
    """Most video frames of a step; None where nothing counts them."""
    slots = [capacity.sequences] if geometry.sequences == "frame" else []
    return min(slots + ([] if capacity.frames is None else [capacity.frames]), default=None)


def _past_slots(geometry: ViTGeometry, capacity: Capacity, past: int) -> int | None:
    """As many frames as a step may have and ``past`` more, or the fewest above that, where frames
    come in multiples; at most so many, where ``past`` is 0. None where there are none such."""
    slots, step = _frame_slots(geometry, capacity), geometry.frame_step
    if slots is None:
        return None
    frames = slots // step * step if past == 0 else -(-(slots + past) // step) * step
    return frames or None


def _clip_past_slots(past: int) -> _Edge:
    """One clip with as many frames as a step may have, and ``past`` more."""

    def edge(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
        frames = _past_slots(geometry, capacity, past)
        if frames is None:
            return None
        # So wide that the rest still fits, and the frames alone decide.
        narrowest = geometry.usage((frames, geometry.merge_size, geometry.merge_size))
        widest = min(capacity.budget // narrowest.tokens, capacity.patches // narrowest.patches)
        if not widest:
            return None
        return _clips(geometry, [(frames, shape_of(pick(range(1, widest + 1)), pick))])

    return edge


def _clips_past_slots(past: int) -> _Edge:
    """Two or more clips of single tokens that share the frames of a step, and ``past`` more."""

    def edge(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
        frames, step = _past_slots(geometry, capacity, past), geometry.frame_step
        if frames is None:
            return None
        most = min(capacity.items, frames // step, _MOST_PARTS)
        # Merged in twos and threes, frames take half as many tokens or fewer, or one.
        worst = most + (frames - most) // 2 if geometry.temporal_merge == "halve" else frames
        if most < 2 or worst > capacity.budget:
            return None
        parts = parts_of(frames // step, pick(range(2, most + 1)), pick)
        return _clips(geometry, [(step * part, (1, 1)) for part in parts])

    return edge


def _clip_fills(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    """The budget's tokens in several frames, where each frame counts."""
    slots = _frame_slots(geometry, capacity)
    most = capacity.budget if slots is None else min(slots, capacity.budget)
    frames = [t for t in range(2, most + 1) if capacity.budget % t == 0]
    if geometry.temporal_merge != "none" or not frames:
        return None
    t = pick(frames)
    return _clips(geometry, [(t, shape_of(capacity.budget // t, pick))])


def _three_frames_make_one(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    """The most patches for the tokens, where two frames become one."""
    slots = _frame_slots(geometry, capacity)
    if geometry.frames_per_token != 3 or (slots is not None and slots < 3):
        return None
    return _clips(geometry, [(3, shape_of(capacity.budget, pick))])


def _above(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    tokens = pick(range(capacity.budget + 1, 2 * capacity.budget + 2))
    return stills(geometry, [shape_of(tokens, pick)])


def _above_among_others(geometry: ViTGeometry, capacity: Capacity, pick: Pick) -> Batch | None:
    around = [shape_of(pick(range(1, capacity.budget + 1)), pick) for _ in range(2)]
    tokens = pick(range(capacity.budget + 1, 2 * capacity.budget + 2))
    return stills(geometry, [around[0], shape_of(tokens, pick), around[1]])


_EDGES_OF_LARGEST: Mapping[str, _Edge] = {
    "one merged token": _one_token,
    "above every budget": _above,
    "above every budget among others": _above_among_others,
}

_EDGES: Mapping[str, _Edge] = {
    "one item fills the budget": _one_fills,
    "one item fills the budget, turned": _one_fills_turned,
    "several items fill the budget": _several_past_budget(0),
    "two alike fill the budget": _two_alike,
    "one item one row over": _one_row_over,
    "several items one row over": _several_past_budget(1),
    "smallest items up to the item limit": _items_past_limit(0),
    "smallest items one above the item limit": _items_past_limit(1),
    "a strip fills the budget": _longest_strip,
    "a strip with the most windows": _strip_of_windows,
    "images with the most windows": _images_of_most_windows,
    "single whole windows": _single_windows,
    "one row and column past a window": _one_past_window,
}

_EDGES_OF_CLIPS: Mapping[str, _Edge] = {
    "one clip fills the budget": _clip_fills,
    "clips with the most windows": _clips_of_most_windows,
    "one clip takes every frame slot": _clip_past_slots(0),
    "one clip one frame above the slots": _clip_past_slots(1),
    "several clips take every frame slot": _clips_past_slots(0),
    "several clips one frame above the slots": _clips_past_slots(1),
    "three frames make one": _three_frames_make_one,
}
