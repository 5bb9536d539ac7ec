# SPDX-License-Identifier: Apache-2.0
"""What is measured at start-up, and which budgets are captured for it. The clock is made up: on a
CPU no real one says anything about a GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import managers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.vit_cudagraph import capturing, measuring
from vllm.vit_cudagraph.captured import CapturedBudget
from vllm.vit_cudagraph.costs import CostLines
from vllm.vit_cudagraph.geometry import ViTGeometry, offset_rows
from vllm.vit_cudagraph.graphs.recorded import RecordedBackend
from vllm.vit_cudagraph.ladder import token_ladder
from vllm.vit_cudagraph.manager import EncoderGraphManager
from vllm.vit_cudagraph.measuring import (
    AUTOMATIC_MARGIN,
    EAGER_DISCOUNT,
    ITEM,
    PROBES_APART,
    Bench,
    eager_sizes,
    full_image,
    last_winner,
    measure,
    never_falling,
    still_images,
)
from vllm.vit_cudagraph.testing import models
from vllm.vit_cudagraph.testing.profiles import examples

FAMILY = "qwen2_vl"
MOST_TOKENS = 512


@pytest.fixture
def served() -> Any:
    """A model of its own: what is measured is remembered with it."""
    config = models.make_config(FAMILY, max_model_len=MOST_TOKENS)
    return config, models.build_model(config)


def new_manager(served: Any, **given: Any) -> EncoderGraphManager:
    config, model = served
    given |= {"manager_class": EncoderGraphManager}
    return managers.make_manager(FAMILY, of=model, base=config, **given)


@pytest.fixture(autouse=True)
def all_that_win() -> Iterator[None]:
    """As on a GPU: the twin would thin the ladder, for the sake of memory."""
    with mock.patch.object(RecordedBackend, "most_graphs", None):
        yield


@contextmanager
def clock(crossover: int) -> Iterator[list[tuple[str, int]]]:
    """Replays and eager runs cost the same at ``crossover`` tokens; yields what was timed."""
    timed: list[tuple[str, int]] = []

    def replay_ms(bench: Bench, captured: CapturedBudget, grids: Any = None) -> float:
        timed.append(("replay", captured.capacity.budget))
        return 1.0 * captured.capacity.budget

    def eager_ms(bench: Bench, tokens: int) -> float:
        timed.append(("eager", tokens))
        return max(crossover, 0.9 * tokens)

    with mock.patch.multiple(Bench, replay_ms=replay_ms, eager_ms=eager_ms):
        yield timed


def texts(records: list[Any], level: str) -> list[str]:
    return [record.message for record in records if record.levelname == level]


# -- which budgets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("crossover", [100, 250, 10_000])
def test_the_ladder_is_captured_up_to_the_crossover(served: Any, crossover: int) -> None:
    ladder = token_ladder(64, MOST_TOKENS)
    with clock(crossover) as timed:
        manager = new_manager(served)
    probed = sorted({tokens for what, tokens in timed if what == "replay"} - set(manager.captured))
    winning = [b for b in ladder if b <= (1 - AUTOMATIC_MARGIN) * crossover]
    assert list(manager.captured) == ladder[: len(manager.captured)]
    assert winning[-1] / PROBES_APART <= max(manager.captured) <= winning[-1]
    assert len(probed) <= 4 and all(budget <= 2.3 * crossover for budget in probed)
    assert manager.path_token_budgets == {"default": list(manager.captured)}
    assert manager.costs.measured(64) == 64 and manager.costs.eager(64) == pytest.approx(
        (1 - EAGER_DISCOUNT) * crossover
    )


def test_nothing_wins(served: Any, vllm_log: list[Any]) -> None:
    with clock(10):
        manager = new_manager(served)
    assert not manager.captured and not manager.is_captured()
    (said,) = texts(vllm_log, "WARNING")
    assert "eager is as fast at every size" in said and "encoder_cudagraph_token_budgets" in said
    assert manager.execute(managers.batch(served[1], [[1, 8, 8]])) is None


def test_the_users_budgets_are_captured_as_they_stand(served: Any) -> None:
    """Timed all the same: plans need to know what they cost."""
    with clock(100) as timed:
        manager = new_manager(served, budgets=[50, 300])
    assert list(manager.captured) == [50, 300]
    assert [budget for what, budget in timed if what == "replay"] == [50, 300]
    # 300 tokens are cheaper eagerly, by this clock, and so is what would have to be padded to them.
    managers.run(manager, managers.batch(served[1], [[1, 30, 32]]))
    managers.run(manager, managers.batch(served[1], [[1, 8, 8]]))
    assert dict(manager.statistics.eager) == {"cheaper eagerly": 1}
    assert dict(manager.statistics.replays) == {50: 1}


def test_measured_once_a_model(served: Any) -> None:
    """Both runners capture twice: V2 with one manager, V1 with another."""
    with clock(250) as timed:
        first = new_manager(served)
        count = len(timed)
        first.clear()
        first.capture(object())
        second = new_manager(served)
    assert len(timed) == count > 0
    assert list(first.captured) == list(second.captured) and second.costs == first.costs


def test_other_settings_are_measured_anew(served: Any) -> None:
    with clock(250) as timed:
        new_manager(served, budgets=[64])
        count = len(timed)
        new_manager(served, budgets=[64], items=2)
    assert len(timed) == 2 * count


def test_scratch_memory_is_given_back(served: Any) -> None:
    with (
        clock(100),
        mock.patch.object(RecordedBackend, "give_back", autospec=True) as give_back,
        mock.patch.object(RecordedBackend, "new_pool", autospec=True) as new_pool,
    ):
        new_manager(served)
    # After each probe, whose pool is its own, and after the last measurement.
    assert give_back.call_count == new_pool.call_count + 1


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_backend_may_bound_the_number_of_graphs(served: Any, most: int) -> None:
    with clock(400), mock.patch.object(RecordedBackend, "most_graphs", most):
        manager = new_manager(served)
    assert len(manager.captured) == most and max(manager.captured) > 330
    assert most == 1 or min(manager.captured) == 64


# -- failures --------------------------------------------------------------------------------------


def test_a_clock_that_fails_costs_only_the_measurements(served: Any, vllm_log: list[Any]) -> None:
    with mock.patch.object(Bench, "eager_ms", side_effect=RuntimeError("no clock")):
        manager = new_manager(served)
    assert set(texts(vllm_log, "WARNING")) == {
        "Encoder CUDA graphs are not timed: RuntimeError: no clock"
    }
    assert list(manager.captured) == token_ladder(64, MOST_TOKENS)
    kwargs = managers.batch(served[1], [[1, 8, 8]])
    managers.assert_same(managers.run(manager, kwargs), managers.eager(served[1], kwargs))
    assert manager.statistics.replayed == 1


def test_a_probe_without_memory_does_not_win(served: Any) -> None:
    capture = EncoderGraphManager._capture

    def no_room(manager: EncoderGraphManager, budget: int) -> CapturedBudget:
        if budget > 150:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture(manager, budget)

    with clock(10_000), mock.patch.object(EncoderGraphManager, "_capture", no_room):
        manager = new_manager(served)
    assert 150 / PROBES_APART / 1.12 <= max(manager.captured) <= 150
    ((said, budgets),) = manager.left_out.items()
    assert "CUDA out of memory" in said and min(budgets) > 150


def test_a_tower_that_cannot_be_captured_says_so(served: Any, vllm_log: list[Any]) -> None:
    """Not that eager is as fast; and the next round of capture tries again."""
    broken = mock.patch.object(
        EncoderGraphManager, "_capture", side_effect=RuntimeError("a host read")
    )
    with clock(10_000), broken:
        manager = new_manager(served)
    assert not manager.captured
    (said,) = texts(vllm_log, "WARNING")
    assert "[64] tokens are left out: RuntimeError: a host read" in said
    with clock(250):
        manager.capture(object())
    assert manager.captured


def test_under_tensor_parallel_weights_nothing_is_timed(served: Any) -> None:
    """A replay within vLLM's ``graph_capture`` would read the peers' buffers before they are known;
    and ranks must plan alike."""
    several = mock.patch.object(capturing, "get_tensor_model_parallel_world_size", lambda: 2)
    with clock(100) as timed, several:
        manager = new_manager(served)
    assert not timed
    assert list(manager.captured) == token_ladder(64, MOST_TOKENS)
    assert manager.costs == CostLines.modelled(manager.captured)


# -- one measurement -------------------------------------------------------------------------------


def test_what_is_timed_is_what_is_served(served: Any) -> None:
    """With the host's clock: a replay of a full graph, and an eager run of as many tokens."""

    def milliseconds(backend: RecordedBackend, run: Any) -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    with mock.patch.object(RecordedBackend, "milliseconds", milliseconds):
        manager = new_manager(served, budgets=[64, 256])
        bench = manager._bench()
        graph = manager.captured[256]
        with mock.patch.object(type(graph.graph), "replay", autospec=True) as replay:
            assert bench.replay_ms(graph) is not None
        replay.assert_called_once_with(graph.graph)
    assert graph.buffers["pixel_values"].float().std() > 0.5
    assert int(graph.buffers["cu_seqlens"][1]) == 1024  # one image fills it
    assert [budget for budget, _ in manager.costs.replay_ms] == [64, 256]
    assert [tokens for tokens, _ in manager.costs.eager_ms] == [64, 128, 256, 512]
    kwargs = managers.batch(served[1], [[1, 8, 8]])
    managers.assert_same(managers.run(manager, kwargs), managers.eager(served[1], kwargs))


