# SPDX-License-Identifier: Apache-2.0
"""Plans: which items of a batch are replayed together, in which graph, and which run eagerly.

A *step* is one replay of a graph, or one eager run, over some of the batch's items. A *plan* is the
steps of a batch. ``packing.py`` finds the cheapest steps within every capacity of every graph;
here items of a model become what it packs, and plans are remembered. Pure Python, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vllm.vit_cudagraph.costs import NS_PER_MS, CostLines
from vllm.vit_cudagraph.geometry import Capacity, Grid, Usage
from vllm.vit_cudagraph.packing import Packer, Packing, PlanCache

MIN_TOKEN_BUDGET = 64
"""Output tokens of a 224 x 224 image under patch 14 and merge 2: the smallest usual image."""

CHEAPER_EAGERLY = "cheaper eagerly"
ABOVE_ALL = "larger than every token budget"
NOT_CAPTURED = "no graph is captured"
NOT_CAPTURABLE = "the model captures no such item"

_NOWHERE = 2**40  # more patches than any graph holds


@dataclass(frozen=True)
class Step:
    """Some items of a batch, run together.

    Attributes:
        items: Their positions in the batch, ascending.
        budget: The graph's token budget, or None for an eager run.
        reasons: Why items run eagerly, and how many for each reason; empty for a replay.
    """

    items: tuple[int, ...]
    budget: int | None
    reasons: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Plan:
    """The steps of a batch: each item stands in exactly one; at most one, the last, is eager.

    Attributes:
        cost_ms: What they are predicted to take.
        eager_ms: What one eager run over all items is predicted to take; never less.
    """

    steps: tuple[Step, ...]
    cost_ms: float
    eager_ms: float


def why_eager(use: Usage, largest: Capacity) -> str | None:
    """Name the first capacity of the largest graph that one item exceeds; None if it fits."""
    if use.tokens > largest.budget or use.patches > largest.patches:
        return ABOVE_ALL
    if largest.frames is not None and use.frames > largest.frames:
        return "more video frames than encoder_cudagraph_max_frames_per_batch"
    if use.sequences > largest.sequences:
        return "more attention sequences (frames) than a graph holds"
    if use.windows > largest.windows:
        return "more attention windows than a graph holds"
    return None


class Planner:
    """Plans batches for one set of captured graphs.

    From the grids alone, without a clock or chance: ranks with the same graphs and the same costs
    make the same plans.

    Args:
        capacities: One a graph, each at least as large as the one before in every kind; may be
            empty.
        costs: Each of their budgets was measured.
        usage: What an item takes of a graph's capacity.
        capturable: Whether an item may go through a graph at all.
    """

    def __init__(
        self,
        capacities: Sequence[Capacity],
        costs: CostLines,
        usage: Callable[[Grid], Usage],
        capturable: Callable[[Grid], bool],
    ) -> None:
        self._capacities = list(capacities)
        self._costs, self._usage, self._capturable = costs, usage, capturable
        self._packer = Packer(self._capacities, costs)
        self._plans: PlanCache[tuple[Grid, ...], Plan] = PlanCache(self._plan)

    def plan(self, grids: Sequence[Grid]) -> Plan:
        """The plan of a batch; batches that were planned lately are looked up."""
        return self._plans(tuple(grids))

    def _plan(self, grids: tuple[Grid, ...]) -> Plan:
        able = [self._capturable(grid) for grid in grids]
        usages = [self._usage(grid) for grid in grids]
        shown = [
            use if may else replace(use, patches=_NOWHERE)
            for use, may in zip(usages, able, strict=True)
        ]
        packing = self._packer.pack(shown)
        lost_ms = self._lost_ms(packing, usages)
        if lost_ms > 0 and packing.cost_ms + lost_ms >= packing.eager_ms:
            everything = (tuple(range(len(grids))), None)
            packing = Packing((everything,), packing.eager_ms, packing.eager_ms)
        steps = []
        for items, budget in packing.steps:
            reasons: Counter[str] = Counter()
            if budget is None:
                reasons.update(self._reason(usages[i], able[i]) for i in items)
            steps.append(Step(items, budget, tuple(reasons.items())))
        return Plan(tuple(steps), packing.cost_ms, packing.eager_ms)

    def _lost_ms(self, packing: Packing, usages: Sequence[Usage]) -> float:
        """What a packing loses to one eager run over all items, where sequences are longer than
        those that were timed: an eager run that waits for launches has that attention for nothing,
        until the device has as much to do as the host. Below 0 where it wins instead."""
        longer_ns = [self._costs.longer_ns(use.patches, use.sequences) for use in usages]
        if not any(longer_ns):
            return 0.0
        whole_ns = lost_ns = 0.0
        for items, budget in packing.steps:
            step_ns = sum(longer_ns[i] for i in items)
            whole_ns += step_ns
            lost_ns += step_ns if budget is not None else self._unhidden_ns(step_ns, items, usages)
        return (lost_ns - self._unhidden_ns(whole_ns, range(len(usages)), usages)) / NS_PER_MS

    def _unhidden_ns(self, ns: float, items: Sequence[int], usages: Sequence[Usage]) -> float:
        """What is left of some attention that an eager run over items hides where it waits."""
        return max(0.0, ns - self._costs.waiting_ns(sum(usages[i].tokens for i in items)))

    def _reason(self, use: Usage, able: bool) -> str:
        if not self._capacities:
            return NOT_CAPTURED
        if not able:
            return NOT_CAPTURABLE
        return why_eager(use, self._capacities[-1]) or CHEAPER_EAGERLY
