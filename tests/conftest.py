# SPDX-License-Identifier: Apache-2.0
"""Settings for every test: offline, away from the user's caches, and no CUDA call unless asked for
(``VIT_CUDAGRAPH_TEST_DEVICE=cuda``, see ``testing/models.py``)."""

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

# Before anything imports vLLM, torch or transformers: they read these when they are imported, and
# the servers that tests start inherit them.
_CACHE_ROOT = tempfile.mkdtemp(prefix="vit-cudagraph-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_CACHE_ROOT"] = _CACHE_ROOT
# Tensors here are tiny: threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Importing any part of the package imports torch, so it comes after the settings above.
from vllm.vit_cudagraph.testing import profiles  # noqa: E402

profiles.load()


@pytest.fixture(scope="session", autouse=True)
def no_cuda_call() -> Iterator[None]:
    """Fail the session if anything in this process has initialised CUDA, unless it was asked to."""
    yield
    torch = sys.modules.get("torch")
    asked = os.environ.get("VIT_CUDAGRAPH_TEST_DEVICE") == "cuda"
    assert asked or torch is None or not torch.cuda.is_initialized(), "a test made a CUDA call"


@pytest.fixture(scope="session", autouse=True)
def inspected_here() -> Iterator[None]:
    """vLLM inspects each model class in a process of its own, which imports vLLM for it: seconds
    for each of some fifty classes that this process loads anyway. Servers do as they always do."""
    from vllm.model_executor.models import registry

    with mock.patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()):
        yield


# -- how much of the tolerances a run has used -----------------------------------------------------


def _worst() -> dict[tuple[str, str, float], float]:
    """Largest errors of this process, by what they were held against, dtype and tolerance."""
    oracles = sys.modules.get("vllm.vit_cudagraph.testing.oracles")
    return {
        (what, str(dtype), oracles.TOLERANCE[dtype]): worst  # type: ignore[union-attr]
        for (what, dtype), worst in getattr(oracles, "WORST", {}).items()
    }


_OF_WORKERS: dict[tuple[str, str, float], float] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker of pytest-xdist: tell the process that writes the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["worst"] = [(*seen, e) for seen, e in _worst().items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for *seen, worst in getattr(node, "workeroutput", {}).get("worst", ()):
        key = seen[0], seen[1], seen[2]
        _OF_WORKERS[key] = max(worst, _OF_WORKERS.get(key, 0.0))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for (what, dtype, allowed), worst in sorted({**_OF_WORKERS, **_worst()}.items()):
        terminalreporter.write_line(
            f"largest error against {what}, {dtype}: {worst:.1e} of {allowed:.0e} allowed"
        )


# -- two workers -----------------------------------------------------------------------------------

_SERVERS = (
    "tests/test_serve.py",
    "tests/test_serve_families.py",
    "tests/test_serve_ranks.py",
    "tests/test_serving_benchmark.py",
    "tests/test_examples.py",
    "tests/test_settings.py",
    "tests/test_stopped.py",
)
"""Files whose tests start servers, each of which keeps both cores busy: never two of these files at
once. They take the longest, so they come first."""


def scope_of(nodeid: str) -> str:
    """What a worker runs as a whole."""
    return "servers" if nodeid.startswith(_SERVERS) else nodeid.split("::", 1)[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(_SERVERS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file goes to one worker, and all files with servers to the same."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByFile(config, log)


def pytest_unconfigure() -> None:
    """Remove the run's own cache folder."""
    shutil.rmtree(_CACHE_ROOT, ignore_errors=True)


@pytest.fixture
def vllm_log() -> Iterator[list[logging.LogRecord]]:
    """Records of INFO and above of vLLM's loggers, ours among them; ``record.message`` is the text
    as it was when it was logged.

    They do not propagate to ``caplog`` once vLLM has configured logging. It does so when it makes a
    configuration, and drops handlers then: a test makes its configuration before this fixture.
    """
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            self.format(record)  # sets `message`
            records.append(record)

    logger, handler = logging.getLogger("vllm"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.setLevel(level)
    logger.removeHandler(handler)
