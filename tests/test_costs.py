# SPDX-License-Identifier: Apache-2.0
"""Cost lines: true to what was measured, and of the shape that planning relies on."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm.vit_cudagraph.costs import H200_EAGER_MS, CostLines
from vllm.vit_cudagraph.testing.profiles import examples

NS = 1e-6  # in milliseconds: costs are rounded to it

sizes = st.integers(1, 100) | st.integers(1, 20000)
times = st.floats(0.01, 500, allow_nan=False) | st.integers(1, 9).map(float)
curves = st.dictionaries(sizes, times, min_size=1, max_size=8)
lines = st.builds(
    CostLines.of, curves, curves, st.integers(0, 5000), st.floats(0, 50, allow_nan=False)
)


# -- eager -----------------------------------------------------------------------------------------


@given(costs=lines, a=sizes, b=sizes)
@pytest.mark.fuzz
@examples(300)
def test_eager_never_falls_and_one_run_is_never_dearer_than_two(
    costs: CostLines, a: int, b: int
) -> None:
    least, most = sorted((a, b))
    assert costs.eager(0) == 0 < costs.eager(least) <= costs.eager(most)
    assert costs.eager(a + b) <= costs.eager(a) + costs.eager(b) + NS
    assert costs.eager(most) / most <= costs.eager(least) / least + NS / least


@given(costs=lines)
@pytest.mark.fuzz
@examples(200)
@example(costs=CostLines.of({}, {10: 5, 20: 4, 30: 100}))
def test_eager_is_never_above_what_was_measured(costs: CostLines) -> None:
    for tokens, ms in costs.eager_ms:
        assert costs.eager(tokens) <= ms + NS


@given(points=st.dictionaries(sizes, st.floats(0, 1), min_size=1, max_size=8))
@pytest.mark.fuzz
@examples(200)
def test_measurements_of_the_right_shape_are_left_as_they_are(points: dict[int, float]) -> None:
    """Built to rise and to bend: each cost lies between the last one and the last one's rate."""
    tokens = sorted(points)
    ms = [10.0]
    for (m, n), part in zip(pairwise(tokens), (points[n] for n in tokens[1:]), strict=True):
        ms.append(ms[-1] + part * (ms[-1] * n / m - ms[-1]))
    costs = CostLines.of({}, dict(zip(tokens, ms, strict=True)))
    for size, expected in zip(tokens, ms, strict=True):
        assert costs.eager(size) == pytest.approx(expected, rel=1e-9, abs=NS)


def test_eager_by_hand() -> None:
    costs = CostLines.of({}, {100: 20, 200: 20, 400: 30})
    assert [costs.eager(n) for n in (1, 100, 150, 200, 300, 400)] == [20, 20, 20, 20, 25, 30]
    assert costs.eager(800) == 60  # what a token costs at 400
    assert costs.eager_ns([[0, 1], [300, 800]]).tolist() == [[0, 20e6], [25e6, 60e6]]


def test_noise_only_adds() -> None:
    """A point above a later one falls to it; one dearer a token than an earlier one falls too."""
    disturbed = CostLines.of({}, {64: 30, 256: 22, 629: 22, 1258: 60})
    assert [disturbed.eager(n) for n in (64, 256, 629, 1258)] == [22, 22, 22, 44]


# -- replays ---------------------------------------------------------------------------------------


@given(costs=lines)
@pytest.mark.fuzz
@examples(200)
def test_a_replay_costs_the_least_measured_from_its_budget_up(costs: CostLines) -> None:
    budgets = [budget for budget, _ in costs.replay_ms]
    replay = [costs.replay(budget) for budget in budgets]
    assert replay == sorted(replay)
    for i, (budget, ms) in enumerate(costs.replay_ms):
        assert costs.measured(budget) == pytest.approx(ms, abs=NS)
        assert replay[i] == min(map(costs.measured, budgets[i:]))


def test_a_slow_shape_costs_what_the_next_one_does() -> None:
    costs = CostLines.of({64: 3, 72: 9, 80: 4, 96: 5}, {64: 20})
    assert [costs.replay(budget) for budget in (64, 72, 80, 96)] == [3, 4, 4, 5]
    assert costs.measured(72) == 9


@pytest.mark.parametrize("budget", [0, 63, 65, 1000])
def test_a_budget_that_was_not_measured_is_refused(budget: int) -> None:
    costs = CostLines.of({64: 3}, {64: 20})
    for ask in (costs.replay, costs.measured, lambda b: costs.winning([b])):
        with pytest.raises(ValueError, match=rf"no replay of {budget} tokens .* only of \[64\]"):
            ask(budget)


# -- where graphs win ------------------------------------------------------------------------------


