# SPDX-License-Identifier: Apache-2.0
"""Counts, and the log line that a user sees."""

import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.vit_cudagraph import metrics
from vllm.vit_cudagraph.statistics import (
    DEFAULT_LOG_INTERVAL,
    LOG_INTERVAL,
    MOST_RUNNING,
    TIMED_EVERY,
    Statistics,
    log_interval,
)
from vllm.vit_cudagraph.testing.profiles import examples

Records = list[logging.LogRecord]

LINE = re.compile(
    r"Encoder CUDA graphs: (?P<replayed>\d+) items replayed, (?P<eager>\d+) items eager"
    r"(?: \((?P<reasons>[^()]+: \d+(?:; [^()]+: \d+)*)\))?"
    r", (?P<replays>\d+) replays, (?P<padding>\d+) padding tokens"
)


def lines(records: Records) -> list[str]:
    return [r.message for r in records if r.levelno == logging.INFO]


# -- the line --------------------------------------------------------------------------------------


def test_the_line_as_documented() -> None:
    statistics = Statistics()
    statistics.count_eager("larger than every token budget", 2)
    for budget, items, tokens in [(64, 3, 64), (64, 3, 51), (128, 2, 100), (128, 2, 100)]:
        statistics.count_replay(budget, items, tokens)
    statistics.count_eager("pixel dtype differs from the buffer", 1)
    statistics.count_replay(256, 2, 238)
    assert str(statistics) == (
        "Encoder CUDA graphs: 12 items replayed, 3 items eager (larger than every token budget: 2; "
        "pixel dtype differs from the buffer: 1), 5 replays, 87 padding tokens"
    )


def test_no_parenthesis_where_nothing_ran_eagerly() -> None:
    statistics = Statistics()
    statistics.count_replay(64, 1, 60)
    assert str(statistics) == (
        "Encoder CUDA graphs: 1 items replayed, 0 items eager, 1 replays, 4 padding tokens"
    )


reasons = st.sampled_from(["a reason", "another, with a comma", "a third"])
events = st.lists(
    st.one_of(
        st.tuples(st.just("replay"), st.integers(1, 500), st.integers(1, 9), st.integers(0, 500)),
        st.tuples(st.just("eager"), reasons, st.integers(1, 9)),
    ),
    max_size=20,
)


@given(events)
@pytest.mark.fuzz
@examples(80)
def test_every_item_is_counted_once(happened: list[tuple]) -> None:
    statistics, told = Statistics(), []
    replayed = replays = padding = 0
    eager: dict[str, int] = {}
    for kind, what, items, *spare in happened:
        if kind == "replay":
            statistics.count_replay(what, items, what - min(spare[0], what))
            replayed, replays = replayed + items, replays + 1
            padding += min(spare[0], what)
        else:
            assert statistics.count_eager(what, items) == (what not in eager)
            eager[what] = eager.get(what, 0) + items
        told.append(str(statistics))
    shape = LINE.fullmatch(str(statistics))
    assert shape is not None, str(statistics)
    counts = {name: int(shape[name]) for name in ("replayed", "eager", "replays", "padding")}
    assert counts == {
        "replayed": replayed,
        "eager": sum(eager.values()),
        "replays": replays,
        "padding": padding,
    }
    said = "; ".join(f"{reason}: {items}" for reason, items in eager.items())
    assert (shape["reasons"] or "") == said
    assert len(set(told)) == len(told), "each event changes the line"


# -- when it is logged -----------------------------------------------------------------------------


def run(statistics: Statistics, interval: int, batches: int, items: int = 1) -> None:
    for _ in range(batches):
        statistics.count_replay(64, items, 60)
        statistics.log(interval)


def test_every_batch_with_an_interval_of_one(vllm_log: Records) -> None:
    statistics = Statistics()
    run(statistics, 1, 3, items=4)
    assert [line.split(",")[0] for line in lines(vllm_log)] == [
        f"Encoder CUDA graphs: {n} items replayed" for n in (4, 8, 12)
    ]
    assert all(LINE.fullmatch(line) for line in lines(vllm_log))
    statistics.log(1)
    assert len(lines(vllm_log)) == 3, "nothing new happened"


