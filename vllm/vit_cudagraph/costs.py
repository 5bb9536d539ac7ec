# SPDX-License-Identifier: Apache-2.0
"""What a replay and an eager run cost, in milliseconds, from a few measurements at start-up.

Times measured once are noisy, and noise only adds. What is known about the true cost turns each
measurement into a bound on others, and the curves here are the least of these bounds:

* More rows never cost less. So what was measured for *more* tokens bounds the cost of fewer.
* One eager run never costs more than two over the same items. So the cost of a token never grows
  with the size of the run, and what a token cost in a *smaller* run bounds its cost in a larger.

Times are whole nanoseconds, which float64 adds without rounding: two plans that cost the same
compare equal on every rank, in whatever order their steps are added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

Points = tuple[tuple[int, float], ...]
"""Pairs ``(tokens, ms)``, ascending in tokens, each number of tokens once."""

NS_PER_MS = 1e6

MARGIN = 0.02
"""How much cheaper than eager a replay must be to be worth its memory: more than timing noise."""

H200_REPLAY_MS: Points = ((64, 2.8), (256, 5.4), (629, 11.9), (1196, 21.2), (2116, 37.4))
"""Exact-shape replays of Qwen2.5-VL-7B's tower on an H200 (docs/measurements.md)."""

H200_EAGER_MS: Points = ((64, 22.0), (256, 22.0), (629, 22.0), (1196, 28.0), (2116, 39.0))
"""The same tower, eager, as measured; but the 30 ms at 64 tokens are taken as the 22 of the next
two sizes, since all three wait for the same launches."""

_FAR = 2**40
"""More tokens than any batch has: where the last piece of the eager curve ends."""


def _checked(name: str, points: Points) -> None:
    tokens = [size for size, _ in points]
    if any(size < 1 for size in tokens) or tokens != sorted(set(tokens)):
        raise ValueError(f"{name}: token counts must be positive and ascend, got {tokens}")
    for size, ms in points:
        if not (math.isfinite(ms) and ms > 0):
            raise ValueError(f"{name}: {size} tokens cannot take {ms} ms")


def _on_lines(tokens: int, points: Points) -> float:
    """Milliseconds at ``tokens`` on the lines through ``points``."""
    after = next((i for i, (size, _) in enumerate(points) if size >= tokens), len(points) - 1)
    (left, low), (right, high) = points[max(0, after - 1) : max(0, after - 1) + 2]
    return max(low + (high - low) / (right - left) * (tokens - left), 1e-3)


def _least_of_later(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values), min))[::-1]


