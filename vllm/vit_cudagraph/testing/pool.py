# SPDX-License-Identifier: Apache-2.0
"""What lies in a CUDA graph's memory pool before a replay: the worst that could."""

from __future__ import annotations

from typing import Any

import torch

from vllm.utils.torch_utils import current_stream
from vllm.vit_cudagraph.graphs import no_collection


class PoolPoison:
    """Writes NaN into all memory of a pool that its graphs use and hold no result in.

    Tensors that live only inside a forward are free again once it has been captured, and the pool
    gives their memory to whoever captures next. So one more graph is captured that asks for all of
    it and fills it; what it wrote is what the others find.

    Args:
        pool: The pool's handle, after all other graphs have been captured in it.

    Attributes:
        bytes: How much is written. 0 means that nothing was free.
    """

    def __init__(self, pool: Any) -> None:
        free = [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(pool)
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]
        self.bytes = sum(free)
        self._graph = torch.cuda.CUDAGraph()
        held = []
        with no_collection(), torch.cuda.graph(self._graph, pool=pool, stream=current_stream()):
            for size in sorted(free, reverse=True):
                rows = torch.empty(size // 2, dtype=torch.bfloat16, device="cuda")
                held.append(rows.fill_(float("nan")))

    def replay(self) -> None:
        """Poison the pool now."""
        self._graph.replay()
