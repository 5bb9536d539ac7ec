# SPDX-License-Identifier: Apache-2.0
"""The workers' counts as Prometheus metrics: ``vllm:encoder_cudagraph_*`` on ``/metrics``.

WHY FILES. Workers count; the API server, another process, is scraped. With one API server vLLM
serves ``prometheus_client.REGISTRY``, so each worker replaces a small file at most once a second
and a collector in that registry reads the files when it is scraped. With several API servers vLLM
sets ``PROMETHEUS_MULTIPROC_DIR`` and each scrape makes a registry of its own, which no collector
can be added to; it reads the library's multiprocess files, so there the workers write those.

WHOSE FILES. A process has a directory of its own below its parent's, and reads what lies below its
own. So two servers that one process started do not see each other's workers::

    <tmp>/vllm-vit-cudagraph-metrics-5e0d.../   the root
        4711-9a4c21d0/                          the first process that loaded the plugin: the server
            4712-03b7e6f1/                      the engine core
                4713-c86a5512/counts.json       a worker

The variable ``VIT_CUDAGRAPH_METRICS_DIR`` carries a process's directory to its ``multiprocessing``
children; a program started afresh starts a root of its own. Nothing is made before a worker
writes. The root goes when the process that named it ends; if that was killed, the next worker that
makes a root removes it.

ALIVE. A worker is alive while it holds the lock (``flock``) of its directory, and a root is in use
while a worker holds it. The kernel lets go of a lock when its holder ends, however it ends. A pid
recurs, and says nothing in another container that shares ``/tmp``.

Workers on other hosts, and those that Ray starts, are not seen.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.values import MultiProcessValue

from vllm.logger import init_logger
from vllm.vit_cudagraph.failures import brief

logger = init_logger(__name__)

DIRECTORY = "VIT_CUDAGRAPH_METRICS_DIR"
"""Set by this module, for the children of a process."""

INTERVAL_S = 1.0
"""Least time between two writes of a worker, so also the age that a scraped count can have."""

WORKER_LABELS = ("model_name", "engine", "rank")
"""As vLLM labels its own metrics, and the worker's rank within its engine."""

_ROOT_PREFIX = "vllm-vit-cudagraph-metrics-"
_FILE = "counts.json"
_MOST_BYTES = 1 << 20

Counts = dict[str, dict[str, float]]
"""Metric's key -> value of its own label ("" where it has none) -> value."""


class Definition(NamedTuple):
    """A metric: its key in a snapshot, its own label (beside the worker's), its help text."""

    key: str
    label: str
    text: str
    kind: Literal["counter", "gauge"] = "counter"

    @property
    def name(self) -> str:
        return f"vllm:encoder_cudagraph_{self.key}"

    @property
    def label_names(self) -> list[str]:
        return [*WORKER_LABELS, self.label] if self.label else [*WORKER_LABELS]

    def label_values(self, worker: tuple[str, ...], value: str) -> list[str]:
        return [*worker, value] if self.label else [*worker]

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        made = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return made(self.name, self.text, labels=self.label_names)


