# SPDX-License-Identifier: Apache-2.0
"""Token budgets, and packing a batch of vision items into steps. Pure Python, no torch.

A *step* is one replay of a graph, or one eager run, over some of the batch's items. A *plan* is the
steps of a batch. The plan here is safe first: a step never exceeds any capacity of its graph
(tokens, items, patches, attention sequences, windows), and what fits nowhere runs eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.vit_cudagraph.geometry import Capacity, Usage

MIN_TOKEN_BUDGET = 64
"""Output tokens of a 224 x 224 image under patch 14 and merge 2: the smallest usual image."""

REPLAY_OVERHEAD_TOKENS = 96
"""What one more replay costs, in tokens. A replay takes about 1.5 ms + 0.0165 ms a token on an
H200 (Qwen2.5-VL-7B's tower: 2.8 ms at 64 tokens, 37.4 ms at 2116; docs/measurements.md)."""


LONGEST_EXACT = 256
"""Items that are cut exactly at a time. The cost of cutting grows with the square of a run's
length, and so long a run of small items fills its graphs wherever it is cut."""


@dataclass(frozen=True)
class Step:
    """Some items of a batch, run together.

    Attributes:
        items: Their positions in the batch.
        budget: The graph's token budget, or None for an eager run.
        reason: Why the run is eager; None for a replay.
    """

    items: tuple[int, ...]
    budget: int | None
    reason: str | None = None


def budget_ladder(smallest: int, largest: int) -> list[int]:
    """Powers of two times ``smallest`` up to ``largest``, which is always the last.

    Raises:
        ValueError: ``smallest`` or ``largest`` is below 1, or they are in the wrong order.
    """
    if not 1 <= smallest <= largest:
        raise ValueError(f"no token budgets lie between {smallest} and {largest}")
    ladder = []
    budget = smallest
    while budget < largest:
        ladder.append(budget)
        budget *= 2
    return [*ladder, largest]


def why_eager(use: Usage, largest: Capacity) -> str:
    """Name the first capacity of the largest graph that one item exceeds."""
    if use.tokens > largest.budget or use.patches > largest.patches:
        return "larger than every token budget"
    if largest.frames is not None and use.frames > largest.frames:
        return "more video frames than encoder_cudagraph_max_frames_per_batch"
    if use.sequences > largest.sequences:
        return "more attention sequences (frames) than a graph holds"
    return "more attention windows than a graph holds"


def plan_steps(usages: Sequence[Usage], capacities: Sequence[Capacity]) -> list[Step]:
    """Pack items into steps.

    Items that fit a graph alone are sorted by tokens, and that order is cut into runs so that the
    budgets replayed, plus :data:`REPLAY_OVERHEAD_TOKENS` for each, add up to the least (dynamic
    programming over the cuts: exact among contiguous runs, for :data:`LONGEST_EXACT` items at a
    time). All others share one eager step a reason.

    Args:
        usages: One an item, in the batch's order.
        capacities: One a captured graph, each at least as large as the one before in every kind;
            may be empty.

    Returns:
        Steps in which each item of the batch stands exactly once.
    """
    steps: list[Step] = []
    fitting: list[int] = []
    eager: dict[str, list[int]] = {}
    for index, use in enumerate(usages):
        if capacities and capacities[-1].holds(1, use):
            fitting.append(index)
        else:
            reason = why_eager(use, capacities[-1]) if capacities else "no graph is captured"
            eager.setdefault(reason, []).append(index)
    fitting.sort(key=lambda index: (usages[index].tokens, usages[index].sequences))
    for first in range(0, len(fitting), LONGEST_EXACT):
        part = fitting[first : first + LONGEST_EXACT]
        for start, stop, budget in _cheapest_cuts([usages[i] for i in part], capacities):
            steps.append(Step(tuple(sorted(part[start:stop])), budget))
    steps.extend(Step(tuple(items), None, reason) for reason, items in eager.items())
    return steps


def _cheapest_cuts(
    usages: Sequence[Usage], capacities: Sequence[Capacity]
) -> list[tuple[int, int, int]]:
    """Cut a sequence of items, each of which fits alone, into runs ``(start, stop, budget)``."""
    best = [0.0] + [float("inf")] * len(usages)
    cut: list[tuple[int, int]] = [(0, 0)] * (len(usages) + 1)
    for start in range(len(usages)):
        patches = tokens = sequences = windows = frames = level = 0
        for stop in range(start + 1, len(usages) + 1):
            last = usages[stop - 1]
            patches += last.patches
            tokens += last.tokens
            sequences += last.sequences
            windows += last.windows
            frames += last.frames
            # Capacities grow together, so a run that outgrew a graph never fits it again.
            while level < len(capacities) and not capacities[level].holds_counts(
                stop - start, patches, tokens, sequences, windows, frames
            ):
                level += 1
            if level == len(capacities):
                break
            cost = best[start] + capacities[level].budget + REPLAY_OVERHEAD_TOKENS
            if cost < best[stop]:
                best[stop] = cost
                cut[stop] = (start, capacities[level].budget)
    runs = []
    stop = len(usages)
    while stop:
        start, budget = cut[stop]
        runs.append((start, stop, budget))
        stop = start
    return runs[::-1]
