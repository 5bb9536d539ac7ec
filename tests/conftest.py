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
    """Records of vLLM's loggers, ours among them; they do not propagate to ``caplog``."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("vllm").addHandler(handler)
    yield records
    logging.getLogger("vllm").removeHandler(handler)
