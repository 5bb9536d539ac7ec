# SPDX-License-Identifier: Apache-2.0
"""What a vision tower declares about itself, the arithmetic of grids, and proven bounds.

Everything here is pure Python and numpy: no torch, no vllm. Three ideas carry the module.

* A **grid** ``(t, h, w)`` counts patches of one vision item. All sizes follow from it.
* A tower's metadata is a set of named tensors. For each, :class:`Rows` says *what its rows count*;
  from that alone its capacity under a token budget is known, and no dummy input is ever run.
* A **bound** that a graph bakes in must cover every replay that can reach the graph. Each bound
  below has its proof in its docstring, and a property test that compares it with brute force.

Letters: ``N`` patches, ``T`` merged tokens, ``S`` attention sequences, ``W`` windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Grid = tuple[int, int, int]
"""One vision item: frames, rows and columns, in patches."""

Kind = Literal["patches", "tokens", "sequences", "windows", "longest"]
Value = Literal["position", "learned", "order", "inverse", "merge", "offsets", "lengths", "longest"]
Pad = Literal["zero", "last", "identity", "bound"]

_PAD_OF_VALUE: dict[Value, Pad] = {
    "position": "zero",
    "learned": "zero",
    "order": "identity",
    "inverse": "identity",
    "merge": "identity",
    "offsets": "last",
    "lengths": "zero",
    "longest": "bound",
}

_MOST_PASSED = 4096
"""Grids that a geometry remembers to have passed; a process sees far fewer kinds at a time."""

_CHOICES = {
    "temporal_merge": ("none", "halve", "pool"),
    "sequences": ("frame", "item"),
    "output_rows": ("tokens", "patches"),
}


class NotCapturable(ValueError):
    """This input cannot go through a graph; the batch runs eagerly.

    Args:
        reason: One of few texts, counted in the statistics: nothing of the input's values in it.
        detail: What was found in this input.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason


MALFORMED = "input does not fit its grids"

PIXELS = "pixel_values"
"""Name of the pixel buffer, whatever the modality."""


@dataclass(frozen=True)
class Rows:
    """One tensor of the tower's metadata.

    Attributes:
        kind: What its rows count. ``longest`` is a 0-d host number, baked into the graph.
        value: What the rows hold, so that the default metadata can be derived: ``position`` rows
            depend on one grid alone and are cached; ``learned`` rows depend on weights as well and
            are never cached; ``order`` and ``inverse`` are the window order of tokens and back;
            ``merge`` is the order of merged tokens over patches that come row by row;
            ``offsets`` are cumulative lengths in patches (one more than their kind's count).
        covers: For ``lengths`` and ``longest``: the name of the offsets that they belong to.
        tail: How unused rows are filled, where it is not what ``value`` implies.
    """

    kind: Kind
    value: Value
    covers: str | None = None
    tail: Pad | None = None

    @property
    def pad(self) -> Pad:
        """``zero``; ``last`` repeats the last offset; ``identity`` is the row's own index."""
        return self.tail or _PAD_OF_VALUE[self.value]


def position_rows(*names: str) -> dict[str, Rows]:
    """One row a patch that depends on one grid alone (rotary tables); cached per grid."""
    return {name: Rows("patches", "position") for name in names}


def learned_rows(*names: str) -> dict[str, Rows]:
    """One row a patch that depends on weights too (learned positions); never cached."""
    return {name: Rows("patches", "learned") for name in names}


def window_rows(order: str, inverse: str) -> dict[str, Rows]:
    """Index of tokens in window order, and the index that undoes it."""
    return {order: Rows("tokens", "order"), inverse: Rows("tokens", "inverse")}


def merge_rows(name: str) -> dict[str, Rows]:
    """Index of patches in the order of merged tokens, for a tower whose patches come row by row."""
    return {name: Rows("patches", "merge")}


