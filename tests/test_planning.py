# SPDX-License-Identifier: Apache-2.0
"""Plans are safe, complete and as cheap as their promise; budgets form a ladder."""

import random
from collections.abc import Sequence
from dataclasses import astuple, replace
from itertools import pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from vllm.vit_cudagraph.geometry import Capacity, Limits, Usage, ViTGeometry, offset_rows
from vllm.vit_cudagraph.planning import (
    REPLAY_OVERHEAD_TOKENS,
    Step,
    budget_ladder,
    plan_steps,
    why_eager,
)
from vllm.vit_cudagraph.testing.profiles import examples

LARGER = "larger than every token budget"
SEQUENCES = "more attention sequences (frames) than a graph holds"
WINDOWS = "more attention windows than a graph holds"
FRAMES = "more video frames than encoder_cudagraph_max_frames_per_batch"
NOTHING = "no graph is captured"

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
def capacities_of_graphs(draw: st.DrawFn, most: int = 5, least: int = 0) -> list[Capacity]:
    """Graphs in which each holds at least what the one before does, in every kind."""
    budgets = draw(st.lists(st.integers(1, 300), min_size=least, max_size=most, unique=True))
    kinds = [
        sorted(draw(st.lists(st.integers(1, top), min_size=len(budgets), max_size=len(budgets))))
        for top in (8, 1200, 30, 60)
    ]
    frames = draw(st.none() | st.integers(0, 20))  # the user's limit, the same for all graphs
    return [Capacity(*row, frames) for row in zip(sorted(budgets), *kinds, strict=True)]


batches = st.lists(usages, max_size=12)


def total(items: Sequence[int], of: Sequence[Usage]) -> Usage:
    if not items:
        return Usage(0, 0, 0, 0, 0)
    return Usage(*map(sum, zip(*(astuple(of[i]) for i in items), strict=True)))


def exceeded(items: int, use: Usage, capacity: Capacity) -> list[str]:
    """Kinds of which there are more than a graph holds, one by one."""
    there = {"items": items, "tokens": use.tokens, "patches": use.patches}
    there |= {"sequences": use.sequences, "windows": use.windows, "frames": use.frames}
    room = {"items": capacity.items, "tokens": capacity.budget, "patches": capacity.patches}
    room |= {"sequences": capacity.sequences, "windows": capacity.windows}
    room["frames"] = use.frames if capacity.frames is None else capacity.frames
    return [kind for kind, n in there.items() if n > room[kind]]


def faults(plan: Sequence[Step], batch: Sequence[Usage], graphs: Sequence[Capacity]) -> list[str]:
    """Everything that is wrong with a plan; empty for a sound one."""
    found = []
    placed = [item for step in plan for item in step.items]
    if sorted(placed) != list(range(len(batch))):
        found.append("items missing, doubled or invented")
        return found
    by_budget = {graph.budget: graph for graph in graphs}
    for step in plan:
        if not step.items:
            found.append("an empty step")
        if list(step.items) != sorted(step.items):
            found.append("items of a step out of order")
        if (step.budget is None) == (step.reason is None):
            found.append("a step is a replay, or it says why not")
        if step.budget is None:
            for item in step.items:
                if any(not exceeded(1, batch[item], graph) for graph in graphs):
                    found.append(f"item {item} runs eagerly although a graph holds it")
        elif step.budget not in by_budget:
            found.append(f"no graph of {step.budget} tokens")
        else:
            over = exceeded(len(step.items), total(step.items, batch), by_budget[step.budget])
            found += [f"more {kind} than the graph of {step.budget} holds" for kind in over]
    reasons = [step.reason for step in plan if step.budget is None]
    if len(set(reasons)) < len(reasons):
        found.append("two eager steps for one reason")
    return found


def cost(plan: Sequence[Step]) -> int:
    return sum(step.budget + REPLAY_OVERHEAD_TOKENS for step in plan if step.budget is not None)


