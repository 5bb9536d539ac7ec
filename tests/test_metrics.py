# SPDX-License-Identifier: Apache-2.0
"""Counts on ``/metrics``: from real worker processes, through files, into the registry that vLLM
serves; what happens to them when a process dies; that nothing stays behind and nothing is broken.
"""

import fcntl
import functools
import itertools
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm.v1.metrics import reader
from vllm.v1.metrics.prometheus import get_prometheus_registry, unregister_vllm_metrics
from vllm.vit_cudagraph import metrics
from vllm.vit_cudagraph.testing.profiles import examples

FORK = multiprocessing.get_context("fork")
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
PREFIX = "vllm:encoder_cudagraph_"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
Snapshot = Mapping[str, Any]


# -- a server, its workers, a scrape ---------------------------------------------------------------


@contextmanager
def serving(folder: str) -> Iterator[Path]:
    """This process as the first that loads the plugin; roots are made in ``folder``."""
    with (
        mock.patch.object(tempfile, "tempdir", folder),
        mock.patch.object(metrics, "_process", None),
        mock.patch.object(metrics, "_warned", False),
        mock.patch.dict(os.environ),
    ):
        os.environ.pop(MULTIPROCESS, None)
        os.environ.pop(metrics.DIRECTORY, None)
        metrics._collector.restart()
        metrics.prepare()
        yield Path(folder)
        if metrics._process is not None and metrics._process.current is not None:
            metrics._process.current._close()
        metrics._collector.restart()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    with serving(str(tmp_path)) as folder:
        yield folder


def scrape(registry: CollectorRegistry = REGISTRY) -> Series:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    ours = [sample for sample in samples if sample.name.startswith(PREFIX)]
    series = {(s.name, frozenset(s.labels.items())): s.value for s in ours}
    assert len(series) == len(ours), "a series came twice"
    return series


def as_series(snapshot: Snapshot, rank: int, model_name: str = "m", engine: int = 0) -> Series:
    """What a scrape shows of a snapshot, written down apart from the module's own table."""
    worker = {"model_name": model_name, "engine": str(engine), "rank": str(rank)}
    series = {}
    for key, value in snapshot.items():
        if key == "captured_graphs":
            series[PREFIX + key, frozenset(worker.items())] = float(value)
            continue
        label = "reason" if key == "eager_items" else "budget"
        for label_value, number in value.items():
            labels = worker | {label: str(label_value)}
            series[f"{PREFIX}{key}_total", frozenset(labels.items())] = float(number)
    return series


def counters(series: Series) -> Series:
    return {at: value for at, value in series.items() if at[0].endswith("_total")}


def write(snapshot: Snapshot, rank: int = 0) -> None:
    metrics.publish(snapshot, rank, model_name="m")
    metrics.flush()


def _work(rank: int, pipe: Any) -> None:
    while (snapshot := pipe.recv()) is not None:
        write(snapshot, rank)
        pipe.send("written")


class Worker:
    """A worker process, forked by the process that makes this."""

    def __init__(self, rank: int) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=_work, args=(rank, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def publish(self, snapshot: Snapshot) -> None:
        self.pipe.send(snapshot)
        assert self.pipe.poll(20) and self.pipe.recv() == "written"

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join(20)
        assert self.process.exitcode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join(20)
        assert self.process.exitcode == -signal.SIGKILL


def roots(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{metrics._ROOT_PREFIX}*"))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*/**/{metrics._FILE}"))


def waited_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return condition()


SNAPSHOT: Snapshot = {
    "replays": {64: 3, 128: 1},
    "items_replayed": {64: 5, 128: 1},
    "tokens": {64: 150, 128: 100},
    "padding_tokens": {64: 42, 128: 28},
    "eager_items": {"larger than every token budget": 2, 'a "quoted" reason': 1},
    "predicted_milliseconds": {64: 4.5, 128: 2.25},
    "measured_milliseconds": {64: 4.75, 128: 2.5},
    "captured_graphs": 17,
}


