# SPDX-License-Identifier: Apache-2.0
"""Packings are safe, complete, exact for few items, and never dearer than eager or upstream's."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm.v1.worker.encoder_cudagraph_defs import EncoderItemSpec
from vllm.vit_cudagraph import packing
from vllm.vit_cudagraph.costs import CostLines
from vllm.vit_cudagraph.geometry import (
    Capacity,
    Grid,
    Limits,
    Usage,
    ViTGeometry,
    offset_rows,
    window_rows,
)
from vllm.vit_cudagraph.ladder import token_ladder
from vllm.vit_cudagraph.packing import (
    EXACT_ITEMS,
    Packer,
    Packing,
    PlanCache,
    upstream_groups,
)

# Not from vLLM's module, where the plugin may have put this package's manager in its place.
from vllm.vit_cudagraph.stock_safety import EncoderCudaGraphManager
from vllm.vit_cudagraph.testing.profiles import examples

Plan = Sequence[tuple[Sequence[int], int | None]]
Cost = tuple[int, int, int]  # nanoseconds, steps, eager steps: compared in this order


def ns(ms: float) -> int:
    return round(ms * 1e6)


# -- what may be drawn -----------------------------------------------------------------------------

usages = st.builds(
    lambda tokens, patches, sequences, windows, frames: Usage(
        patches=tokens * 4 + patches,
        tokens=tokens,
        sequences=sequences,
        windows=windows,
        frames=frames,
    ),
    tokens=st.integers(1, 40) | st.integers(1, 400),
    patches=st.sampled_from([0, 0, 0, 30]),
    sequences=st.sampled_from([1, 1, 1, 2, 5, 20]),
    windows=st.sampled_from([0, 1, 4, 25]),
    frames=st.sampled_from([1, 1, 2, 9]),
)


@st.composite
def capacities_of_graphs(draw: st.DrawFn, most: int = 6, least: int = 0) -> list[Capacity]:
    """Graphs in which each holds at least what the one before does, in every kind."""
    budgets = draw(st.lists(st.integers(1, 600), min_size=least, max_size=most, unique=True))
    kinds = [
        sorted(draw(st.lists(st.integers(low, top), min_size=len(budgets), max_size=len(budgets))))
        for low, top in ((1, 8), (1, 2400), (0, 30), (0, 60))
    ]
    frames = draw(st.none() | st.integers(0, 20))  # the user's limit, the same for all graphs
    return [Capacity(*row, frames) for row in zip(sorted(budgets), *kinds, strict=True)]


@st.composite
def cost_lines(draw: st.DrawFn, graphs: Sequence[Capacity]) -> CostLines:
    """A tower's: a line with noise, or anything; small whole numbers make ties."""
    budgets = [graph.budget for graph in graphs]
    if draw(st.booleans()):
        overhead, rate = (
            draw(st.sampled_from([0.1, 1.5, 30])),
            draw(st.sampled_from([0, 0.02, 0.3])),
        )
        noise = draw(st.lists(st.floats(1, 1.3), min_size=len(budgets), max_size=len(budgets)))
        replays = {b: (overhead + rate * b) * n for b, n in zip(budgets, noise, strict=True)}
    else:
        times = st.integers(1, 5).map(float) | st.floats(0.5, 50)
        replays = {budget: draw(times) for budget in budgets}
    eager = draw(
        st.dictionaries(
            st.integers(1, 500),
            st.integers(1, 9).map(float) | st.floats(1, 99),
            min_size=1,
            max_size=4,
        )
    )
    return CostLines.of(replays, eager)


@st.composite
def problems(
    draw: st.DrawFn, batches: st.SearchStrategy[list[Usage]]
) -> tuple[list[Usage], list[Capacity], CostLines]:
    graphs = draw(capacities_of_graphs())
    return draw(batches), graphs, draw(cost_lines(graphs))