def cheapest(batch: Sequence[Usage], graphs: Sequence[Capacity]) -> int | None:
    """Least cost over every way to cut the sorted items into runs; None if none is allowed."""
    order = sorted(batch, key=lambda use: (use.tokens, use.sequences))
    best = None
    for bits in range(2 ** max(0, len(order) - 1)):
        cuts = [0, *(i + 1 for i in range(len(order) - 1) if bits >> i & 1), len(order)]
        costs = []
        for start, stop in pairwise(cuts):
            use = total(range(start, stop), order)
            fits = [graph.budget for graph in graphs if not exceeded(stop - start, use, graph)]
            costs.append(min(fits, default=None))
        if None not in costs:
            this = sum(costs) + REPLAY_OVERHEAD_TOKENS * len(costs)
            best = this if best is None else min(best, this)
    return best


# -- plans -----------------------------------------------------------------------------------------


@given(batch=batches, graphs=capacities_of_graphs())
@pytest.mark.fuzz
@examples(300)
@example(batch=[], graphs=[Capacity(64, 1, 256, 8, 64)])
@example(batch=[Usage(4, 1, 1, 1)] * 5, graphs=[Capacity(64, 2, 256, 8, 64)])
@example(batch=[Usage(4, 1, 3, 1)] * 5, graphs=[Capacity(64, 9, 256, 8, 64)])
@example(batch=[Usage(4, 1, 1, 9)] * 5, graphs=[Capacity(64, 9, 256, 8, 20)])
@example(batch=[Usage(90, 1, 1, 1)] * 5, graphs=[Capacity(64, 9, 256, 8, 64)])
def test_plans_are_safe_and_complete(batch: list[Usage], graphs: list[Capacity]) -> None:
    assert faults(plan_steps(batch, graphs), batch, graphs) == []


@given(batch=st.lists(usages, max_size=7), graphs=capacities_of_graphs(least=1))
@pytest.mark.fuzz
@examples(200)
def test_the_cut_is_the_cheapest(batch: list[Usage], graphs: list[Capacity]) -> None:
    fitting = [use for use in batch if not exceeded(1, use, graphs[-1])]
    assert cost(plan_steps(batch, graphs)) == (cheapest(fitting, graphs) if fitting else 0)


@given(
    tokens=st.lists(st.integers(1, 300), min_size=2, max_size=7),
    budgets=st.lists(st.sampled_from([64, 100, 128, 200, 256, 400, 1000]), min_size=1, unique=True),
)
@pytest.mark.fuzz
@examples(100)
@example(tokens=[60, 60], budgets=[64, 400])
@example(tokens=[60, 60], budgets=[64, 128])
@example(tokens=[30, 30, 90, 90], budgets=[64, 100, 1000])
def test_the_cut_is_the_cheapest_where_tokens_alone_decide(
    tokens: list[int], budgets: list[int]
) -> None:
    graphs = [Capacity(budget, 9, 9999, 99, 99) for budget in sorted(budgets)]
    batch = [Usage(4 * n, n, 1, 1) for n in tokens]
    fitting = [use for use in batch if use.tokens <= graphs[-1].budget]
    assert cost(plan_steps(batch, graphs)) == (cheapest(fitting, graphs) if fitting else 0)


def test_items_share_a_replay_only_where_that_is_cheaper() -> None:
    batch = [Usage(240, 60, 1, 1)] * 2
    small, middle, large = (Capacity(budget, 9, 9999, 99, 99) for budget in (64, 128, 400))
    assert plan_steps(batch, [small, middle]) == [Step((0, 1), 128)]
    assert plan_steps(batch, [small, large]) == [Step((0,), 64), Step((1,), 64)]


@given(use=usages, graphs=capacities_of_graphs(least=1))
@pytest.mark.fuzz
@examples(100)
def test_one_item_takes_the_smallest_graph_that_holds_it(
    use: Usage, graphs: list[Capacity]
) -> None:
    fits = [graph.budget for graph in graphs if not exceeded(1, use, graph)]
    (step,) = plan_steps([use], graphs)
    assert step.budget == (fits[0] if fits else None)


