# SPDX-License-Identifier: Apache-2.0
"""A server that is stopped while it captures graphs, and while it replays them, ends as stock vLLM
does: in seconds, nothing of it left, no client left waiting. Started again on its port, it serves.

Where no ``--shutdown-timeout`` is given, stock vLLM ends its engine by SIGKILL ("force killing" in
its log), and where that comes before the engine has told of its aborted requests, their clients
wait for good, and its front process for them. So under load it is given. It also leaves files in
the folder for temporary ones, the sockets of its processes: a stock server is stopped beside ours,
and the names of what it leaves are what ours may leave.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_serve import CASES, TOKEN_BUDGETS, assert_equal, twin

from vllm.vit_cudagraph.testing.checkpoints import make_checkpoint
from vllm.vit_cudagraph.testing.serving import STOCK, Answer, Server

pytestmark = pytest.mark.serve

FORCED = "force killing"
PATIENT = {"arguments": ["--shutdown-timeout=20"]}
PROGRESS = re.compile(r"Capturing encoder CUDA graphs:\s+\d+%\|[^|]*\| (\d+)/(\d+)")
SHARED_MEMORY = Path("/dev/shm")

#: Some seconds of capturing.
MANY_BUDGETS = list(range(64, 192))

END_S = 120.0
"""Within this all processes have ended. Stock vLLM's own waits add up to about ten seconds on a
quiet machine; requests in flight are answered first, beside other tests."""

CLIENTS = 4


def wait_until(holds: Callable[[], Any], what: str, seconds: float = END_S) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} seconds: {what}"
        time.sleep(0.05)


# -- a server, and what it leaves behind -----------------------------------------------------------


@dataclass
class Watched:
    """A server with a folder of its own for temporary files.

    Attributes:
        folder: Of temporary files; its name is short, as a socket's path holds 107 bytes.
        server: Started and stopped by the test.
    """

    folder: Path
    server: Server

    def stop(self, number: int, *, all_at_once: bool = False) -> set[str]:
        """Send a signal, and see all of it end.

        Args:
            number: The signal.
            all_at_once: To each process, as a terminal does for Ctrl-C; else to the front alone.

        Returns:
            What is left in the folder, by :func:`kind`.

        Raises:
            AssertionError: A process, a segment of shared memory or an open port is left.
        """
        front = self.server._process
        assert front is not None and front.poll() is None, self.server.log()[-4000:]
        processes = psutil.Process(front.pid).children(recursive=True)
        segments = self.segments()
        (os.killpg if all_at_once else os.kill)(front.pid, number)
        wait_until(lambda: front.poll() is not None, "the front process ends")
        wait_until(lambda: not any(map(is_there, processes)), f"all end: {processes}")
        wait_until(lambda: not group_is_there(front.pid), "its process group is empty")
        wait_until(lambda: not any(map(Path.exists, segments)), f"all are gone: {segments}")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", self.server.port), 5.0)
        self.server.stop()
        return {kind(path) for path in self.folder.iterdir()}

    def segments(self) -> set[Path]:
        """Shared memory that the server's processes have mapped."""
        front = self.server._process
        assert front is not None
        processes = psutil.Process(front.pid).children(recursive=True)
        return {path for process in processes for path in segments_of(process)}

    def captured_so_far(self) -> tuple[int, int]:
        """Graphs that the log's progress bar has counted, of how many."""
        seen = PROGRESS.findall(self.server.log())
        return (int(seen[-1][0]), int(seen[-1][1])) if seen else (0, 0)