DEFINITIONS = (
    Definition("replays", "budget", "Replays of encoder CUDA graphs, by token budget."),
    Definition("items_replayed", "budget", "Vision items whose graph ran, by token budget."),
    Definition("tokens", "budget", "Output tokens of replayed items, by token budget."),
    Definition("padding_tokens", "budget", "Tokens of replayed budgets that no item filled."),
    Definition("eager_items", "reason", "Vision items that ran eagerly, by reason."),
    Definition("predicted_milliseconds", "budget", "Predicted cost of steps, by token budget."),
    Definition("timed_replays", "budget", "Replays that were timed, by token budget."),
    Definition("measured_milliseconds", "budget", "What timed replays took on the device."),
    Definition("captured_graphs", "", "Encoder CUDA graphs that a worker holds.", "gauge"),
)
"""All metrics. A counter's name on ``/metrics`` ends in ``_total``, as the library writes it."""


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give this process its directory's name, and the registry that ``/metrics`` serves the
    collector. Touches no disk, never raises; safe to call again.

    Args:
        environ: Where the name is left for the children of this process.
    """
    global _process
    try:
        if _process is None:
            _process = _Process.started(environ)
        _install()
    except Exception as error:
        _warn_once(error)


def publish(
    snapshot: Mapping[str, Any], rank: int, *, model_name: str = "", engine: int = 0
) -> None:
    """Leave a worker's counts for the next scrape. Microseconds: a thread writes them, at most
    every ``INTERVAL_S``. Never raises. Without :func:`prepare` it does nothing.

    Args:
        snapshot: Cumulative counts by :data:`DEFINITIONS`' keys: a mapping from the metric's own
            label to a number, or a number where it has none. Keys may be missing. Counts that
            start again (a second manager in the process) are added to those before.
        rank: Of this worker within its engine.
        model_name: As vLLM's own metrics have it: ``served_model_name``.
        engine: Index of the engine (``data_parallel_index``).
    """
    try:
        if _process is not None:
            copied = {k: dict(v) if isinstance(v, Mapping) else v for k, v in snapshot.items()}
            _process.publisher().publish((str(model_name), str(engine), str(rank)), copied)
    except Exception as error:
        _warn_once(error)


def flush() -> None:
    """Write now what was published last; done at exit too. Never raises."""
    if _process is not None and _process.current is not None:
        _process.current.flush()


# -- this process among the others -----------------------------------------------------------------


@dataclass
class _Process:
    """Where this process writes and below which it reads: ``place``, itself below ``root``."""

    environ: MutableMapping[str, str]
    root: Path
    place: Path
    current: _Publisher | None = None
    _making: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def started(cls, environ: MutableMapping[str, str]) -> _Process:
        """Below the directory that a ``multiprocessing`` parent left, else below a new root."""
        inherited = Path(environ.get(DIRECTORY, ""))
        root = _root_of(inherited)
        if root is None or multiprocessing.parent_process() is None:
            root = inherited = Path(tempfile.gettempdir(), _ROOT_PREFIX + secrets.token_hex(8))
            # A negative priority comes after multiprocessing has joined the children.
            Finalize(None, _remove, (root,), exitpriority=-1)
        return cls(environ, root, inherited)._below()

    def _below(self) -> _Process:
        place = self.place / f"{os.getpid()}-{secrets.token_hex(4)}"
        self.environ[DIRECTORY] = str(place)
        return _Process(self.environ, self.root, place)

    def forked(self) -> _Process:
        """The same for a forked child, which keeps neither its parent's thread nor its locks."""
        if self.current is not None:
            self.current.drop()
        return self._below()

    def publisher(self) -> _Publisher:
        with self._making:
            if self.current is None:
                self.current = _Publisher(self._sink)
            return self.current

    def _sink(self) -> _Sink:
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            return _MultiprocessFiles(self.place.name)
        own = _OwnFile(self.root, self.place)
        _remove_unused_roots(self.root)
        return own


_process: _Process | None = None
_warned = False


def _root_of(place: Path) -> Path | None:
    below = (path for path in place.parents if path.name.startswith(_ROOT_PREFIX))
    return next(below, None) if place.is_absolute() else None


@cache
def _install() -> None:
    """Once a process; what was forked has it already."""
    os.register_at_fork(after_in_child=_forked)
    REGISTRY.register(_collector)


def _forked() -> None:
    global _process
    if _process is not None:
        _process = _process.forked()
    _collector.restart()


def _warn_once(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "Counts of encoder CUDA graphs are missing on /metrics: %s (said once)", brief(error)
        )


# -- writing: in the worker ------------------------------------------------------------------------


class _Sink(Protocol):
    def write(self, worker: tuple[str, ...], counts: Counts) -> None: ...

    def close(self) -> None: ...


