# SPDX-License-Identifier: Apache-2.0
"""Encoder data parallelism through upstream's own sharding and gather, with ranks as threads.

Each rank is a thread with a manager of its own; the collective is an exchange between the threads,
with a time limit, so that a rank that stays away is a failure here and not a hang. Real processes
and real devices are another matter (``docs/design.md``).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import managers
import pytest
import torch

from vllm.config import set_current_vllm_config
from vllm.vit_cudagraph.failures import RankFailure
from vllm.vit_cudagraph.manager import EncoderGraphManager

FAMILY = "qwen2_5_vl"
UPSTREAM = "vllm.v1.worker.encoder_cudagraph"


class Ranks:
    """Threads that stand for ranks, and their all-gather.

    One computes at a time: they share one model, and vLLM's CPU kernels keep scratch memory in it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = threading.local()
        self.barrier = threading.Barrier(size, timeout=30)
        self.computing = threading.Lock()
        self.sent: list[Any] = [None] * size

    def all_gather(self, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
        self.sent[self.rank.number] = rows
        self.computing.release()
        try:
            self.barrier.wait()
            return torch.cat(self.sent, dim=dim)
        finally:
            self.computing.acquire()

    @contextmanager
    def as_the_group(self) -> Iterator[None]:
        here = "vllm.vit_cudagraph.capturing.get_tensor_model_parallel_world_size"
        with (
            mock.patch(f"{UPSTREAM}.get_tensor_model_parallel_rank", lambda: self.rank.number),
            mock.patch(f"{UPSTREAM}.get_tensor_model_parallel_world_size", lambda: self.size),
            mock.patch(f"{UPSTREAM}.tensor_model_parallel_all_gather", self.all_gather),
            mock.patch(here, lambda: self.size),
        ):
            yield

    def execute(self, ranks: list[EncoderGraphManager], mm_kwargs: dict[str, Any]) -> list[Any]:
        """What each rank's ``execute`` gives or raises."""
        results: list[Any] = [None] * self.size
        config = ranks[0].vllm_config

        def run(number: int) -> None:
            self.rank.number = number
            try:
                with self.computing, torch.inference_mode(), set_current_vllm_config(config):
                    results[number] = ranks[number].execute(mm_kwargs)
            except Exception as error:
                results[number] = error
                self.barrier.abort()

        threads = [threading.Thread(target=run, args=(n,)) for n in range(self.size)]
        with self.as_the_group():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
        return results


def make_ranks(size: int) -> list[EncoderGraphManager]:
    ranks = [managers.make_manager(FAMILY, budgets=[64, 256]) for _ in range(size)]
    for manager in ranks:
        manager.use_dp = True
    return ranks


BATCHES = {
    "more items than ranks": [[1, 8, 8], [1, 4, 20], [1, 2, 2], [1, 16, 16], [1, 10, 6]],
    "fewer items than ranks": [[1, 8, 8]],
    "one above every budget": [[1, 40, 40], [1, 4, 4]],
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_every_item_in_order(size: int, name: str) -> None:
    ranks = make_ranks(size)
    kwargs = managers.batch(ranks[0].model, BATCHES[name])
    expected = managers.eager(ranks[0].model, kwargs)
    for outputs in Ranks(size).execute(ranks, kwargs):
        managers.assert_same(outputs, expected)
    assert sum(manager.statistics.replayed for manager in ranks) > 0


def test_one_rank_without_graphs_takes_part_eagerly() -> None:
    ranks = make_ranks(2)
    ranks[1].captured.clear()
    assert ranks[1].is_captured()
    kwargs = managers.batch(ranks[0].model, BATCHES["more items than ranks"])
    expected = managers.eager(ranks[0].model, kwargs)
    for outputs in Ranks(2).execute(ranks, kwargs):
        managers.assert_same(outputs, expected)
    assert ranks[0].statistics.replayed and not ranks[1].statistics.replayed
    assert ranks[1].statistics.eager["no graph is captured"]


def test_a_rank_that_cannot_reach_the_gather_ends_with_a_message() -> None:
    ranks = make_ranks(2)
    ranks[1].captured.clear()
    kwargs = managers.batch(ranks[0].model, BATCHES["more items than ranks"])
    failing = mock.Mock(side_effect=torch.OutOfMemoryError("none left"))
    with mock.patch.object(ranks[1], "_execute_steps", failing):
        results = Ranks(2).execute(ranks, kwargs)
    assert isinstance(results[1], RankFailure) and "cudagraph_mm_encoder=false" in str(results[1])
    assert isinstance(results[0], RankFailure)  # here the exchange breaks; NCCL's watchdog ends it
