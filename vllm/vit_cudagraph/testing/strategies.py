# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for what an encoder may be given: grids, batches, settings, configurations.

They take a :class:`~vllm.vit_cudagraph.geometry.ViTGeometry`, never a model. Everything shrinks
towards one image of one merged token with seed 0. ``edges.py`` aims at given graphs.

* :func:`grids`, :func:`images`, :func:`videos` and :func:`batches` draw any input;
  :func:`processed_grids` draws what a real processor makes of a picture in pixels.
* :func:`graph_settings` and :func:`vision_configs` draw what a user and a checkpoint may set.

``shape`` stands for the rows and columns of a frame in merged tokens, ``tokens`` for merged tokens
of all frames before any frames are merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from vllm.vit_cudagraph.costs import CostLines
from vllm.vit_cudagraph.geometry import Grid, ViTGeometry

MOST_ASPECT_RATIO = 200
"""Longest side over shortest that ``smart_resize`` accepts."""

_MOST_SEED = 99
_PHOTO = 4096  # pixels of the shortest side of a large photograph

T = TypeVar("T")
Shape = tuple[int, int]


@dataclass(frozen=True, repr=False)
class Batch:
    """Vision items of one modality, as one call of the encoder gets them.

    Attributes:
        modality: As vLLM has it, ``image`` or ``video``.
        grids: One an item, in patches.
        seed: Of the pixels.

    Any sequences do for ``grids``; tuples are kept. ``repr`` can be pasted as code.
    """

    modality: str
    grids: tuple[Grid, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "grids", tuple((t, h, w) for t, h, w in self.grids))

    def __repr__(self) -> str:
        items = repr(list(self.grids))
        if len(self.grids) > 3 and len(set(self.grids)) == 1:
            items = f"[{self.grids[0]}] * {len(self.grids)}"
        return f"Batch({self.modality!r}, {items}, seed={self.seed})"


@dataclass(frozen=True)
class GraphSettings:
    """vLLM's three settings of encoder graphs.

    Attributes:
        budgets: ``encoder_cudagraph_token_budgets``, ascending.
        items: ``encoder_cudagraph_max_vision_items_per_batch``; 0 is automatic.
        frames: ``encoder_cudagraph_max_frames_per_batch``; None is automatic.
    """

    budgets: tuple[int, ...]
    items: int = 0
    frames: int | None = None


# -- grids -----------------------------------------------------------------------------------------


def grids(
    geometry: ViTGeometry, *, most_tokens: int = 120, frames: int = 1
) -> SearchStrategy[Grid]:
    """Grids of any shape, with strips, squares and multiples of the window, and processed ones.

    Args:
        most_tokens: Most merged tokens of the item, all frames together.
        frames: Most frames of the grid.

    Raises:
        ValueError: A limit is below 1.
    """
    processed = processed_grids(geometry, most_tokens=most_tokens, frames=frames)
    step, frames = _frame_step(geometry, most_tokens, frames)
    side = geometry.window_side or 1
    kinds: list[_Kind] = [_as_drawn, _strip, _square]
    if side > 1:
        kinds += [_on_windows(side, 0), _on_windows(side, 1), _on_windows(side, -1)]
    return st.one_of(
        _shaped_grids(geometry.merge_size, most_tokens, frames, step, tuple(kinds)), processed
    )


def processed_grids(
    geometry: ViTGeometry, *, most_tokens: int = 120, frames: int = 1
) -> SearchStrategy[Grid]:
    """Grids that a Qwen processor makes of a picture: its size in pixels through ``smart_resize``.

    Sizes go from one pixel to large photographs, aspect ratios to 200:1 either way. The processor's
    own limit, ``max_pixels``, starts at ``most_tokens`` a frame and comes down where a strip would
    exceed that: ``smart_resize`` never makes a side shorter than one merged token, and so lets
    strips pass its limit.

    Args:
        most_tokens: Most merged tokens of the item, all frames together.
        frames: Most frames of the grid (after the temporal patch).

    Raises:
        ValueError: A limit is below 1.
    """
    _check_positive(most_tokens=most_tokens, frames=frames)
    # Imported here and not while an example is drawn: it brings torch.
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    factor = geometry.patch_size * geometry.merge_size
    step, frames = _frame_step(geometry, most_tokens, frames)
    return _processed(smart_resize, factor, geometry.merge_size, most_tokens, frames, step)