# -- what a scrape shows ---------------------------------------------------------------------------


def test_the_page_as_documented(server: Path) -> None:
    metrics.publish({k: SNAPSHOT[k] for k in ("replays", "captured_graphs")}, 1, model_name="Qwen")
    metrics.flush()
    page = generate_latest(REGISTRY).decode()
    ours = [line for line in page.splitlines() if PREFIX in line]
    assert ours == [
        "# HELP vllm:encoder_cudagraph_replays_total "
        "Replays of encoder CUDA graphs, by token budget.",
        "# TYPE vllm:encoder_cudagraph_replays_total counter",
        "vllm:encoder_cudagraph_replays_total"
        '{budget="64",engine="0",model_name="Qwen",rank="1"} 3.0',
        "vllm:encoder_cudagraph_replays_total"
        '{budget="128",engine="0",model_name="Qwen",rank="1"} 1.0',
        "# HELP vllm:encoder_cudagraph_captured_graphs Encoder CUDA graphs that a worker holds.",
        "# TYPE vllm:encoder_cudagraph_captured_graphs gauge",
        'vllm:encoder_cudagraph_captured_graphs{engine="0",model_name="Qwen",rank="1"} 17.0',
    ]


def test_nothing_is_shown_before_a_worker_wrote(server: Path) -> None:
    assert PREFIX not in generate_latest(REGISTRY).decode()


whole = st.integers(0, 2**40)
budgets = st.sampled_from([64, 72, 128, 1024, 8192])
readable = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1, max_size=30)
numbers = st.one_of(whole, st.floats(0, 1e9))
snapshots = st.fixed_dictionaries(
    {},
    optional={
        "replays": st.dictionaries(budgets, whole),
        "padding_tokens": st.dictionaries(budgets, whole),
        "eager_items": st.dictionaries(readable, whole),
        "predicted_milliseconds": st.dictionaries(budgets, numbers),
        "captured_graphs": st.integers(0, 60),
    },
)


@pytest.mark.fuzz
@examples(60)
@given(snapshots, st.integers(0, 63), st.integers(0, 7), readable)
def test_what_is_published_is_scraped(
    snapshot: Snapshot, rank: int, engine: int, model_name: str
) -> None:
    with tempfile.TemporaryDirectory() as folder, serving(folder):
        metrics.publish(snapshot, rank, model_name=model_name, engine=engine)
        metrics.flush()
        assert scrape() == as_series(snapshot, rank, model_name, engine)


def test_a_snapshot_is_taken_when_it_is_published(server: Path) -> None:
    live = {"replays": {64: 1}}
    with mock.patch.object(metrics._Publisher, "flush"):  # the thread does not write yet
        metrics.publish(live, 0, model_name="m")
        live["replays"][64] = 2
    metrics.flush()
    assert scrape() == as_series({"replays": {64: 1}}, 0)


def test_three_workers_publish_while_the_server_is_scraped(server: Path) -> None:
    workers = [Worker(rank) for rank in range(3)]
    last: list[Series] = [{}, {}, {}]
    seen: Series = {}
    for turn in range(1, 61):
        for rank, worker in enumerate(workers):
            counts = {"replays": {64: turn * (rank + 1), 128: turn}, "eager_items": {"why": turn}}
            worker.pipe.send(counts)
            last[rank] = as_series(counts, rank)
        now = scrape()
        assert all(now.get(at, 0.0) >= value for at, value in seen.items()), "a counter went down"
        seen = now
        for worker in workers:
            assert worker.pipe.recv() == "written"
    assert seen != {}, "no scrape fell between the writes"
    assert scrape() == last[0] | last[1] | last[2]
    for worker in workers:
        worker.end()


