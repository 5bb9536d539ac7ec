# SPDX-License-Identifier: Apache-2.0
"""The real `vllm serve` as a child process, and chat requests to it over HTTP.

    with Server(checkpoint, **TWIN) as server:
        answer = server.chat([image_part(photo("rocket")), text_part("What is this?")])
        print(answer.text, server.statistics())

Used by the demonstration and by the tests. Nothing here imports torch or vllm: the server is a
separate process, started with the `vllm` command that belongs to the running interpreter.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from vllm.vit_cudagraph.testing.photos import image_url

#: Settings for `Server` with which vLLM runs as if this package were not installed.
STOCK: dict[str, Any] = {"env": {"VLLM_PLUGINS": ""}}

#: Settings for `Server` with which encoder graphs run on the CPU twin.
TWIN: dict[str, Any] = {
    "compilation_config": {"cudagraph_mm_encoder": True},
    "worker_cls": "vllm.vit_cudagraph.testing.cpu_worker.TwinWorker",
    "env": {"VIT_CUDAGRAPH_LOG_INTERVAL": "1"},
}

MODEL_NAME = "tiny"

# Small and quick, and nothing that could hide a run of the encoder: no prefix cache, no cache of
# processed images. Encoder graphs on the twin do not mind --enforce-eager; on a GPU they would.
ARGUMENTS = (
    "--enforce-eager",
    "--dtype=float32",
    "--max-model-len=4096",
    "--max-num-seqs=8",
    "--no-enable-prefix-caching",
    "--mm-processor-cache-gb=0",
)
LIMITS = {"image": 8, "video": 2}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # enough for these sizes, and servers side by side do not compete
}
_STOP_SECONDS = 15.0
_GROUP_SECONDS = 5.0
_LOG_TAIL_LINES = 40


class ServerError(RuntimeError):
    """The server did not come up, or died; the message ends with the tail of its log."""


class RequestError(RuntimeError):
    """The server refused a request. `status` is the HTTP status, the message is its body."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status


@dataclass(frozen=True)
class Answer:
    """A greedy answer: its text and tokens, one log-probability a token, the prompt's length."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int

    def distance(self, other: Answer) -> float:
        """Largest difference of log-probabilities; infinite where tokens differ or one is NaN."""
        if self.token_ids != other.token_ids:
            return math.inf
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        differences = [abs(mine - theirs) for mine, theirs in pairs]
        # Every comparison with NaN is false, so it would pass for a small difference.
        return math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0)


@dataclass(frozen=True)
class Statistics:
    """Counters of a statistics line in the server's log, since the server started."""

    replayed: int = 0
    eager: int = 0
    reasons: str = ""
    replays: int = 0
    padding: int = 0

    def since(self, before: Statistics) -> Statistics:
        """What was counted after `before`; `reasons` stay those of the whole run."""
        return Statistics(
            self.replayed - before.replayed,
            self.eager - before.eager,
            self.reasons,
            self.replays - before.replays,
            self.padding - before.padding,
        )


_STATISTICS_LINE = re.compile(
    r"Encoder CUDA graphs: (\d+) items replayed, (\d+) items eager(?: \((.*)\))?, "
    r"(\d+) replays, (\d+) padding tokens"
)

_ERROR_LINE = re.compile(r"\w(Error|Exception): ")


def text_part(text: str) -> dict[str, Any]:
    """A text as a part of a chat message."""
    return {"type": "text", "text": text}


def image_part(image: Image.Image, image_format: str = "PNG") -> dict[str, Any]:
    """An image as a part of a chat message."""
    return {"type": "image_url", "image_url": {"url": image_url(image, image_format)}}


def video_part(url: str) -> dict[str, Any]:
    """A video, given as a data URL, as a part of a chat message."""
    return {"type": "video_url", "video_url": {"url": url}}


