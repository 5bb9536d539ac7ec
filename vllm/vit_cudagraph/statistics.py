# SPDX-License-Identifier: Apache-2.0
"""Counts of what ran as a graph and what ran eagerly, and the log line that shows them."""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.logger import init_logger

logger = init_logger(__name__)

LOG_INTERVAL = "VIT_CUDAGRAPH_LOG_INTERVAL"
DEFAULT_LOG_INTERVAL = 100

TIMED_EVERY = 16
"""One replay of a budget in so many is timed: two events on the device, and no wait for them."""

MOST_RUNNING = 32
"""Watches whose replays have not ended yet; beyond, none is started."""


def log_interval() -> int:
    """Items between two statistics lines, from the environment; 1 logs after every batch."""
    text = os.environ.get(LOG_INTERVAL, "")
    if not text:
        return DEFAULT_LOG_INTERVAL
    if text.isdecimal() and len(text) < 10 and int(text) > 0:
        return int(text)
    logger.warning(
        "%s=%r is not a positive whole number; using %d", LOG_INTERVAL, text, DEFAULT_LOG_INTERVAL
    )
    return DEFAULT_LOG_INTERVAL


class Stopwatch(Protocol):
    """Times one replay, without anybody waiting for it."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def milliseconds(self) -> float | None:
        """Between start and stop; None as long as the device has not come so far."""


@dataclass
class Statistics:
    """Cumulative counts of one manager.

    Attributes:
        replayed: Items whose graph really ran.
        eager: Items that ran eagerly, by reason.
        replays, items, tokens: Graph replays, and what was in them, by token budget.
        predicted_ms: What all replays were expected to cost, by token budget; with all that a step
            of the manager does around them.
        timed, timed_ms: Replays that were timed, and what they alone took on the device, by token
            budget.
    """

    replayed: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    replays: Counter[int] = field(default_factory=Counter)
    items: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    predicted_ms: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    timed: Counter[int] = field(default_factory=Counter)
    timed_ms: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    _running: deque[tuple[int, Stopwatch]] = field(default_factory=deque)
    _logged: int = 0

    @property
    def padding(self) -> int:
        """Tokens of the replayed budgets that no item filled."""
        return sum(self.padding_of(budget) for budget in self.replays)

    def padding_of(self, budget: int) -> int:
        """The same of one budget."""
        return budget * self.replays[budget] - self.tokens[budget]

    def count_replay(self, budget: int, items: int, tokens: int, predicted_ms: float = 0.0) -> None:
        self.replayed += items
        self.replays[budget] += 1
        self.items[budget] += items
        self.tokens[budget] += tokens
        self.predicted_ms[budget] += predicted_ms

    def wants_time(self, budget: int) -> bool:
        """Whether the next replay of a budget is to be timed: the second, since the first launch
        of a graph is slower than all others, and then a few."""
        return self.replays[budget] % TIMED_EVERY == 1 and len(self._running) < MOST_RUNNING

    def count_time(self, budget: int, watch: Stopwatch) -> None:
        """Take a stopped watch, and read those whose replays have ended."""
        self._running.append((budget, watch))
        self.read_watches()

    def read_watches(self) -> None:
        """Read the watches of replays that have ended, oldest first."""
        while self._running:
            budget, watch = self._running[0]
            ms = watch.milliseconds()
            if ms is None:
                return
            self._running.popleft()
            self.timed[budget] += 1
            self.timed_ms[budget] += ms

    def snapshot(self, captured: int) -> dict[str, Any]:
        """Counts by the names that ``metrics.DEFINITIONS`` gives them; none ever falls.

        Args:
            captured: Graphs that the manager holds.
        """
        return {
            "replays": self.replays,
            "items_replayed": self.items,
            "tokens": self.tokens,
            "padding_tokens": {budget: self.padding_of(budget) for budget in self.replays},
            "eager_items": self.eager,
            "predicted_milliseconds": self.predicted_ms,
            "timed_replays": self.timed,
            "measured_milliseconds": self.timed_ms,
            "captured_graphs": captured,
        }

    def count_eager(self, reason: str, items: int) -> bool:
        """Count; tell whether this reason is new."""
        new = reason not in self.eager
        self.eager[reason] += items
        return new

    def __str__(self) -> str:
        eager = self.eager.total()
        reasons = "; ".join(f"{reason}: {items}" for reason, items in self.eager.items())
        return (
            f"Encoder CUDA graphs: {self.replayed} items replayed, {eager} items eager"
            f"{f' ({reasons})' if eager else ''}, {self.replays.total()} replays, "
            f"{self.padding} padding tokens"
        )

    def log(self, interval: int) -> None:
        """Log once the first items came, then whenever ``interval`` more did."""
        items = self.replayed + self.eager.total()
        if items and (not self._logged or items - self._logged >= interval):
            self._logged = items
            logger.info("%s", self)
