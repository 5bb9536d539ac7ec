# SPDX-License-Identifier: Apache-2.0
"""Counts of what ran as a graph and what ran eagerly, and the log line that shows them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

from vllm.logger import init_logger

logger = init_logger(__name__)

LOG_INTERVAL = "VIT_CUDAGRAPH_LOG_INTERVAL"
DEFAULT_LOG_INTERVAL = 100


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


@dataclass
class Statistics:
    """Cumulative counts of one manager.

    Attributes:
        replayed: Items whose graph really ran.
        eager: Items that ran eagerly, by reason.
        replays: Graph replays by token budget.
        padding: Tokens of the replayed budgets that no item filled.
    """

    replayed: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    replays: Counter[int] = field(default_factory=Counter)
    padding: int = 0
    _logged: int = 0

    def count_replay(self, budget: int, items: int, tokens: int) -> None:
        self.replayed += items
        self.replays[budget] += 1
        self.padding += budget - tokens

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
