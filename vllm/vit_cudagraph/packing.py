# SPDX-License-Identifier: Apache-2.0
"""The cheapest way to run a batch: which items share a replay, of which graph, which run eagerly.

A **group** of items can be replayed by any graph that holds it in every kind: tokens, attention
sequences, patches, windows, frames, items. Capacities grow together, so the smallest such graph
(the group's **level**) is the largest of the levels of its kinds, and the group costs the least
that was measured from that level up. All that runs eagerly runs in one step, because eager cost is
subadditive (:meth:`CostLines.eager`). So a plan is a partition of the items into groups and at most
one eager step.

* Up to :data:`EXACT_ITEMS` items that fit a graph: all ``2^n`` groups are priced at once, and
  dynamic programming over subsets finds the cheapest partition. Exact.
* More items: the better of (a) the cheapest contiguous cuts of the items sorted by size, any number
  of the largest run eagerly, and (b) vLLM's own greedy packing. Then a few steps at a time are
  packed anew by the exact method, in :data:`BLOCKS` blocks of items, which can only make the plan
  cheaper. A heuristic, but **never dearer than eager**, which is one of (a), **and never
  dearer than vLLM's packing over the same budgets where that respects all capacities**. Exact for
  up to :data:`LONGEST_RUN` equal items.

Among plans of equal cost the one with fewer steps is taken, then the one without an eager step. All
costs are whole numbers in float64: nanoseconds, and below them 12 bits that order ties. Sums are
exact up to 2^53, a predicted 36 minutes, so plans of equal cost compare equal in whatever order
they were added up, and every rank makes the same plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from operator import le
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from vllm.vit_cudagraph.costs import NS_PER_MS, CostLines
from vllm.vit_cudagraph.geometry import Capacity, Usage

EXACT_ITEMS = 10
"""Most items that are packed exactly. That takes 3^10 / 2 pairs of subsets, and no longer than the
heuristic takes for so many; with each item more it takes three times as long."""

LONGEST_RUN = 64
"""Most items of a run that cuts consider, so that their time is linear in the number of items.
Longer runs than that are vLLM's, if its packing is the better."""

BLOCKS = 8
"""Blocks of items that are packed anew together, by the exact method."""

REPACKED_STEPS = 4
"""Replays that are packed anew together. Each, and the eager step, is at least one block."""

MOST_REPACKED = 4
"""Sets of :data:`REPACKED_STEPS` that are packed anew in one round; there are two rounds."""

UNITS_PER_NS = 4096.0
REPLAY_TIE, EAGER_TIE = 2.0, 3.0
"""What a step adds below the nanosecond: two for a replay and three for the one eager step order
plans of equal cost by steps first (up to 2,047), then by whether one of them is eager."""

CACHED_PLANS = 1024

_UNLIMITED = 2**40  # more of anything than a batch has

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Row = tuple[int, int, int, int, int, int]
"""Tokens, sequences, patches, windows, frames, items: of one item, a group or a graph."""

_NO_ROOM: Row = (-1, -1, -1, -1, -1, -1)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class Packing:
    """How to run a batch.

    Attributes:
        steps: ``(items, budget)``: positions in the batch, ascending, and the token budget of the
            graph that replays them. An eager step has the budget None; there is at most one, and it
            is the last. Each item of the batch stands in exactly one step.
        cost_ms: Predicted milliseconds of all steps.
        eager_ms: Predicted milliseconds of one eager run over all items.
    """

    steps: tuple[tuple[tuple[int, ...], int | None], ...]
    cost_ms: float
    eager_ms: float


class _Candidate(NamedTuple):
    """One way to run the items that fit a graph: groups, each with its level, and what is eager."""

    groups: list[tuple[list[int], int]]
    eager: list[int]


