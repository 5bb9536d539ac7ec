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

from vllm.logger import init_logger
from vllm.vit_cudagraph.captured import CapturedBudget
from vllm.vit_cudagraph.costs import NS_PER_MS, CostLines
from vllm.vit_cudagraph.failures import brief, poisons_the_process
from vllm.vit_cudagraph.geometry import PIXELS, Grid, ViTGeometry
from vllm.vit_cudagraph.graphs import GraphBackend

logger = init_logger(__name__)

AUTOMATIC_MARGIN = 0.05
"""By how much a full replay must beat eager for its budget to be captured unasked: batches fill a
step of the ladder (5 %) half on average, and timing is good to about 2 %."""

EAGER_DISCOUNT = 0.03
"""By how much eager runs are taken for cheaper than they were timed: a plan with replays must be
worth more than the timing is off by, or batches run slower than they would have eagerly."""

ITEM = 256
"""Tokens of each image that is timed. Attention within an image costs the same in whichever step it
runs, so it stays out of the figures, which then tell what rows cost. One image of all tokens would
make large steps look dearer than they are for the batches that are packed: several images of a few
hundred tokens. What larger images take is measured once (:func:`further_attention`): it matters
where an eager run waits for launches and has it for nothing."""

LARGE = 4096
"""Tokens of the largest image that tells what attention costs: over more it takes seconds."""

PROBES_APART = 1.1
"""Ratio of two budgets between which the crossover is not looked for any closer."""


@dataclass(frozen=True)
class Bench:
    """What is timed.

    Attributes:
        model: On the mixin.
        backend: Its ``milliseconds`` is the clock.
        device, dtype: Of the tower's input.
        most_items: Of a step.
    """

    model: Any
    backend: GraphBackend
    device: torch.device
    dtype: torch.dtype
    most_items: int

    def replay_ms(
        self, captured: CapturedBudget, grids: Sequence[Grid] | None = None
    ) -> float | None:
        """One step of still images, or of these, in a graph: from their grids to rows that the next
        replay leaves alone, as the manager runs it; None without a clock. A host that launches
        slowly is slow in this too: a few tenths of a millisecond, which three replays have thrice
        and one eager run once."""
        grids = grids or self.images(captured.capacity.budget)
        pixels = self._pixels(grids)

        def run() -> None:
            values = {**self.model.vit_metadata_parts(grids, self.device), PIXELS: [pixels]}
            captured.check(values)
            captured.load(values)
            captured.graph.replay()
            captured.output[: self.model.vit_declared.tower_rows(grids)].clone()

        with torch.inference_mode():
            return self.backend.milliseconds(run)

    def eager_ms(self, tokens: int) -> float | None:
        """One eager run, metadata included; None without a clock."""
        grids = self.images(tokens)
        pixels = self._pixels(grids)

        def run() -> None:
            self.model.vit_forward(pixels, self.model.vit_metadata(grids, self.device))

        with torch.inference_mode():
            return self.backend.milliseconds(run)

    def images(self, tokens: int) -> list[Grid]:
        """What is timed for so many tokens; see :func:`still_images`."""
        return still_images(self.model.vit_declared, tokens, self.most_items)

    def _pixels(self, grids: Sequence[Grid]) -> torch.Tensor:
        """Random: arithmetic on zeros draws less power, and so runs faster."""
        rows = sum(map(self.model.vit_declared.patches, grids))
        pixels = self.model.vit_pixel_buffer(rows, self.device, self.dtype)
        return pixels.normal_() if pixels.is_floating_point() else pixels.random_(0, 256)


def full_image(geometry: ViTGeometry, tokens: int) -> Grid:
    """One frame of at most ``tokens`` merged tokens, nearly square and nearly full."""
    rows = isqrt(tokens)
    return 1, rows * geometry.merge_size, tokens // rows * geometry.merge_size


def still_images(geometry: ViTGeometry, tokens: int, most_items: int) -> list[Grid]:
    """Images of :data:`ITEM` tokens, or of more where that would be too many, of at most ``tokens``
    together and nearly as many; the last is the largest."""
    count = max(1, min(most_items, tokens // ITEM))
    binds = most_items < tokens // ITEM
    first = full_image(geometry, tokens // count if binds else min(ITEM, tokens))
    left = tokens - (count - 1) * geometry.output_tokens(first)
    return [first] * (count - 1) + [full_image(geometry, left)]


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


def measure(bench: Bench, captured: Mapping[int, CapturedBudget], most: int) -> CostLines | None:
    """Time each graph, and some eager runs (:func:`eager_sizes`); None without a clock.

    Eager runs that may wait for launches are timed twice, before the graphs and after them: a host
    with other work may launch at half its speed for a second or two.
    """
    largest = max(captured)
    sizes = eager_sizes(min(captured), largest, most)
    eager: dict[int, float] = {}
    replay: dict[int, float] = {}
    for tokens in sizes:
        if (ms := bench.eager_ms(tokens)) is None:
            return None
        eager[tokens] = ms
    for budget, graph in captured.items():
        if (ms := bench.replay_ms(graph)) is None:
            return None
        replay[budget] = ms
    for tokens in sizes:
        if tokens <= largest and (ms := bench.eager_ms(tokens)) is not None:
            eager[tokens] = min(eager[tokens], ms)
    sequence, pair_ns = 0, 0.0
    try:
        sequence, pair_ns = further_attention(bench, captured[largest], replay[largest])
    except Exception as error:  # an image that large may find no memory; the rest is known
        if poisons_the_process(error):
            raise
        logger.warning("What attention over large images costs is not timed: %s", brief(error))
    discounted = {tokens: (1 - EAGER_DISCOUNT) * ms for tokens, ms in eager.items()}
    return CostLines.of(never_falling(replay), discounted, sequence, pair_ns)


def further_attention(bench: Bench, captured: CapturedBudget, small_ms: float) -> tuple[int, float]:
    """What longer sequences cost: a replay with small images against one with a large image.

    Args:
        bench: The clock.
        captured: A graph, the largest.
        small_ms: What its replay took with :meth:`Bench.images`.

    Returns:
        Patches of a small image's sequences, and the nanoseconds of each pair of patches, one
        attending to the other, that the large image has more; ``(0, 0.0)`` where it is not much
        larger, or not captured.
    """
    declared, budget = bench.model.vit_declared, captured.capacity.budget
    large, small = [full_image(declared, min(budget, LARGE))], bench.images(budget)
    left = budget - declared.output_tokens(large[0])
    if left and bench.most_items > 1:  # as many rows as before, and as much work in windows
        large += still_images(declared, left, bench.most_items - 1)
    further = _pairs(declared, large) - _pairs(declared, small)
    long, short = (max(declared.sequence_lengths(grids[0])) for grids in (large, small))
    if long < 2 * short or further <= 0 or not bench.model.vit_capturable(large[0]):
        return 0, 0.0
    ms = bench.replay_ms(captured, large)
    assert ms is not None
    return short, max(0.0, (ms - small_ms) * NS_PER_MS / further)


def _pairs(geometry: ViTGeometry, grids: Sequence[Grid]) -> int:
    lengths = (length for grid in grids for length in geometry.sequence_lengths(grid))
    return sum(length**2 for length in lengths)


def never_falling(ms: Mapping[int, float]) -> dict[int, float]:
    """Each at most what any larger graph takes: that one computes all of the smaller one's rows and
    more, so where it was timed as faster, something disturbed the smaller one."""
    least, falling = float("inf"), {}
    for budget in sorted(ms, reverse=True):
        falling[budget] = least = min(least, ms[budget])
    return dict(sorted(falling.items()))


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