few_kinds = st.lists(usages, min_size=1, max_size=3).flatmap(
    lambda kinds: st.lists(st.sampled_from(kinds), max_size=40)
)
few = st.lists(usages, max_size=6)
exact = st.lists(usages, min_size=7, max_size=EXACT_ITEMS)
many = st.lists(usages, min_size=EXACT_ITEMS + 1, max_size=30) | few_kinds


# -- judges, which share no code with the packer ---------------------------------------------------


def exceeded(items: Sequence[Usage], graph: Capacity) -> list[str]:
    """Kinds of which there are more than a graph holds, one by one."""
    room = {
        "items": (len(items), graph.items),
        "tokens": (sum(use.tokens for use in items), graph.budget),
        "patches": (sum(use.patches for use in items), graph.patches),
        "sequences": (sum(use.sequences for use in items), graph.sequences),
        "windows": (sum(use.windows for use in items), graph.windows),
    }
    if graph.frames is not None:
        room["frames"] = (sum(use.frames for use in items), graph.frames)
    return [kind for kind, (there, most) in room.items() if there > most]


def cost_of(plan: Plan, batch: Sequence[Usage], costs: CostLines) -> Cost:
    total = 0
    for items, budget in plan:
        tokens = sum(batch[i].tokens for i in items)
        total += ns(costs.eager(tokens) if budget is None else costs.measured(budget))
    return total, len(plan), sum(budget is None for _, budget in plan)


def faults(
    packed: Packing, batch: Sequence[Usage], graphs: Sequence[Capacity], costs: CostLines
) -> list[str]:
    """Everything that is wrong with a packing, its price apart; empty for a sound one."""
    placed = sorted(item for items, _ in packed.steps for item in items)
    if placed != list(range(len(batch))):
        return ["items missing, doubled or invented"]
    found = []
    by_budget = {graph.budget: graph for graph in graphs}
    if any(budget is not None and budget not in by_budget for _, budget in packed.steps):
        return ["a graph that is not there"]
    if any(budget is None for _, budget in packed.steps[:-1]):
        found.append("an eager step that is not the only one and the last")
    for items, budget in packed.steps:
        if not items or list(items) != sorted(items):
            found.append("an empty step, or items of a step out of order")
        if budget is not None:
            over = exceeded([batch[i] for i in items], by_budget[budget])
            found += [f"more {kind} than the graph of {budget} holds" for kind in over]
    if ns(packed.cost_ms) != cost_of(packed.steps, batch, costs)[0]:
        found.append("its steps cost something else")
    if ns(packed.eager_ms) != ns(costs.eager(sum(use.tokens for use in batch))):
        found.append("eager costs something else")
    return found


def cheapest(batch: Sequence[Usage], graphs: Sequence[Capacity], costs: CostLines) -> Cost:
    """The least cost of all partitions into replays and one eager step, by trying each."""

    @cache
    def replay(items: tuple[int, ...]) -> Cost | None:
        group = [batch[i] for i in items]
        fits = [costs.measured(graph.budget) for graph in graphs if not exceeded(group, graph)]
        return (ns(min(fits)), 1, 0) if fits else None

    @cache
    def replays(items: tuple[int, ...]) -> Cost | None:
        if not items:
            return 0, 0, 0
        best = None
        for count in range(len(items)):
            for others in combinations(items[1:], count):
                first = replay((items[0], *others))
                rest = first and replays(tuple(i for i in items[1:] if i not in others))
                if first and rest:
                    cost = (first[0] + rest[0], first[1] + rest[1], 0)
                    best = cost if best is None else min(best, cost)
        return best

    everything = tuple(range(len(batch)))
    best = replays(everything)
    for count in range(1, len(batch) + 1):
        for eager in combinations(everything, count):
            rest = replays(tuple(i for i in everything if i not in eager))
            if rest:
                run = ns(costs.eager(sum(batch[i].tokens for i in eager)))
                cost = (run + rest[0], 1 + rest[1], 1)
                best = cost if best is None else min(best, cost)
    assert best is not None
    return best