class Packer:
    """Packs batches for one set of captured graphs.

    Args:
        capacities: One a graph, each budget larger than the one before and no kind smaller. May be
            empty: everything then runs in one eager step.
        costs: Each of these budgets was measured.

    Raises:
        ValueError: Capacities that do not ascend, or a budget that was not measured.
    """

    def __init__(self, capacities: Sequence[Capacity], costs: CostLines) -> None:
        rooms = [_room(capacity) for capacity in capacities]
        for low, high in pairwise(rooms):
            if low[0] == high[0] or any(a > b for a, b in zip(low, high, strict=True)):
                raise ValueError(f"capacities must ascend in every kind, but {high} follows {low}")
        self._costs = costs
        self._rooms = rooms
        self._by_kind = list(zip(*rooms, strict=True))
        self._price([capacity.budget for capacity in capacities])
        self._tabulate()
        _pairs()  # 10 ms once in a process, which no batch should wait for

    def _price(self, budgets: list[int]) -> None:
        """For each level, the cheapest of the graphs from there up, the smaller of equals, and its
        cost: by noise or by its shape, a graph may cost more than a larger one."""
        ns = [float(round(self._costs.measured(budget) * NS_PER_MS)) for budget in budgets]
        best: list[tuple[float, int]] = []
        for cost, budget in zip(reversed(ns), reversed(budgets), strict=True):
            best.append(min([(cost, budget), *best[-1:]]))
        self._replayed = [budget for _, budget in reversed(best)]
        self._level_ns = [cost for cost, _ in reversed(best)]
        self._level_units = np.array(
            [*(cost * UNITS_PER_NS + REPLAY_TIE for cost in self._level_ns), np.inf]
        )

    def _tabulate(self) -> None:
        """One table of levels for all kinds: of a kind, ``_table[min(count, _top) + _first]``.

        A kind's part has an entry for each count up to its largest limit and one, the last, for
        more. A gather takes a fraction of the time of as many binary searches.
        """
        tables: list[Ints] = []
        tops, firsts = [], []
        for room in self._by_kind:
            tops.append(max((limit + 1 for limit in room if limit < _UNLIMITED), default=0))
            firsts.append(sum(map(len, tables)))
            tables.append(np.searchsorted(room, np.arange(tops[-1] + 1)))
        self._table = np.concatenate([*tables, np.zeros(0)]).astype(np.int16)
        self._top = np.array(tops, np.int64)[:, None]
        self._first = np.array(firsts, np.int64)[:, None]

    # -- a batch -------------------------------------------------------------------------------

    def pack(self, usages: Sequence[Usage]) -> Packing:
        """The cheapest plan that is known for a batch; the module's docstring says how cheap.

        Its cost does not depend on the order of the items, except for more than ``EXACT_ITEMS``
        where items of equal tokens differ in another kind that binds: the cost of vLLM's packing
        depends on it there.

        Args:
            usages: One an item, in the batch's order.
        """
        rows: list[Row] = []
        fitting: list[int] = []
        outside: list[int] = []
        room = self._rooms[-1] if self._rooms else _NO_ROOM
        for index, use in enumerate(usages):
            row = (use.tokens, use.sequences, use.patches, use.windows, use.frames, 1)
            if all(map(le, row, room)):
                fitting.append(index)
                rows.append(row)
            else:
                outside.append(index)
        base = sum(usages[index].tokens for index in outside) if outside else None
        if not rows:
            found = _Candidate([], [])
        elif len(rows) <= EXACT_ITEMS:
            found = self._exact(rows, base)
        else:
            found = self._heuristic(rows, base)
        return self._packing(usages, fitting, outside, found)

    def _packing(
        self, usages: Sequence[Usage], fitting: list[int], outside: list[int], found: _Candidate
    ) -> Packing:
        replays = [
            (tuple(sorted(fitting[i] for i in items)), self._replayed[level])
            for items, level in found.groups
        ]
        steps: list[tuple[tuple[int, ...], int | None]] = [*sorted(replays)]
        ns = sum(self._level_ns[level] for _, level in found.groups)
        eager = sorted([*outside, *(fitting[i] for i in found.eager)])
        tokens = [use.tokens for use in usages]
        step_ns, all_ns = self._costs.eager_ns([sum(tokens[i] for i in eager), sum(tokens)])
        if eager:
            steps.append((tuple(eager), None))
        return Packing(tuple(steps), float(ns + step_ns) / NS_PER_MS, float(all_ns) / NS_PER_MS)

    def _eager_units(self, tokens: npt.ArrayLike, base: int | None) -> Floats:
        """Cost of an eager step over items of ``tokens`` and those that fit no graph (``base``)."""
        sizes = np.asarray(tokens, np.float64) + (base or 0)
        return self._costs.eager_ns(sizes) * UNITS_PER_NS + EAGER_TIE

    def _levels(self, sums: Ints) -> npt.NDArray[np.int16]:
        """Level of each group, ``len(capacities)`` where no graph holds it.

        Args:
            sums: ``[kinds, ...]``; overwritten. The result is ``[...]``.
        """
        flat = sums.reshape(len(sums), -1)
        np.minimum(flat, self._top, out=flat)
        flat += self._first
        return self._table.take(flat).max(axis=0).reshape(sums.shape[1:])

    # -- few items: exact ----------------------------------------------------------------------

    def _exact(self, rows: list[Row], base: int | None) -> _Candidate:
        """The cheapest partition; no row needs to fit a graph. Sets of items are bit masks.

        ``best[S]`` is the least cost of replaying exactly the items of ``S``. Its highest item
        ``i`` is replayed together with some ``U`` of the rest ``T = S - {i}``:
        ``best[{i} + T] = min over U within T of group[{i} + U] + best[T - U]``. All ``T`` below
        ``2^i`` are known before any set with ``i`` as its highest item: ``n`` rounds, in which the
        pairs ``(T, U)`` are the first ``3^i`` of one list.
        """
        sums = np.array(rows, np.float64).T @ _members(len(rows))  # [kinds, 2^n]
        eager = self._eager_units(sums[0], base)
        if base is None:
            eager[0] = 0.0
        level = self._levels(sums.astype(np.int64))
        group = self._level_units.take(level)
        within, rest, starts = _pairs()
        best = np.zeros(len(group))
        for i in range(len(rows)):
            pairs, bit = 3**i, 1 << i
            costs = group[bit : 2 * bit].take(within[:pairs])
            costs += best.take(rest[:pairs])
            best[bit : 2 * bit] = np.minimum.reduceat(costs, starts[:bit])
        total = eager + best[::-1]  # the complement of what runs eagerly is replayed
        eager_set = int(total.argmin())
        masks = _partition(len(group) - 1 - eager_set, group, best)
        groups = [(_items(mask), int(level[mask])) for mask in masks]
        return _Candidate(groups, _items(eager_set))

    # -- many items: heuristics ----------------------------------------------------------------

    def _heuristic(self, rows: list[Row], base: int | None) -> _Candidate:
        """The better of the cuts and vLLM's packing, improved."""

        def units(candidate: _Candidate) -> float:
            cost = sum(float(self._level_units[level]) for _, level in candidate.groups)
            if base is not None or candidate.eager:
                cost += float(self._eager_units(sum(rows[i][0] for i in candidate.eager), base))
            return cost

        best = min([self._cuts(rows, base), *self._upstream(rows)], key=units)
        if len(set(rows)) > 1:
            for inwards in (True, False):
                best = self._repacked(best, rows, base, inwards)
        return best

    def _repacked(
        self, plan: _Candidate, rows: list[Row], base: int | None, inwards: bool
    ) -> _Candidate:
        """``plan`` with a few replays at a time, and the eager step, packed anew; never dearer.

        The groups are taken by the size of their items, neighbours together; or ``inwards``, from
        both ends, the largest together with the smallest, which sorted cuts never mix.
        """
        last = len(plan.groups) - 1
        groups = sorted(plan.groups, key=lambda g: sum(rows[i][0] for i in g[0]) / len(g[0]))
        if inwards:
            order = sorted(range(last + 1), key=lambda place: min(place, last - place))
            groups = [groups[place] for place in order]
        repacked, eager = [], plan.eager
        for first in range(0, max(1, len(groups)), REPACKED_STEPS):
            some = groups[first : first + REPACKED_STEPS]
            if first >= MOST_REPACKED * REPACKED_STEPS:
                repacked += some
                continue
            parts = [items for items, _ in some] + ([eager] if eager else [])
            blocks = _blocks([sorted(part, key=rows.__getitem__) for part in parts])
            anew = self._exact([_sum([rows[i] for i in block]) for block in blocks], base)
            repacked += [([i for b in held for i in blocks[b]], lv) for held, lv in anew.groups]
            eager = [i for b in anew.eager for i in blocks[b]]
        return _Candidate(repacked, eager)

    def _cuts(self, rows: list[Row], base: int | None) -> _Candidate:
        """The cheapest contiguous cuts of the sorted items and number of the largest that run
        eagerly."""
        order = sorted(range(len(rows)), key=rows.__getitem__)
        sums = np.zeros((len(rows[0]), len(rows) + 1), np.int64)
        np.cumsum(np.array([rows[i] for i in order]).T, axis=1, out=sums[:, 1:])
        levels = self._levels_of_runs(sums)
        units = self._level_units.take(levels)
        best = _cheapest_cuts(units)
        eager = self._eager_units(sums[0, -1] - sums[0], base)
        if base is None:
            eager[-1] = 0.0
        stop = int((best + eager).argmin())
        groups = [
            (order[start:end], int(levels[end - 1, start - end]))
            for start, end in _cuts_before(stop, units, best)
        ]
        return _Candidate(groups, order[stop:])

    def _levels_of_runs(self, prefix: Ints) -> npt.NDArray[np.int16]:
        """Level of each run of up to ``D`` items; ``[m, D]``: ``[j - 1, D - d]`` is of the ``d``
        items before position ``j``, and no graph holds one that would start before the list.

        Args:
            prefix: Sums of the first 0..m items, ``[kinds, m + 1]``, tokens first and no item of
                fewer tokens than the one before: so no run that fits is longer than the longest
                at the start.
        """
        longest = int(np.searchsorted(prefix[0], self._rooms[-1][0], side="right")) - 1
        depth = min(longest, LONGEST_RUN)
        before = np.full((len(prefix), depth), -_UNLIMITED)
        padded = np.concatenate([before, prefix], axis=1)
        starts = np.lib.stride_tricks.sliding_window_view(padded[:, 1:-1], depth, axis=1)
        return self._levels(prefix[:, 1:, None] - starts)

    def _upstream(self, rows: list[Row]) -> list[_Candidate]:
        """vLLM's packing, each group in the cheapest graph that holds it; none if one fits none."""
        tokens = [row[0] for row in rows]
        groups = upstream_groups(tokens, self._by_kind[0], self._rooms[-1][5])
        levels = [self._level(_sum([rows[i] for i in items])) for items in groups]
        if max(levels) == len(self._rooms):
            return []
        return [_Candidate(list(zip(groups, levels, strict=True)), [])]

    def _level(self, row: Sequence[int]) -> int:
        """Of one group, as :meth:`_levels`."""
        return max(bisect_left(room, n) for room, n in zip(self._by_kind, row, strict=True))


