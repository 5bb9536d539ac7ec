# SPDX-License-Identifier: Apache-2.0
"""Plans of a model's batches are safe, complete, explained and remembered. What they cost is
``test_packing.py``'s business."""

import random
from collections.abc import Sequence
from dataclasses import astuple, replace
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm.vit_cudagraph.costs import CostLines
from vllm.vit_cudagraph.geometry import Capacity, Grid, Limits, Usage, ViTGeometry, offset_rows
from vllm.vit_cudagraph.ladder import token_ladder
from vllm.vit_cudagraph.packing import Packer
from vllm.vit_cudagraph.planning import (
    CHEAPER_EAGERLY,
    NOT_CAPTURABLE,
    NOT_CAPTURED,
    Plan,
    Planner,
    Step,
    why_eager,
)
from vllm.vit_cudagraph.testing.profiles import examples

LARGER = "larger than every token budget"
SEQUENCES = "more attention sequences (frames) than a graph holds"
WINDOWS = "more attention windows than a graph holds"
FRAMES = "more video frames than encoder_cudagraph_max_frames_per_batch"


def geometry(side: int | None = 4, temporal_merge: str = "none") -> ViTGeometry:
    rows = offset_rows("sequences", "full", "longest")
    if side:
        rows |= offset_rows("windows", "windows", "longest_window")
    return ViTGeometry(
        patch_size=14, merge_size=2, rows=rows, window_side=side, temporal_merge=temporal_merge
    )


def dear_eager(capacities: Sequence[Capacity]) -> CostLines:
    """Costs by which whatever fits a graph is replayed."""
    return CostLines.of({c.budget: 1 + c.budget / 64 for c in capacities}, {1: 1e6})


def planner(
    capacities: Sequence[Capacity],
    of: ViTGeometry,
    costs: CostLines | None = None,
    capturable: object = lambda grid: True,
) -> Planner:
    return Planner(capacities, costs or dear_eager(capacities), of.usage, capturable)


def exceeded(items: int, use: Usage, capacity: Capacity) -> list[str]:
    """Kinds of which there are more than a graph holds, one by one."""
    there = {"items": items, "tokens": use.tokens, "patches": use.patches}
    there |= {"sequences": use.sequences, "windows": use.windows, "frames": use.frames}
    room = {"items": capacity.items, "tokens": capacity.budget, "patches": capacity.patches}
    room |= {"sequences": capacity.sequences, "windows": capacity.windows}
    room["frames"] = use.frames if capacity.frames is None else capacity.frames
    return [kind for kind, n in there.items() if n > room[kind]]


def faults(plan: Plan, batch: Sequence[Usage], graphs: Sequence[Capacity]) -> list[str]:
    """Everything that is wrong with a plan; empty for a sound one."""
    placed = [item for step in plan.steps for item in step.items]
    if sorted(placed) != list(range(len(batch))):
        return ["items missing, doubled or invented"]
    found = []
    by_budget = {graph.budget: graph for graph in graphs}
    for step in plan.steps:
        if not step.items or list(step.items) != sorted(step.items):
            found.append("items of a step out of order, or none")
            continue
        told = sum(items for _, items in step.reasons)
        if told != (len(step.items) if step.budget is None else 0):
            found.append("an eager item without a reason, or a replayed one with it")
        if step.budget is None:
            continue
        if step.budget not in by_budget:
            found.append(f"no graph of {step.budget} tokens")
            continue
        total = Usage(*map(sum, zip(*(astuple(batch[i]) for i in step.items), strict=True)))
        over = exceeded(len(step.items), total, by_budget[step.budget])
        found += [f"more {kind} than the graph of {step.budget} holds" for kind in over]
    if [step.budget for step in plan.steps[:-1]].count(None):
        found.append("an eager step that is not the last")
    if plan.cost_ms > plan.eager_ms:
        found.append("dearer than one eager run")
    return found


grids = st.tuples(
    st.sampled_from([1, 1, 1, 2, 7]),
    st.integers(1, 20).map(lambda n: 2 * n),
    st.integers(1, 9).map(lambda n: 2 * n),
)