def offset_rows(
    kind: Literal["sequences", "windows"], offsets: str, longest: str, lengths: str | None = None
) -> dict[str, Rows]:
    """Cumulative offsets of attention sequences, their longest length and, for backends that want
    them, the single lengths."""
    rows = {
        offsets: Rows(kind, "offsets"),
        longest: Rows("longest", "longest", covers=offsets),
    }
    if lengths is not None:
        rows[lengths] = Rows(kind, "lengths", covers=offsets)
    return rows


@dataclass(frozen=True)
class Usage:
    """What one vision item takes of a graph's capacity."""

    patches: int
    tokens: int
    sequences: int
    windows: int
    frames: int = 1


@dataclass(frozen=True)
class Limits:
    """How many items and frames one step may hold.

    Attributes:
        items: Most vision items in a step (at least 1).
        frames: Most video frames in a step as the user set it; 0 where videos are off; ``None``
            leaves it to ``tokens_per_sequence``.
        tokens_per_sequence: Without a user's limit a graph has one sequence slot for so many
            tokens (counted before frames are merged). 1 can never overflow, since a sequence
            holds at least one of them.
    """

    items: int
    frames: int | None = None
    tokens_per_sequence: int = 8

    def sequences(self, budget: int) -> int:
        """Most attention sequences in a step of ``budget`` tokens, where each is a frame.

        Each frame holds at least one token, so ``budget`` bounds it always. An image is one
        sequence, so ``items`` slots must be there; frames come from the user or from the ratio.
        """
        frames = self.frames
        if frames is None:
            frames = -(-budget // self.tokens_per_sequence)
        return max(1, min(budget, max(self.items, frames)))


@dataclass(frozen=True)
class Capacity:
    """Most of each kind that a graph of one token budget can hold.

    Attributes:
        frames: A limit on video frames that the user has set; None where there is none. No buffer
            depends on it: where a frame is a sequence, ``sequences`` has it already.
    """

    budget: int
    items: int
    patches: int
    sequences: int
    windows: int
    frames: int | None = None

    def holds_counts(
        self, items: int, patches: int, tokens: int, sequences: int, windows: int, frames: int
    ) -> bool:
        """Whether so much of each kind fits."""
        return (
            items <= self.items
            and tokens <= self.budget
            and patches <= self.patches
            and sequences <= self.sequences
            and windows <= self.windows
            and (self.frames is None or frames <= self.frames)
        )

    def holds(self, items: int, use: Usage) -> bool:
        """Whether so many items that together use ``use`` fit."""
        return self.holds_counts(
            items, use.patches, use.tokens, use.sequences, use.windows, use.frames
        )


@dataclass(frozen=True)
class ViTGeometry:
    """The geometry of a vision tower.

    Attributes:
        patch_size, temporal_patch_size, in_channels: Give the width of one pixel row.
        merge_size: Side of the square of patches that becomes one merged token.
        rows: Every tensor of the tower's metadata, by the name that the tower reads.
        window_side: Side of an attention window in merged tokens, or None.
        temporal_merge: ``none``; ``halve`` (two frames become one token row, Ernie4.5-VL);
            ``pool`` (all frames become one, Kimi-K2.5).
        frame_step: Items of several frames have a multiple of so many, where the model defines
            nothing else.
        sequences: Whether an attention sequence is a ``frame`` or a whole ``item``.
        sequence_frames: Most frames of a sequence where that is an item: one of more frames is
            several sequences.
        output_rows: What a row of the tower's output is: a merged ``tokens`` row, or one of
            ``patches`` where a resampler follows.
        modalities: Names as vLLM has them.
        pixel_row_shape: Shape of one pixel row; by default flat
            (``in_channels * temporal_patch_size * patch_size ** 2`` numbers).

    Raises:
        ValueError: A size that is not positive, windows without window rows or the reverse,
            a ``covers`` that names no offsets.
    """

    patch_size: int
    merge_size: int
    rows: Mapping[str, Rows]
    temporal_patch_size: int = 1
    in_channels: int = 3
    window_side: int | None = None
    temporal_merge: Literal["none", "halve", "pool"] = "none"
    frame_step: int = 1
    sequences: Literal["frame", "item"] = "frame"
    sequence_frames: int | None = None
    output_rows: Literal["tokens", "patches"] = "tokens"
    modalities: tuple[str, ...] = ("image", "video")
    pixel_row_shape: tuple[int, ...] = field(default=())

    @classmethod
    def of_tower(
        cls, tower: Any, *rows: Mapping[str, Rows], embed: Any = None, **declared: Any
    ) -> ViTGeometry:
        """Read patch, merge and channel sizes off a tower of the usual make.

        Args:
            tower: Has ``patch_embed`` (``patch_size``, ``temporal_patch_size`` unless it is 1, and
                ``in_channels``, ``num_channels`` or a convolution ``proj``) and
                ``spatial_merge_size``.
            embed: What stands for ``tower.patch_embed``.
            rows: The metadata's tensors, see :func:`position_rows` and its neighbours.
            declared: Any other field.
        """
        embed = tower.patch_embed if embed is None else embed
        channels = getattr(embed, "in_channels", None) or getattr(embed, "num_channels", None)
        return cls(
            patch_size=embed.patch_size,
            temporal_patch_size=getattr(embed, "temporal_patch_size", 1),
            in_channels=channels or embed.proj.in_channels,
            merge_size=tower.spatial_merge_size,
            rows={name: row for part in rows for name, row in part.items()},
            **declared,
        )

    def __post_init__(self) -> None:
        sizes = ("patch_size", "merge_size", "temporal_patch_size", "in_channels", "frame_step")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("window_side", "sequence_frames"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {getattr(self, name)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        values = {row.value for row in self.rows.values()}
        if ("order" in values) != ("inverse" in values):
            raise ValueError("declare window order and its inverse together, or neither")
        windowed = "order" in values or any(r.kind == "windows" for r in self.rows.values())
        if windowed != (self.window_side is not None):
            raise ValueError("declare window_side together with window rows, or neither")
        for name, row in self.rows.items():
            covered = self.rows.get(row.covers or "")
            if row.value in ("lengths", "longest") and (
                covered is None or covered.value != "offsets"
            ):
                raise ValueError(f"{name!r} must cover declared offsets, not {row.covers!r}")

    # -- one grid ------------------------------------------------------------------------------

    @property
    def merge_unit(self) -> int:
        """Patches in one merged token."""
        return self.merge_size**2

    @cached_property
    def pixel_row(self) -> tuple[int, ...]:
        """Shape of the pixels of one patch."""
        return self.pixel_row_shape or (
            self.in_channels * self.temporal_patch_size * self.patch_size**2,
        )

    @cached_property
    def learns_rows(self) -> bool:
        """Whether some rows of the metadata depend on weights."""
        return any(row.value == "learned" for row in self.rows.values())

    def check_grid(self, grid: Sequence[int]) -> None:
        """Raise :class:`NotCapturable` unless ``grid`` is one that the tower defines."""
        if len(grid) != 3 or min(grid) < 1:
            raise NotCapturable(MALFORMED, f"{tuple(grid)} is not three positive numbers")
        t, h, w = grid
        if t > 1 and t % self.frame_step:
            raise NotCapturable(
                MALFORMED, f"{t} frames are not a multiple of {self.frame_step} frames"
            )
        if h % self.merge_size or w % self.merge_size:
            raise NotCapturable(
                MALFORMED, f"{tuple(grid)} is not a multiple of merge size {self.merge_size}"
            )

    def checked_patches(self, grid: Grid) -> int:
        """:meth:`patches` of a grid that :meth:`check_grid` lets pass. A grid that did is looked
        up: this runs for each item of each batch."""
        patches = self._passed.get(grid)
        if patches is None:
            self.check_grid(grid)
            if len(self._passed) >= _MOST_PASSED:
                self._passed.clear()
            patches = self._passed[grid] = self.patches(grid)
        return patches

    @cached_property
    def _passed(self) -> dict[Grid, int]:
        return {}

    def patches(self, grid: Grid) -> int:
        """``t * h * w``: pixel rows of the item."""
        return grid[0] * grid[1] * grid[2]

    def frame_tokens(self, grid: Grid) -> int:
        """Merged tokens of one frame."""
        return (grid[1] // self.merge_size) * (grid[2] // self.merge_size)

    def output_tokens(self, grid: Grid) -> int:
        """Rows that the item has in the final embeddings."""
        if self.temporal_merge == "none":  # asked for each item several times a batch
            return grid[0] * self.frame_tokens(grid)
        frames = max(1, grid[0] // 2) if self.temporal_merge == "halve" else 1
        return frames * self.frame_tokens(grid)

    def tower_rows(self, grids: Iterable[Grid]) -> int:
        """Rows that the items have in the tower's own output."""
        count = self.patches if self.output_rows == "patches" else self.output_tokens
        return sum(count(grid) for grid in grids)

    def sequence_lengths(self, grid: Grid) -> list[int]:
        """Lengths in patches of the item's full-attention sequences, in order."""
        t, frame = grid[0], grid[1] * grid[2]
        if self.sequences == "frame":
            return [frame] * t
        most = self.sequence_frames or t
        return [min(most, t - first) * frame for first in range(0, t, most)]

    def window_lengths(self, grid: Grid) -> npt.NDArray[np.int64]:
        """Lengths in patches of the item's non-empty windows, in window order; shape ``[W]``."""
        keys = self._window_keys(grid)
        return np.bincount(keys) * self.merge_unit

    def window_order(self, grid: Grid) -> npt.NDArray[np.int64]:
        """The item's merged tokens in window order; shape ``[T]``, a permutation of ``0..T-1``.

        Frames come in turn; within a frame windows run row by row, and so do tokens in a window.
        """
        return np.argsort(self._window_keys(grid), kind="stable")

    @staticmethod
    def inverse_order(order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The permutation that undoes ``order``; shape ``[T]``."""
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return inverse

    def merge_order(self, grid: Grid) -> npt.NDArray[np.int64]:
        """The item's patches, which come row by row, in the order of merged tokens: those of one
        token are neighbours; shape ``[N]``, a permutation of ``0..N-1``."""
        t, h, w, side = *grid, self.merge_size
        squares = np.arange(t * h * w).reshape(t, h // side, side, w // side, side)
        return squares.transpose(0, 1, 3, 2, 4).reshape(-1)

    def _window_keys(self, grid: Grid) -> npt.NDArray[np.int64]:
        """Number of the window that each merged token (row by row, frame by frame) lies in.

        Windows tile a frame from its top left corner, so none of those counted is empty.
        """
        if self.window_side is None:
            raise ValueError("this geometry declares no windows")
        side = self.window_side
        t, rows, cols = grid[0], grid[1] // self.merge_size, grid[2] // self.merge_size
        across = -(-cols // side)
        in_frame = (np.arange(rows) // side)[:, None] * across + (np.arange(cols) // side)[None, :]
        per_frame = across * -(-rows // side)
        frames = np.arange(t)[:, None] * per_frame + in_frame.reshape(1, -1)
        return frames.reshape(-1)

    def windows(self, grid: Grid) -> int:
        """Non-empty windows: ``t * ceil(rows / side) * ceil(cols / side)``, 0 without windows."""
        if self.window_side is None:
            return 0
        rows, cols = grid[1] // self.merge_size, grid[2] // self.merge_size
        return grid[0] * -(-rows // self.window_side) * -(-cols // self.window_side)

    def usage(self, grid: Grid) -> Usage:
        """What the item takes of a graph's capacity."""
        return Usage(
            patches=self.patches(grid),
            tokens=self.output_tokens(grid),
            sequences=self._sequences(grid[0]),
            windows=self.windows(grid),
            frames=grid[0],
        )

    def _sequences(self, frames: int) -> int:
        """Attention sequences of an item of so many frames."""
        if self.sequences == "frame":
            return frames
        return -(-frames // self.sequence_frames) if self.sequence_frames else 1

    # -- one budget ----------------------------------------------------------------------------

    def capacity(self, budget: int, limits: Limits) -> Capacity:
        """Most of each kind in any step whose output tokens are at most ``budget``."""
        return Capacity(
            budget=budget,
            items=max(1, min(limits.items, budget)),
            patches=self._most_patches(budget),
            sequences=self._most_sequences(budget, limits),
            windows=self._most_windows(budget, self._most_sequences(budget, limits)),
        )

    def _most_patches(self, budget: int) -> int:
        """Most patches: ``budget * merge_unit``, more where frames are merged.

        Each output token is made of ``merge_unit`` patches of one frame. Where two frames become
        one, ``t`` frames give ``max(1, t // 2)``, and ``t <= 3 * max(1, t // 2)`` (equality at
        t = 3). Where all frames are pooled no bound exists; such a tower captures t = 1 alone
        (``vit_capturable``), for which the plain bound holds.
        """
        return budget * self.merge_unit * self.frames_per_token

    @property
    def frames_per_token(self) -> int:
        """Most frames that one output token is made of (see :meth:`_most_patches`)."""
        if self.temporal_merge != "halve":
            return 1
        return 3 if self.frame_step % 2 else 2

    def _most_sequences(self, budget: int, limits: Limits) -> int:
        """Most attention sequences; the planner never sends a step with more to the graph."""
        if self.sequences == "item" and self.sequence_frames is None:
            return max(1, min(limits.items, budget))
        # A sequence of an item in parts has a frame at least, and an image is one.
        return limits.sequences(budget * self.frames_per_token)

    def _most_windows(self, budget: int, sequences: int) -> int:
        """Most non-empty windows: ``floor((T + (s - 1) * S) / s)``, never more than ``T``.

        Proof, with window side ``s``. A frame of ``r x c`` merged tokens, ``n = r * c``, has
        ``ceil(r/s) * ceil(c/s) <= (r + s - 1)(c + s - 1) / s**2
        = (n + (s - 1)(r + c) + (s - 1)**2) / s**2``. For ``r, c >= 1``: ``(r-1)(c-1) >= 0``, so
        ``r + c <= n + 1`` and the count is at most
        ``(n + (s - 1)(n + 1) + (s - 1)**2) / s**2 = (n + s - 1) / s``. Summed over ``S`` frames of
        ``T`` tokens in all: ``(T + (s - 1) * S) / s``, and a count is whole. Strips reach it
        (``r = 1, c = s * k + 1``). A window holds a token, so ``T`` bounds it as well; that is the
        bound used where a sequence is a whole item, since frames are not counted there.
        """
        if self.window_side is None:
            return 0
        tokens = self._most_patches(budget) // self.merge_unit
        if self.sequences == "item":
            return tokens
        return min(tokens, (tokens + (self.window_side - 1) * sequences) // self.window_side)

    def rows_capacity(self, kind: Kind, capacity: Capacity) -> int:
        """Rows of a buffer whose rows count ``kind`` (offsets take one more)."""
        return {
            "patches": capacity.patches,
            "tokens": capacity.patches // self.merge_unit,
            "sequences": capacity.sequences,
            "windows": capacity.windows,
            "longest": 0,
        }[kind]

    def tower_rows_capacity(self, capacity: Capacity) -> int | None:
        """Rows of the tower's output over a full buffer; None where frames are merged inside the
        tower, since they then depend on how the rows fall into items."""
        if self.output_rows == "patches":
            return capacity.patches
        return capacity.patches // self.merge_unit if self.temporal_merge == "none" else None

    def longest_bound(self, name: str, capacity: Capacity) -> int:
        """Longest sequence in patches, over all steps within ``capacity``, of the offsets that
        ``name`` covers.

        A window holds at most ``side ** 2`` merged tokens. A frame, or an item where sequences are
        items, holds at most all patches of the step. Neither can exceed the step's patches.
        """
        covered = self.rows[str(self.rows[name].covers)]
        if covered.kind == "windows":
            assert self.window_side is not None
            return min(self.window_side**2 * self.merge_unit, capacity.patches)
        return capacity.patches

    def smallest_grid(self) -> Grid:
        """The smallest item: one merged token."""
        return (1, self.merge_size, self.merge_size)
