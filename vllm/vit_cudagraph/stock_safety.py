# SPDX-License-Identifier: Apache-2.0
"""What models without the mixin get: upstream's manager, whose failures become eager runs.

Under tensor parallelism an error is passed on as upstream does: the other ranks may already wait
in a collective, and an eager run here would leave them there.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.vit_cudagraph.failures import poisons_the_process, text_of
from vllm.vit_cudagraph.graphs.cuda import close_failed_capture

logger = init_logger(__name__)


class StockSafety(EncoderCudaGraphManager):
    """Adds to upstream's manager that an error is survived where that is possible."""

    graph_pool: Any
    _warned: frozenset[str] = frozenset()

    def capture_stock(self, graph_pool: Any) -> None:
        """Upstream's ``capture``, on a device that has CUDA graphs."""
        if self.device.type != "cuda":
            self._warn_once("the CPU twin captures only models on WindowedViTCudaGraphMixin")
            return
        super().capture(graph_pool)

    def _capture_budget_graph(
        self, token_budget: int, path: str = "default", axis_keys: tuple[Any, ...] = ()
    ) -> None:
        try:
            super()._capture_budget_graph(token_budget, path, axis_keys)
        except Exception as error:
            self._pass_on_if_fatal(error)
            close_failed_capture(self.graph_pool)
            if torch.cuda.is_available():
                self.graph_pool = torch.cuda.graph_pool_handle()  # no cover: needs a GPU
            self._warn_once(f"the graph of {token_budget} tokens is left out ({text_of(error)})")

    def execute_stock(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Upstream's ``execute``; None, for the model's own eager path, where it fails
        or nothing was captured."""
        if not self.is_captured():
            return None
        try:
            return super().execute(mm_kwargs)
        except Exception as error:
            self._pass_on_if_fatal(error)
            self._warn_once(f"a batch runs eagerly after {type(error).__name__} ({text_of(error)})")
            return None

    def _pass_on_if_fatal(self, error: Exception) -> None:
        if poisons_the_process(error) or get_tensor_model_parallel_world_size() > 1:
            raise error

    def _warn_once(self, text: str) -> None:
        kind = text.partition("(")[0]
        if kind not in self._warned:
            self._warned |= {kind}
            logger.warning("Encoder CUDA graphs (vLLM's own): %s", text)