@pytest.mark.fuzz
@given(
    batch=st.lists(grids, max_size=14),
    side=st.sampled_from([None, 4]),
    temporal_merge=st.sampled_from(["none", "halve"]),
    frames=st.sampled_from([None, 0, 3]),
    cheap=st.booleans(),
)
@examples(150)
@example(batch=[], side=4, temporal_merge="none", frames=None, cheap=True)
@example(batch=[(1, 40, 18)] * 9, side=4, temporal_merge="none", frames=None, cheap=True)
def test_plans_are_safe_complete_and_explained(
    batch: list[Grid], side: int | None, temporal_merge: str, frames: int | None, cheap: bool
) -> None:
    declared = geometry(side, temporal_merge)
    limits = Limits(items=5, frames=frames)
    graphs = [
        replace(declared.capacity(budget, limits), frames=frames)
        for budget in token_ladder(16, 500)
    ]
    costs = CostLines.modelled([c.budget for c in graphs]) if cheap else dear_eager(graphs)
    plan = planner(graphs, declared, costs).plan(batch)
    usages = [declared.usage(grid) for grid in batch]
    assert faults(plan, usages, graphs) == []
    if not cheap:
        eager = {i for step in plan.steps if step.budget is None for i in step.items}
        assert eager == {i for i, use in enumerate(usages) if exceeded(1, use, graphs[-1])}


def test_a_broken_plan_is_noticed() -> None:
    declared = geometry()
    graphs = [declared.capacity(budget, Limits(items=3)) for budget in (50, 100, 200)]
    batch = [(1, 8, 8), (1, 10, 8), (1, 12, 14), (1, 6, 8), (1, 90, 90)]
    usages = [declared.usage(grid) for grid in batch]
    plan = planner(graphs, declared).plan(batch)
    assert faults(plan, usages, graphs) == []
    *replays, last = plan.steps
    step = next(step for step in replays if len(step.items) > 1)
    others = tuple(s for s in plan.steps if s != step)

    def broken(*instead: Step) -> list[str]:
        return faults(replace(plan, steps=(*instead, *others)), usages, graphs)

    assert broken(replace(step, items=step.items[1:]))  # one dropped
    assert broken(replace(step, items=(*step.items, step.items[0])))  # one doubled
    assert broken(replace(step, items=step.items[::-1]))  # out of order
    assert broken(replace(step, budget=77))  # a graph that is not there
    assert broken(replace(step, budget=None))  # eager without a reason
    assert broken(replace(step, reasons=((LARGER, len(step.items)),)))  # a reason for a replay
    assert broken(step, Step((), 50))
    assert faults(replace(plan, steps=tuple(replays)), usages, graphs)  # no eager step
    assert faults(replace(plan, steps=(last, *replays)), usages, graphs)  # not the last
    assert faults(replace(plan, cost_ms=plan.eager_ms + 1), usages, graphs)


@pytest.mark.parametrize("kind", ["items", "patches", "sequences", "windows", "budget", "frames"])
def test_a_step_over_any_one_capacity_is_noticed(kind: str) -> None:
    declared = geometry()
    uses = [declared.usage((2, 20, 20)), declared.usage((1, 20, 20))]
    total = Usage(*map(sum, zip(*map(astuple, uses), strict=True)))
    graph = Capacity(
        total.tokens, 2, total.patches, total.sequences, total.windows, frames=total.frames
    )
    plan = Plan((Step((0, 1), graph.budget),), 1.0, 1.0)
    assert faults(plan, uses, [graph]) == []
    tight = replace(graph, **{kind: getattr(graph, kind) - 1})
    assert faults(replace(plan, steps=(Step((0, 1), tight.budget),)), uses, [tight])


# -- why an item runs eagerly ----------------------------------------------------------------------

LARGE = Capacity(budget=100, items=2, patches=400, sequences=4, windows=20)
FULL = Usage(patches=400, tokens=100, sequences=4, windows=20)


