# SPDX-License-Identifier: Apache-2.0
"""Real CUDA graphs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vllm.utils.torch_utils import current_stream
from vllm.vit_cudagraph.graphs import no_collection

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CudaBackend:
    """Captures with ``torch.cuda.CUDAGraph`` on the stream that vLLM runs the model on."""

    name = "cuda"

    def refusal(self, vllm_config: "VllmConfig") -> str | None:
        """Nothing in the settings stops a CUDA capture as such."""
        return None

    def capture(
        self, forward: Callable[[], torch.Tensor], pool: Any
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """See :class:`vllm.vit_cudagraph.graphs.GraphBackend`. CUDA's errors pass unchanged."""
        stream = current_stream()  # no cover: needs a GPU
        graph = torch.cuda.CUDAGraph()  # no cover: needs a GPU
        with torch.inference_mode(), torch.cuda.stream(stream):  # no cover: needs a GPU
            # Kernels are loaded, workspaces allocated and autotuned here: none of it is legal
            # while capturing. The first wait keeps it off work that is still in flight elsewhere,
            # the second brings a failure of the warm-up to light before capture begins.
            torch.cuda.synchronize()  # no cover: needs a GPU
            forward()  # no cover: needs a GPU
            torch.cuda.synchronize()  # no cover: needs a GPU
            output = _capture_into(graph, forward, pool, stream)  # no cover: needs a GPU
        return graph, output  # no cover: needs a GPU


def _capture_into(
    graph: torch.cuda.CUDAGraph,
    forward: Callable[[], torch.Tensor],
    pool: Any,
    stream: torch.cuda.Stream,
) -> torch.Tensor:
    cause: Exception | None = None
    try:
        with no_collection(), torch.cuda.graph(graph, pool=pool, stream=stream):
            try:
                return forward()
            except Exception as exc:
                cause = exc
                raise
    except Exception as exc:
        # Ending an invalidated capture raises too, and would hide what went wrong inside it.
        if cause is None or cause is exc:
            raise
        raise cause from exc
