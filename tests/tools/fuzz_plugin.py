# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin behind ``fuzz.py``: lists properties, records each one's end, replays one.

It is loaded with ``-p fuzz_plugin`` and does nothing without its options. What a property did is in
``state.json`` as soon as it has ended, so a run that is killed loses only what was running.
"""

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import reproduce_failure, settings, stateful
from hypothesis.statistics import collector, describe_statistics

_BLOB = re.compile(r"@reproduce_failure\('([^']+)', b'([^']*)'\)")
_PHASE = re.compile(r"during (\w+) phase.*?(\d+) passing, (\d+) failing", re.DOTALL)
_STOPPED = re.compile(r"Stopped because (.*)")


def read_state(folder: Path) -> dict[str, dict[str, Any]]:
    """What is recorded in ``folder``, by node id."""
    try:
        return json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def record(folder: Path, nodeid: str, entry: dict[str, Any]) -> None:
    """Set the entry of one node id; safe beside other processes that do the same."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = read_state(folder) | {nodeid: entry}
        part = folder / "state.json.part"
        part.write_text(json.dumps(state, indent=1, sort_keys=True), encoding="utf-8")
        part.replace(folder / "state.json")


def log_file(folder: Path, nodeid: str) -> Path:
    """Where the whole output of a failure of ``nodeid`` lies: a name of its own, readable."""
    digest = hashlib.sha256(nodeid.encode()).hexdigest()[:6]
    return folder / f"{re.sub(r'[^A-Za-z0-9.]+', '_', nodeid)[-100:]}-{digest}.log"


def asked_of(item: pytest.Item) -> int:
    """How many examples a test asks for.

    ``@given`` keeps the settings on the function, a state machine's ``TestCase`` on the class. A
    test that runs a state machine itself does not show them: the profile's number stands for it.
    """
    test = getattr(item, "obj", None)
    if hasattr(test, "_hypothesis_state_machine_class"):
        return item.cls.settings.max_examples
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    return (own or settings()).max_examples


def examples_run(statistics: str) -> tuple[int, str]:
    """Examples that were run to their end and why there were no more, out of hypothesis' text."""
    phases = [match.groups() for match in _PHASE.finditer(statistics)]
    total = sum(int(good) + int(bad) for name, good, bad in phases if name in ("reuse", "generate"))
    stopped = _STOPPED.search(statistics)
    return total, stopped.group(1).strip() if stopped else ""


def notes_of(error: BaseException) -> Iterator[str]:
    """Notes of an exception, those of the exceptions of a group included."""
    yield from getattr(error, "__notes__", ())
    for inner in getattr(error, "exceptions", ()):
        yield from notes_of(inner)


def failure_of(error: BaseException) -> dict[str, Any]:
    """``error``: its message; ``example``: what hypothesis notes on it; ``blobs``: one for each
    distinct failure, ``version:blob``."""
    notes = list(notes_of(error))
    blobs = [match for note in notes if (match := _BLOB.search(note))]
    return {
        "error": f"{type(error).__name__}: {error}"[:500],
        "example": "\n".join(note for note in notes if not _BLOB.search(note)),
        "blobs": [":".join(match.groups()) for match in blobs],
    }


class Recorder:
    """Writes the end of each property to ``folder``; starts none after ``until``, a Unix time."""

    def __init__(self, folder: Path, until: float, common: dict[str, Any]) -> None:
        self.folder, self.until, self.common = folder, until, common
        self.parent = os.getppid()
        self.entry: dict[str, Any] = {}
        self.output: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leave the test out when time is up or when nobody waits for it, else note its start."""
        if time.time() >= self.until or os.getppid() != self.parent:
            item.session.shouldstop = "no time left"
            return True
        self.output = []
        self.entry = {**self.common, "result": "running", "started": time.time()}
        record(self.folder, item.nodeid, self.entry)
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Keep statistics of what a test without ``@given`` runs; hypothesis' own plugin does it
        for the others."""

        def keep(statistics: Any) -> None:
            item.hypothesis_statistics = describe_statistics(statistics)

        with collector.with_value(keep):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo
    ) -> Iterator[pytest.TestReport]:
        """Note what a stage of the test came to, and write it down after the last stage."""
        report = yield
        self.entry["seconds"] = round(time.time() - self.entry["started"], 1)
        if report.failed and call.excinfo is not None:
            self.entry.setdefault("failure", failure_of(call.excinfo.value))
            self.output.append(report.longreprtext)
            self.output += [f"--- {name}\n{text}" for name, text in report.sections]
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.entry["skipped"] = str(getattr(call.excinfo, "value", ""))
        if report.when == "teardown":
            self._settle(item)
        return report

    def _settle(self, item: pytest.Item) -> None:
        entry, log = self.entry, log_file(self.folder, item.nodeid)
        entry["asked"] = asked_of(item)
        statistics = getattr(item, "hypothesis_statistics", "")
        entry["examples"], entry["stopped"] = examples_run(statistics)
        entry["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        entry["result"] = next((r for r in ("failed", "skipped") if _SIGN[r] in entry), "passed")
        log.unlink(missing_ok=True)
        if entry["result"] == "failed":
            log.write_text("\n\n".join([item.nodeid, *self.output, statistics]), encoding="utf-8")
        record(self.folder, item.nodeid, entry)


_SIGN = {"failed": "failure", "skipped": "skipped"}


class Lister:
    """Writes the collected node ids with the number of examples that each asks for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Node id -> examples asked for."""
        asked = {item.nodeid: asked_of(item) for item in session.items}
        self.path.write_text(json.dumps(asked), encoding="utf-8")


class Replayer:
    """Runs one example instead of many: ``@reproduce_failure`` from outside."""

    def __init__(self, version: str, blob: str) -> None:
        self.version, self.blob = version, blob.encode()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Decorate what ``@given`` made, and the state machines that the other tests run."""
        decorate = reproduce_failure(self.version, self.blob)
        for item in items:
            if hasattr(item.obj, "hypothesis"):
                decorate(getattr(item.obj, "__func__", item.obj))
        make = stateful.get_state_machine_test
        stateful.get_state_machine_test = lambda *args, **kwargs: decorate(make(*args, **kwargs))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that ``fuzz.py`` passes."""
    group = parser.getgroup("fuzz")
    group.addoption("--fuzz-list", type=Path, help="file for the collected node ids")
    group.addoption("--fuzz-state", type=Path, help="folder of state.json")
    group.addoption("--fuzz-until", type=float, default=float("inf"), help="Unix time")
    group.addoption("--fuzz-common", type=json.loads, default={}, help="fields of every entry")
    group.addoption("--fuzz-blob", help="version:blob of a @reproduce_failure")


def pytest_configure(config: pytest.Config) -> None:
    """Register what the options ask for."""
    option = config.getoption
    if option("--fuzz-list"):
        config.pluginmanager.register(Lister(option("--fuzz-list")))
    if option("--fuzz-state"):
        recorder = Recorder(option("--fuzz-state"), option("--fuzz-until"), option("--fuzz-common"))
        config.pluginmanager.register(recorder)
    if option("--fuzz-blob"):
        config.pluginmanager.register(Replayer(*option("--fuzz-blob").split(":", 1)))
