# SPDX-License-Identifier: Apache-2.0
"""``make fuzz`` on a small folder of its own; and the profiles that it and the other runs load."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import fuzz
import fuzz_plugin
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.vit_cudagraph.testing import profiles

TOOL = Path(fuzz.__file__)
HEADER = """
    import os, signal, time
    import pytest
    from hypothesis import example, given, strategies as st
    pytestmark = pytest.mark.fuzz
"""
CONFTEST = """
    import os
    from hypothesis import HealthCheck, settings
    number = int(os.environ.get("EXAMPLES", 40))
    inherited = [HealthCheck.differing_executors]
    settings.register_profile(
        "nightly", max_examples=number, print_blob=True, suppress_health_check=inherited
    )
    settings.load_profile(os.environ["HYPOTHESIS_PROFILE"])
"""


class Folder:
    """A project with tests of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("pytest.ini", "[pytest]\nmarkers = fuzz: a property\naddopts = --strict-markers")
        self.write("tests/conftest.py", CONFTEST)

    def write(self, name: str, *parts: str) -> None:
        """Write a file of the project; a module of tests gets the imports that it needs."""
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(map(dedent, parts)))

    def start(self, *options: str, **env: str) -> subprocess.Popen[str]:
        """The tool, running."""
        cleared = {k: v for k, v in os.environ.items() if k != "HYPOTHESIS_PROFILE"}
        return subprocess.Popen(
            [sys.executable, str(TOOL), "--root", str(self.root), *options],
            env={**cleared, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *options: str, **env: str) -> tuple[int, str]:
        """Exit status and output of the tool."""
        process = self.start(*options, **env)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def state(self) -> dict[str, Any]:
        """Entries of the state file by the last part of the node id."""
        read = fuzz_plugin.read_state(self.root / ".fuzz")
        return {name.rpartition("::")[2]: entry for name, entry in read.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_what_passed_is_run_again_only_for_a_reason(folder: Folder) -> None:
    good = """
        @pytest.mark.parametrize("name", ["a b", "c"])
        @given(n=st.integers())
        def test_good(name, n): pass
        @given(n=st.booleans())
        def test_finite(n): pass
        def test_skipped(): pytest.skip("no GPU here")
        from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
        class Machine(RuleBasedStateMachine):
            @rule(n=st.integers())
            def check(self, n): pass
        def test_machine(): run_state_machine_as_test(lambda: Machine())
    """
    folder.write("tests/test_p.py", HEADER, good)
    folder.write("tests/test_q.py", "def test_not_marked(): assert False")
    status, output = folder.run()
    assert (status, "5 properties: 0 passed before, 4 passed now, 1 skipped, 0 failed, 0 left") == (
        fuzz.DONE,
        output.splitlines()[-1],
    )
    entries = folder.state()
    assert {entries[f"test_good[{name}]"]["examples"] for name in ("a b", "c")} == {40}
    assert entries["test_finite"]["examples"] == 2
    assert entries["test_machine"]["examples"] == 40
    assert "fewer than 40, because nothing left to do" in output
    assert "no GPU here" in output
    assert entries["test_good[c]"].keys() >= {"digest", "result", "seconds", "asked", "date"}

    def to_run(*options: str, **env: str) -> int:
        status, output = folder.run(*options, **env)
        assert status == fuzz.DONE, output
        return int(output.split()[0])

    assert to_run() == 1  # what was skipped
    assert to_run("--again") == 5
    assert to_run(EXAMPLES="41") == 5
    assert to_run(EXAMPLES="40") == 1  # more than asked is enough
    folder.write("tests/test_q.py", "def test_not_marked(): assert False, 'changed'")
    assert to_run(EXAMPLES="41") == 5


FAILING = """
    @given(n=st.integers())
    def test_bad(n): assert n < 100
    @given(n=st.integers())
    def test_two(n):
        if abs(n) > 1000: raise (KeyError if n > 0 else ValueError)("far off")
    @given(n=st.integers())
    @example(n=3)
    def test_explicit(n): assert n != 3
    from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
    class Machine(RuleBasedStateMachine):
        total = 0
        @rule(k=st.integers(0, 5))
        def add(self, k):
            self.total += k
            assert self.total < 7
    TestMachine = Machine.TestCase
    def test_machine(): run_state_machine_as_test(lambda: Machine())
    class Base:
        @given(n=st.integers())
        def test_inherited(self, n): assert n < self.limit
    class TestFifty(Base): limit = 50
    class TestSixty(Base): limit = 60
"""


def replays(output: str, nodeid: str) -> list[str]:
    """The commands that the tool printed for a failure."""
    found = re.findall(r"^    replay: (.*)$", output, re.MULTILINE)
    return [line for line in found if nodeid in shlex.split(line)]


def test_a_failure_is_shown_and_replayed(folder: Folder, tmp_path_factory: Any) -> None:
    folder.write("tests/test_p.py", HEADER, FAILING)
    status, output = folder.run()
    assert status == fuzz.FAILED
    wanted = {  # what the example must show; the errors that its replays must end with
        "test_bad": (r"test_bad\(\s+n=100,", ["assert 100 < 100"]),
        "test_two": (r"n=1001,", ["ValueError: far off", "KeyError: 'far off'"]),
        "test_explicit": (r"test_explicit\(\s+n=3,", ["assert 3 != 3"]),
        "TestMachine::runTest": (r"state\.add\(k=\d\)", ["assert 7 < 7"]),
        "test_machine": (r"state\.add\(k=\d\)", ["assert 7 < 7"]),
        "TestFifty::test_inherited": (r"n=50,", ["assert 50 < 50"]),
        "TestSixty::test_inherited": (r"n=60,", ["assert 60 < 60"]),
    }
    for name, (example, errors) in wanted.items():
        nodeid = f"tests/test_p.py::{name}"
        told = output.partition(f"failed {nodeid}:")[2].partition("\n[")[0]
        assert re.search(example, told), told
        log = Path(re.search(r"^    output: (.*)$", told, re.MULTILINE).group(1))
        assert nodeid in log.read_text() and re.search(errors[0], log.read_text())
        commands = replays(output, nodeid)
        assert len(commands) == len(errors)
        seen = ""
        for command in commands:
            done = subprocess.run(
                shlex.split(command),
                cwd=tmp_path_factory.mktemp("elsewhere"),  # the command works from any folder
                env={k: v for k, v in os.environ.items() if k != "HYPOTHESIS_PROFILE"},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 1
            seen += done.stdout
        assert all(error in seen for error in errors), seen


def test_a_replay_runs_the_example_and_no_other(folder: Folder) -> None:
    source = """
        from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
        @given(n=st.integers())
        def test_bad(n):
            print("ran", n)
            assert n < LIMIT
        class Machine(RuleBasedStateMachine):
            @rule(n=st.integers(0))
            def check(self, n):
                print("ran", n)
                assert n < LIMIT
        TestMachine = Machine.TestCase
        def test_machine(): run_state_machine_as_test(Machine)
    """
    folder.write("tests/test_p.py", HEADER, source.replace("LIMIT", "100"))
    _, output = folder.run()
    folder.write("tests/test_p.py", HEADER, source.replace("LIMIT", "float('inf')"))
    for name in ("test_bad", "TestMachine::runTest", "test_machine"):
        (command,) = replays(output, f"tests/test_p.py::{name}")
        done = subprocess.run(shlex.split(command), capture_output=True, text=True)
        assert "DidNotReproduce" in done.stdout
        assert set(re.findall(r"^ran (.*)$", done.stdout, re.MULTILINE)) == {"100"}
    assert folder.run()[0] == fuzz.DONE
    assert not list((folder.root / ".fuzz").glob("tests_*.log")), "a failure that is no more"


def test_a_process_that_dies_or_hangs_costs_one_property(folder: Folder) -> None:
    fatal = """
        def test_before(): pass
        def test_dies(): os.kill(os.getpid(), signal.SIGSEGV)
        def test_hangs(): time.sleep(600)
        def test_after(): pass
    """
    folder.write("tests/test_p.py", HEADER, fatal)
    status, output = folder.run("--cap", "1.5")
    assert status == fuzz.FAILED
    assert {name: entry["result"] for name, entry in folder.state().items()} == {
        "test_before": "passed",
        "test_dies": "failed",
        "test_hangs": "failed",
        "test_after": "passed",
    }
    assert "its process ended with -11" in output
    assert "no end after 1.5 s (--cap)" in output
    (log,) = (folder.root / ".fuzz").glob("*test_dies*.log")
    assert "Segmentation fault" in log.read_text()


def test_pytest_that_cannot_start_ends(folder: Folder) -> None:
    folder.write("tests/test_p.py", HEADER, "def test_a(): pass\ndef test_b(): pass\n")
    ends = """
        def pytest_runtestloop(session):
            if not session.config.option.collectonly: os._exit(7)
    """
    folder.write("tests/conftest.py", CONFTEST, ends)
    status, output = folder.run()
    assert status == fuzz.FAILED
    assert output.count("pytest ended with 7 before it") == 2


def test_minutes(folder: Folder) -> None:
    folder.write("tests/test_p.py", HEADER, "def test_a(): pass\ndef test_b(): pass\n")
    status, output = folder.run("--minutes", "0")
    assert status == fuzz.UNFINISHED
    assert "2 left" in output and "left: tests/test_p.py::test_b" in output
    assert folder.run("--minutes", "0", "--part")[0] == fuzz.DONE
    status, output = folder.run("--minutes", "5")
    assert status == fuzz.DONE and "2 passed now" in output and "0 left" in output


def test_no_property_is_started_after_the_time(folder: Folder) -> None:
    """The first test moves the end of time to now."""
    first = """
        def test_first(request):
            plugins = request.config.pluginmanager.get_plugins()
            [recorder] = [p for p in plugins if type(p).__name__ == "Recorder"]
            recorder.until = time.time()
        def test_second(): pass
    """
    folder.write("tests/test_p.py", HEADER, first)
    command = fuzz.pytest_command("--fuzz-state=.fuzz", "--fuzz-until=inf", "tests/test_p.py")
    subprocess.run(command, cwd=folder.root, env=fuzz.environment(1), capture_output=True)
    assert folder.state().keys() == {"test_first"}


WAITING = """
    def wait_for(name):
        while not os.path.exists(name): time.sleep(0.05)
    def test_1(): pass
    def test_2():
        open("begun", "w").close()
        wait_for("go")
    def test_3(): pass
"""


def wait_for(path: Path) -> None:
    """Wait until a file is there, at most a minute."""
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_ended_loses_what_was_running(folder: Folder, number: int) -> None:
    folder.write("tests/test_p.py", HEADER, WAITING)
    process = folder.start()
    wait_for(folder.root / "begun")
    process.send_signal(number)
    process.wait(timeout=60)
    (folder.root / "go").touch()  # after SIGKILL test_2 is alive, and ends now
    time.sleep(1)
    state = folder.state()
    assert state["test_1"]["result"] == "passed"
    assert "test_3" not in state, "a process that nobody waits for goes on"
    if number == signal.SIGTERM:
        assert process.returncode == fuzz.UNFINISHED
        assert "2 left" in process.stdout.read()
        assert state["test_2"]["result"] == "running"
    process.stdout.close()
    status, output = folder.run()
    assert status == fuzz.DONE
    assert "passed tests/test_p.py::test_1:" not in output
    assert "passed tests/test_p.py::test_3:" in output


def test_without_properties_there_is_no_success(folder: Folder) -> None:
    folder.write("tests/test_p.py", "def test_a(): pass")
    assert folder.run()[0] == fuzz.USAGE
    folder.write("tests/test_p.py", HEADER, "def test_a(): pass\n")
    folder.write("tests/test_q.py", "import nowhere")
    status, output = folder.run()
    assert status == fuzz.USAGE
    assert "No module named 'nowhere'" in output


def test_longest_ago_first() -> None:
    names = [f"{file}::{n}" for file in ("a", "b") for n in range(5)]
    state = {name: {"date": "2026-01-02"} for name in names if name != "b::3"}
    state["a::4"]["date"] = "2026-01-01"
    groups = fuzz.chunks(names, state)
    assert groups[0][0] == "b::3" and groups[1][0] == "a::4"
    assert sorted(name for group in groups for name in group) == names
    assert all(len({name[0] for name in group}) == 1 for group in groups)
    assert max(map(len, groups)) == fuzz.AT_ONCE


def test_the_digest_covers_the_package_and_the_tests(tmp_path: Path) -> None:
    seen = set()
    for name in ("vllm/vit_cudagraph/models/a.py", "tests/tools/b.py", "tests/c.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a = 1")
        seen.add(fuzz.source_digest(tmp_path))
        path.write_text("a = 2")
        seen.add(fuzz.source_digest(tmp_path))
    assert len(seen) == 6
    (tmp_path / "docs.py").write_text("")
    assert fuzz.source_digest(tmp_path) in seen


@pytest.fixture
def profile() -> Iterator[None]:
    """The profile of this run is the same afterwards."""
    name = settings.get_current_profile_name()
    yield
    profiles.register_profiles()
    settings.load_profile(name)


def number_of_examples(chosen: settings) -> int:
    """How many examples a property with these settings runs."""
    ran = []

    @chosen
    @given(st.integers())
    def count(n: int) -> None:
        ran.append(n)

    count()
    return len(ran)


@pytest.mark.parametrize(
    "name, counts",
    [("dev", (10, 7)), ("ci", (40, 7)), ("gpu", (12, 12)), ("nightly", ())],
)
def test_examples(
    profile: None, monkeypatch: pytest.MonkeyPatch, name: str, counts: tuple[int, ...]
) -> None:
    monkeypatch.setenv("VIT_CUDAGRAPH_EXAMPLES", "12")
    monkeypatch.setenv("HYPOTHESIS_PROFILE", name)
    assert profiles.load() == name
    for asked, expected in zip((40, 7), counts, strict=False):
        assert number_of_examples(profiles.examples(asked)) == expected
    assert profiles.examples(40).deadline is None
    if name == "nightly":
        numbers = [profiles.examples(asked).max_examples for asked in (1, 40, 6000)]
        assert numbers == [5000, 5000, 6000]


def test_examples_under_another_profile(profile: None) -> None:
    settings.register_profile("theirs", max_examples=3)
    settings.load_profile("theirs")
    assert profiles.examples(40).max_examples == 40
    settings.register_profile("dev-with-verbose-verbosity", settings.get_profile("dev"))
    settings.load_profile("dev-with-verbose-verbosity")
    assert profiles.examples(40).max_examples == 10


def test_a_property_may_be_inherited_twice(profile: None) -> None:
    profiles.load("ci")

    class Base:
        @profiles.examples(5)
        @given(st.integers())
        def check(self, n: int) -> None:
            pass

    for name in "AB":
        type(name, (Base,), {})().check()


def test_repeatable_and_fresh_profiles() -> None:
    profiles.register_profiles()
    for name in ("ci", "gpu"):
        assert settings.get_profile(name).derandomize
        assert settings.get_profile(name).database is None
    nightly = settings.get_profile("nightly")
    assert not nightly.derandomize and nightly.database is not None and nightly.print_blob
    assert HealthCheck.too_slow in nightly.suppress_health_check
    assert HealthCheck.filter_too_much not in nightly.suppress_health_check


def test_settings_that_are_wrong_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="HYPOTHESIS_PROFILE to one of dev, ci, nightly, gpu"):
        profiles.load("nigthly")
    for text in ("0", "-1", "many", ""):
        monkeypatch.setenv("VIT_CUDAGRAPH_EXAMPLES", text)
        with pytest.raises(ValueError, match="positive whole number, for example 40"):
            profiles.register_profiles()