def _room(capacity: Capacity) -> Row:
    frames = _UNLIMITED if capacity.frames is None else capacity.frames
    return (
        capacity.budget,
        capacity.sequences,
        capacity.patches,
        capacity.windows,
        frames,
        capacity.items,
    )


def _sum(rows: Sequence[Row]) -> Row:
    tokens, sequences, patches, windows, frames, items = map(sum, zip(*rows, strict=True))
    return tokens, sequences, patches, windows, frames, items


def _blocks(parts: list[list[int]]) -> list[list[int]]:
    """At most :data:`BLOCKS` lists, each within one part: the last item of the part with most
    is split off, until they are so many."""
    parts = [list(part) for part in parts]
    single: list[list[int]] = []
    while len(parts) + len(single) < BLOCKS:
        longest = max(parts, key=len)
        if len(longest) == 1:
            break
        single.append([longest.pop()])
    return parts + single


# -- vLLM's packing ----------------------------------------------------------------------------


def upstream_groups(
    tokens: Sequence[int], budgets: Sequence[int], most_items: int
) -> list[list[int]]:
    """How vLLM (0.32, 0.33: ``EncoderCudaGraphManager._execute_local``) groups a batch.

    It knows tokens and the number of items. It takes items by ascending tokens into the group that
    is open, and closes that first if the largest budget or the limit on items would be exceeded; or
    if the item needs at least the group's budget, and both apart need less in sum than together.

    Args:
        tokens: Of each item, at most the largest budget.
        budgets: Ascending.
        most_items: Of one group.

    Returns:
        Positions of the items of each group.
    """
    opened: list[int] = []
    groups = [opened]
    held = 0
    for i in sorted(range(len(tokens)), key=tokens.__getitem__):
        full = len(opened) == most_items or held + tokens[i] > budgets[-1]
        if opened and (full or _better_apart(held, tokens[i], budgets)):
            opened, held = [], 0
            groups.append(opened)
        opened.append(i)
        held += tokens[i]
    return groups


