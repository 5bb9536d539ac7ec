# SPDX-License-Identifier: Apache-2.0
"""Run every property of the suite at length: ``make fuzz``.

A property is a test with the marker ``fuzz``. Each runs under the hypothesis profile ``nightly``
(5,000 examples), a few to a pytest process. What each came to is kept in ``.fuzz/state.json``, by
node id, as soon as it has ended. A later run leaves out what passed on the same sources with at
least as many examples, and begins with what has not run for the longest time; so a whole night can
be done in pieces (``--minutes``).

For a failure it prints the node id, the falsifying example, the command that replays it and the
file with the whole output.

Exit status: 0 when every property has passed (or is skipped, by name), 1 when one has failed, 2
when the tests could not be collected, 3 when properties are left and none of those run failed (0
with ``--part``). ``make`` shows the status and ends with its own, 2, for all but 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import fuzz_plugin

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("vllm/vit_cudagraph", "tests")
LIBRARIES = ("hypothesis", "torch", "transformers", "vllm")
AT_ONCE = 4  # properties of one file that share a process: importing vLLM takes 8 s
DEFAULT_CAP_S = 3 * 3600
POLL_S = 0.2
DONE, FAILED, USAGE, UNFINISHED = 0, 1, 2, 3


def source_digest(root: Path) -> str:
    """Hash of all that decides what a property does: our sources, and the libraries' versions."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    for name in LIBRARIES:
        try:
            digest.update(f"{name} {metadata.version(name)}".encode())
        except metadata.PackageNotFoundError:
            digest.update(f"no {name}".encode())
    return digest.hexdigest()[:16]