class UpstreamPacking(EncoderCudaGraphManager):
    """vLLM's manager on a batch of token counts: its own packing, with nothing behind it."""

    def __init__(self, tokens: Sequence[int], budgets: Sequence[int], most_items: int) -> None:
        self.specs = [EncoderItemSpec(input_size=4 * n, output_tokens=n) for n in tokens]
        self.token_budgets = list(budgets)
        self.path_token_budgets = {"default": list(budgets)}
        self.max_batch_size = most_items
        self.graph_misses = 0
        self.model = self
        self.steps: list[tuple[list[int], int | None]] = []
        self._execute_local({})

    def _get_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        return self.specs

    def _select_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> Any:
        return {"items": indices}, ()

    def _run_budget_graph(self, mm_kwargs: dict[str, Any], token_budget: int, **_: Any) -> Any:
        self.steps.append((mm_kwargs["items"], token_budget))
        return "rows"

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], **_: Any) -> Any:
        self.steps.append((mm_kwargs["items"], None))
        return "rows"

    def postprocess_encoder_output(
        self, outputs: Any, items: list[int], sizes: Any, done: dict[int, Any], **_: Any
    ) -> None:
        done.update(dict.fromkeys(items, outputs))


def upstream_cost(
    batch: Sequence[Usage], graphs: Sequence[Capacity], costs: CostLines
) -> int | None:
    """Nanoseconds of vLLM's packing over these graphs; None where it overfills one."""
    tokens = [use.tokens for use in batch]
    budgets = [graph.budget for graph in graphs]
    plan = UpstreamPacking(tokens, budgets, graphs[-1].items).steps
    assert sorted(i for items, _ in plan for i in items) == list(range(len(batch)))
    by_budget = {graph.budget: graph for graph in graphs}
    for items, budget in plan:
        if budget is not None and exceeded([batch[i] for i in items], by_budget[budget]):
            return None
    return cost_of(plan, batch, costs)[0]


def one_by_one(batch: Sequence[Usage], costs: CostLines) -> int:
    return sum(ns(costs.eager(use.tokens)) for use in batch)


# -- few items -------------------------------------------------------------------------------------


@given(problem=problems(few))
@pytest.mark.fuzz
@examples(250)
def test_few_items_are_packed_at_the_least_cost(
    problem: tuple[list[Usage], list[Capacity], CostLines],
) -> None:
    batch, graphs, costs = problem
    packed = Packer(graphs, costs).pack(batch)
    assert faults(packed, batch, graphs, costs) == []
    assert cost_of(packed.steps, batch, costs) == (
        cheapest(batch, graphs, costs) if batch else (0, 0, 0)
    )


@given(problem=problems(exact))
@pytest.mark.fuzz
@examples(20)
def test_as_many_items_as_are_exact_are_packed_at_the_least_cost(
    problem: tuple[list[Usage], list[Capacity], CostLines],
) -> None:
    batch, graphs, costs = problem
    packed = Packer(graphs, costs).pack(batch)
    assert faults(packed, batch, graphs, costs) == []
    assert cost_of(packed.steps, batch, costs) == cheapest(batch, graphs, costs)


@given(problem=problems(few | many))
@pytest.mark.fuzz
@examples(100)
def test_a_second_eager_step_would_save_nothing(
    problem: tuple[list[Usage], list[Capacity], CostLines],
) -> None:
    """Cut the eager step in two in every place: it costs no less, to a nanosecond of rounding."""
    batch, graphs, costs = problem
    for items, budget in Packer(graphs, costs).pack(batch).steps:
        tokens = [batch[i].tokens for i in items]
        for cut in range(1, len(items) if budget is None else 0):
            parts = ns(costs.eager(sum(tokens[:cut]))) + ns(costs.eager(sum(tokens[cut:])))
            assert ns(costs.eager(sum(tokens))) <= parts + 1