def test_scrapes_at_the_same_time_see_the_same(server: Path) -> None:
    """A scrape that looks at the lock of a dead worker does not make it look alive to another."""
    alive, dead = Worker(0), Worker(1)
    alive.publish(SNAPSHOT)
    dead.publish(SNAPSHOT)
    dead.kill()
    expected = as_series(SNAPSHOT, 0) | counters(as_series(SNAPSHOT, 1))
    meanwhile = []

    def flock(descriptor: int, how: int, real: Any = fcntl.flock) -> None:
        real(descriptor, how)
        with mock.patch.object(fcntl, "flock", real):
            records = dict(metrics._records_below(metrics._process.place))
        meanwhile.append(sorted(record.alive for record in records.values()))

    with mock.patch.object(fcntl, "flock", flock):
        assert scrape() == expected
    assert meanwhile == [[False, True]]
    alive.end()


def test_no_read_is_torn(server: Path) -> None:
    """Thousands of reads while a file is replaced as fast as it can be."""
    stop = FORK.Event()

    def replace() -> None:
        place = metrics._process.place
        file = metrics._OwnFile(metrics._process.root, place)
        turn = 0
        while not stop.is_set():
            turn += 1
            # Long and short by turns, and one number throughout.
            labels = [str(n) for n in range(1 + turn % 2 * 200)]
            file.write(("m", "0", "0"), {"replays": dict.fromkeys(labels, float(turn))})

    writer = FORK.Process(target=replace, daemon=True)
    writer.start()
    try:
        assert waited_for(lambda: files(server) != [])
        (path,) = files(server)
        turns: set[float] = set()
        reads = 0
        # On a busy machine the writer may get less time than the reader.
        until = time.monotonic() + 20
        while reads < 3000 or (len(turns) <= 50 and time.monotonic() < until):
            (turn,) = set(metrics._read(path).counts["replays"].values())
            turns.add(turn)
            reads += 1
    finally:
        stop.set()
        writer.join(20)
    assert len(turns) > 50, "the file was hardly replaced"


# -- counters do not go down -----------------------------------------------------------------------


def test_a_dead_workers_counts_stay_and_it_is_not_alive(server: Path) -> None:
    first, second = Worker(0), Worker(1)
    first.publish(SNAPSHOT)
    second.publish(SNAPSHOT)
    both = as_series(SNAPSHOT, 0) | as_series(SNAPSHOT, 1)
    assert scrape() == both
    first.kill()
    assert scrape() == counters(as_series(SNAPSHOT, 0)) | as_series(SNAPSHOT, 1)
    again = Worker(0)
    again.publish({"replays": {64: 10}, "captured_graphs": 16})
    expected = both | as_series({"replays": {64: 3 + 10, 128: 1}, "captured_graphs": 16}, 0)
    assert scrape() == expected
    again.end()
    second.end()
    assert scrape() == counters(expected), "workers that ended of themselves are not alive either"


@pytest.mark.parametrize("loss", ["garbage", "removed", "all removed"])
def test_counts_once_seen_stay_whatever_happens_to_the_file(server: Path, loss: str) -> None:
    worker = Worker(0)
    worker.publish(SNAPSHOT)
    seen = scrape()
    (path,) = files(server)
    if loss == "garbage":
        path.write_text('{"labels": {"model_')
    else:
        path.unlink()
    if loss == "all removed":
        worker.kill()
        metrics._remove(metrics._process.root)
    assert scrape() == counters(seen)
    if loss == "garbage":
        worker.publish(SNAPSHOT)
        assert scrape() == seen
        worker.end()


