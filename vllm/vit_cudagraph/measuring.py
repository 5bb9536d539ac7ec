# SPDX-License-Identifier: Apache-2.0
"""Times a tower's graphs and its eager runs at start-up, and finds where eager catches up.

All measurements of the package are taken here. They go into :class:`CostLines`, by which batches
are planned, so a figure need not be exact: it must rank a replay against another one and against an
eager run. Each is the least of a few runs, since what disturbs a run only adds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch

from vllm.vit_cudagraph.captured import CapturedBudget
from vllm.vit_cudagraph.costs import CostLines
from vllm.vit_cudagraph.geometry import PIXELS, Grid, ViTGeometry
from vllm.vit_cudagraph.graphs import GraphBackend

AUTOMATIC_MARGIN = 0.05
"""By how much a full replay must beat eager for its budget to be captured unasked: batches fill a
step of the ladder (5 %) half on average, and timing is good to about 2 %."""

EAGER_DISCOUNT = 0.03
"""By how much eager runs are taken for cheaper than they were timed: a plan with replays must be
worth more than the timing is off by, or batches run slower than they would have eagerly."""

BEYOND_ITEM = 512
"""Tokens of each image of the eager runs that are timed beyond the largest graph. Attention costs a
token less where images are small, so no batch of that many tokens is much cheaper."""

PROBES_APART = 1.1
"""Ratio of two budgets between which the crossover is not looked for any closer."""


@dataclass(frozen=True)
class Bench:
    """What is timed.

    Attributes:
        model: On the mixin.
        backend: Its ``milliseconds`` is the clock.
        device, dtype: Of the tower's input.
    """

    model: Any
    backend: GraphBackend
    device: torch.device
    dtype: torch.dtype

    def replay_ms(self, captured: CapturedBudget) -> float | None:
        """One replay, its buffers filled by one still image; None without a clock."""
        grid = full_image(self.model.vit_declared, captured.capacity.budget)
        with torch.inference_mode():
            metadata = self.model.vit_metadata_parts([grid], self.device)
            captured.load({**metadata, PIXELS: [self._pixels(grid)]})
            return self.backend.milliseconds(captured.graph.replay)

    def eager_ms(self, tokens: int, item: int | None = None) -> float | None:
        """One eager run, metadata included; None without a clock.

        Args:
            tokens: Of the run.
            item: Tokens of each still image of it but the last; by default it is one image.
        """
        whole, rest = divmod(tokens, item or tokens)
        sizes = [item or tokens] * whole + [rest] * (rest > 0)
        grids = [full_image(self.model.vit_declared, size) for size in sizes]
        pixels = torch.cat([self._pixels(grid) for grid in grids])

        def run() -> None:
            self.model.vit_forward(pixels, self.model.vit_metadata(grids, self.device))

        with torch.inference_mode():
            return self.backend.milliseconds(run)

    def _pixels(self, grid: Grid) -> torch.Tensor:
        """Random: arithmetic on zeros draws less power, and so runs faster."""
        rows = self.model.vit_declared.patches(grid)
        pixels = self.model.vit_pixel_buffer(rows, self.device, self.dtype)
        return pixels.normal_() if pixels.is_floating_point() else pixels.random_(0, 256)


def full_image(geometry: ViTGeometry, tokens: int) -> Grid:
    """One frame of at most ``tokens`` merged tokens, nearly square and nearly full."""
    rows = isqrt(tokens)
    return 1, rows * geometry.merge_size, tokens // rows * geometry.merge_size


def eager_sizes(smallest: int, largest: int, most: int) -> list[int]:
    """Token counts whose eager runs are timed.

    Doubling from the smallest budget up to the largest one, and twice beyond it: around the largest
    budget an eager run may still wait for launches, and what a token costs where it does not is
    seen further on.

    Args:
        smallest, largest: Token budgets.
        most: Tokens above which no batch of the engine goes.
    """
    sizes = [smallest]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    beyond = (min(largest * factor, most) for factor in (2, 4))
    return sorted({*sizes, largest, *(size for size in beyond if size > largest)})


def measure(
    bench: Bench, captured: Mapping[int, CapturedBudget], most: int = 0
) -> CostLines | None:
    """Time each graph once, and some eager runs (:func:`eager_sizes`); None without a clock."""
    eager: dict[int, float] = {}
    for tokens in eager_sizes(min(captured), max(captured), most):
        beyond = tokens > max(max(captured), BEYOND_ITEM)
        ms = bench.eager_ms(tokens, BEYOND_ITEM if beyond else None)
        if ms is None:
            return None
        eager[tokens] = (1 - EAGER_DISCOUNT) * ms
    replay = {budget: bench.replay_ms(graph) for budget, graph in captured.items()}
    return CostLines.of({b: ms for b, ms in replay.items() if ms is not None}, eager)


def last_winner(ladder: Sequence[int], wins: Callable[[int], bool]) -> int | None:
    """The largest budget up to which graphs win, found with few probes.

    A replay saves launches, whose time does not grow with the batch, so once eager has caught up it
    stays ahead. Probes double from the smallest budget, so that none is much above the crossover:
    memory and time of a probe grow with it.

    Args:
        ladder: Budgets, ascending, at least one.
        wins: Captures and times a budget; called once for each that is probed.

    Returns:
        A budget of the ladder that wins while the next one that was probed, at most
        :data:`PROBES_APART` above, does not; None if the smallest does not win.
    """
    low, high = -1, 0
    while wins(ladder[high]):
        low = high
        if high == len(ladder) - 1:
            return ladder[high]
        high = min(bisect_left(ladder, 2 * ladder[low]), len(ladder) - 1)
    while high - low > 1 and (low < 0 or ladder[high] > PROBES_APART * ladder[low]):
        middle = (low + high) // 2
        if wins(ladder[middle]):
            low = middle
        else:
            high = middle
    return ladder[low] if low >= 0 else None
