# SPDX-License-Identifier: Apache-2.0
"""The real graph backend, where there is a GPU: failures in a capture, clocks, staging, memory.

On a machine with a GPU::

    VIT_CUDAGRAPH_TEST_DEVICE=cuda python -m pytest -o addopts= tests/test_cuda_backend.py
"""

import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from vllm.vit_cudagraph.arena import FlatArena, HostArena, fill_host
from vllm.vit_cudagraph.graphs.cuda import CudaBackend

pytestmark = pytest.mark.skipif(
    os.environ.get("VIT_CUDAGRAPH_TEST_DEVICE") != "cuda",
    reason="needs a GPU: set VIT_CUDAGRAPH_TEST_DEVICE=cuda",
)


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    yield CudaBackend()
    gc.collect()
    CudaBackend().give_back()


def buffer(value: float = 1.0, rows: int = 256) -> torch.Tensor:
    return torch.full((rows, 64), value, device="cuda")


@pytest.mark.parametrize("kind", ["reads a value", "wants too much memory", "raises"])
def test_a_failed_capture_says_why_and_does_no_harm(backend: CudaBackend, kind: str) -> None:
    pool, rows, runs = backend.new_pool(), buffer(), []

    def fails() -> torch.Tensor:
        doubled = rows * 2
        runs.append(kind)
        if len(runs) > 1:  # in the capture, not in the warm-up
            if kind == "reads a value":
                doubled.sum().item()
            elif kind == "wants too much memory":
                torch.empty(2**50, device="cuda")
            else:
                raise KeyError("planted")
        return doubled

    before, before_output = backend.capture(lambda: rows + 1, pool)
    with pytest.raises((RuntimeError, KeyError)) as caught:
        backend.capture(fails, pool)
    expected = {
        "reads a value": "captur",
        "wants too much memory": "out of memory",
        "raises": "planted",
    }
    assert expected[kind] in str(caught.value)
    del caught
    assert torch.rand(1, device="cuda").isfinite()  # generators wait for no graph
    free, _ = torch.cuda.mem_get_info()
    torch.empty(2**30, dtype=torch.uint8, device="cuda")
    gc.collect()  # as the manager does after a failure
    backend.give_back()
    assert torch.cuda.mem_get_info()[0] > free - 2**28  # and memory goes back
    assert torch.empty(2**20, pin_memory=True).is_pinned()
    if kind != "reads a value":  # torch could end the capture
        backend.capture(lambda: rows * 3, pool)
    pool = backend.new_pool()
    after, after_output = backend.capture(lambda: (rows * 3).sin(), pool)
    for value in (2.0, 5.0):
        rows.fill_(value)
        before.replay()
        assert torch.equal(before_output, rows + 1)
        after.replay()
        assert torch.equal(after_output, (rows * 3).sin())


def test_scratch_memory_comes_back(backend: CudaBackend) -> None:
    backend.capture(lambda: buffer(rows=8), backend.new_pool())  # cuBLAS, kernels, streams
    gc.collect()  # as the manager does after a failure
    backend.give_back()
    free, _ = torch.cuda.mem_get_info()
    rows = buffer(rows=2**20)

    graph, output = backend.capture(
        lambda of=rows: (of * 2 + 1).sum(1),  # type: ignore[misc]
        backend.new_pool(),
    )
    graph.replay()
    assert torch.cuda.mem_get_info()[0] < free - rows.nbytes
    del graph, output, rows
    gc.collect()  # as the manager does after a failure
    backend.give_back()
    assert torch.cuda.mem_get_info()[0] > free - 64 * 2**20


def test_clocks_tell_long_from_short(backend: CudaBackend) -> None:
    short, long = (torch.randn(n, n, device="cuda") for n in (64, 8192))
    assert (
        0 < backend.milliseconds(lambda: short @ short) < backend.milliseconds(lambda: long @ long)
    )
    watch = backend.stopwatch()
    watch.start()
    for _ in range(10):
        long @ long
    watch.stop()
    assert watch.milliseconds() is None  # nobody waits
    torch.cuda.synchronize()
    assert 0 < watch.milliseconds() < 1000


def test_loads_in_a_row_do_not_overtake_their_copies() -> None:
    """Each load is followed by work that reads what it wrote, without a wait in between."""
    device = torch.device("cuda")
    arena = HostArena({"a": ((5000,), torch.int32), "b": ((77,), torch.int64)}, device)
    slow, seen = torch.randn(4096, 4096, device=device), []
    for number in range(1, 9):
        arena.wait()
        fill_host(arena.staged["a"], np.full(4000, number, dtype=np.int32), "last")
        fill_host(arena.staged["b"], np.full(30, -number, dtype=np.int64), "zero")
        for _ in range(5):
            slow = slow @ slow / 64
        arena.send()
        seen.append((arena.buffers["a"].clone(), arena.buffers["b"].clone()))
    for number, (a, b) in enumerate(seen, start=1):
        assert torch.equal(a, torch.full_like(a, number))
        assert torch.equal(b[:30], torch.full_like(b[:30], -number)) and not b[30:].any()


def test_views_of_an_arena_are_aligned_as_tensors_are() -> None:
    flat = FlatArena(
        {name: ((rows, 3), torch.bfloat16) for name, rows in (("a", 7), ("b", 50), ("c", 1))},
        torch.device("cuda"),
    )
    assert all(view.data_ptr() % 256 == 0 for view in flat.buffers.values())