@pytest.mark.fuzz
@examples(40)
@given(
    st.lists(
        st.lists(st.dictionaries(st.sampled_from([64, 128]), st.integers(0, 50)), max_size=5),
        max_size=4,
    )
)
def test_a_second_manager_goes_on_counting(managers: list[list[dict[int, int]]]) -> None:
    """V1's runner makes two; each counts from zero. No total goes down, and none is lost that a
    later, smaller count shows to be another manager's."""
    totals = metrics._Totals()
    before: dict[str, float] = {}
    for increments in managers:
        own = {"64": 0.0, "128": 0.0}
        for increment in [{}, *increments]:
            for budget, more in increment.items():
                own[str(budget)] += more
            graphs = {"": sum(increment.values(), 0.0)}
            counts = totals.after({"replays": own, "captured_graphs": graphs})
            for budget, value in own.items():
                assert counts["replays"][budget] == before.get(budget, 0.0) + value
            assert counts["captured_graphs"] == graphs, "a gauge goes up and down"
        for budget, value in own.items():
            before[budget] = before.get(budget, 0.0) + value


# -- whatever else lies there ----------------------------------------------------------------------

GARBAGE: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"\xff\xfe\x00",
    b"null",
    b'{"labels": {}, "counts": {}}',
    b'{"labels": {"model_name": 1, "engine": "0", "rank": "0"}, "counts": {}}',
    b'{"labels": {"model_name": "m", "engine": "0", "rank": "0"}, "counts": []}',
    *(
        b'{"labels": {"model_name": "m", "engine": "0", "rank": "0"}, "counts": {"replays": %s}}'
        % counts
        for counts in (b'{"64": NaN}', b'{"64": -1}', b'{"64": null}', b"7", b'{"64": 1e999}')
    ),
    b'{"labels": {"model_name": "m", "engine": "0", "rank": "0"}, "counts": {"captured_graphs": '
    b'{"a": 1}}}',
    b"[" * 100_000,
    b" " * (1 << 21) + b'{"labels": {"model_name": "m", "engine": "0", "rank": "9"}, '
    b'"counts": {"replays": {"64": 1}}}',
]


def counts_in(name: str) -> Path:
    """Of a folder where a worker's would be: below this process's own."""
    place = metrics._process.place / name
    place.mkdir()
    return place / metrics._FILE


def test_foreign_files_are_skipped(server: Path) -> None:
    worker = Worker(0)
    worker.publish(SNAPSHOT)
    (path,) = files(server)
    for n, data in enumerate(GARBAGE):
        counts_in(f"garbage-{n}").write_bytes(data)
    os.mkfifo(counts_in("pipe"))
    counts_in("folder").mkdir()
    counts_in("link").symlink_to(path)
    counts_in("nowhere").symlink_to(path.parent / "missing")
    (path.parent / "notes.txt").write_text("foreign")
    (path.parent.parent / "loop").symlink_to(path.parent.parent)
    assert scrape() == as_series(SNAPSHOT, 0)
    worker.end()


texts = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["labels", "counts", "model_name", "replays", "", "64"]), inner
        ),
    ),
)


