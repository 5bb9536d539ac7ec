# SPDX-License-Identifier: Apache-2.0
"""How the processes of a test or a benchmark join each other: gloo on CPUs, NCCL with a GPU each.

Where ranks are more than GPUs they share them, over gloo: NCCL takes no two ranks on one GPU.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch

from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import set_custom_all_reduce
from vllm.vit_cudagraph.testing.models import place


def backend(world: int) -> str:
    """What ``world`` ranks of this machine join over, where :func:`models.place` says."""
    alone = place().device == "cuda" and torch.cuda.device_count() >= world
    return "nccl" if alone else "gloo"


def take_gpu(rank: int) -> int:
    """Make this rank's GPU the current one, where :func:`models.place` says GPUs; its number among
    this machine's devices."""
    if place().device == "cpu":
        return rank
    local = rank % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return local


def join(rank: int, world: int, folder: Path, timeout: timedelta | None = None) -> None:
    """Make vLLM's groups, of ``world`` tensor-parallel ranks that meet in ``folder``, on a GPU each
    where there are GPUs. A current configuration is to be set.

    Args:
        timeout: Of what ranks do together; torch's by default.
    """
    # Names that differ: vLLM then takes gloo in place of shared memory, in which a rank would wait
    # for ever for one that has gone.
    os.environ["VLLM_DIST_IDENT"] = f"rank-{rank}"
    chosen, local = backend(world), take_gpu(rank)
    if place().device == "cuda" and chosen == "gloo":
        os.environ["VLLM_DISABLE_PYNCCL"] = "1"
        set_custom_all_reduce(False)
    init_distributed_environment(
        world_size=world,
        rank=rank,
        distributed_init_method=f"file://{folder / 'rendezvous'}",
        local_rank=local,
        backend=chosen,
        timeout=timeout,
    )
    initialize_model_parallel(world, 1)