def test_a_replay_is_charged_with_what_its_step_does_around_it(served: Any) -> None:
    """As an eager run is with its metadata: two replays do it twice, one eager run once."""
    now, model = [0.0], served[1]

    def takes(ms: float, of: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            now[0] += ms
            return of(*args, **kwargs)

        return run

    def milliseconds(backend: RecordedBackend, run: Any) -> float:
        start = now[0]
        run()
        return now[0] - start

    manager = new_manager(served, budgets=[64])
    graph, bench = manager.captured[64], manager._bench()
    with (
        mock.patch.object(RecordedBackend, "milliseconds", milliseconds),
        mock.patch.object(model, "vit_metadata_parts", takes(0.25, model.vit_metadata_parts)),
        mock.patch.object(graph, "check", takes(0.5, graph.check)),
        mock.patch.object(graph, "load", takes(1.0, graph.load)),
        mock.patch.object(graph, "graph", mock.Mock(replay=takes(16.0, graph.graph.replay))),
    ):
        assert bench.replay_ms(graph) == 17.75


def test_small_images_are_timed_and_eager_counts_for_less() -> None:
    """One large image costs more attention than most batches of as many tokens; and a plan with
    replays must be worth more than clocks are off by."""
    config = models.make_config(FAMILY, max_model_len=4096)
    model = models.build_model(config)
    runs: list[list[int]] = []

    def milliseconds(backend: RecordedBackend, run: Any) -> float:
        with mock.patch.object(model, "vit_forward") as forward:
            run()
        if forward.called:
            offsets = forward.call_args.args[1]["cu_seqlens"]
            runs.append([int(n) // 4 for n in offsets.diff()])
        return 10.0

    with mock.patch.object(RecordedBackend, "milliseconds", milliseconds):
        manager = new_manager((config, model), budgets=[300])
    near, *beyond, again = runs
    assert again == near  # may wait for launches, so it is timed twice
    assert len(near) == 1 and [sum(run) > 500 for run in beyond] == [True, True]
    assert all(max(run) < 2 * ITEM and len(run) > 1 for run in beyond)
    assert {ms for _, ms in manager.costs.eager_ms} == {10.0 * (1 - EAGER_DISCOUNT)}
    assert {ms for _, ms in manager.costs.replay_ms} == {10.0}


def test_a_host_that_was_slow_for_a_while_does_not_make_eager_dear(served: Any) -> None:
    """Runs that wait for launches: the first round meets a slow host, the second does not."""
    with clock(250), mock.patch.object(Bench, "eager_ms", autospec=True) as eager:
        eager.side_effect = [25.0, 26.0, 27.0, 30.0, 15.0, 14.0, 16.0]
        manager = new_manager(served, budgets=[64, 256])
    assert [call.args[1] for call in eager.call_args_list] == [64, 128, 256, 512, 64, 128, 256]
    least = {64: 15.0, 128: 14.0, 256: 16.0, 512: 30.0}
    assert dict(manager.costs.eager_ms) == {
        tokens: pytest.approx((1 - EAGER_DISCOUNT) * ms) for tokens, ms in least.items()
    }


@pytest.mark.parametrize("most, side", [(4096, (34, 35)), (700, (26, 26))])
def test_what_larger_images_take_is_measured(most: int, side: tuple[int, int]) -> None:
    """A clock that runs with the pairs of patches that attend to each other."""
    config = models.make_config(FAMILY, max_model_len=4096)
    model = models.build_model(config)
    given: list[Any] = []

    def milliseconds(backend: RecordedBackend, run: Any) -> float:
        with mock.patch.object(model, "vit_forward") as forward:
            run()
        lengths = manager.captured[1200].buffers["cu_seqlens"].diff().double()
        if not forward.called:
            given.append(lengths[lengths > 0].int().tolist())
        return 1.0 + float((lengths**2).sum()) * 3e-6

    with mock.patch.object(RecordedBackend, "milliseconds", lambda *_: None):
        manager = new_manager((config, model), budgets=[1200])
    clocked = mock.patch.object(RecordedBackend, "milliseconds", milliseconds)
    with clocked, mock.patch.object(measuring, "LARGE", most):
        costs = measure(manager._bench(), manager.captured, 4096)
    assert costs is not None
    assert costs.sequence == 4 * ITEM and costs.pair_ns == pytest.approx(3.0)
    largest = 4 * side[0] * side[1]  # one image that fills the graph, or the largest timed
    assert max(lengths[0] for lengths in given) == largest
    assert all(sum(lengths) > 0.9 * 4 * 1200 for lengths in given)  # beside others that fill it


def test_large_images_without_memory_cost_only_that_measurement(
    served: Any, vllm_log: list[Any]
) -> None:
    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with clock(250), mock.patch.object(measuring, "further_attention", no_room):
        manager = new_manager(served)
    assert manager.costs.measured(64) == 64 and manager.costs.pair_ns == 0
    assert texts(vllm_log, "WARNING") == [
        "What attention over large images costs is not timed: OutOfMemoryError: CUDA out of memory"
    ]


def test_graphs_no_larger_than_a_timed_image_say_nothing_of_attention(served: Any) -> None:
    with clock(100):
        manager = new_manager(served, budgets=[64, 200])
    assert (manager.costs.sequence, manager.costs.pair_ns) == (0, 0.0)


GEOMETRY = ViTGeometry(14, 2, offset_rows("sequences", "cu_seqlens", "max_seqlen"))


@pytest.mark.fuzz
@given(st.integers(1, 20_000))
@examples(100)
def test_a_full_image_nearly_fills_its_budget(tokens: int) -> None:
    grid = full_image(GEOMETRY, tokens)
    GEOMETRY.check_grid(grid)
    assert 0.75 * tokens <= GEOMETRY.output_tokens(grid) <= tokens
    assert grid[1] <= grid[2] <= 3 * grid[1]


@pytest.mark.fuzz
@given(st.dictionaries(st.integers(1, 99), st.floats(0.1, 9.0), min_size=1))
@examples(50)
def test_no_graph_counts_for_more_than_a_larger_one(ms: dict[int, float]) -> None:
    given = never_falling(ms)
    assert list(given) == sorted(ms) and list(given.values()) == sorted(given.values())
    assert all(given[b] == min(t for other, t in ms.items() if other >= b) for b in ms)


def test_of_two_graphs_that_cost_the_same_the_smaller_one_runs(served: Any) -> None:
    with clock(100), mock.patch.object(Bench, "replay_ms", lambda *_: 1.0):
        manager = new_manager(served, budgets=[64, 88, 109])
    managers.run(manager, managers.batch(served[1], [[1, 8, 8]]))
    assert dict(manager.statistics.replays) == {64: 1}


@pytest.mark.fuzz
@given(st.integers(1, 20_000), st.integers(1, 100))
@examples(100)
def test_timed_images_are_within_the_limits_and_nearly_fill_the_budget(
    tokens: int, most_items: int
) -> None:
    grids = still_images(GEOMETRY, tokens, most_items)
    sizes = [GEOMETRY.output_tokens(grid) for grid in grids]
    assert len(sizes) <= most_items and 0.75 * tokens <= sum(sizes) <= tokens
    assert len(set(sizes[:-1])) <= 1
    if len(sizes) < most_items:
        assert max(sizes) < 2 * ITEM


@pytest.mark.fuzz
@given(st.integers(1, 300), st.integers(0, 30_000), st.integers(0, 200_000))
@examples(100)
def test_sizes_of_eager_runs_reach_beyond_the_largest_graph(
    smallest: int, more: int, most: int
) -> None:
    largest = smallest + more
    sizes = eager_sizes(smallest, largest, most)
    assert sizes[0] == smallest and largest in sizes
    assert sizes[-1] == max(largest, min(4 * largest, most))
    assert sorted(set(sizes)) == sizes and len(sizes) <= 20


@pytest.mark.fuzz
@given(st.integers(1, 100), st.integers(0, 20_000), st.integers(0, 25_000))
@examples(200)
def test_the_crossover_is_found_from_below(smallest: int, more: int, crossover: int) -> None:
    ladder, probed = token_ladder(smallest, smallest + more), []

    def wins(budget: int) -> bool:
        probed.append(budget)
        return budget <= crossover

    found = last_winner(ladder, wins)
    winners = [budget for budget in ladder if budget <= crossover]
    assert (found is None) == (not winners)
    if found is not None:
        following = [b for b in ladder if b > found][:1]
        assert found <= winners[-1]
        assert found == winners[-1] or winners[-1] < PROBES_APART * found or following == []
    assert len(set(probed)) == len(probed) <= 24
    assert all(budget <= max(2.3 * crossover + 8, ladder[0]) for budget in probed)