def _better_apart(held: int, size: int, budgets: Sequence[int]) -> bool:
    group = budgets[bisect_left(budgets, held)]
    alone = budgets[bisect_left(budgets, size)]
    return alone >= group and group + alone < budgets[bisect_left(budgets, held + size)]


# -- subsets -----------------------------------------------------------------------------------


@cache
def _members(count: int) -> Floats:
    """``[n, 2^n]``: whether item ``i`` is in set ``S``. float64, whose products BLAS computes."""
    return (np.arange(1 << count)[None, :] >> np.arange(count)[:, None] & 1).astype(np.float64)


@cache
def _pairs() -> tuple[Ints, Ints, Ints]:
    """For each set ``T`` of ``EXACT_ITEMS - 1`` items, in ascending order, all ``U`` within ``T``:
    the ``U``, the ``T - U``, and for each ``T`` where its first ``U`` stands."""
    sets = range(1 << (EXACT_ITEMS - 1))
    within = [[part for part in range(whole + 1) if part | whole == whole] for whole in sets]
    rest = [whole - part for whole in sets for part in within[whole]]
    starts = [0, *accumulate(map(len, within))]
    flat = [part for parts in within for part in parts]
    return np.array(flat), np.array(rest), np.array(starts)


def _partition(whole: int, group: Floats, best: Floats) -> list[int]:
    """The groups that ``best[whole]`` is made of."""
    within, rest, starts = _pairs()
    masks = []
    while whole:
        bit = 1 << (whole.bit_length() - 1)
        of = slice(starts[whole - bit], starts[whole - bit + 1])
        at = int((group[bit + within[of]] + best[rest[of]]).argmin())
        masks.append(bit + int(within[of][at]))
        whole -= masks[-1]
    return masks