@given(batch=batches, graphs=capacities_of_graphs(), seed=st.integers(0, 99))
@pytest.mark.fuzz
@examples(100)
def test_the_order_of_a_batch_does_not_change_the_cost(
    batch: list[Usage], graphs: list[Capacity], seed: int
) -> None:
    """Ranks and retries that see one batch pay the same; and a plan is made of it alone."""
    shuffled = random.Random(seed).sample(batch, len(batch))
    assert cost(plan_steps(batch, graphs)) == cost(plan_steps(shuffled, graphs))
    assert plan_steps(batch, graphs) == plan_steps(list(batch), tuple(graphs))


@pytest.mark.parametrize("side", [None, 4])
@pytest.mark.parametrize("frames", [None, 0, 3])
@pytest.mark.parametrize("temporal_merge", ["none", "halve"])
def test_plans_of_real_geometries(
    side: int | None, frames: int | None, temporal_merge: str
) -> None:
    """Capacities as a manager has them, batches of images and clips from a seed."""
    rows = offset_rows("sequences", "full", "longest")
    if side:
        rows |= offset_rows("windows", "windows", "longest_window")
    geometry = ViTGeometry(
        patch_size=14, merge_size=2, rows=rows, window_side=side, temporal_merge=temporal_merge
    )
    limits = Limits(items=5, frames=frames)
    graphs = [geometry.capacity(budget, limits) for budget in budget_ladder(16, 500)]
    generator = random.Random(0)
    replayed = 0
    for _ in range(60):
        grids = [
            (
                generator.choice([1, 1, 2, 7]),
                2 * generator.randint(1, 20),
                2 * generator.randint(1, 9),
            )
            for _ in range(generator.randint(1, 14))
        ]
        batch = [geometry.usage(grid) for grid in grids]
        plan = plan_steps(batch, graphs)
        assert faults(plan, batch, graphs) == []
        replayed += sum(step.budget is not None for step in plan)
    assert replayed > 60


def test_nothing_to_plan() -> None:
    graphs = [Capacity(64, 4, 256, 8, 64)]
    assert plan_steps([], graphs) == []
    assert plan_steps([], []) == []


def test_without_graphs_all_is_eager_in_one_step() -> None:
    batch = [Usage(4, 1, 1, 1), Usage(4000, 1000, 1, 1)]
    assert plan_steps(batch, []) == [Step((0, 1), None, NOTHING)]


SMALL = Capacity(budget=50, items=1, patches=200, sequences=2, windows=10)
LARGE = Capacity(budget=100, items=2, patches=400, sequences=4, windows=20)
FULL = Usage(patches=400, tokens=100, sequences=4, windows=20)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (replace(FULL, tokens=101), LARGER),
        (replace(FULL, patches=401), LARGER),
        (replace(FULL, sequences=5), SEQUENCES),
        (replace(FULL, windows=21), WINDOWS),
        (replace(FULL, tokens=101, sequences=5), LARGER),
        (replace(FULL, sequences=5, windows=21), SEQUENCES),
    ],
)
def test_what_fits_nowhere_says_what_is_too_much(use: Usage, reason: str) -> None:
    graphs = [SMALL, LARGE]
    assert why_eager(use, LARGE) == reason
    assert plan_steps([use], graphs) == [Step((0,), None, reason)]
    # It does not take its neighbours with it.
    assert plan_steps([FULL, use], graphs) == [Step((0,), 100), Step((1,), None, reason)]


def test_one_eager_step_a_reason() -> None:
    batch = [replace(FULL, tokens=101), FULL, replace(FULL, sequences=9), replace(FULL, tokens=900)]
    assert plan_steps(batch, [SMALL, LARGE]) == [
        Step((1,), 100),
        Step((0, 3), None, LARGER),
        Step((2,), None, SEQUENCES),
    ]


def test_a_limit_of_no_frames_makes_every_video_eager() -> None:
    graphs = [replace(LARGE, sequences=0)]
    (step,) = plan_steps([Usage(4, 1, 1, 1)] * 3, graphs)
    assert step == Step((0, 1, 2), None, SEQUENCES)