def _frame_step(geometry: ViTGeometry, most_tokens: int, frames: int) -> tuple[int, int]:
    """What numbers of frames are multiples of, and the most; one frame where no multiple fits."""
    step = geometry.frame_step
    return (1, 1) if min(most_tokens, frames) < step else (step, frames)


@st.composite
def _processed(
    draw: st.DrawFn,
    resize: Callable[..., tuple[int, int]],
    factor: int,
    merge: int,
    most_tokens: int,
    frames: int,
    step: int,
) -> Grid:
    t = step * draw(_up_to(min(frames, most_tokens) // step))
    limit = most_tokens // t
    fits_unscaled = factor * (math.isqrt(limit) + 1)
    short = draw(_up_to(draw(_one_of((fits_unscaled, _PHOTO)))))
    ratio = draw(_one_of((1, 2, 4, 16, 64, MOST_ASPECT_RATIO)))
    long = short + draw(st.integers(0, short * (ratio - 1)))
    height, width = _turn(draw, short, long)
    for allowed in _halvings(limit):
        rows, cols = _processed_shape(resize, height, width, factor, allowed)
        if rows * cols <= limit:
            return t, rows * merge, cols * merge
    # A strip whose shortest form is longer than the limit; it can be made only by tiny limits.
    assume(False)
    raise AssertionError("unreachable")


def _halvings(limit: int) -> Iterator[int]:
    """``limit``, half of it, and so on down to 1."""
    while limit:
        yield limit
        limit //= 2


def _processed_shape(
    resize: Callable[..., tuple[int, int]], height: int, width: int, factor: int, most_tokens: int
) -> Shape:
    """Shape that a picture of so many pixels has after the processor's resize."""
    pixels = resize(
        height, width, factor=factor, min_pixels=factor**2, max_pixels=most_tokens * factor**2
    )
    return pixels[0] // factor, pixels[1] // factor


# Each kind is a function of the same two numbers. Were they drawn kind by kind, the one with the
# fewest draws would count as the simplest, whatever it draws.
_Kind = Callable[[int, int], Shape]


@st.composite
def _shaped_grids(
    draw: st.DrawFn, merge: int, most_tokens: int, frames: int, step: int, kinds: tuple[_Kind, ...]
) -> Grid:
    t = step * draw(_up_to(min(frames, most_tokens) // step))
    kind = draw(_one_of(kinds))
    # The shorter side first: drawn over the whole range, nearly all would be strips.
    short = draw(_up_to(math.isqrt(most_tokens // t)))
    long = draw(_up_to(most_tokens // t // short))
    rows, cols = _turn(draw, *kind(short, long))
    return t, rows * merge, cols * merge


@cache
def _up_to(most: int) -> SearchStrategy[int]:
    return st.integers(1, most)


@cache
def _one_of(options: tuple[T, ...]) -> SearchStrategy[T]:
    return st.sampled_from(options)


def _turn(draw: st.DrawFn, first: int, second: int) -> tuple[int, int]:
    return (second, first) if draw(st.booleans()) else (first, second)


def _as_drawn(short: int, long: int) -> Shape:
    return short, long


def _strip(short: int, long: int) -> Shape:
    return 1, short * long


def _square(short: int, long: int) -> Shape:
    side = min(short, long)
    return side, side


@cache
def _on_windows(side: int, past: int) -> _Kind:
    """Sides of whole windows and ``past`` more tokens (-1, 0 or 1), never longer than drawn."""

    def whole(length: int) -> int:
        aligned = (length - past) // side * side + past
        return aligned if aligned > 0 else length

    return lambda short, long: (whole(short), whole(long))


# -- shapes and parts ------------------------------------------------------------------------------


class Pick(Protocol):
    """Chooses one option: drawn, or the first for a named example."""

    def __call__(self, options: Sequence[T], /) -> T: ...


def drawing(draw: st.DrawFn) -> Pick:
    """One that draws."""

    def pick(options: Sequence[T], /) -> T:
        return draw(st.sampled_from(options))

    return pick


@cache
def shapes_of(tokens: int) -> tuple[Shape, ...]:
    """All shapes of so many tokens, the squarest first, wide before tall."""
    wide = [(rows, tokens // rows) for rows in range(1, math.isqrt(tokens) + 1)]
    wide = [(rows, cols) for rows, cols in wide if rows * cols == tokens]
    tall = [(cols, rows) for rows, cols in wide if rows != cols]
    return (*wide[::-1], *tall[::-1])


def shape_of(tokens: int, pick: Pick) -> Shape:
    """One shape of so many tokens."""
    return pick(shapes_of(tokens))


def parts_of(total: int, count: int, pick: Pick) -> list[int]:
    """``total`` as a sum of ``count`` positive numbers; 1 each but the last, where not drawn."""
    parts = []
    for after in range(count - 1, 0, -1):
        parts.append(pick(range(1, total - after + 1)))
        total -= parts[-1]
    return [*parts, total]


def stills(geometry: ViTGeometry, shapes: Iterable[Shape], seed: int = 0) -> Batch:
    """Items of one frame; as images, unless the model has none."""
    still = [name for name in geometry.modalities if name != "video"]
    modality = "image" if "image" in still else [*still, "video"][0]
    merge = geometry.merge_size
    items = tuple((1, rows * merge, cols * merge) for rows, cols in shapes)
    return Batch(modality, items, seed)


# -- batches ---------------------------------------------------------------------------------------


def images(
    geometry: ViTGeometry, *, most_items: int = 8, most_tokens: int = 120, modality: str = "image"
) -> SearchStrategy[Batch]:
    """Batches of images, in any order of sizes.

    Args:
        most_items: Most images of a batch (at least 1 is drawn).
        most_tokens: Most merged tokens of one image.
        modality: Another name that the model has for items of one frame.

    Raises:
        ValueError: A limit is below 1, or the geometry has no such modality.
    """
    return _batches_of(geometry, modality, most_items, most_tokens, frames=1)


def videos(
    geometry: ViTGeometry, *, most_items: int = 4, most_tokens: int = 160, frames: int = 8
) -> SearchStrategy[Batch]:
    """Batches of videos.

    Args:
        most_items: Most videos of a batch (at least 1 is drawn).
        most_tokens: Most merged tokens of one video, all its frames together.
        frames: Most frames of a grid (after the temporal patch).

    Raises:
        ValueError: A limit is below 1, or the geometry has no videos.
    """
    return _batches_of(geometry, "video", most_items, most_tokens, frames)


def batches(
    geometry: ViTGeometry,
    *,
    most_items: int = 8,
    most_tokens: int = 120,
    most_videos: int = 4,
    most_video_tokens: int = 160,
    frames: int = 8,
) -> SearchStrategy[Batch]:
    """Batches of each modality that the geometry has; see :func:`images` and :func:`videos`.

    Raises:
        ValueError: A limit is below 1.
    """
    kinds = []
    for modality in sorted(geometry.modalities, key=lambda name: name == "video"):
        if modality == "video":
            kinds.append(
                videos(
                    geometry,
                    most_items=most_videos,
                    most_tokens=most_video_tokens,
                    frames=frames,
                )
            )
        else:
            kinds.append(
                images(geometry, most_items=most_items, most_tokens=most_tokens, modality=modality)
            )
    return st.one_of(kinds)


def same_totals(
    geometry: ViTGeometry, *, most_items: int = 4, most_tokens: int = 60
) -> SearchStrategy[tuple[Batch, Batch]]:
    """Two different batches of images with one total of merged tokens, cut in other parts.

    A graph that is keyed, padded or filled by the total alone takes the second for the first.

    Args:
        most_items: Most images of either.
        most_tokens: Most merged tokens of either, all images together; at least 2.

    Raises:
        ValueError: ``most_items`` is below 1 or ``most_tokens`` below 2.
    """
    _check_positive(most_items=most_items)
    if most_tokens < 2:
        raise ValueError(f"most_tokens={most_tokens} has one partition only; set it to 2 or more")
    return _same_totals(geometry, most_items, most_tokens)


@st.composite
def _same_totals(
    draw: st.DrawFn, geometry: ViTGeometry, most_items: int, most_tokens: int
) -> tuple[Batch, Batch]:
    pick = drawing(draw)
    total = draw(st.integers(2, most_tokens))
    first, second = (
        stills(
            geometry,
            [
                shape_of(part, pick)
                for part in parts_of(total, draw(st.integers(1, min(most_items, total))), pick)
            ],
            draw(SEEDS),
        )
        for _ in range(2)
    )
    assume(first.grids != second.grids)
    return first, second


SEEDS = st.integers(0, _MOST_SEED)


def _batches_of(
    geometry: ViTGeometry, modality: str, most_items: int, most_tokens: int, frames: int
) -> SearchStrategy[Batch]:
    _check_positive(most_items=most_items)
    if modality not in geometry.modalities:
        raise ValueError(
            f"modality={modality!r} is not one of the geometry's modalities "
            f"{geometry.modalities}; use one of these, or batches()"
        )
    items = st.lists(
        grids(geometry, most_tokens=most_tokens, frames=frames), min_size=1, max_size=most_items
    )
    return st.builds(Batch, st.just(modality), items, SEEDS)


def _check_positive(**limits: int) -> None:
    for name, limit in limits.items():
        if limit < 1:
            raise ValueError(f"{name}={limit} allows nothing; set it to 1 or more")


# -- settings --------------------------------------------------------------------------------------


@st.composite
def _graph_settings(draw: st.DrawFn, most_budget: int) -> GraphSettings:
    budgets = draw(st.sets(st.integers(1, most_budget), min_size=1, max_size=3))
    # One draw each: an alternative with fewer draws would count as simpler than a smaller number.
    items = draw(st.sampled_from((0, 1, 2, 3, 5, 8, min(budgets) + 1)))
    frames = draw(st.sampled_from((None, 0, 1, 2, 5, 12)))
    return GraphSettings(tuple(sorted(budgets)), items, frames)


def graph_settings(*, most_budget: int = 160) -> SearchStrategy[GraphSettings]:
    """vLLM's three settings of encoder graphs: one to three budgets from 1 token up, automatic and
    small limits on items (also above the smallest budget) and frames.

    Raises:
        ValueError: ``most_budget`` is below 1.
    """
    _check_positive(most_budget=most_budget)
    return _graph_settings(most_budget)


def cost_lines(budgets: Sequence[int]) -> SearchStrategy[CostLines]:
    """What replays of ``budgets`` and eager runs might have been measured to take: anything."""
    times = st.sampled_from([0.1, 1.0, 1.0, 3.0, 10.0, 100.0])
    sizes = (1, *(budget + 1 for budget in budgets))
    return st.builds(
        lambda replay, eager: CostLines.of(
            dict(zip(budgets, replay, strict=True)), dict(zip(sizes, eager, strict=True))
        ),
        st.tuples(*[times for _ in budgets]),
        st.tuples(*[times for _ in sizes]),
    )


# -- configurations --------------------------------------------------------------------------------

VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Families that :func:`vision_configs` knows."""

_MOST_DEPTH = 4
_MOST_WINDOW_SIDE = 5
_MOST_DEEPSTACK_LEVELS = 3  # one a layer of the checkpoint's text model


def vision_configs(family: str) -> SearchStrategy[dict[str, Any]]:
    """Entries of ``vision_config`` to replace in a tiny checkpoint's configuration.

    Depth 1 to 4, patch, temporal patch and merge size, heads; the window side from 1 to 5 merged
    tokens and any set of layers with full attention (none and all of them too); any set of up to
    three deepstack layers, and the table of learned positions. Widths stay, so the text model fits;
    the checkpoint's own weights do not, so the model needs random ones.

    Args:
        family: One of :data:`VISION_FAMILIES`.

    Raises:
        ValueError: The family has no configurations here.
    """
    if family not in VISION_FAMILIES:
        raise ValueError(
            f"family={family!r} has no vision configurations; use one of "
            f"{', '.join(VISION_FAMILIES)}, or add it to vision_configs()"
        )
    return _vision_configs(family)


# What vLLM cannot build or run, and so is never drawn: in_channels other than 3 (it normalises
# three colours); a window smaller than one merged token; another merge size for Qwen2-VL (its
# merger is made with 2, whatever the configuration says).
@st.composite
def _vision_configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    depth = draw(_up_to(_MOST_DEPTH))
    patch = draw(_one_of((16, 14, 8) if family.startswith("qwen3") else (14, 16, 8)))
    config = {
        "depth": depth,
        "patch_size": patch,
        "temporal_patch_size": draw(_one_of((2, 1))),
        "num_heads": draw(_one_of((4, 2))),
    }
    if family == "qwen2_vl":
        return config
    merge = draw(_one_of((2, 1, 3)))
    some = draw(st.lists(st.booleans(), min_size=depth, max_size=depth))
    layers = [layer for layer in range(depth) if some[layer]]
    config["spatial_merge_size"] = merge
    if family == "qwen2_5_vl":
        side = draw(_up_to(_MOST_WINDOW_SIDE))
        return config | {"window_size": side * merge * patch, "fullatt_block_indexes": layers}
    return config | {
        "deepstack_visual_indexes": layers[-_MOST_DEEPSTACK_LEVELS:],
        "num_position_embeddings": draw(_one_of((256, 25, 1))),
    }
