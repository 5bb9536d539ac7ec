# SPDX-License-Identifier: Apache-2.0
"""A worker that runs encoder graphs on the CPU twin, inside the real vLLM.

Use it through vLLM's own option:
``--worker-cls vllm.vit_cudagraph.testing.cpu_worker.TwinWorker``. For tests and demonstrations:
the twin keeps the rules of CUDA graphs, it does not make anything faster.
"""

from __future__ import annotations

from typing import Any

# Upstream's CPU worker must be imported before the rest of vLLM's workers.
from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip

from vllm.logger import init_logger
from vllm.model_executor.models.utils import StageMissingLayer
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin
from vllm.vit_cudagraph.testing import reference_attention

logger = init_logger(__name__)


def use_reference_attention(model: Any) -> None:
    """Tell a loaded model's tower that its backend is FLASH_ATTN.

    vLLM's CPU platform names TORCH_SDPA for every tower, and maximum lengths would then be 0. The
    reference attention, registered before the model was built, keeps FlashAttention's rules.
    """
    if isinstance(model, WindowedViTCudaGraphMixin) and not isinstance(
        model.vit_tower(), StageMissingLayer
    ):
        model.vit_tower().attn_backend = AttentionBackendEnum.FLASH_ATTN


class TwinWorker(CPUWorker):
    """vLLM's CPU worker, with reference attention and encoder graphs."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        reference_attention.register()
        super().load_model(*args, **kwargs)
        use_reference_attention(self.model_runner.get_model())

    def compile_or_warm_up_model(self) -> Any:
        """Upstream's, then what its GPU worker does and its CPU worker does not: capture."""
        times = super().compile_or_warm_up_model()
        runner = self.model_runner
        runner._maybe_init_encoder_cudagraph_manager()
        manager = runner.encoder_cudagraph_manager
        if manager is not None:
            manager.capture(graph_pool=object())
        return times
