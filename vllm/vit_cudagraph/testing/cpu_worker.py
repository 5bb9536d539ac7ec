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

from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.utils import StageMissingLayer
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin
from vllm.vit_cudagraph.testing import reference_attention

logger = init_logger(__name__)

NOT_SERVED = (
    "The CPU twin runs no graphs here: the model is not served by vllm-vit-cudagraph "
    "(is VLLM_PLUGINS set without vit_cudagraph?). Everything runs eagerly."
)


def use_reference_attention(model: Any) -> None:
    """Tell a loaded model's tower that its backend is FLASH_ATTN.

    vLLM's CPU platform names TORCH_SDPA for every tower, and maximum lengths would then be 0. The
    reference attention, registered before the model was built, keeps FlashAttention's rules.
    """
    if isinstance(model, WindowedViTCudaGraphMixin) and not isinstance(
        model.vit_tower(), StageMissingLayer
    ):
        model.vit_tower().attn_backend = AttentionBackendEnum.FLASH_ATTN


def capture_encoder_graphs(runner: Any) -> None:
    """Capture on the twin, once the model is loaded, what upstream's flag asks for.

    ``runner`` is vLLM's V1 model runner. A model that is not on the mixin gets no manager: it
    would capture by upstream's own code, which needs a GPU. One warning says so.
    """
    runner._maybe_init_encoder_cudagraph_manager()
    manager = runner.encoder_cudagraph_manager
    if manager is None:
        return
    if not isinstance(runner.get_model(), WindowedViTCudaGraphMixin):
        runner.encoder_cudagraph_manager = None
        logger.warning(NOT_SERVED)
        return
    manager.capture(graph_pool=object())


class TwinWorker(CPUWorker):
    """vLLM's CPU worker, with reference attention and encoder graphs."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        # vLLM's form of it for CPUs ends the engine under Ernie4.5-VL's text model, and under
        # DeepSeek's without MLA it rotates rows by other rows' positions; plain torch does not.
        operators = self.compilation_config.custom_ops
        if not {"-rotary_embedding", "+rotary_embedding"} & set(operators):
            operators.append("-rotary_embedding")
        # For a model that stays upstream's, the tower's attention stays upstream's too.
        if issubclass(get_model_cls(self.model_config), WindowedViTCudaGraphMixin):
            reference_attention.register()
        # As on a GPU: a tower's all-reduce is then an operator, which the twin can record.
        get_tp_group().use_custom_op_call = True
        super().load_model(*args, **kwargs)
        use_reference_attention(self.model_runner.get_model())

    def compile_or_warm_up_model(self) -> Any:
        """Upstream's, then what its GPU worker does and its CPU worker does not: capture."""
        times = super().compile_or_warm_up_model()
        capture_encoder_graphs(self.model_runner)
        return times
