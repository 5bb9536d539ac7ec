# SPDX-License-Identifier: Apache-2.0
"""How the processes of a test join each other over gloo."""

import os
from datetime import timedelta
from pathlib import Path

from vllm.distributed import init_distributed_environment, initialize_model_parallel


def join(rank: int, world: int, folder: Path, timeout: timedelta | None = None) -> None:
    """Make vLLM's groups, of ``world`` tensor-parallel ranks that meet in ``folder``.

    Args:
        timeout: Of what ranks do together; torch's by default.
    """
    # Names that differ: vLLM then takes gloo in place of shared memory, in which a rank would wait
    # for ever for one that has gone.
    os.environ["VLLM_DIST_IDENT"] = f"rank-{rank}"
    init_distributed_environment(
        world_size=world,
        rank=rank,
        distributed_init_method=f"file://{folder / 'rendezvous'}",
        local_rank=rank,
        backend="gloo",
        timeout=timeout,
    )
    initialize_model_parallel(world, 1)