@pytest.mark.fuzz
@examples(60)
@given(st.one_of(st.binary(max_size=60), texts.map(lambda value: json.dumps(value).encode())))
def test_no_content_breaks_a_scrape(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, serving(folder):
        write({"replays": {64: 1}})
        counts_in("foreign").write_bytes(data)
        assert scrape() == as_series({"replays": {64: 1}}, 0)


def test_a_valid_file_in_a_foreign_folder_is_not_alive(server: Path) -> None:
    """The name of the folder says nothing: this one has the pid of a live process."""
    write(SNAPSHOT, rank=0)
    (path,) = files(server)
    copy = counts_in(f"{os.getpid()}-0badc0de")
    copy.write_text(path.read_text().replace('"rank": "0"', '"rank": "1"'))
    assert scrape() == as_series(SNAPSHOT, 0) | counters(as_series(SNAPSHOT, 1))


# -- the registry that vLLM serves -----------------------------------------------------------------


def test_registered_once_however_often_it_is_prepared(server: Path) -> None:
    name = os.environ[metrics.DIRECTORY]
    for _ in range(3):
        metrics.prepare()
    assert os.environ[metrics.DIRECTORY] == name
    kind = metrics.EncoderCudaGraphCollector
    assert sum(isinstance(c, kind) for c in list(REGISTRY._collector_to_names)) == 1
    assert get_prometheus_registry() is REGISTRY


def test_it_survives_vllms_unregistering(server: Path) -> None:
    write(SNAPSHOT)
    unregister_vllm_metrics()
    assert scrape() == as_series(SNAPSHOT, 0)


def test_the_offline_api_shows_it(server: Path) -> None:
    """``LLM.get_metrics()``, which knows counters, gauges and histograms and asserts on others."""
    write(SNAPSHOT)
    with mock.patch.object(reader, "REGISTRY", CollectorRegistry()) as registry:
        registry.register(metrics._collector)
        found = reader.get_metrics_snapshot()
    shown = {(m.name, frozenset(m.labels.items())): m.value for m in found}
    expected = {(n.removesuffix("_total"), at): v for (n, at), v in as_series(SNAPSHOT, 0).items()}
    assert shown == {
        at: int(v) if "milliseconds" in at[0] else v for at, v in expected.items()
    }  # vLLM makes whole numbers of counters


def test_registering_and_describing_touch_no_disk(server: Path) -> None:
    with mock.patch("os.walk", side_effect=AssertionError), mock.patch("builtins.open") as opened:
        registry = CollectorRegistry(auto_describe=True)
        registry.register(metrics.EncoderCudaGraphCollector())
    opened.assert_not_called()
    names = {f"{PREFIX}{key}" for key in SNAPSHOT}
    assert names <= set(registry._names_to_collectors)
    write(SNAPSHOT)
    only = registry.restricted_registry([f"{PREFIX}captured_graphs"])
    assert [(m.name, len(m.samples)) for m in only.collect()] == [(f"{PREFIX}captured_graphs", 1)]


def _api_server(pipe: Any) -> None:
    """As vLLM's instrumentator: a registry for each scrape."""
    while pipe.recv() is not None:
        pipe.send(scrape(get_prometheus_registry()))


def test_several_api_servers_show_the_workers_once(server: Path) -> None:
    folder = server / "prometheus"
    folder.mkdir()
    os.environ[MULTIPROCESS] = str(folder)
    workers = [Worker(rank) for rank in range(2)]
    in_this_process = functools.partial(write, rank=2)
    pipes = []
    for _ in range(2):
        ours, theirs = FORK.Pipe()
        FORK.Process(target=_api_server, args=(theirs,), daemon=True).start()
        theirs.close()
        pipes.append(ours)

    def scrapes() -> list[Series]:
        for pipe in pipes:
            pipe.send("scrape")
        return [pipe.recv() for pipe in pipes]

    expected: Series = {}
    for turn in (1, 2):
        for rank, publish in enumerate([workers[0].publish, workers[1].publish, in_this_process]):
            now = SNAPSHOT | {"replays": {64: turn + rank}, "captured_graphs": turn}
            publish(now)
            expected |= as_series(now, rank)
    assert scrapes() == [expected, expected]
    assert roots(server) == [], "the other kind of files is not written as well"
    workers[0].kill()
    again = Worker(0)
    again.publish({"replays": {64: 5}, "captured_graphs": 1})
    now = expected | as_series({"replays": {64: 2 + 5}, "captured_graphs": 1}, 0)
    assert scrapes() == [now, now], "a worker that was started again goes on counting"
    again.end()
    workers[1].end()
    assert scrapes() == [now, now], "the library's files outlive the workers"
    for pipe in pipes:
        pipe.send(None)


# -- whose workers ---------------------------------------------------------------------------------


def _serve(rank: int, pipe: Any) -> None:
    """A server that another process forked: with a worker of its own."""
    worker = Worker(rank)
    worker.publish(SNAPSHOT)
    pipe.send(scrape())
    pipe.recv()
    worker.end()


def test_two_servers_of_one_process_see_their_own_workers(server: Path) -> None:
    """As vLLM's supervisor of data-parallel servers starts them."""
    pipes, processes, seen = [], [], []
    for rank in range(2):
        ours, theirs = FORK.Pipe()
        processes.append(FORK.Process(target=_serve, args=(rank, theirs)))
        processes[-1].start()
        pipes.append(ours)
        # The first still runs when the second is scraped.
        seen.append(ours.recv() if ours.poll(20) else None)
    both = scrape()
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join()
    assert seen == [as_series(SNAPSHOT, 0), as_series(SNAPSHOT, 1)]
    assert both == seen[0] | seen[1]
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(roots(server)) == 1


PROGRAM = """
import multiprocessing, os, sys
from prometheus_client import REGISTRY, generate_latest
from vllm.vit_cudagraph import metrics

def work():
    metrics.prepare()
    metrics.publish({"replays": {64: 1}}, 0, model_name="m")
    metrics.flush()
    metrics.publish({"replays": {64: 3}}, 0, model_name="m")

if __name__ == "__main__":
    metrics.prepare()
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
    print(generate_latest(REGISTRY).decode())
    print("directory", os.environ[metrics.DIRECTORY])
"""


def test_a_program_with_a_spawned_worker_leaves_nothing_behind(server: Path) -> None:
    """A fresh program: the name that it inherits is not its own, its workers' counts are seen by
    nobody else."""
    other = server / "elsewhere"
    other.mkdir()
    (server / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, server / "program.py"],
        env=os.environ | {"TMPDIR": str(other)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    page, _, directory = done.stdout.rpartition("directory ")
    assert f'{PREFIX}replays_total{{budget="64",engine="0",model_name="m",rank="0"}} 3.0' in page
    assert directory.startswith(f"{other}/{metrics._ROOT_PREFIX}")
    assert list(other.iterdir()) == []
    assert scrape() == {}


# -- what stays behind -----------------------------------------------------------------------------


def _own_server(folder: str, pipe: Any, forks: bool) -> None:
    """A server apart from the process that forks it; it writes itself, or a worker does."""
    with serving(folder):
        worker = None
        if forks:
            worker = Worker(0)
            worker.publish(SNAPSHOT)
        else:
            write(SNAPSHOT)
        pipe.send(worker.process.pid if worker else os.getpid())
        signal.pause()


def kill(process: Any) -> None:
    process.kill()
    # With a time limit it would wait for the process's own children as well.
    process.join()


@contextmanager
def other_server(folder: Path, forks: bool = False) -> Iterator[tuple[Any, int]]:
    """Its process, and the pid of the one that writes."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_own_server, args=(str(folder), theirs, forks))
    process.start()
    try:
        assert ours.poll(20)
        yield process, ours.recv()
    finally:
        kill(process)


def test_prepare_alone_makes_nothing(server: Path) -> None:
    assert list(server.iterdir()) == []
    start = time.perf_counter()
    with mock.patch.object(metrics, "_process", None):
        metrics.prepare()
    print(f"prepare: {1e3 * (time.perf_counter() - start):.2f} ms")
    assert list(server.iterdir()) == []


def test_the_root_is_closed_to_others(server: Path) -> None:
    write(SNAPSHOT)
    (root,) = roots(server)
    assert root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", [signal.SIGINT, None], ids=["Ctrl-C", "normal"])
def test_the_root_goes_with_its_server(tmp_path: Path, how: signal.Signals | None) -> None:
    ours, theirs = FORK.Pipe()

    def serve() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with serving(str(tmp_path)):
            write(SNAPSHOT)
            theirs.send(len(roots(tmp_path)))
            while how is not None:
                time.sleep(0.01)

    process = FORK.Process(target=serve, daemon=True)
    process.start()
    assert ours.poll(20) and ours.recv() == 1
    if how is not None:
        os.kill(process.pid, how)
    process.join(20)
    assert not process.is_alive() and roots(tmp_path) == []


def test_a_killed_servers_root_is_removed_by_the_next(server: Path) -> None:
    with other_server(server) as (process, _):
        (theirs,) = roots(server)
        write(SNAPSHOT)
        assert theirs in roots(server) and len(roots(server)) == 2, "a live server's root stays"
        kill(process)
    with serving(str(server)):
        write(SNAPSHOT)
        assert theirs not in roots(server)
    assert scrape() == as_series(SNAPSHOT, 0), "a live one's stays"


def test_a_root_stays_while_a_worker_of_a_killed_server_lives(server: Path) -> None:
    with other_server(server, forks=True) as (process, writer):
        (theirs,) = roots(server)
        kill(process)
        write(SNAPSHOT)
        assert theirs in roots(server)
        os.kill(writer, signal.SIGKILL)

        def swept() -> bool:
            metrics._remove_unused_roots(metrics._process.root)
            return theirs not in roots(server)

        assert waited_for(swept)
    assert len(roots(server)) == 1


def test_a_recycled_pid_keeps_no_root(server: Path) -> None:
    """Left by a process whose pid is now another's, here this one's: only a lock says alive."""
    left = server / f"{metrics._ROOT_PREFIX}0123456789abcdef" / f"{os.getpid()}-deadbeef"
    left.mkdir(parents=True)
    (left / metrics._FILE).write_text("{}")
    write(SNAPSHOT)
    assert not left.parent.exists()
    assert len(roots(server)) == 1


def test_what_is_not_a_root_is_left_alone(server: Path) -> None:
    kept = server / "kept"
    kept.mkdir()
    (kept / "file").write_text("")
    (server / f"{metrics._ROOT_PREFIX}file").write_text("")
    (server / f"{metrics._ROOT_PREFIX}link").symlink_to(kept)
    others = server / f"{metrics._ROOT_PREFIX}others"
    others.mkdir()
    with mock.patch("os.getuid", return_value=os.getuid() + 1):
        metrics._remove_unused_roots(metrics._process.root)
    assert others.exists()
    write(SNAPSHOT)
    assert not others.exists()
    assert (kept / "file").exists() and len(roots(server)) == 3


def test_a_root_that_is_removed_while_it_is_made_is_made_again(server: Path) -> None:
    real, calls = fcntl.flock, []

    def removed_first(descriptor: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            metrics._remove(metrics._process.root)
        real(descriptor, how)

    with mock.patch.object(fcntl, "flock", removed_first):
        write(SNAPSHOT)
    assert calls[:3] == [fcntl.LOCK_SH, fcntl.LOCK_SH, fcntl.LOCK_EX]
    assert scrape() == as_series(SNAPSHOT, 0)


# -- never down ------------------------------------------------------------------------------------


def warnings_of(records: list[logging.LogRecord]) -> list[str]:
    return [r.message for r in records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("bad", ["missing", "a file", "read-only"])
def test_without_a_folder_for_temporary_files_life_goes_on(
    tmp_path: Path, vllm_log: list[logging.LogRecord], bad: str
) -> None:
    folder = Path("/proc/self") if bad == "read-only" else tmp_path / "tmp"
    if bad == "a file":
        folder.write_text("")
    with serving(str(folder)):
        for _ in range(3):
            write(SNAPSHOT)
        assert scrape() == {}
        (said,) = warnings_of(vllm_log)
        assert "missing on /metrics" in said and "Error" in said
        if bad == "missing":
            folder.mkdir()
            write(SNAPSHOT)
            assert scrape() == as_series(SNAPSHOT, 0), "it goes on when it can"
    assert len(warnings_of(vllm_log)) == 1


def test_without_any_folder_nothing_is_prepared(vllm_log: list[logging.LogRecord]) -> None:
    error = FileNotFoundError("none usable")
    with mock.patch.object(tempfile, "gettempdir", side_effect=error), serving("unused"):
        assert metrics.DIRECTORY not in os.environ
        write(SNAPSHOT)
        assert scrape() == {}
    (said,) = warnings_of(vllm_log)
    assert "none usable" in said


@pytest.mark.parametrize(
    "snapshot",
    [None, 7, {"replays": 3}, {"replays": {64: -1}}, {"replays": {64: "many"}}],
    ids=str,
)
def test_a_bad_snapshot_is_one_warning(
    server: Path, vllm_log: list[logging.LogRecord], snapshot: Any
) -> None:
    for _ in range(3):
        write(snapshot)
    assert len(warnings_of(vllm_log)) == 1
    write(SNAPSHOT)
    assert scrape() == as_series(SNAPSHOT, 0)


def test_a_thread_that_cannot_start_is_one_warning(
    server: Path, vllm_log: list[logging.LogRecord]
) -> None:
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread left")):
        write(SNAPSHOT)
        write(SNAPSHOT)
    (said,) = warnings_of(vllm_log)
    assert "no thread left" in said


def test_a_root_that_somebody_removes_is_not_made_again(
    server: Path, vllm_log: list[logging.LogRecord]
) -> None:
    """It may be the server's end: made again, it would be left behind."""
    write(SNAPSHOT)
    metrics._remove(metrics._process.root)
    write(SNAPSHOT)
    write(SNAPSHOT)
    assert len(warnings_of(vllm_log)) == 1 and roots(server) == []


def test_not_prepared_nothing_is_published(server: Path) -> None:
    with mock.patch.object(metrics, "_process", None):
        write(SNAPSHOT)
        assert scrape() == {}
    assert list(server.iterdir()) == []


def test_on_a_file_system_without_locks_the_counts_are_there(server: Path) -> None:
    with mock.patch.object(fcntl, "flock", side_effect=OSError("no locks here")):
        write(SNAPSHOT)
        assert scrape() == as_series(SNAPSHOT, 0)


# -- when it is written ----------------------------------------------------------------------------


def test_the_last_of_a_burst_is_written_without_another_call(server: Path) -> None:
    writes = []

    def counted(self: Any, *what: Any, real: Any = metrics._OwnFile.write) -> None:
        writes.append(time.monotonic())
        real(self, *what)

    with (
        mock.patch.object(metrics, "INTERVAL_S", 0.3),
        mock.patch.object(metrics._OwnFile, "write", counted),
    ):
        metrics.publish({"replays": {64: 1}}, 0, model_name="m")
        assert waited_for(lambda: len(writes) == 1)
        for n in range(2, 501):
            metrics.publish({"replays": {64: n}}, 0, model_name="m")
        last = as_series({"replays": {64: 500}}, 0)
        assert waited_for(lambda: scrape() == last)
    assert all(later - earlier > 0.29 for earlier, later in itertools.pairwise(writes))


def test_without_news_nothing_is_written(server: Path) -> None:
    with mock.patch.object(metrics._OwnFile, "write") as written:
        metrics.publish(SNAPSHOT, 0)
        for _ in range(3):
            metrics.flush()
    written.assert_called_once()


def test_what_is_published_is_written_when_the_worker_ends(server: Path) -> None:
    def work() -> None:
        for n in range(1, 5):
            metrics.publish({"replays": {64: n}}, 0, model_name="m")
            if n == 1:
                metrics.flush()

    process = FORK.Process(target=work, daemon=True)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert scrape() == as_series({"replays": {64: 4}}, 0)


def test_a_forked_process_is_another_writer(server: Path) -> None:
    """One that was forked from a worker has neither its thread nor its lock."""
    write(SNAPSHOT, rank=0)
    child = Worker(1)
    child.publish({"replays": {64: 1}})
    write(SNAPSHOT, rank=0)
    assert scrape() == as_series(SNAPSHOT, 0) | as_series({"replays": {64: 1}}, 1)
    (own,) = [path for path in files(server) if path.parent == metrics._process.place]
    metrics._process.current._close()
    assert not metrics._alive(own.parent), "the child holds its parent's lock"
    assert len(files(server)) == 2
    child.end()