def environment(jobs: int) -> dict[str, str]:
    """Variables for a pytest process: the profile, the plugin's folder, a share of the cores."""
    env = dict(os.environ)
    env["HYPOTHESIS_PROFILE"] = env.get("HYPOTHESIS_PROFILE") or "nightly"
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    path = [str(Path(__file__).parent), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return env


def pytest_command(*arguments: str) -> list[str]:
    """A pytest with the plugin. Its own time limit is off: hypothesis would take it for a failure
    of the example and shrink it."""
    return [sys.executable, "-m", "pytest", "-p", "fuzz_plugin", "--timeout=0", *arguments]


def collect(root: Path, paths: list[str]) -> dict[str, int]:
    """Node ids of the properties and the examples that each asks for; exits where pytest cannot."""
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "list.json"
        command = pytest_command(
            "--collect-only", "-q", "-m", "fuzz", f"--fuzz-list={listing}", *paths
        )
        done = subprocess.run(command, cwd=root, env=environment(1), capture_output=True, text=True)
        found = json.loads(listing.read_text()) if listing.is_file() else {}
    if done.returncode != 0 or not found:
        print(done.stdout[-5000:] + done.stderr[-5000:], file=sys.stderr)
        print(
            f"no properties: pytest ended with {done.returncode} where it collected tests with the "
            f"marker fuzz in {' '.join(paths)}",
            file=sys.stderr,
        )
        raise SystemExit(USAGE)
    return found


def is_done(entry: dict[str, Any] | None, digest: str, asked: int) -> bool:
    """Has this property passed on these sources with at least as many examples?"""
    if entry is None or entry["result"] != "passed" or entry["digest"] != digest:
        return False
    return entry["asked"] >= asked


def chunks(nodeids: list[str], state: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Groups of up to ``AT_ONCE`` of one file; those first that were run longest ago, or never."""
    oldest_first = sorted(nodeids, key=lambda name: state.get(name, {}).get("date", ""))
    files: dict[str, list[list[str]]] = {}
    result = []
    for name in oldest_first:
        groups = files.setdefault(name.partition("::")[0], [])
        if not groups or len(groups[-1]) == AT_ONCE:
            groups.append([])
            result.append(groups[-1])
        groups[-1].append(name)
    return result


class Chunk:
    """Properties of one file in one pytest process; a new process goes on where one died."""

    def __init__(self, run: Run, number: int, nodeids: list[str]) -> None:
        self.run, self.number, self.left = run, number, list(nodeids)
        self.output = run.folder / f"process-{number}.log"
        self.settled = 0  # properties that this process has brought to an end

    def start(self) -> None:
        """Start a process for what is left."""
        run, self.settled = self.run, 0
        common = json.dumps({"digest": run.digest, "run": run.name})
        options = [f"--fuzz-state={run.folder}", f"--fuzz-until={run.until}"]
        command = pytest_command("-q", *options, f"--fuzz-common={common}", *self.left)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=run.root,
                env=environment(run.jobs),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End the process and all that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def unsettled(self) -> dict[str, dict[str, Any]]:
        """Report what has ended; the entries of this run that have begun and not ended."""
        state = fuzz_plugin.read_state(self.run.folder)
        mine = {name: state.get(name, {}) for name in self.left}
        mine = {name: entry for name, entry in mine.items() if entry.get("run") == self.run.name}
        for name, entry in list(mine.items()):
            if entry["result"] != "running":
                self._settle(name, mine.pop(name))
        return mine

    def watch(self) -> bool:
        """Look once, see to what hangs or died; True while work is left."""
        status = self.process.poll()
        for name, entry in self.unsettled().items():
            if status is not None:
                self._no_verdict(name, entry, f"its process ended with {status}")
            elif time.time() - entry["started"] > self.run.cap_s:
                self.kill()
                self._no_verdict(name, entry, f"no end after {self.run.cap_s:g} s (--cap)")
        if status is None:
            return True
        if not self.left or time.time() >= self.run.until:
            return False
        if not self.settled:  # the same process would be started for ever
            self._no_verdict(self.left[0], {}, f"pytest ended with {status} before it")
        if self.left:
            self.start()
        return bool(self.left)

    def _no_verdict(self, name: str, entry: dict[str, Any], why: str) -> None:
        """A failure that pytest could not tell of; its log is what the process had written."""
        entry = {
            **entry,
            "digest": self.run.digest,
            "run": self.run.name,
            "result": "failed",
            "asked": 0,
            "examples": 0,
            "seconds": round(time.time() - entry["started"], 1) if entry else 0,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            "failure": {"error": why, "example": "", "blobs": []},
        }
        log = fuzz_plugin.log_file(self.run.folder, name)
        log.write_bytes(f"{name}: {why}\n\n".encode() + self.output.read_bytes())
        fuzz_plugin.record(self.run.folder, name, entry)
        self._settle(name, entry)

    def _settle(self, name: str, entry: dict[str, Any]) -> None:
        self.left.remove(name)
        self.settled += 1
        self.run.report(name, entry)


class Run:
    """One call of the tool: what it is to do, and what it has seen."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.root, self.jobs, self.cap_s = options.root.resolve(), options.jobs, options.cap
        self.part = options.part
        self.default_root = options.root == ROOT
        self.folder = self.root / ".fuzz"
        self.folder.mkdir(exist_ok=True)
        self.until = time.time() + 60 * options.minutes
        self.name = f"{time.time():.3f}-{os.getpid()}"
        self.digest = source_digest(self.root)
        self.asked = collect(self.root, options.paths)
        state = fuzz_plugin.read_state(self.folder)
        again = options.again
        self.todo = [
            name
            for name, asked in self.asked.items()
            if again or not is_done(state.get(name), self.digest, asked)
        ]
        self.seen: dict[str, dict[str, Any]] = {}
        self.waiting = [
            Chunk(self, number, names) for number, names in enumerate(chunks(self.todo, state))
        ]

    def work(self) -> None:
        """Run what is to be done, ``jobs`` processes at a time, until it is done or time is up."""
        running: list[Chunk] = []
        try:
            while self.waiting or running:
                while self.waiting and len(running) < self.jobs and time.time() < self.until:
                    running.append(self.waiting.pop(0))
                    running[-1].start()
                if not running:
                    return
                time.sleep(POLL_S)
                running = [chunk for chunk in running if chunk.watch()]
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        finally:
            for chunk in running:
                chunk.kill()
                chunk.unsettled()

    def replay_commands(self, name: str, entry: dict[str, Any]) -> list[str]:
        """Command lines that run the failing examples of ``name`` again, from any folder."""
        parts = [sys.executable, str(Path(__file__).resolve())]
        parts += [] if self.default_root else ["--root", str(self.root)]
        parts += ["--replay", name]
        blobs = entry["failure"]["blobs"]
        return [shlex.join([*parts, "--blob", blob]) for blob in blobs] or [shlex.join(parts)]

    def report(self, name: str, entry: dict[str, Any]) -> None:
        """Print what a property came to."""
        self.seen[name] = entry
        print(
            f"[{len(self.seen)}/{len(self.todo)}] {entry['result']} {name}: "
            f"{entry['examples']} examples, {entry['seconds']:.0f} s"
        )
        if entry["result"] == "skipped":
            print(f"    {entry['skipped']}")
        elif entry["result"] == "failed":
            failure = entry["failure"]
            print(textwrap.indent(f"{failure['error']}\n{failure['example']}".strip(), "    "))
            for command in self.replay_commands(name, entry):
                print(f"    replay: {command}")
            print(f"    output: {fuzz_plugin.log_file(self.folder, name)}")
        elif entry["stopped"] and entry["examples"] < entry["asked"]:
            print(f"    fewer than {entry['asked']}, because {entry['stopped']}")
        sys.stdout.flush()

    def finish(self) -> int:
        """Print the sum of it; the exit status."""
        results = [entry["result"] for entry in self.seen.values()]
        left = [name for name in self.todo if name not in self.seen]
        before = len(self.asked) - len(self.todo)
        print(
            f"{len(self.asked)} properties: {before} passed before, "
            f"{results.count('passed')} passed now, {results.count('skipped')} skipped, "
            f"{results.count('failed')} failed, {len(left)} left"
        )
        for name in left:
            print(f"    left: {name}")
        if "failed" in results:
            return FAILED
        return UNFINISHED if left and not self.part else DONE


def replay(root: Path, nodeid: str, blob: str | None) -> int:
    """Run one property in the foreground, only the example of ``blob`` if it is given.

    Without a blob hypothesis runs the explicit examples first, then the failures in its database
    (``.hypothesis``). Returns pytest's exit status: 1 when it fails again.
    """
    example = [f"--fuzz-blob={blob}"] if blob else []
    command = pytest_command("-q", *example, nodeid)
    return subprocess.run(command, cwd=root, env=environment(1)).returncode


def arguments(given: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="run the properties at length; resumes")
    parser.add_argument("paths", nargs="*", default=["tests"], help="files or node ids; all tests")
    cores = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=cores, help="processes; default: the cores")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no property after these minutes"
    )
    parser.add_argument("--part", action="store_true", help="end with 0 when time is up")
    parser.add_argument("--again", action="store_true", help="run what has passed as well")
    parser.add_argument(
        "--cap", type=float, default=DEFAULT_CAP_S, help="seconds a property may take"
    )
    parser.add_argument("--replay", metavar="NODEID", help="run one property in the foreground")
    parser.add_argument("--blob", help="with --replay: version:blob that hypothesis printed")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder to run in")
    options = parser.parse_args(given)
    if options.jobs < 1:
        parser.error("--jobs needs a process to run in; give 1 or more")
    return options


def main(given: list[str] | None = None) -> int:
    """Command line; the exit status is described at the top."""
    options = arguments(given)
    if options.replay:
        return replay(options.root, options.replay, options.blob)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the processes, say what is left
    run = Run(options)
    print(
        f"{len(run.todo)} of {len(run.asked)} properties to run, {run.jobs} at a time, "
        f"profile {environment(run.jobs)['HYPOTHESIS_PROFILE']}",
        flush=True,
    )
    run.work()
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