@given(problem=problems(few))
@pytest.mark.fuzz
@examples(100)
def test_no_plan_needs_a_graph_that_cannot_win(
    problem: tuple[list[Usage], list[Capacity], CostLines],
) -> None:
    """The manager need not capture it: the promise of `CostLines.winning`."""
    batch, graphs, costs = problem
    won = costs.winning([graph.budget for graph in graphs], margin=0)
    fewer = [graph for graph in graphs if graph.budget in won]
    least, all_graphs = (Packer(g, costs).pack(batch).cost_ms for g in (fewer, graphs))
    assert ns(all_graphs) <= ns(least) <= ns(all_graphs) + len(batch)


@given(problem=problems(few | exact | many), seed=st.integers(0, 99))
@pytest.mark.fuzz
@examples(150)
@example(  # a nightly run found it: equal tokens and sequences, but other windows
    problem=(
        [Usage(4, 1, 1, 0)] * 5
        + [Usage(16, 4, 1, 0), Usage(16, 4, 1, 4)]
        + [Usage(4, 1, 1, 0)] * 2,
        [
            Capacity(1, 1, 1, 1, 1),
            Capacity(2, 1, 1, 1, 1),
            Capacity(4, 1, 16, 1, 1),
            Capacity(5, 2, 20, 2, 4),
        ],
        CostLines.of({1: 97, 2: 98, 4: 100, 5: 101}, {1: 10_000}),
    ),
    seed=0,
)
def test_the_order_of_a_batch_does_not_change_the_cost(
    problem: tuple[list[Usage], list[Capacity], CostLines], seed: int
) -> None:
    """Exactly, and the same batch gives the same plan from another packer. With many items, those
    of equal tokens are made equal: there, the cost of upstream's packing depends on their order."""
    batch, graphs, costs = problem
    if len(batch) > EXACT_ITEMS:
        of_size = {use.tokens: use for use in batch}
        batch = [of_size[use.tokens] for use in batch]
    shuffled = random.Random(seed).sample(batch, len(batch))
    packed = Packer(graphs, costs).pack(batch)
    assert Packer(graphs, costs).pack(shuffled).cost_ms == packed.cost_ms
    assert Packer(tuple(graphs), costs).pack(tuple(batch)) == packed


# -- many items ------------------------------------------------------------------------------------


@given(problem=problems(many))
@pytest.mark.fuzz
@examples(300)
@example(  # upstream interleaves items of equal tokens, which sorted cuts cannot
    problem=(
        [Usage(40, 10, sequences, 0) for sequences in (1, 5) * 6],
        [Capacity(20, 2, 80, 6, 0)],
        CostLines.of({20: 5}, {1: 1000}),
    )
)
def test_many_items_are_never_dearer_than_eager_or_upstream(
    problem: tuple[list[Usage], list[Capacity], CostLines],
) -> None:
    batch, graphs, costs = problem
    packed = Packer(graphs, costs).pack(batch)
    assert faults(packed, batch, graphs, costs) == []
    assert packed.cost_ms <= packed.eager_ms
    assert ns(packed.cost_ms) <= one_by_one(batch, costs) + len(batch)
    upstream = upstream_cost(batch, graphs, costs) if graphs else None
    if upstream is not None:
        # One by one: upstream's eager runs are of one item each.
        assert ns(packed.cost_ms) <= upstream + len(batch)


@given(
    problem=problems(st.just([])),
    use=usages,
    count=st.integers(EXACT_ITEMS + 1, packing.LONGEST_RUN),
)
@pytest.mark.fuzz
@examples(100)
def test_equal_items_are_packed_at_the_least_cost(
    problem: tuple[list[Usage], list[Capacity], CostLines], use: Usage, count: int
) -> None:
    """Counts alone matter: coins of replays for 0..count items, the rest eager."""
    _, graphs, costs = problem
    replays: list[int | None] = [0]
    for total in range(1, count + 1):
        options = []
        for size in range(1, total + 1):
            fits = [costs.measured(g.budget) for g in graphs if not exceeded([use] * size, g)]
            before = replays[total - size]
            if fits and before is not None:
                options.append(ns(min(fits)) + before)
        replays.append(min(options, default=None))
    eager = [ns(costs.eager(n * use.tokens)) for n in range(count + 1)]
    least = min(eager[count - n] + cost for n, cost in enumerate(replays) if cost is not None)
    packed = Packer(graphs, costs).pack([use] * count)
    assert faults(packed, [use] * count, graphs, costs) == []
    assert ns(packed.cost_ms) == least


