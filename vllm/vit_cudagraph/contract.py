# SPDX-License-Identifier: Apache-2.0
"""The pieces of vLLM that this package relies on, compared at start-up with what they were.

On a mismatch the plugin leaves stock vLLM as it is and says which piece differs.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from packaging.specifiers import SpecifierSet

SUPPORTED = SpecifierSet(">=0.32,<0.34")

_MANAGER = "vllm.v1.worker.encoder_cudagraph:EncoderCudaGraphManager"
_PROTOCOL = "vllm.model_executor.models.interfaces:SupportsEncoderCudaGraph"
_DEFS = "vllm.v1.worker.encoder_cudagraph_defs"
_ATTENTION = "vllm.model_executor.layers.attention.mm_encoder_attention:MMEncoderAttention"
_LINEAR = "vllm.model_executor.layers.linear"
_LAZY = "vllm.model_executor.models.registry:_LazyRegisteredModel"

SIGNATURES: dict[str, str] = {
    f"{_MANAGER}.__init__": "self vllm_config device dtype model",
    f"{_MANAGER}.supports_modality": "self modality",
    f"{_MANAGER}.is_captured": "self",
    f"{_MANAGER}.clear": "self",
    f"{_MANAGER}.capture": "self graph_pool",
    f"{_MANAGER}.get_num_graphs_to_capture": "self",
    f"{_MANAGER}.execute": "self mm_kwargs",
    f"{_MANAGER}.get_cumulative_stats": "self",
    f"{_MANAGER}._capture_budget_graph": "self token_budget path axis_keys",
    f"{_MANAGER}._dp_shard": "self mm_kwargs per_item_out_tokens",
    f"{_MANAGER}._dp_gather": (
        "self local_outputs per_item_out_tokens image_rank_assignment images_per_rank "
        "max_output_tokens_per_rank"
    ),
    f"{_PROTOCOL}.get_encoder_cudagraph_config": "self",
    f"{_PROTOCOL}.get_input_modality": "self mm_kwargs",
    f"{_PROTOCOL}.get_max_frames_per_video": "self",
    f"{_PROTOCOL}.get_encoder_cudagraph_budget_range": "self vllm_config",
    f"{_PROTOCOL}.get_encoder_cudagraph_item_specs": "self mm_kwargs",
    f"{_PROTOCOL}.select_encoder_cudagraph_items": "self mm_kwargs indices",
    f"{_PROTOCOL}.postprocess_encoder_output": (
        "self outputs indices per_item_out_tokens dest clone batch_mm_kwargs"
    ),
    f"{_PROTOCOL}.prepare_encoder_cudagraph_capture_inputs": (
        "self token_budget max_batch_size max_frames_per_batch device dtype path axis_keys"
    ),
    f"{_PROTOCOL}.prepare_encoder_cudagraph_replay_buffers": (
        "self mm_kwargs max_batch_size max_frames_per_batch path"
    ),
    f"{_PROTOCOL}.encoder_cudagraph_forward": "self inputs path",
    f"{_PROTOCOL}.encoder_eager_forward": "self mm_kwargs path",
    f"{_LAZY}._get_modelinfo_module_hash": "model_path",
    f"{_ATTENTION}.compute_max_seqlen": "attn_backend cu_seqlens",
    f"{_ATTENTION}.maybe_compute_seq_lens": "attn_backend cu_seqlens device",
    f"{_ATTENTION}.maybe_recompute_cu_seqlens": (
        "attn_backend cu_seqlens hidden_size tp_size device fp8_padded_hidden_size"
    ),
    f"{_LINEAR}:UnquantizedLinearMethod.apply": "self layer x bias",
    f"{_LINEAR}:UnquantizedLinearMethod.process_weights_after_loading": "self layer",
    f"{_LINEAR}:ColumnParallelLinear.forward": "self input_",
    f"{_LINEAR}:RowParallelLinear.forward": "self input_",
    "vllm.model_executor.layers.activation:SiluAndMul.forward_native": "x",
    "vllm.utils.torch_utils:current_stream": "",
    "vllm.distributed:get_pp_group": "",
    "vllm.distributed:get_tensor_model_parallel_world_size": "",
    "vllm.distributed.parallel_state:is_global_first_rank": "",
}
"""Parameter names, in order, of each callable that is overridden or called."""

FIELDS: dict[str, str] = {
    f"{_DEFS}:EncoderItemSpec": "input_size output_tokens path_output_tokens",
    f"{_DEFS}:EncoderCudaGraphConfig": (
        "modalities buffer_keys out_hidden_size padding_logics max_frames_per_video paths "
        "capture_axes"
    ),
    f"{_DEFS}:EncoderCudaGraphCaptureInputs": "values",
    f"{_DEFS}:EncoderCudaGraphReplayBuffers": "values",
    _LAZY: "module_name class_name",
}
"""Fields, in order, of each dataclass that is made or read."""


PRESENT = (
    "vllm.model_executor.models.utils:StageMissingLayer",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.FLASH_ATTN",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.TRITON_ATTN",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.FLASHINFER",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.ROCM_AITER_FA",
    "vllm.utils.torch_utils:async_tensor_h2d",
    "vllm.utils.math_utils:round_up",
)
"""Pieces that are used by name."""


def unsupported_version(version: str) -> str | None:
    """Why this vLLM version is not supported, or None."""
    if SUPPORTED.contains(version, prereleases=True):
        return None
    return f"vLLM {version} is not in the supported range {SUPPORTED}"


def broken_pieces() -> list[str]:
    """One line for each piece of the installed vLLM that differs from what is relied on."""
    return [
        *_mismatches(SIGNATURES.items(), lambda piece: list(inspect.signature(piece).parameters)),
        *_mismatches(((path, "") for path in PRESENT), lambda piece: []),
        *_mismatches(FIELDS.items(), lambda piece: [f.name for f in dataclasses.fields(piece)]),
    ]


def _mismatches(
    expected: Iterable[tuple[str, str]], names_of: Callable[[Any], list[str]]
) -> list[str]:
    found = []
    for path, names in expected:
        try:
            actual = names_of(_resolve(path))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            found.append(f"{path}: {error}")
            continue
        if actual != names.split():
            found.append(f"{path} has ({', '.join(actual)}), not ({', '.join(names.split())})")
    return found


def _resolve(path: str) -> Any:
    module, _, attributes = path.partition(":")
    piece: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        piece = getattr(piece, attribute)
    return piece