@dataclass(frozen=True)
class CostLines:
    """Measured costs of one tower on one device.

    Attributes:
        replay_ms: For each captured token budget, what a replay took; may be empty.
        eager_ms: At a few sizes, what an eager run of so many tokens took; at least one. Measure
            one at the largest budget too: beyond the last size a token costs what it costs there.
        sequence: Patches of the attention sequences that were timed.
        pair_ns: What a patch takes longer for each patch by which its sequence is longer than that;
            0 where it was not measured.

    Raises:
        ValueError: Token counts that do not ascend or are below 1, times that are not positive and
            finite, no eager size, a negative ``sequence`` or ``pair_ns``.
    """

    replay_ms: Points
    eager_ms: Points
    sequence: int = 0
    pair_ns: float = 0.0

    def __post_init__(self) -> None:
        if self.sequence < 0 or not (math.isfinite(self.pair_ns) and self.pair_ns >= 0):
            raise ValueError(f"no cost of attention: {self.sequence} patches, {self.pair_ns} ns")
        _checked("replay_ms", self.replay_ms)
        _checked("eager_ms", self.eager_ms)
        if not self.eager_ms:
            raise ValueError("eager_ms: measure an eager run of at least one size")

    @classmethod
    def of(
        cls,
        replay_ms: Mapping[int, float],
        eager_ms: Mapping[int, float],
        sequence: int = 0,
        pair_ns: float = 0.0,
    ) -> CostLines:
        """From measurements in any order, by tokens."""
        return cls(
            tuple((int(tokens), float(ms)) for tokens, ms in sorted(replay_ms.items())),
            tuple((int(tokens), float(ms)) for tokens, ms in sorted(eager_ms.items())),
            sequence,
            pair_ns,
        )

    @classmethod
    def modelled(
        cls,
        budgets: Iterable[int],
        replay_ms: Points = H200_REPLAY_MS,
        eager_ms: Points = H200_EAGER_MS,
    ) -> CostLines:
        """Costs where nothing was measured: by default those of Qwen2.5-VL-7B's tower on an H200.

        Args:
            budgets: Token budgets, in any order.
            replay_ms: At least two points that replays lie on; straight lines between them, and
                the first and the last of these lines go on.
            eager_ms: Points of the eager curve.
        """
        return cls.of({b: _on_lines(b, replay_ms) for b in budgets}, dict(eager_ms))

    # -- replays -------------------------------------------------------------------------------

    @cached_property
    def _measured_ns(self) -> dict[int, float]:
        return {budget: float(round(ms * NS_PER_MS)) for budget, ms in self.replay_ms}

    @cached_property
    def _replay_ns(self) -> dict[int, float]:
        ns = self._measured_ns
        return dict(zip(ns, _least_of_later(list(ns.values())), strict=True))

    def measured(self, budget: int) -> float:
        """Milliseconds that a replay of ``budget`` took, to the nanosecond.

        Raises:
            ValueError: That budget was not measured.
        """
        return self._of(self._measured_ns, budget)

    def replay(self, budget: int) -> float:
        """Milliseconds that a replay costs which can hold ``budget`` tokens; never decreasing.

        It is the least that was measured for this budget or a larger one. A budget that came out
        dearer than a larger one was either disturbed, or its shape truly is slow (a matrix kernel
        for an awkward number of rows); in both cases replaying the larger one costs this, so the
        figure is one that was measured for the graph that runs. An average over neighbours
        (pool-adjacent-violators) would promise what no graph has shown.

        Raises:
            ValueError: That budget was not measured.
        """
        return self._of(self._replay_ns, budget)

    def _of(self, ns: dict[int, float], budget: int) -> float:
        if budget not in ns:
            raise ValueError(f"no replay of {budget} tokens was measured, only of {list(ns)}")
        return ns[budget] / NS_PER_MS

    # -- eager runs ----------------------------------------------------------------------------

    @cached_property
    def _eager_curve(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Corners of the curve: tokens, and nanoseconds.

        Lower each point to the least of those after it, then each cost of a token to the least of
        those before it; the second keeps what the first has made. For ``i < k`` with costs
        ``c_i <= c_k``, sizes ``t_i < t_k`` and ``j`` the one that lowers ``k``: where ``j <= i``,
        ``t_k * c_j / t_j >= t_i * c_j / t_j``, which is at least point ``i``; where ``j > i``,
        ``t_k * c_j / t_j >= c_j >= c_i``.
        """
        tokens = [size for size, _ in self.eager_ms]
        falling = _least_of_later([ms for _, ms in self.eager_ms])
        rates = accumulate((ms / size for ms, size in zip(falling, tokens, strict=True)), min)
        # The product may be a rounding error above the quotient's own point.
        ms = [min(m, rate * size) for m, rate, size in zip(falling, rates, tokens, strict=True)]
        far = ms[-1] / tokens[-1] * _FAR
        return np.array([*tokens, _FAR], np.float64), np.array([*ms, far]) * NS_PER_MS

    def eager_ns(self, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Whole nanoseconds of an eager run; any shape in, the same out. See :meth:`eager`."""
        sizes = np.asarray(tokens, np.float64)
        # Rounded up: whole numbers above two terms add up to one above their sum.
        return np.ceil(np.interp(sizes, *self._eager_curve)) * (sizes > 0)

    def eager(self, tokens: int) -> float:
        """Milliseconds of one eager run over items of so many tokens together; 0 for none.

        Linear between the measured sizes; up to the first of them its cost, since such a run waits
        for launches. Beyond the last, a token costs what it costs on average there: no less, or
        a noisy last piece could promise more for nothing; no more, by the next property.

        Never decreasing, and the cost of a token never grows: a piece between two points whose
        costs a token do not grow lies on a line that meets zero tokens at a cost of 0 or more.
        Hence ``eager(a + b) <= eager(a) + eager(b)``: with ``c(a + b) / (a + b)`` at most
        ``c(a) / a`` and ``c(b) / b``, ``c(a + b) = a * c(a + b) / (a + b) + b * c(a + b) / (a + b)
        <= c(a) + c(b)``. So one eager step is never dearer than two, and a planner that makes at
        most one loses nothing (but for a nanosecond where float64 rounds across a whole one).
        """
        return float(self.eager_ns(tokens)) / NS_PER_MS

    def waiting_ns(self, tokens: int) -> float:
        """For how long the device waits for launches in an eager run, as far as that is known: what
        the run costs above the least that so many tokens cost in any run. Whole nanoseconds, 0 or
        more.
        """
        sizes, ns = self._eager_curve
        least = float(ns[-1] / sizes[-1])  # the cost of a token never grows
        return max(0.0, float(self.eager_ns(tokens)) - math.ceil(least * tokens))

    def longer_ns(self, patches: int, sequences: int) -> float:
        """What the attention of an item of equal sequences takes beyond that of sequences as short
        as were timed, in whole nanoseconds."""
        if not sequences:
            return 0.0
        return float(round(self.pair_ns * patches * max(0.0, patches / sequences - self.sequence)))

    # -- where graphs win ----------------------------------------------------------------------

    def winning(self, budgets: Iterable[int], margin: float = MARGIN) -> list[int]:
        """Those budgets that can win, in the order given.

        A budget serves counts of tokens from the next smaller one's up to itself. Eager cost does
        not fall over that range while the replay's stays, so it wins somewhere exactly if it wins
        when it is full. No plan gets dearer without the others (with ``margin`` 0): a replay that
        costs at least as much as eager over its own budget can be added to the eager step.

        Args:
            margin: By what part of eager's cost the replay must be cheaper.

        Raises:
            ValueError: A budget was not measured.
        """
        return [b for b in budgets if self.replay(b) < (1 - margin) * self.eager(b)]

    def crossover(self, margin: float = MARGIN) -> int | None:
        """The largest measured budget whose replay is cheaper than eager, or None; as winning."""
        return max(self.winning(self._replay_ns, margin), default=None)

    # -- between processes ---------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """What was measured, ready for JSON; :meth:`from_dict` gives an equal object back."""
        return {
            "replay_ms": [list(point) for point in self.replay_ms],
            "eager_ms": [list(point) for point in self.eager_ms],
            "sequence": self.sequence,
            "pair_ns": self.pair_ns,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostLines:
        """From :meth:`as_dict`.

        Raises:
            ValueError: A curve is missing, or is not pairs of a whole number and a time; the cost
                of attention is no number.
        """
        try:
            replay_ms, eager_ms = (
                tuple((_whole(tokens), float(ms)) for tokens, ms in values[name])
                for name in ("replay_ms", "eager_ms")
            )
            sequence, pair_ns = _whole(values.get("sequence", 0)), float(values.get("pair_ns", 0))
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not the cost lines of a tower: {error!r}") from error
        return cls(replay_ms, eager_ms, sequence, pair_ns)


def _whole(number: Any) -> int:
    if number != int(number):
        raise ValueError(f"a number of tokens is whole, got {number}")
    return int(number)
