# SPDX-License-Identifier: Apache-2.0
"""Which token budgets to capture: a ladder fine enough that padding cannot eat what a graph gains.

A batch of ``n`` tokens replays the smallest budget ``b >= n``, and its padding costs as much as
real rows. Graphs gain up to eightfold at few tokens, where eager execution waits for launches, and
a few percent near the crossover, where arithmetic fills the card. So steps are wider below.
"""

from __future__ import annotations

COARSE_BELOW = 64
"""Tokens of the smallest usual image (224 x 224 under patch 14, merge 2). Few batches are smaller,
so steps below it are counted in tokens."""

COARSE_STEP = 8
"""Tokens of such a step."""

FINE_FROM = 512
"""Tokens from which steps are at most 5 % instead of 12 %."""


def furthest_next(budget: int) -> int:
    """The largest budget that may follow ``budget`` in a ladder.

    At most 5 % more, 12 % more where that stays within :data:`FINE_FROM`, and
    :data:`COARSE_STEP` tokens more where that stays within :data:`COARSE_BELOW`. A wide step ends
    at the border of its range, so that no token count above a border is padded by the rule below
    it. The result never decreases in ``budget``: each term does not, nor does the largest of them.
    """
    return max(
        budget + budget * 5 // 100,
        min(budget + budget * 12 // 100, FINE_FROM),
        min(budget + COARSE_STEP, COARSE_BELOW),
    )


def token_ladder(smallest: int, largest: int) -> list[int]:
    """Token budgets from ``smallest`` to ``largest``, both included, ascending, each once.

    Each is at most :func:`furthest_next` of the one before: 12 % more rows below 512 tokens, 5 %
    from there up, 8 tokens below 64. No ladder that keeps to this has fewer budgets: always taking
    the furthest step is best, since ``furthest_next`` never decreases, so the i-th budget here is
    at least the i-th budget of any other ladder.

    Args:
        smallest, largest: Output tokens; ``largest`` is where eager execution catches up.

    Raises:
        ValueError: ``smallest`` or ``largest`` is below 1, or they are in the wrong order.
    """
    if not 1 <= smallest <= largest:
        raise ValueError(f"no token budgets lie between {smallest} and {largest}")
    ladder = [smallest]
    while ladder[-1] < largest:
        ladder.append(min(furthest_next(ladder[-1]), largest))
    return ladder


def thinned(ladder: list[int], most: int | None) -> list[int]:
    """At most ``most`` budgets of a ladder, evenly spread over it, the smallest and the largest
    among them (the largest alone, where ``most`` is 1); all of them where ``most`` is None."""
    if most is None or len(ladder) <= most:
        return ladder
    if most == 1:
        return ladder[-1:]
    last = len(ladder) - 1
    return [ladder[i * last // (most - 1)] for i in range(most)]
