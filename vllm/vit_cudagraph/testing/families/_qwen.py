# SPDX-License-Identifier: Apache-2.0
"""What the checkpoints of models with a Qwen tower have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from vllm.vit_cudagraph.testing import checkpoints


def qwen3_vision(**changed: Any) -> dict[str, Any]:
    """Sizes of a Qwen3-VL tower of three layers, levels of deepstack on two of them."""
    return {
        "depth": 3,
        "hidden_size": checkpoints.VISION_HIDDEN,
        "intermediate_size": 2 * checkpoints.VISION_HIDDEN,
        "num_heads": checkpoints.VISION_HEADS,
        "out_hidden_size": checkpoints.TEXT_HIDDEN,
        "patch_size": 16,
        "spatial_merge_size": checkpoints.MERGE_SIZE,
        "temporal_patch_size": checkpoints.TEMPORAL_PATCH_SIZE,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    } | changed


def qwen2_5_vision(**changed: Any) -> dict[str, Any]:
    """Sizes of a Qwen2.5-VL tower of three layers, the middle one without windows."""
    return {
        "depth": 3,
        "hidden_size": checkpoints.VISION_HIDDEN,
        "intermediate_size": 2 * checkpoints.VISION_HIDDEN,
        "num_heads": checkpoints.VISION_HEADS,
        "out_hidden_size": checkpoints.TEXT_HIDDEN,
        "patch_size": 14,
        "spatial_merge_size": checkpoints.MERGE_SIZE,
        "temporal_patch_size": checkpoints.TEMPORAL_PATCH_SIZE,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    } | changed


def text(tokenizer: Any, **changed: Any) -> dict[str, Any]:
    """Sizes of a text model that vLLM builds on a CPU, with positions in three dimensions."""
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": checkpoints.TEXT_HIDDEN,
        "intermediate_size": 2 * checkpoints.TEXT_HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": checkpoints.TEXT_HEAD_DIM,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    } | changed


def experts(**changed: Any) -> dict[str, Any]:
    """Four experts of which two are asked; to be joined to :func:`text`."""
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": True,
    } | changed


def token_ids(tokenizer: Any) -> dict[str, int]:
    """Entries of the model's configuration that name special tokens."""
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {entry: tokenizer.convert_tokens_to_ids(token) for entry, token in names.items()}


def write_weights(path: Path, seed: int, config: Any, tokenizer: Any) -> None:
    """Configuration and seeded random weights of the model that transformers has for it."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    checkpoints.fill_weights(model, tokenizer, seed)
    with checkpoints.no_progress_bar():
        model.save_pretrained(path)


def rename(path: Path, architecture: str, **changed: Any) -> None:
    """Name another architecture, and other entries, in a configuration that was written."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | {"architectures": [architecture]} | changed
    file.write_text(json.dumps(config, indent=2))


def write_config(path: Path, model_type: str, tokenizer: Any, **entries: Any) -> None:
    """Configuration alone, by transformers' class or vLLM's."""
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    entries = {"tie_word_embeddings": False} | token_ids(tokenizer) | entries
    if model_type in _CONFIG_REGISTRY:
        config = _CONFIG_REGISTRY[model_type](**entries)
    else:
        config = AutoConfig.for_model(model_type, **entries)
    config.save_pretrained(path)