def segments_of(process: psutil.Process) -> Iterator[Path]:
    """Files in shared memory that a process has mapped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for mapped in process.memory_maps():
            path = Path(mapped.path)
            if path.is_relative_to(SHARED_MEMORY) and path.exists():
                yield path


def is_there(process: psutil.Process) -> bool:
    """Whether a process runs: one that nobody has waited for yet has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def group_is_there(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def kind(path: Path) -> str:
    """A file's name without what is drawn anew each time."""
    return re.sub(r"[0-9a-f]{8}(-?[0-9a-f]{4,}){0,4}", "#", path.name)


@contextlib.contextmanager
def watched(checkpoint: Path, log_path: Path, settings: Mapping[str, Any]) -> Iterator[Watched]:
    """A server that has not been started; on exit, whatever happened, none of it runs."""
    with tempfile.TemporaryDirectory(prefix="stop-") as folder:
        settings = {**settings, "env": {**settings["env"], "TMPDIR": folder}}
        server = Server(checkpoint, log_path=log_path, **settings)
        try:
            yield Watched(Path(folder), server)
        finally:
            server.stop()


# -- clients ---------------------------------------------------------------------------------------


@dataclass
class Client:
    """Sends one photograph after another until the server ends.

    Attributes:
        answers: By case, what came back before that.
        error: With which the last request ended.
    """

    server: Server
    cases: tuple[str, ...]
    answers: list[tuple[str, Answer]] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while True:
                for case in self.cases:
                    self.answers.append((case, self.server.chat(CASES[case].content)))
        except Exception as error:
            self.error = error


@contextlib.contextmanager
def clients_in_flight(server: Server) -> Iterator[list[Client]]:
    """Several clients that keep the encoder busy; on exit each has had its error."""
    names = ("rocket", "astronaut", "chelsea", "coffee")
    clients = [Client(server, names[i:] + names[:i]) for i in range(CLIENTS)]
    wait_until(lambda: all(len(client.answers) >= 2 for client in clients), "clients are served")
    yield clients
    for client in clients:
        client.thread.join(END_S)
        assert not client.thread.is_alive(), "a client waits for a server that has ended"
        assert client.error is not None


# -- the tests -------------------------------------------------------------------------------------


def test_stopped_in_captures_and_in_replays_it_ends_and_serves_again(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen2_5_vl", tmp_path / "model", shallow=True)
    slow = twin(encoder_cudagraph_token_budgets=MANY_BUDGETS)
    with (
        watched(checkpoint, tmp_path / "stock.log", STOCK | PATIENT) as stock,
        watched(checkpoint, tmp_path / "captures.log", slow) as captures,
        watched(checkpoint, tmp_path / "replays.log", twin() | PATIENT) as replays,
    ):
        # On one port: the second is the first one, started again.
        use_port_of(replays.server, captures.server)
        stock.server.start()
        captures.server.start()
        left_by_captures = stopped_while_capturing(captures)
        replays.server.start()
        stock.server.wait_ready()
        expected = {name: stock.server.chat(CASES[name].content) for name in CASES}
        with clients_in_flight(stock.server):
            left_by_stock = stock.stop(signal.SIGINT)
        replays.server.wait_ready()
        left_by_replays = stopped_while_replaying(replays, expected)
        assert any(name.startswith("#") for name in left_by_stock), left_by_stock
        assert left_by_captures | left_by_replays <= left_by_stock
        assert FORCED not in stock.server.log()
        assert FORCED not in replays.server.log()

        with replays.server as again:
            for name in ("rocket", "video", "three photographs"):
                assert_equal(again.chat(CASES[name].content), expected[name], name)
            assert (again.statistics().replayed, again.statistics().eager) == (5, 0)


def use_port_of(server: Server, other: Server) -> None:
    server._command.remove(f"--port={server.port}")
    server.port = other.port
    server._command.append(f"--port={server.port}")


def stopped_while_capturing(captures: Watched) -> set[str]:
    """Gives what is left by a stop after the first few graphs.

    A SIGTERM would be lost: while stock vLLM waits for its engine, its front process defers that
    until the engine is up. Ctrl-C reaches the worker as well, in the midst of a capture.
    """
    wait_until(lambda: captures.captured_so_far()[0] > 3, "graphs are captured", 240)
    done, of = captures.captured_so_far()
    assert done < of == len(MANY_BUDGETS), "it is not in the middle any more"
    left = captures.stop(signal.SIGINT, all_at_once=True)
    assert "Application startup complete" not in captures.server.log()
    return left


def stopped_while_replaying(replays: Watched, expected: Mapping[str, Answer]) -> set[str]:
    """Gives what is left by a stop under load; answers before it are right."""
    assert f"Captured {len(TOKEN_BUDGETS)} encoder CUDA graphs" in replays.server.log()
    with clients_in_flight(replays.server) as clients:
        left = replays.stop(signal.SIGINT)
    for client in clients:
        for name, answer in client.answers[:-1]:
            assert_equal(answer, expected[name], name)
        name, answer = client.answers[-1]
        assert_equal(answer, beginning(expected[name], len(answer.token_ids)), f"the last, {name}")
    assert replays.server.statistics().replays > 0
    return left


def beginning(answer: Answer, tokens: int) -> Answer:
    """What stock vLLM gives for a request that it aborts: as far as it was."""
    return replace(answer, token_ids=answer.token_ids[:tokens], logprobs=answer.logprobs[:tokens])


def test_what_is_left_is_seen(tmp_path: Path) -> None:
    """Processes, segments and files: each way in which the test above looks finds one."""
    me = psutil.Process()
    assert is_there(me) and group_is_there(os.getpgid(0))
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            assert Path(file.name) in set(segments_of(me))
    names = {
        "c48e99a7-7083-4941-9020-702026e51811": "#",
        "vllm_dist_e63a2a266da44392a6efbce2feb84b36": "vllm_dist_#",
        "vllm-vit-cudagraph-metrics-5884a7cd5336bccb": "vllm-vit-cudagraph-metrics-#",
    }
    assert {name: kind(tmp_path / name) for name in names} == names


def test_the_tests_own_stop_lets_the_last_process_clean_up(tmp_path: Path) -> None:
    """As the one of ``multiprocessing`` that unlinks shared memory, a moment after all others."""
    server, shared = Server(tmp_path, **STOCK), tmp_path / "shared"
    cleaner = f"while kill -0 $$; do sleep 0.1; done; sleep 0.5; rm {shared}"
    server._command = ["sh", "-c", f"touch {shared}; ({cleaner}) & exec sleep 60"]
    server.start()
    wait_until(shared.exists, "the file is there")
    server.stop()
    assert not shared.exists()