@pytest.mark.parametrize(
    ("use", "largest", "reason"),
    [
        (FULL, LARGE, None),
        (replace(FULL, tokens=101), LARGE, LARGER),
        (replace(FULL, patches=401), LARGE, LARGER),
        (replace(FULL, sequences=5), LARGE, SEQUENCES),
        (replace(FULL, windows=21), LARGE, WINDOWS),
        (replace(FULL, tokens=101, sequences=5), LARGE, LARGER),
        (replace(FULL, sequences=5, windows=21), LARGE, SEQUENCES),
        (replace(FULL, frames=4, sequences=5), replace(LARGE, frames=3), FRAMES),
        (replace(FULL, frames=3), replace(LARGE, frames=3), None),
    ],
)
def test_what_fits_nowhere_says_what_is_too_much(
    use: Usage, largest: Capacity, reason: str | None
) -> None:
    assert why_eager(use, largest) == reason


def test_one_eager_step_and_a_count_for_each_reason() -> None:
    declared = geometry()
    graphs = [declared.capacity(100, Limits(items=4, frames=6))]
    batch = [(1, 90, 90), (1, 8, 8), (7, 2, 2), (1, 90, 80), (1, 2, 2)]
    able = planner(graphs, declared, capturable=lambda grid: grid != (1, 2, 2))
    assert able.plan(batch).steps == (
        Step((1,), 100),
        Step((0, 2, 3, 4), None, ((LARGER, 2), (SEQUENCES, 1), (NOT_CAPTURABLE, 1))),
    )


def test_what_eager_does_cheaper_says_so() -> None:
    declared = geometry()
    graphs = [declared.capacity(budget, Limits(items=9)) for budget in (64, 256)]
    costs = CostLines.of({64: 2.0, 256: 30.0}, {64: 20.0, 256: 25.0})
    mixed = planner(graphs, declared, costs)
    assert mixed.plan([(1, 16, 16)]).steps == (Step((0,), 64),)
    (step,) = mixed.plan([(1, 32, 32)]).steps
    assert step == Step((0,), None, ((CHEAPER_EAGERLY, 1),))


#: Two graphs, and eager runs that wait for launches until 20 ms: at 0.04 ms a token, 500 tokens.
WAITING = {64: 2.0, 256: 17.0}, {64: 20.0, 500: 20.0, 1000: 40.0}


@pytest.mark.parametrize(
    "sequence, pair_ns, batch, replayed",
    [
        (1024, 0.0, [(1, 32, 32)], True),  # nothing is known of attention
        (1024, 9.9, [(1, 32, 32)], True),  # no longer than what was timed
        (256, 2.0, [(1, 32, 32)], True),  # 1024 x 768 pairs: 1.6 ms, so 18.6 of 20
        (256, 4.0, [(1, 32, 32)], False),  # 3.1 ms
        (256, 4.0, [(4, 16, 16)], True),  # each frame a sequence
        (256, 0.0, [(1, 32, 32), (1, 14, 18)], True),  # 19 ms of 20
        (256, 2.0, [(1, 32, 32), (1, 14, 18)], False),  # and 1.6
        (64, 999.0, [(1, 16, 16)], True),  # an eager run waits 17.4 ms: a replay of 2 loses no more
    ],
)
def test_attention_that_an_eager_run_hides_counts_against_replays(
    sequence: int, pair_ns: float, batch: list[Grid], replayed: bool
) -> None:
    declared = geometry(side=None)
    graphs = [declared.capacity(budget, Limits(items=9)) for budget in (64, 256)]
    plan = planner(graphs, declared, CostLines.of(*WAITING, sequence, pair_ns)).plan(batch)
    assert any(step.budget is not None for step in plan.steps) == replayed
    if not replayed:
        (step,) = plan.steps
        assert step.items == tuple(range(len(batch))) and plan.cost_ms == plan.eager_ms
        assert dict(step.reasons)[CHEAPER_EAGERLY] > 0


