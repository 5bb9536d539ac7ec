# SPDX-License-Identifier: Apache-2.0
"""Settings for every test: offline, away from the user's caches, and never a CUDA call."""

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Before anything imports vLLM, torch or transformers: they read these when they are imported, and
# the servers that tests start inherit them.
_CACHE_ROOT = tempfile.mkdtemp(prefix="vit-cudagraph-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_CACHE_ROOT"] = _CACHE_ROOT
os.environ.setdefault("OMP_NUM_THREADS", str(min(4, os.cpu_count() or 1)))

settings.register_profile("ci", derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile("dev", max_examples=10, deadline=None)
settings.register_profile("nightly", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(scope="session", autouse=True)
def no_cuda_call() -> Iterator[None]:
    """Fail the session if anything in this process has initialised CUDA."""
    yield
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "a test made a CUDA call"


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