# -- the checks can fail ---------------------------------------------------------------------------


def planned(seed: int) -> tuple[list[Usage], list[Capacity], list[Step]]:
    """A batch whose plan has replays of several items, and an eager step."""
    generator = random.Random(seed)
    graphs = [SMALL, LARGE, Capacity(200, 3, 800, 8, 40)]
    batch = [Usage(4 * n, n, 1, 3) for n in (generator.randint(5, 60) for _ in range(6))]
    batch.append(Usage(4000, 1000, 1, 1))
    plan = plan_steps(batch, graphs)
    assert faults(plan, batch, graphs) == []
    assert any(len(step.items) > 1 and step.budget for step in plan)
    return batch, graphs, plan


def first_replay(plan: list[Step]) -> int:
    return next(i for i, step in enumerate(plan) if step.budget and len(step.items) > 1)


@pytest.mark.parametrize("seed", range(3))
def test_a_broken_plan_is_noticed(seed: int) -> None:
    batch, graphs, plan = planned(seed)
    at = first_replay(plan)
    step = plan[at]

    def broken(**change: object) -> list[str]:
        mutant = [*plan[:at], replace(step, **change), *plan[at + 1 :]]
        return faults(mutant, batch, graphs)

    assert broken(items=step.items[1:])  # one dropped
    assert broken(items=(*step.items, step.items[0]))  # one doubled
    assert broken(items=step.items[::-1])  # out of order
    assert broken(budget=50)  # a graph that is too small
    assert broken(budget=77)  # a graph that is not there
    assert broken(budget=None, reason=LARGER)  # eager for no reason
    assert broken(reason=LARGER)  # both
    assert faults(plan[:-1], batch, graphs)  # no eager step
    assert faults([*plan, Step((), 50)], batch, graphs)
    merged = Step(tuple(range(6)), 200)
    assert faults([merged, *(s for s in plan if s.budget is None)], batch, graphs)


@pytest.mark.parametrize("kind", ["items", "patches", "sequences", "windows", "budget"])
def test_a_step_over_any_one_capacity_is_noticed(kind: str) -> None:
    batch, graph = [FULL, Usage(0, 0, 0, 0)], LARGE
    plan = [Step((0, 1), graph.budget)]
    assert faults(plan, batch, [graph]) == []
    tight = replace(graph, **{kind: getattr(graph, kind) - 1})
    assert faults([replace(plan[0], budget=tight.budget)], batch, [tight])


def test_a_dearer_cut_is_noticed() -> None:
    batch, graphs, plan = planned(0)
    apart = [
        part
        for step in plan
        for part in ([replace(step, items=(i,)) for i in step.items] if step.budget else [step])
    ]
    assert faults(apart, batch, graphs) == []
    assert cost(apart) > cost(plan) == cheapest(batch[:-1], graphs)


# -- the ladder ------------------------------------------------------------------------------------


@given(smallest=st.integers(1, 5000), largest=st.integers(1, 50000))
@pytest.mark.fuzz
@examples(200)
@example(smallest=64, largest=64)
@example(smallest=64, largest=65)
@example(smallest=64, largest=128)
@example(smallest=1, largest=2)
def test_budget_ladder(smallest: int, largest: int) -> None:
    assume(smallest <= largest)
    ladder = budget_ladder(smallest, largest)
    assert (ladder[0], ladder[-1]) == (smallest, largest)
    for lower, upper in pairwise(ladder):
        assert lower < upper <= 2 * lower
    assert all(budget == smallest * 2**i for i, budget in enumerate(ladder[:-1]))


@pytest.mark.parametrize(("smallest", "largest"), [(0, 64), (-1, 64), (65, 64), (0, 0), (1, 0)])
def test_a_ladder_of_nothing_is_refused(smallest: int, largest: int) -> None:
    with pytest.raises(ValueError, match=f"lie between {smallest} and {largest}"):
        budget_ladder(smallest, largest)