def test_the_first_items_then_each_interval(vllm_log: Records) -> None:
    run(Statistics(), 100, 250)
    assert [line.split()[3] for line in lines(vllm_log)] == ["1", "101", "201"]


def test_a_batch_larger_than_the_interval_is_one_line(vllm_log: Records) -> None:
    run(Statistics(), 10, 2, items=95)
    assert len(lines(vllm_log)) == 2


def test_eager_items_count_as_items(vllm_log: Records) -> None:
    statistics = Statistics()
    statistics.log(1)
    assert lines(vllm_log) == [], "no line before any item"
    statistics.count_eager("a reason", 3)
    statistics.log(100)
    assert lines(vllm_log) == [
        "Encoder CUDA graphs: 0 items replayed, 3 items eager (a reason: 3), 0 replays, "
        "0 padding tokens"
    ]


# -- the interval ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        (None, DEFAULT_LOG_INTERVAL),
        ("", DEFAULT_LOG_INTERVAL),
        ("1", 1),
        ("007", 7),
        ("5000", 5000),
    ],
)
def test_the_interval_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, vllm_log: Records, text: str | None, interval: int
) -> None:
    monkeypatch.delenv(LOG_INTERVAL, raising=False)
    if text is not None:
        monkeypatch.setenv(LOG_INTERVAL, text)
    assert log_interval() == interval
    assert vllm_log == []


def test_names_and_default_as_documented() -> None:
    assert (LOG_INTERVAL, DEFAULT_LOG_INTERVAL) == ("VIT_CUDAGRAPH_LOG_INTERVAL", 100)


@pytest.mark.parametrize(
    "text", ["0", "-1", "+5", "1.5", "1e3", "ten", " 10", "10\n", "²", "0x10", "None", "9" * 5000]
)
def test_a_bad_interval_warns_and_the_default_holds(
    monkeypatch: pytest.MonkeyPatch, vllm_log: Records, text: str
) -> None:
    """No environment ends the engine."""
    monkeypatch.setenv(LOG_INTERVAL, text)
    assert log_interval() == DEFAULT_LOG_INTERVAL
    (record,) = vllm_log
    assert record.levelno == logging.WARNING
    assert LOG_INTERVAL in record.message
    assert f"using {DEFAULT_LOG_INTERVAL}" in record.message


class Watch:
    """Ends when it is told to."""

    def __init__(self, ms: float | None = None) -> None:
        self.ms = ms

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def milliseconds(self) -> float | None:
        return self.ms


def test_a_few_replays_are_timed() -> None:
    statistics = Statistics()
    for replay in range(TIMED_EVERY + 2):
        if replay == 0:
            assert not statistics.wants_time(64)  # the first launch is slower than all others
        if statistics.wants_time(64):
            statistics.count_time(64, Watch(2.0 + len(statistics.timed)))
        statistics.count_replay(64, 1, 50, predicted_ms=2.5)
    shown = statistics.snapshot(3)
    assert shown["timed_replays"] == {64: 2} and shown["measured_milliseconds"] == {64: 5.0}
    assert shown["predicted_milliseconds"] == {64: pytest.approx(2.5 * (TIMED_EVERY + 2))}
    assert shown["padding_tokens"] == {64: 14 * (TIMED_EVERY + 2)}
    assert shown["replays"] == shown["items_replayed"] == {64: TIMED_EVERY + 2}
    assert shown["captured_graphs"] == 3


def test_nobody_waits_for_a_replay_that_has_not_ended() -> None:
    statistics, slow = Statistics(), Watch()
    statistics.count_time(64, slow)
    statistics.count_time(128, Watch(1.0))
    assert not statistics.timed  # in the order of the stream
    slow.ms = 5.0
    statistics.read_watches()
    assert statistics.timed_ms == {64: 5.0, 128: 1.0}


def test_so_many_watches_and_no_more() -> None:
    statistics = Statistics()
    statistics.count_replay(64, 1, 50)
    while statistics.wants_time(64):
        statistics.count_time(64, Watch())
    assert len(statistics._running) == MOST_RUNNING


def test_a_snapshot_has_the_names_of_the_metrics() -> None:
    assert list(Statistics().snapshot(0)) == [one.key for one in metrics.DEFINITIONS]