def _items(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


# -- cuts --------------------------------------------------------------------------------------


def _cheapest_cuts(runs: Floats) -> Floats:
    """Least cost of the first 0..m items in a row, cut into runs; ``[m + 1]``.

    Args:
        runs: Cost of each run, ``[m, D]``, laid out as :meth:`Packer._levels_of_runs` has it.
    """
    count, depth = runs.shape
    # best[D + j] is of the first j items; the D before them do not exist.
    best = np.full(depth + count + 1, np.inf)
    best[depth] = 0.0
    least = np.minimum.reduce
    for j, costs in enumerate(runs, start=1):
        best[depth + j] = least(best[j : depth + j] + costs)
    return best[depth:]


def _cuts_before(stop: int, runs: Floats, best: Floats) -> list[tuple[int, int]]:
    """The runs ``(start, end)`` that ``best[stop]`` of :func:`_cheapest_cuts` is made of."""
    cuts = []
    while stop:
        depth = min(stop, runs.shape[1])
        costs = best[stop - depth : stop] + runs[stop - 1, -depth:]
        start = stop - depth + int(costs.argmin())
        cuts.append((start, stop))
        stop = start
    return cuts[::-1]


# -- batches seen before -----------------------------------------------------------------------


class PlanCache(Generic[K, V]):
    """Plans of batches seen before; the least recently used goes first.

    Args:
        plan: Makes the plan of a key it has not seen. What it raises is passed on, not kept.
        entries: Most plans that are kept.

    A key holds all that a plan depends on, as cheaply as it can be hashed: a tuple of grids is five
    times faster than one of :class:`Usage`. Make a new cache, or :meth:`clear` this one, when
    anything else changes (a graph is retired).
    """

    def __init__(self, plan: Callable[[K], V], entries: int = CACHED_PLANS) -> None:
        self._cached = lru_cache(maxsize=entries)(plan)

    def __call__(self, key: K) -> V:
        return self._cached(key)

    def __len__(self) -> int:
        return self._cached.cache_info().currsize

    @property
    def hits(self) -> int:
        """Plans that were not made again."""
        return self._cached.cache_info().hits

    def clear(self) -> None:
        """Forget all plans."""
        self._cached.cache_clear()