class _Publisher:
    """Writes the latest snapshot from a thread: a slow disk must not hold up a step."""

    def __init__(self, open_sink: Callable[[], _Sink]) -> None:
        self._open_sink = open_sink
        self._sink: _Sink | None = None
        self._latest: tuple[tuple[str, ...], Mapping[str, Any]] | None = None
        self._totals = _Totals()
        self._news = threading.Event()
        self._writing = threading.Lock()
        self._closed = False
        threading.Thread(target=self._run, name="vit-cudagraph-metrics", daemon=True).start()
        # Runs in forked workers as well, where atexit's functions do not.
        Finalize(None, self._close, exitpriority=0)

    def publish(self, worker: tuple[str, ...], snapshot: Mapping[str, Any]) -> None:
        self._latest = (worker, snapshot)
        self._news.set()

    def _run(self) -> None:
        while self._news.wait() and not self._closed:
            self.flush()
            time.sleep(INTERVAL_S)

    def flush(self) -> None:
        with self._writing:
            try:
                self._write()
            except Exception as error:
                _warn_once(error)

    def _write(self) -> None:
        if not self._news.is_set() or self._latest is None or self._closed:
            return
        self._news.clear()
        worker, snapshot = self._latest
        totals = self._totals.after(_checked(snapshot))
        if self._sink is None:
            self._sink = self._open_sink()
        self._sink.write(worker, totals)

    def _close(self) -> None:
        """At exit: the last counts, if there is a place for them; the server may be gone. Does not
        wait for a disk that hangs."""
        if not self._writing.acquire(timeout=1.0):
            return
        if self._sink is not None:
            with suppress(Exception):
                self._write()
        self.drop()
        self._news.set()
        self._writing.release()

    def drop(self) -> None:
        """Let go of what this process holds, without a lock: a forked child may call it."""
        self._closed = True
        if self._sink is not None:
            self._sink.close()


class _Totals:
    """Counts of all managers that a process had; each starts from zero."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], float] = defaultdict(float)
        self._last: dict[tuple[str, str], float] = defaultdict(float)
        self._totals: Counts = defaultdict(dict)

    def after(self, counts: Counts) -> Counts:
        for definition in DEFINITIONS:
            for label, value in counts.get(definition.key, {}).items():
                at = (definition.key, label)
                if definition.kind == "counter" and value < self._last[at]:
                    self._before[at] += self._last[at]
                self._last[at] = value
                self._totals[definition.key][label] = self._before[at] + value
        return self._totals


def _checked(snapshot: Mapping[str, Any]) -> Counts:
    """The known metrics of a snapshot; ``ValueError`` or ``TypeError`` unless they are counts."""
    counts: Counts = {}
    for definition in DEFINITIONS:
        given = snapshot.get(definition.key, {})
        by_label = given if isinstance(given, Mapping) else {"": given}
        counts[definition.key] = {str(label): float(value) for label, value in by_label.items()}
        for label, value in counts[definition.key].items():
            if bool(label) != bool(definition.label) or not 0 <= value < float("inf"):
                raise ValueError(f"{definition.key}[{label!r}] = {value} is not a count")
    return counts


class _OwnFile:
    """One file, replaced as a whole, in a directory whose lock says that its writer is alive."""

    def __init__(self, root: Path, place: Path) -> None:
        self._file = place / _FILE
        self._new = place / f"{_FILE}.new"
        self._locks = [_made_and_held(root)]
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._locks.append(_held(place, fcntl.LOCK_EX))

    def write(self, worker: tuple[str, ...], counts: Counts) -> None:
        labels = dict(zip(WORKER_LABELS, worker, strict=True))
        self._new.write_text(json.dumps({"labels": labels, "counts": counts}))
        os.replace(self._new, self._file)

    def close(self) -> None:
        while self._locks:
            os.close(self._locks.pop())


class _MultiprocessFiles:
    """The library's files in ``PROMETHEUS_MULTIPROC_DIR``, which any API server reads."""

    def __init__(self, name: str) -> None:
        # Not by pid alone: those files are the library's own, and one that recurs would be read.
        # Without an underscore, which the library splits at.
        self._value_class = MultiProcessValue(lambda: f"vit-cudagraph-{name}")
        self._values: dict[tuple[str, ...], Any] = {}

    def write(self, worker: tuple[str, ...], counts: Counts) -> None:
        now = time.time()
        for definition in DEFINITIONS:
            for label, value in counts.get(definition.key, {}).items():
                at = (*worker, definition.key, label)
                if at not in self._values:
                    self._values[at] = self._made(definition, worker, label)
                self._values[at].set(value, timestamp=now)

    def _made(self, definition: Definition, worker: tuple[str, ...], label: str) -> Any:
        suffix = "_total" if definition.kind == "counter" else ""
        return self._value_class(
            definition.kind,
            definition.name,
            definition.name + suffix,
            definition.label_names,
            definition.label_values(worker, label),
            definition.text,
            multiprocess_mode="mostrecent",
        )

    def close(self) -> None:
        """The files stay, as the library's do: counters must not go down."""