@pytest.mark.fuzz
@given(
    batch=st.lists(grids, min_size=1, max_size=6),
    replays=st.floats(0.5, 3.0),
    waits=st.floats(1.0, 30.0),
    sequence=st.integers(0, 600),
    pair_ns=st.floats(0, 100),
)
@examples(150)
def test_attention_makes_no_plan_dearer_than_eager_or_than_it_was(
    batch: list[Grid], replays: float, waits: float, sequence: int, pair_ns: float
) -> None:
    """By a model of its own: a run takes as long as the host or the device, whichever is longer."""
    declared = geometry(side=None)
    graphs = [declared.capacity(budget, Limits(items=9)) for budget in (64, 128, 256)]
    uses = [declared.usage(grid) for grid in batch]
    replay_ms = {graph.budget: replays * graph.budget / 64 for graph in graphs}
    eager_ms = {tokens: max(waits, 0.04 * tokens) for tokens in (64, 256, 1000, 4000)}

    def planned(*attention: float) -> Plan:
        costs = CostLines.of(replay_ms, eager_ms, *attention)  # type: ignore[arg-type]
        return planner(graphs, declared, costs).plan(batch)

    curve = CostLines.of(replay_ms, eager_ms)

    def takes(steps: Sequence[Step]) -> float:
        total = 0.0
        for step in steps:
            longer = sum(
                pair_ns * use.patches * max(0, use.patches / use.sequences - sequence) / 1e6
                for use in (uses[i] for i in step.items)
            )
            tokens = sum(uses[i].tokens for i in step.items)
            waiting = curve.eager(tokens) - 0.04 * tokens
            eager = curve.eager(tokens) + max(0.0, longer - max(0.0, waiting))
            total += eager if step.budget is None else replay_ms[step.budget] + longer
        return total

    plan, nothing_known = planned(sequence, pair_ns), planned()
    everything = Step(tuple(range(len(batch))), None)
    least = min(takes([everything]), takes(nothing_known.steps))
    assert takes(plan.steps) == pytest.approx(least, abs=1e-4)


def test_without_graphs_all_is_eager() -> None:
    plan = planner([], geometry(), CostLines.modelled([])).plan([(1, 2, 2), (1, 90, 90)])
    assert plan.steps == (Step((0, 1), None, ((NOT_CAPTURED, 2),)),)


def test_nothing_to_plan() -> None:
    graphs = [geometry().capacity(64, Limits(items=4))]
    assert planner(graphs, geometry()).plan([]).steps == ()


def test_a_limit_of_no_frames_makes_every_video_eager() -> None:
    graphs = [replace(geometry().capacity(64, Limits(items=4, frames=0)), frames=0)]
    (step,) = planner(graphs, geometry()).plan([(1, 2, 2)] * 3).steps
    assert step == Step((0, 1, 2), None, ((FRAMES, 3),))


# -- plans are remembered --------------------------------------------------------------------------


def test_a_batch_that_was_planned_is_looked_up() -> None:
    graphs = [geometry().capacity(64, Limits(items=4))]
    plans = planner(graphs, geometry())
    batch = [(1, 8, 8), (1, 4, 4)]
    first = plans.plan(batch)
    with mock.patch.object(Packer, "pack", side_effect=AssertionError("planned again")):
        assert plans.plan(list(batch)) is first
        with pytest.raises(AssertionError, match="planned again"):
            plans.plan(batch[::-1])


def test_ranks_make_the_same_plans() -> None:
    """Two planners of the same graphs and costs, which were sent from one rank to the other."""
    declared, generator = geometry(), random.Random(0)
    graphs = [declared.capacity(budget, Limits(items=8)) for budget in token_ladder(64, 900)]
    costs = CostLines.modelled([graph.budget for graph in graphs])
    one = planner(graphs, declared, costs)
    other = planner(graphs, declared, CostLines.from_dict(costs.as_dict()))
    for _ in range(50):
        batch = [
            (1, 2 * generator.randint(1, 30), 2 * generator.randint(1, 30))
            for _ in range(generator.randint(1, 20))
        ]
        assert one.plan(batch) == other.plan(batch)
