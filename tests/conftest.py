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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How much of the tolerances the run has used."""
    oracles = sys.modules.get("vllm.vit_cudagraph.testing.oracles")
    for (what, dtype), worst in sorted(getattr(oracles, "WORST", {}).items(), key=str):
        allowed = oracles.TOLERANCE[dtype]  # type: ignore[union-attr]
        terminalreporter.write_line(
            f"largest error against {what}, {dtype}: {worst:.1e} of {allowed:.0e} allowed"
        )


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