# -- reading: in the API server --------------------------------------------------------------------


class _Record(NamedTuple):
    worker: tuple[str, ...]
    counts: Counts
    alive: bool


class EncoderCudaGraphCollector(Collector):
    """Reads the files below this process's directory when it is scraped.

    A worker that ended keeps its counters, also when its file cannot be read any more: counters do
    not go down while the server lives. Gauges are those of live workers. Metrics without a value
    are left out, so a server without encoder graphs shows none.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._reading = threading.Lock()
        self._records: dict[Path, _Record] = {}

    def describe(self) -> list[Metric]:
        return [definition.family() for definition in DEFINITIONS]

    def collect(self) -> Iterator[Metric]:
        with self._reading:
            ended = {path: r._replace(alive=False) for path, r in self._records.items()}
            found = {} if _process is None else dict(_records_below(_process.place))
            records = self._records = ended | found
        for definition in DEFINITIONS:
            family = definition.family()
            for labels, value in _summed(definition, records.values()).items():
                family.add_metric(labels, value)
            if family.samples:
                yield family


_collector = EncoderCudaGraphCollector()


def _summed(definition: Definition, records: Iterable[_Record]) -> dict[tuple[str, ...], float]:
    """By label values: a worker that was started again has those of the one before."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for record in records:
        if definition.kind == "counter" or record.alive:
            for label, value in record.counts[definition.key].items():
                sums[tuple(definition.label_values(record.worker, label))] += value
    return sums


def _records_below(place: Path) -> Iterator[tuple[Path, _Record]]:
    for directory, _, names in os.walk(place):
        if _FILE in names:
            path = Path(directory, _FILE)
            # Whatever else lies there, a scrape goes on.
            with suppress(Exception):
                yield path, _read(path)


def _read(path: Path) -> _Record:
    # Neither waits for a writer (a pipe) nor follows a link.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        text = file.read(_MOST_BYTES)
    content = json.loads(text)
    worker = tuple(content["labels"][name] for name in WORKER_LABELS)
    if not all(isinstance(value, str) for value in worker):
        raise ValueError(f"labels {worker} are not text")
    return _Record(worker, _checked(content["counts"]), _alive(path.parent))


# -- directories and locks -------------------------------------------------------------------------


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _held(directory: Path, how: int) -> int:
    """A descriptor that holds the directory's lock until it is closed in every process.

    On a file system without locks it holds nothing: its worker then counts as alive for good.
    """
    descriptor = _open_directory(directory)
    with suppress(OSError):
        fcntl.flock(descriptor, how)
    return descriptor


def _made_and_held(root: Path) -> int:
    """The same of a root, which another process may remove until it is held."""
    while True:
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            descriptor = _held(root, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(root)):
                    return descriptor
            os.close(descriptor)


def _alive(directory: Path) -> bool:
    try:
        descriptor = _open_directory(directory)
    except OSError:
        return False
    try:
        # Shared: two scrapes at a time do not take each other for the worker.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _remove_unused_roots(own: Path) -> None:
    """Of this user, where no worker holds a lock any more: their servers were killed."""
    with suppress(OSError):
        for root in own.parent.glob(f"{_ROOT_PREFIX}*"):
            if root != own:
                with suppress(OSError):
                    _remove_if_unused(root)


def _remove_if_unused(root: Path) -> None:
    descriptor = _open_directory(root)
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(descriptor)


def _remove(root: Path) -> None:
    """At the end of the process that named the root. A worker that still writes may add a file
    between a look at the directory and its removal."""
    for _ in range(3):
        shutil.rmtree(root, ignore_errors=True)
        if not root.exists():
            return