# -- a tower's own figures -------------------------------------------------------------------------

QWEN = ViTGeometry(
    patch_size=14,
    merge_size=2,
    window_side=4,
    rows=window_rows("order", "inverse")
    | offset_rows("sequences", "full", "longest")
    | offset_rows("windows", "windows", "longest_window"),
)
BUDGETS = token_ladder(64, 2116)
H200 = CostLines.modelled(BUDGETS)
GRAPHS = [QWEN.capacity(budget, Limits(items=32)) for budget in BUDGETS]
QWEN_PACKER = Packer(GRAPHS, H200)


def image(generator: random.Random) -> Grid:
    """From 112 x 112 to beyond the largest graph, all shapes."""
    sides = [2 * max(2, round(generator.lognormvariate(2.6, 0.6))) for _ in range(2)]
    return (1, *(min(side, 160) for side in sides))


def video(generator: random.Random) -> Grid:
    return (
        generator.choice([2, 4, 8, 16, 60]),
        2 * generator.randint(2, 14),
        2 * generator.randint(2, 14),
    )


@pytest.mark.parametrize("part", range(4))
def test_traces_of_real_batches_are_never_dearer_than_eager_or_upstream(part: int) -> None:
    """2,000 traces in all, each of one modality and one to three batches of 1 to 16 items; each
    batch is held to the bounds, so the traces are. Brute force judges those of up to 5 items."""
    generator = random.Random(part)
    judged = legal = cheaper = 0
    for trace in range(500):
        draw = generator.choice([image, image, video])
        for _ in range(generator.randint(1, 3)):
            grids = [
                draw(generator) for _ in range(generator.choice([1, 2, 3, 4, 5, 6, 8, 12, 16]))
            ]
            batch = [QWEN.usage(grid) for grid in grids]
            packed = QWEN_PACKER.pack(batch)
            assert faults(packed, batch, GRAPHS, H200) == []
            assert packed.cost_ms <= packed.eager_ms
            assert ns(packed.cost_ms) <= one_by_one(batch, H200)
            upstream = upstream_cost(batch, GRAPHS, H200)
            if upstream is not None:
                legal += 1
                cheaper += ns(packed.cost_ms) < upstream
                assert ns(packed.cost_ms) <= upstream
            if len(batch) <= 5 and trace % 10 == 0:
                judged += 1
                assert ns(packed.cost_ms) == cheapest(batch, GRAPHS, H200)[0]
    # The bounds were really tried.
    assert judged > 30
    assert legal > 500 < 3 * cheaper