@given(costs=lines, margin=st.sampled_from([0, 0.02, 0.5]))
@pytest.mark.fuzz
@examples(200)
def test_budgets_win_where_a_replay_is_cheaper_than_eager(costs: CostLines, margin: float) -> None:
    """By the definition: some count of tokens that the budget is the smallest for. Counts in
    between are tried at both ends and in the middle; the proof says that the last one decides."""
    budgets = [budget for budget, _ in costs.replay_ms]
    winners = []
    for low, budget in pairwise([0, *budgets]):
        counts = {low + 1, (low + 1 + budget) // 2, budget}
        if any(costs.replay(budget) < (1 - margin) * costs.eager(n) for n in counts):
            winners.append(budget)
    assert costs.winning(budgets, margin) == winners
    assert costs.crossover(margin) == (winners[-1] if winners else None)


def test_a_win_within_the_noise_is_none() -> None:
    costs = CostLines.of({100: 10, 200: 19.7, 300: 30, 400: 39}, {100: 20, 200: 20, 400: 40})
    assert costs.winning([100, 200, 300, 400]) == [100, 400]
    assert costs.winning([400, 100]) == [400, 100]
    assert costs.winning([100, 200, 300, 400], margin=0) == [100, 200, 400]
    assert costs.crossover() == 400
    assert costs.crossover(margin=0.4) == 100
    assert costs.crossover(margin=0.6) is None
    assert CostLines.of({}, {1: 1}).crossover() is None


# -- modelled --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "eager", "exact_replay"),
    [(64, 22, 2.8), (256, 22, 5.4), (629, 22, 11.9), (1196, 28, 21.2), (2116, 39, 37.4)],
)
def test_the_model_is_near_the_h200(tokens: int, eager: float, exact_replay: float) -> None:
    """docs/measurements.md, "One image"; the 30 ms at 64 tokens are one first run's."""
    costs = CostLines.modelled([tokens])
    assert costs.eager(tokens) == pytest.approx(eager, rel=1e-9)
    assert costs.replay(tokens) == pytest.approx(exact_replay, rel=1e-9)


def test_the_model_can_be_given_other_figures() -> None:
    line = (10, 6.0), (50, 26.0)
    costs = CostLines.modelled([200, 100, 20, 10, 2], replay_ms=line, eager_ms=((10, 3.0),))
    assert costs == CostLines.of({2: 2, 10: 6, 20: 11, 100: 51, 200: 101}, {10: 3})
    assert CostLines.modelled([]).eager_ms == H200_EAGER_MS


def test_by_the_model_graphs_win_up_to_some_two_thousand_tokens() -> None:
    """And not for ever: a padded step of the ladder may cost 5 % more than its items."""
    costs = CostLines.modelled(range(64, 60_000, 16))
    assert 1800 < (costs.crossover(margin=0.05) or 0) < 2116


# -- attention -------------------------------------------------------------------------------------


@given(costs=lines, tokens=sizes)
@pytest.mark.fuzz
@examples(200)
def test_a_run_waits_for_no_longer_than_it_takes(costs: CostLines, tokens: int) -> None:
    assert 0 <= costs.waiting_ns(tokens) <= costs.eager(tokens) / NS + 1


def test_attention_by_hand() -> None:
    costs = CostLines.of({}, {100: 10.0, 1000: 20.0}, sequence=256, pair_ns=2.0)
    assert costs.waiting_ns(100) == pytest.approx(8e6)  # 2 ms of 10 are work
    assert costs.waiting_ns(1000) == costs.waiting_ns(5000) == 0
    assert costs.longer_ns(1024, 1) == 2.0 * 1024 * 768
    assert costs.longer_ns(1024, 4) == costs.longer_ns(4, 1) == costs.longer_ns(0, 0) == 0


@pytest.mark.parametrize(
    "attention", [(-1, 1.0), (64, -0.1), (64, float("nan")), (64, float("inf"))]
)
def test_a_cost_of_attention_is_no_less_than_nothing(attention: tuple[int, float]) -> None:
    with pytest.raises(ValueError, match="no cost of attention"):
        CostLines.of({}, {64: 1.0}, *attention)


# -- between processes -----------------------------------------------------------------------------


@given(costs=lines)
@pytest.mark.fuzz
@examples(200)
def test_json_gives_an_equal_object_back(costs: CostLines) -> None:
    again = CostLines.from_dict(json.loads(json.dumps(costs.as_dict())))
    assert again == costs
    assert hash(again) == hash(costs)
    budgets = [budget for budget, _ in costs.replay_ms]
    assert list(map(again.replay, budgets)) == list(map(costs.replay, budgets))
    assert np.array_equal(again.eager_ns(range(500)), costs.eager_ns(range(500)))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"replay_ms": [[64, 1.0]]},
        {"replay_ms": [[64]], "eager_ms": [[64, 1.0]]},
        {"replay_ms": [[64, None]], "eager_ms": [[64, 1.0]]},
        {"replay_ms": [[64.5, 1.0]], "eager_ms": [[64, 1.0]]},
        {"replay_ms": None, "eager_ms": [[64, 1.0]]},
        {"replay_ms": [[64, 1.0]], "eager_ms": []},
        {"replay_ms": [], "eager_ms": [[64, 1.0]], "sequence": None},
        {"replay_ms": [], "eager_ms": [[64, 1.0]], "sequence": float("inf")},
        {"replay_ms": [], "eager_ms": [[64, 1.0]], "pair_ns": [1.0]},
    ],
)
def test_what_is_no_cost_lines_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        CostLines.from_dict(values)


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_times_are_positive_and_finite(ms: float) -> None:
    with pytest.raises(ValueError, match="replay_ms: 64 tokens cannot take"):
        CostLines.of({64: ms}, {64: 1})
    with pytest.raises(ValueError, match="eager_ms: 64 tokens cannot take"):
        CostLines.of({}, {64: ms})


@pytest.mark.parametrize("tokens", [(0,), (-1, 3), (5, 5), (6, 5)])
def test_sizes_ascend(tokens: tuple[int, ...]) -> None:
    points = tuple((size, 1.0) for size in tokens)
    with pytest.raises(ValueError, match="must be positive and ascend"):
        CostLines(points, ((1, 1.0),))
    with pytest.raises(ValueError, match="must be positive and ascend"):
        CostLines((), points)