class Server:
    """`vllm serve` in a process group of its own, on a free port; a context manager.

    On entry it waits until the server answers /health, `timeout` seconds at most, and raises
    `ServerError` if it does not; on exit, whatever happened, no process of it is left.

    Args:
        model: folder of the checkpoint.
        compilation_config: the value of `--compilation-config`, or None to leave it out.
        worker_cls: the value of `--worker-cls`, or None to leave it out.
        limits: the value of `--limit-mm-per-prompt`.
        arguments: further command line arguments.
        defaults: command line arguments in place of those that suit tiny models on a CPU.
        env: environment variables on top of this process's own.
        log_path: file that takes the server's output; by default a temporary one.
        timeout: seconds that the server may take to come up.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        compilation_config: Mapping[str, Any] | None = None,
        worker_cls: str | None = None,
        limits: Mapping[str, int] | None = None,
        arguments: Sequence[str] = (),
        defaults: Sequence[str] = ARGUMENTS,
        env: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        timeout: float = 240.0,
    ) -> None:
        self.port = _free_port()
        self.timeout = timeout
        self._keeps_log = log_path is not None
        self._log_path = Path(log_path) if log_path is not None else _temporary_log()
        self._env = {**os.environ, **ENVIRONMENT, **(env or {})}
        if env is None or "VLLM_PLUGINS" not in env:
            # The caller's choice, not that of the shell which happens to run it.
            self._env.pop("VLLM_PLUGINS", None)
        self._command = [*_vllm(), "serve", str(model)]
        self._command += [f"--port={self.port}", "--host=127.0.0.1"]
        self._command += [f"--served-model-name={MODEL_NAME}", *defaults]
        self._command.append(f"--limit-mm-per-prompt={json.dumps(dict(limits or LIMITS))}")
        if compilation_config is not None:
            self._command.append(f"--compilation-config={json.dumps(dict(compilation_config))}")
        if worker_cls is not None:
            self._command.append(f"--worker-cls={worker_cls}")
        self._command += arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._final_log: str | None = None

    def __enter__(self) -> Server:
        try:
            self.start()
            self.wait_ready()
        except BaseException:  # an interrupt too must not leave a server behind
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and return at once; several servers can come up side by side."""
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait for /health to answer. Raises `ServerError` if the server dies or is too slow."""
        deadline = time.monotonic() + self.timeout
        while not self.is_healthy():
            if not self.is_running():
                raise ServerError(f"the server ended while starting\n{self._tail()}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the server was not up after timeout={self.timeout:g} seconds; "
                    f"give it more, such as timeout={2 * self.timeout:g}\n{self._tail()}"
                )
            time.sleep(0.2)

    def is_running(self) -> bool:
        """Whether the server's process is there."""
        return self._process is not None and self._process.poll() is None

    def is_healthy(self) -> bool:
        """Whether /health answers 200 now, which it does as long as the engine lives."""
        try:
            with _open(f"http://127.0.0.1:{self.port}/health", None, 5.0) as response:
                return bool(response.status == 200)
        except OSError:  # URLError and HTTPError are kinds of it
            return False

    def stop(self) -> None:
        """End the server and everything that it started; does nothing when it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            # The front process alone first: it ends its engine in good order.
            process.terminate()
            process.wait(_STOP_SECONDS)
            _wait_for_group(process.pid)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not self._keeps_log:
                self._final_log = self._read_log()
                self._log_path.unlink(missing_ok=True)

    def chat(self, content: Sequence[Mapping[str, Any]], *, max_tokens: int = 8) -> Answer:
        """Send one user message, made of `content` parts, and return the greedy answer.

        Raises `RequestError` if the server refuses the request.
        """
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": list(content)}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "logprobs": True,
            "return_token_ids": True,
        }
        reply = self._post("/v1/chat/completions", body)
        choice = reply["choices"][0]
        return Answer(
            text=choice["message"]["content"],
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(token["logprob"] for token in choice["logprobs"]["content"]),
            prompt_tokens=reply["usage"]["prompt_tokens"],
        )

    def chat_together(
        self, contents: Sequence[Sequence[Mapping[str, Any]]], *, max_tokens: int = 8
    ) -> list[Answer]:
        """Send several messages at the same time; answers in the order of `contents`."""
        with ThreadPoolExecutor(len(contents)) as pool:
            return list(pool.map(lambda one: self.chat(one, max_tokens=max_tokens), contents))

    def log(self) -> str:
        """Everything that the server has printed so far."""
        return self._read_log() if self._final_log is None else self._final_log

    def statistics(self) -> Statistics:
        """The counters of the last statistics line in the log; all 0 where there is none yet."""
        lines = _STATISTICS_LINE.findall(self.log())
        if not lines:
            return Statistics()
        replayed, eager, reasons, replays, padding = lines[-1]
        return Statistics(int(replayed), int(eager), reasons, int(replays), int(padding))

    def metrics(self) -> dict[str, float]:
        """Totals on `/metrics` of this package's counters and gauges, by short name, over all
        workers and labels: `{"items_replayed_total": 3.0, ...}`."""
        totals: dict[str, float] = {}
        for name, _, value in self._samples():
            totals[name] = totals.get(name, 0.0) + value
        return totals

    def metric_samples(self, short_name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each sample of one of them."""
        return [(labels, value) for name, labels, value in self._samples() if name == short_name]

    def _samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        with _open(f"http://127.0.0.1:{self.port}/metrics", None, 30.0) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        for family in families:
            for sample in family.samples:
                _, ours, name = sample.name.partition("vllm:encoder_cudagraph_")
                if ours:
                    yield name, dict(sample.labels), float(sample.value)

    def worker_rpc(self, method: str) -> list[Any]:
        """Call a method of each worker; needs `VLLM_SERVER_DEV_MODE=1` in `env`."""
        results: list[Any] = self._post("/collective_rpc", {"method": method})["results"]
        return results

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}{path}"
        try:
            with _open(url, json.dumps(body).encode(), 120.0) as response:
                reply: dict[str, Any] = json.load(response)
                return reply
        except urllib.error.HTTPError as error:
            with error:
                raise RequestError(error.code, error.read().decode(errors="replace")) from None
        except OSError as error:
            if not self.is_running():
                raise ServerError(f"the server died during a request\n{self._tail()}") from error
            raise

    def _read_log(self) -> str:
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def _tail(self) -> str:
        """The end of the log, after the errors that were named further up.

        vLLM's front process ends with a trace of its own, so a worker's error is not at the end.
        """
        lines = self.log().splitlines()
        earlier, last = lines[:-_LOG_TAIL_LINES], lines[-_LOG_TAIL_LINES:]
        return "\n".join([*filter(_ERROR_LINE.search, earlier), *last])


def _vllm() -> list[str]:
    """The command `vllm`: the script of this environment, or its module where there is none."""
    script = Path(sys.executable).with_name("vllm")
    if script.is_file():
        return [str(script)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def _open(url: str, data: bytes | None, timeout: float) -> Any:
    """Open a local URL, past any proxy that the environment names for the outside world."""
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, None, timeout)


def _wait_for_group(leader: int) -> None:
    """The last process to end unlinks the server's shared memory: killed, it would leave that."""
    deadline = time.monotonic() + _GROUP_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(leader, 0)
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _temporary_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="vllm-serve-", suffix=".log")
    os.close(handle)
    return Path(name)