@pytest.mark.parametrize("count", [11, 12])
def test_a_few_more_items_than_exact_are_near_the_least_cost(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heuristic against the exact packer, whose limit is raised for this: a few percent
    at most, and far less on average."""
    generator = random.Random(count)
    batches = [[QWEN.usage(image(generator)) for _ in range(count)] for _ in range(100)]
    heuristic = [QWEN_PACKER.pack(batch).cost_ms for batch in batches]
    monkeypatch.setattr(packing, "EXACT_ITEMS", count)
    monkeypatch.setattr(packing, "_pairs", cache(packing._pairs.__wrapped__))
    least = [QWEN_PACKER.pack(batch).cost_ms for batch in batches]
    ratios = [ours / best for ours, best in zip(heuristic, least, strict=True)]
    assert min(ratios) >= 1
    assert max(ratios) < 1.03
    assert sum(ratios) / len(ratios) < 1.003


@pytest.mark.parametrize("count", [65, 130, 512])
@pytest.mark.parametrize("draw", [image, video])
def test_long_lists_are_never_dearer_than_eager_or_upstream(
    draw: Callable[[random.Random], Grid], count: int
) -> None:
    generator = random.Random(count)
    for part in range(4):
        grids = [draw(generator) for _ in range(count)]
        if part % 2:  # many thumbnails before the rest
            grids[: count // 2] = [(1, 2 * generator.randint(2, 8), 8) for _ in grids[: count // 2]]
        batch = [QWEN.usage(grid) for grid in grids]
        packed = QWEN_PACKER.pack(batch)
        assert faults(packed, batch, GRAPHS, H200) == []
        assert packed.cost_ms <= packed.eager_ms
        upstream = upstream_cost(batch, GRAPHS, H200)
        assert upstream is None or ns(packed.cost_ms) <= upstream


def test_long_lists_of_small_items_fill_their_graphs() -> None:
    """Each is the best that there is: as many items as a step may hold, in 2,016 tokens or more."""
    graphs = [QWEN.capacity(budget, Limits(items=126)) for budget in BUDGETS]
    batch = [QWEN.usage((1, 8, 8))] * 504
    # A straight line: the larger the graph, the less a token costs.
    costs = CostLines.of({b: 1.5 + 0.0165 * b for b in BUDGETS}, dict(H200.eager_ms))
    packed = Packer(graphs, costs).pack(batch)
    assert faults(packed, batch, graphs, costs) == []
    assert [(len(items), budget) for items, budget in packed.steps] == [(126, 2076)] * 4


# -- by hand ---------------------------------------------------------------------------------------

SMALL = Capacity(budget=50, items=2, patches=200, sequences=2, windows=10)
LARGE = Capacity(budget=100, items=3, patches=400, sequences=4, windows=20)
LINES = CostLines.of({50: 2, 100: 3}, {10: 20, 1010: 40})


def tokens(*counts: int) -> list[Usage]:
    return [Usage(4 * n, n, 1, 1) for n in counts]


def test_nothing_to_pack() -> None:
    assert Packer([SMALL], LINES).pack([]) == Packing((), 0, 0)
    assert Packer([], LINES).pack([]) == Packing((), 0, 0)


def test_without_graphs_all_is_eager_in_one_step() -> None:
    assert Packer([], LINES).pack(tokens(1, 509)) == Packing((((0, 1), None),), 30.0, 30.0)
    assert Packer([], LINES).pack(tokens(*[1] * 99)).steps == ((tuple(range(99)), None),)


def test_items_share_a_replay_where_that_is_cheaper() -> None:
    assert Packer([SMALL, LARGE], LINES).pack(tokens(50, 50)).steps == (((0, 1), 100),)
    dear = CostLines.of({50: 2, 100: 5}, {10: 20})
    assert Packer([SMALL, LARGE], dear).pack(tokens(50, 50)).steps == (((0,), 50), ((1,), 50))


def test_of_equal_costs_the_fewer_steps_are_taken_and_then_replays() -> None:
    costs = CostLines.of({50: 2, 100: 4}, {450: 4})
    assert Packer([SMALL, LARGE], costs).pack(tokens(50, 50)).steps == (((0, 1), 100),)
    assert Packer([SMALL], costs).pack(tokens(50, 50)).steps == (((0, 1), None),)
    twelve = CostLines.of({50: 2}, {600: 24})
    assert Packer([SMALL], twelve).pack(tokens(*[50] * 12)).steps == ((tuple(range(12)), None),)
    one = CostLines.of({50: 4}, {450: 4})
    assert Packer([SMALL], one).pack(tokens(50)).steps == (((0,), 50),)


def test_the_largest_of_many_run_eagerly_where_a_last_replay_would_be_dearer() -> None:
    """Three of 33 tokens fill a replay of 3 ms; an eager run is 1.9 for each."""
    full, costs = Capacity(99, 3, 999, 9, 99), CostLines.of({99: 3}, {33: 1.9})
    packed = Packer([full], costs).pack(tokens(*[33] * 13))
    assert [(len(items), budget) for items, budget in packed.steps] == [(3, 99)] * 4 + [(1, None)]
    assert packed.cost_ms == 13.9


def test_a_slow_graph_is_passed_over_for_a_larger_one() -> None:
    costs = CostLines.of({50: 3.5, 100: 3}, {10: 20})
    packed = Packer([SMALL, LARGE], costs).pack(tokens(7))
    assert packed == Packing((((0,), 100),), 3.0, 20.0)
    same = CostLines.of({50: 3, 100: 3}, {10: 20})
    assert Packer([SMALL, LARGE], same).pack(tokens(7)).steps == (((0,), 50),)


def test_what_must_run_eagerly_takes_others_along_where_they_are_cheaper_there() -> None:
    """An eager step has its launches paid for; 40 more tokens cost 0.8 ms, a replay 2."""
    packed = Packer([SMALL, LARGE], LINES).pack(tokens(500, 40))
    assert packed.steps == (((0, 1), None),)
    steep = CostLines.of({50: 2, 100: 3}, {10: 20, 1000: 2000})
    assert Packer([SMALL, LARGE], steep).pack(tokens(500, 40)).steps == (((1,), 50), ((0,), None))
    # The same with many: four replays of three are full, and one item goes along. Cuts of sorted
    # items would leave the largest; packed anew, it is in a replay (33 + 33 + 34 = 100).
    less_steep = CostLines.of({100: 3}, {10: 20, 1000: 60})
    packed = Packer([LARGE], less_steep).pack(tokens(500, *[33] * 12, 34))
    assert [len(items) for items, _ in packed.steps] == [3, 3, 3, 3, 2]
    assert packed.steps[-1][0][0] == 0 < packed.steps[-1][0][1] < 13


@pytest.mark.parametrize("kind", ["items", "budget", "patches", "sequences", "windows", "frames"])
@pytest.mark.parametrize("count", [3, 12])
def test_every_kind_binds(kind: str, count: int) -> None:
    """Three items fill the larger graph in all kinds; with one less of a kind they do not fit."""
    use = Usage(patches=133, tokens=33, sequences=1, windows=6, frames=2)
    full = Capacity(budget=99, items=3, patches=399, sequences=3, windows=18, frames=6)
    costs = CostLines.of({98: 3, 99: 3}, {1: 1e5})
    batch = [use] * count
    assert {len(items) for items, _ in Packer([full], costs).pack(batch).steps} == {3}
    tight = replace(full, **{kind: getattr(full, kind) - 1})
    packed = Packer([tight], costs).pack(batch)
    assert faults(packed, batch, [tight], costs) == []
    assert max(len(items) for items, budget in packed.steps if budget) == 2


def test_a_limit_on_frames_may_end_with_a_graph() -> None:
    """None is no limit: larger than any."""
    graphs = [replace(SMALL, frames=3), replace(LARGE, frames=None)]
    batch = [Usage(4, 1, 1, 1, frames) for frames in (3, 4)]
    assert [Packer(graphs, LINES).pack([use]).steps[0][1] for use in batch] == [50, 100]


@pytest.mark.parametrize("kind", ["budget", "items", "patches", "sequences", "windows", "frames"])
def test_capacities_that_do_not_ascend_are_refused(kind: str) -> None:
    small, large = replace(SMALL, frames=5), replace(LARGE, frames=5)
    assert Packer([small, large], LINES)
    low = getattr(small, kind) - (kind != "budget")
    with pytest.raises(ValueError, match="must ascend in every kind"):
        Packer([small, replace(large, **{kind: low})], LINES)


def test_a_graph_that_was_not_timed_is_refused() -> None:
    with pytest.raises(ValueError, match="no replay of 50 tokens was measured"):
        Packer([SMALL], CostLines.of({64: 1}, {64: 1}))


# -- the judges can fail ---------------------------------------------------------------------------


def test_a_broken_packing_is_noticed() -> None:
    batch, graphs = tokens(20, 30, 45, 60, 500), [SMALL, LARGE]
    steep = CostLines.of({50: 2, 100: 3}, {10: 20, 1000: 2000})
    packed = Packer(graphs, steep).pack(batch)
    assert packed.steps == (((0, 1, 2), 100), ((3,), 100), ((4,), None))
    judge = partial(faults, batch=batch, graphs=graphs, costs=steep)
    assert judge(packed) == []
    first, second, last = packed.steps
    broken = [
        (second, last),
        (first, first, second, last),
        (first, last, second),
        (((0, 1, 2), 50), second, last),
        (((0, 1, 2), 77), second, last),
        (((2, 0, 1), 100), second, last),
        (first, second, ((), 50), last),
        (((0, 1), 50), ((2,), 50), second, last),
    ]
    for steps in broken:
        assert judge(replace(packed, steps=steps)), steps
    assert judge(replace(packed, cost_ms=packed.cost_ms + 1))
    assert judge(replace(packed, eager_ms=packed.eager_ms + 1))


def test_the_stubbed_manager_packs_as_upstream_does() -> None:
    """Greedy up to the largest budget and the most items; a large item does not join small ones
    where that is dearer; what is larger than every budget runs by itself."""
    pack = partial(UpstreamPacking, budgets=[64, 100, 400], most_items=3)
    assert pack([30, 30, 30, 30]).steps == [([0, 1, 2], 100), ([3], 64)]
    assert pack([60, 60]).steps == [([0], 64), ([1], 64)]
    assert pack([200, 150, 100]).steps == [([2, 1], 400), ([0], 400)]
    assert pack([500, 20, 900]).steps == [([1], 64), ([0], None), ([2], None)]


@given(
    sizes=st.lists(st.integers(1, 40) | st.integers(1, 400), min_size=1, max_size=30),
    budgets=st.lists(st.integers(1, 900), max_size=6),
    most_items=st.integers(1, 9),
)
@pytest.mark.fuzz
@examples(200)
@example(sizes=[60, 60], budgets=[64, 400], most_items=3)
@example(sizes=[64, 64], budgets=[128], most_items=3)
@example(sizes=[60, 30, 30], budgets=[64, 100, 400], most_items=3)
@example(sizes=[100, 10], budgets=[64, 100, 400], most_items=3)
def test_the_packers_rule_of_upstream_is_upstreams(
    sizes: list[int], budgets: list[int], most_items: int
) -> None:
    ladder = sorted({*budgets, max(sizes)})
    steps = UpstreamPacking(sizes, ladder, most_items).steps
    assert upstream_groups(sizes, ladder, most_items) == [items for items, _ in steps]


# -- plans seen before -----------------------------------------------------------------------------


def test_a_batch_seen_before_is_not_packed_again() -> None:
    made = []

    def plan(grids: tuple[Grid, ...]) -> Packing:
        made.append(grids)
        return QWEN_PACKER.pack([QWEN.usage(grid) for grid in grids])

    cached = PlanCache(plan)
    first = cached(((1, 16, 16), (1, 20, 20)))
    assert cached(((1, 16, 16), (1, 20, 20))) is first
    assert cached(((1, 20, 20), (1, 16, 16))) is not first
    assert (len(made), len(cached), cached.hits) == (2, 2, 1)
    cached.clear()
    assert (len(cached), cached.hits) == (0, 0)
    assert cached(((1, 16, 16), (1, 20, 20))) == first
    assert len(made) == 3


def test_the_cache_is_bounded_and_the_least_recently_used_goes_first() -> None:
    made: list[int] = []
    cached = PlanCache(lambda key: made.append(key) or key, entries=3)
    for key in (1, 2, 3, 1, 4):  # 2 goes
        assert cached(key) == key
    made.clear()
    for key in (1, 3, 4, 2):
        cached(key)
    assert made == [2]
    assert len(cached) == 3
    full = PlanCache(str)
    for key in range(packing.CACHED_PLANS + 10):
        full(key)
    assert len(full) == packing.CACHED_PLANS == 1024


def test_what_fails_is_not_kept() -> None:
    cached = PlanCache(lambda key: 1 // key)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cached(0)
    assert len(cached) == 0
