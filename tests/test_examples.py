# SPDX-License-Identifier: Apache-2.0
"""The examples run as they stand, and the demonstration fails when it should."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from vllm.vit_cudagraph.testing.serving import Answer, Statistics

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


@pytest.mark.serve
def test_offline_example_generates_with_graphs(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "offline.py"), "--max-tokens=8"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-4000:]
    for media in ("1 images, 0 videos", "2 images, 0 videos", "0 images, 1 videos"):
        assert re.search(rf"{media}: ['\"].+['\"]", run.stdout), run.stdout[-4000:]
    counts = re.findall(r"Encoder CUDA graphs: (\d+) items replayed, (\d+) items eager", output)
    assert counts[-1] == ("4", "0"), output[-4000:]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_demo_finds_each_fault(demo: ModuleType) -> None:
    requests = [demo.Request("one", [], True), demo.Request("two", [], True)]
    replayed, eager = Statistics(replayed=1, replays=1), Statistics(eager=1)
    answers = [Answer("a", (1,), (-0.5,), 9), Answer("a", (1,), (-0.7,), 9)]
    plain = [demo.Row(answer, Statistics()) for answer in answers]
    good = [demo.Row(answer, replayed) for answer in answers]
    assert demo.faults(requests, plain, good) == []

    slightly_off = [good[0], demo.Row(Answer("a", (1,), (-0.702,), 9), replayed)]
    assert demo.faults(requests, plain, slightly_off) == [
        "two: the answer with graphs is not the eager one"
    ]
    no_graph = [demo.Row(answer, eager) for answer in answers]
    assert "no graph ran" in demo.faults(requests, plain, no_graph)[0]
    same = [plain[0], plain[0]], [good[0], good[0]]
    assert demo.faults(requests, *same) == ["one and two got the same log-probabilities"]


def test_demo_ends_with_a_verdict(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.verdict(10, []) == "OK: all 10 answers and log-probabilities equal"
    assert demo.verdict(10, ["a is off", "no graph ran"]) == "FAILED: a is off; no graph ran"

    row = demo.Row(Answer("a", (1,), (-0.5,), 9), Statistics(replayed=1, replays=1))
    demo.print_table([demo.Request("one", [], True)], [row], [row])
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "one      9          graph (1 replays, 0 padding)  equal    equal"
    assert all(line == line.rstrip() for line in lines)


def test_demo_moves_temporary_files_where_sockets_have_room(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "kept")
    monkeypatch.setenv("TMPDIR", "as it was")
    monkeypatch.setattr(demo, "LONGEST_TMPDIR", len(str(tmp_path)))
    demo.keep_files_in(tmp_path)
    assert (os.environ["VLLM_CACHE_ROOT"], os.environ["TMPDIR"]) == ("kept", "as it was")
    monkeypatch.setattr(demo, "LONGEST_TMPDIR", len(str(tmp_path)) + 4)
    demo.keep_files_in(tmp_path)
    assert os.environ["TMPDIR"] == f"{tmp_path}/tmp" and (tmp_path / "tmp").is_dir()


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_interrupted_demo_leaves_nothing_running(name: str) -> None:
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "demo.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Whoever started the tests in the background (nohup) may have had SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 120
        while not children and process.poll() is None and time.monotonic() < deadline:
            # Not the short-lived ones that importing vLLM starts.
            children = [c for c in descendants(process.pid) if "serve" in command(c)]
            time.sleep(0.1)
        children = descendants(process.pid)
        assert children, "the demonstration started no server"
        process.send_signal(signal.Signals[name])
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == {"SIGINT": 130, "SIGTERM": 143}[name], output
    assert not any(child.is_running() for child in children)
