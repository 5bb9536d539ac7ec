# SPDX-License-Identifier: Apache-2.0
"""Ladders of token budgets keep to their steps and have no budget more than that takes."""

from itertools import pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from vllm.vit_cudagraph.ladder import furthest_next, token_ladder
from vllm.vit_cudagraph.testing.profiles import examples


def allowed(low: int, high: int) -> bool:
    """The rule as the documents put it, in products of whole numbers."""
    if high <= 64:
        return high - low <= 8 or 100 * high <= 112 * low
    if high <= 512:
        return 100 * high <= 112 * low
    return 100 * high <= 105 * low


def fewest(smallest: int, largest: int) -> int:
    """Budgets of the shortest ladder under `allowed`, by trying every next budget."""
    reached, count = {smallest}, 1
    while largest not in reached:
        reached = {
            high
            for low in reached
            for high in range(low + 1, min(largest, low + 8 + low // 8) + 1)
            if allowed(low, high)
        }
        count += 1
    return count


@given(smallest=st.integers(1, 600), largest=st.integers(1, 20000))
@pytest.mark.fuzz
@examples(150)
@example(smallest=64, largest=8192)
@example(smallest=1, largest=20000)
@example(smallest=511, largest=572)
def test_steps_are_within_the_rule(smallest: int, largest: int) -> None:
    assume(smallest <= largest)
    ladder = token_ladder(smallest, largest)
    assert (ladder[0], ladder[-1]) == (smallest, largest)
    for low, high in pairwise(ladder):
        assert low < high
        assert allowed(low, high)


@given(smallest=st.integers(1, 700), more=st.integers(0, 300))
@pytest.mark.fuzz
@examples(30)
@example(smallest=1, more=0)
@example(smallest=57, more=14)
@example(smallest=60, more=10)
@example(smallest=450, more=150)
@example(smallest=511, more=61)
def test_no_ladder_is_shorter(smallest: int, more: int) -> None:
    assert len(token_ladder(smallest, smallest + more)) == fewest(smallest, smallest + more)


def test_the_furthest_step_is_the_furthest_allowed_and_never_decreases() -> None:
    """By hand for every budget of interest: the proof that the ladder is shortest rests on both."""
    steps = [furthest_next(budget) for budget in range(1, 3000)]
    assert steps == sorted(steps)
    for budget, step in enumerate(steps, start=1):
        assert allowed(budget, step)
        assert not any(allowed(budget, further) for further in range(step + 1, 2 * step + 9))


@pytest.mark.parametrize(
    ("smallest", "largest", "ladder"),
    [
        (64, 64, [64]),
        (64, 65, [64, 65]),
        (40, 100, [40, 48, 56, 64, 71, 79, 88, 98, 100]),
        (500, 600, [500, 525, 551, 578, 600]),
    ],
)
def test_ladders_by_hand(smallest: int, largest: int, ladder: list[int]) -> None:
    assert token_ladder(smallest, largest) == ladder


def test_as_many_graphs_as_one_captures() -> None:
    """From a 224 x 224 image to the crossover of Qwen2.5-VL-7B's tower on an H200."""
    assert len(token_ladder(64, 1500)) == 43
    assert len(token_ladder(64, 2116)) == 50


@pytest.mark.parametrize(("smallest", "largest"), [(0, 64), (-1, 64), (65, 64), (0, 0), (1, 0)])
def test_a_ladder_of_nothing_is_refused(smallest: int, largest: int) -> None:
    with pytest.raises(ValueError, match=f"lie between {smallest} and {largest}"):
        token_ladder(smallest, largest)
