# SPDX-License-Identifier: Apache-2.0
"""Why a tower is not captured: decided from configuration alone, so that all ranks agree."""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.distributed import get_pp_group
from vllm.model_executor.models.utils import StageMissingLayer
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.failures import brief

CAPTURABLE_BACKENDS = frozenset(
    {
        AttentionBackendEnum.FLASH_ATTN,
        AttentionBackendEnum.TRITON_ATTN,
        AttentionBackendEnum.FLASHINFER,
        AttentionBackendEnum.ROCM_AITER_FA,
    }
)
"""Those whose host side reads only ``max_seqlen``. TORCH_SDPA reads all offsets on the host."""


def model_refusal(model: Any, tower: Any) -> str | None:
    """Why this model's tower cannot be captured as it was built, or None."""
    if isinstance(tower, StageMissingLayer):
        return "this process has no vision tower"
    if not get_pp_group().is_first_rank:
        return "this pipeline rank never runs the vision tower"
    if getattr(model, "is_multimodal_pruning_enabled", False) and not model.vit_prunes():
        return (
            "video pruning changes embeddings after the tower, and this model's vit_finish() does "
            "not do it; set video_pruning_rate=0 for graphs"
        )
    backend = getattr(tower, "attn_backend", None)
    if backend not in CAPTURABLE_BACKENDS:
        return (
            f"attention backend {getattr(backend, 'name', backend)} reads offsets on the host; "
            "set --mm-encoder-attn-backend to FLASH_ATTN or TRITON_ATTN"
        )
    modules = [module for part in model.vit_modules() for module in part.modules()]
    if any(getattr(module, "_fp8_dynamic_scale", False) for module in modules):
        return (
            "FP8 attention with dynamic scales keeps a history on the host; "
            "set mm_encoder_fp8_scale_path to a file of static scales"
        )
    if any(_scales_over_all_rows(module) for module in modules):
        return (
            "a linear layer of the tower scales its input by the largest value of all rows, "
            "padding included; use per-token or static activation scales, or no quantisation there"
        )
    return _geometry_refusal(model, backend)


def _scales_over_all_rows(module: Any) -> bool:
    """Whether a linear layer quantises its input with one dynamic scale for the whole tensor.

    vLLM describes that by a ``QuantKey`` (or a quantiser) whose scale is not static and whose group
    is the tensor. Methods keep it under several names and up to two objects deep.
    """
    method = getattr(module, "quant_method", None)
    kernel = getattr(method, "fp8_linear", None)
    scheme = getattr(module, "scheme", None)
    holders = (method, scheme, kernel, getattr(scheme, "fp8_linear", None))
    configs = (getattr(holder, "config", None) for holder in holders)
    values = (v for h in (*holders, *configs) if hasattr(h, "__dict__") for v in vars(h).values())
    return any(_is_dynamic_per_tensor(value) for value in values)


def _is_dynamic_per_tensor(value: Any) -> bool:
    scale = getattr(value, "scale", value)
    group = getattr(scale, "group_shape", None)
    return getattr(scale, "static", None) is False and bool(
        group is not None and group.is_per_tensor()
    )


def _geometry_refusal(model: Any, backend: AttentionBackendEnum) -> str | None:
    """A geometry that cannot be read costs the graphs, never the server."""
    try:
        rows = model.vit_declared.rows.values()
    except Exception as error:
        return f"vit_geometry() failed, {brief(error)}"
    if backend == AttentionBackendEnum.FLASHINFER and not any(r.value == "lengths" for r in rows):
        return (
            "attention backend FLASHINFER reads single lengths, which this tower does not take; "
            "set --mm-encoder-attn-backend to FLASH_ATTN"
        )
    return None


def config_refusal(vllm_config: Any) -> str | None:
    """Why these settings rule encoder graphs out for any model, or None."""
    lora = vllm_config.lora_config
    if lora is not None and lora.enable_tower_connector_lora:
        return (
            "tower LoRA maps adapters to items in the scheduler's order; "
            "set enable_tower_connector_lora=false for graphs"
        )
    return None


def runner_refusal(vllm_config: Any) -> str | None:
    """Why the model runner will not make a manager at all, or None: nobody else would say so."""
    settings = vllm_config.compilation_config
    asked = settings.cudagraph_mm_encoder and vllm_config.device_config.device_type == "cuda"
    if not asked or settings.cudagraph_mode != CUDAGraphMode.NONE:
        return None
    if vllm_config.use_v2_model_runner:
        return None
    return (
        "the V1 model runner captures nothing with cudagraph_mode=NONE, which enforce_eager sets; "
        "set cudagraph_mode=FULL_DECODE_ONLY, or VLLM_USE_V2_MODEL_RUNNER=1"
    )
