# SPDX-License-Identifier: Apache-2.0
"""What the tiny checkpoints of the Kimi models share: tokens, sizes, names of the tower."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm.vit_cudagraph.testing import checkpoints

MEDIA_PAD = "<|media_pad|>"
IMAGE = f"<|media_begin|>image<|media_content|>{MEDIA_PAD}<|media_end|>"
PATCH_SIZE = 14
TABLE_SIDES = (8, 6)
"""Rows and columns of the table of positions: not square, so that they cannot be swapped."""
LAYERS = 2
HIDDEN, INTERMEDIATE = checkpoints.VISION_HIDDEN, 2 * checkpoints.VISION_HIDDEN


def make_tokenizer(*more: str) -> Any:
    media = ("<|media_begin|>", "<|media_content|>", MEDIA_PAD, "<|media_end|>")
    tokenizer = checkpoints.make_tokenizer((*checkpoints.CHAT_TOKENS, *media, *more))
    tokenizer.chat_template = checkpoints.chat_template(IMAGE)
    return tokenizer


def token_ids(tokenizer: Any) -> dict[str, int]:
    """Of the text model's configuration."""
    return {
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def deepseek_config(tokenizer: Any, **more: Any) -> dict[str, Any]:
    """A text model of DeepSeek's kind, dense in all layers, whose heads are 32 wide: the narrowest
    that vLLM's CPU attention has a kernel for."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": checkpoints.TEXT_HIDDEN,
        "intermediate_size": 2 * checkpoints.TEXT_HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "max_position_embeddings": 32768,
        "rope_theta": 50000.0,
        "tie_word_embeddings": False,
        **token_ids(tokenizer),
        **more,
    }


def write_config(path: Path, config: dict[str, Any]) -> None:
    (path / "config.json").write_text(json.dumps(config, indent=2))


def save_weights(
    path: Path, seed: int, tokenizer: Any, language_model: Any, **projector: Mapping[str, nn.Module]
) -> None:
    """Seeded random weights under the checkpoint's names.

    Args:
        language_model: transformers' text model.
        projector: The parts of the projector behind its first norm, under the projector's name.
    """
    from safetensors.torch import save_file

    model = nn.ModuleDict({"vision_tower": _tower_names(), "language_model": language_model})
    for name, parts in projector.items():
        model[name] = nn.ModuleDict({"pre_norm": nn.LayerNorm(HIDDEN), **parts})
    model.get_output_embeddings = language_model.get_output_embeddings
    checkpoints.fill_weights(model, tokenizer, seed)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def projector_layers() -> tuple[nn.Module, nn.Module]:
    """The two linear layers of the projector."""
    merged = HIDDEN * checkpoints.MERGE_SIZE**2
    return nn.Linear(merged, merged), nn.Linear(merged, checkpoints.TEXT_HIDDEN)


def _tower_names() -> nn.Module:
    """The tower's weights, and nothing that computes."""
    table, patches, encoder = nn.Module(), nn.Module(), nn.Module()
    table.weight = nn.Parameter(torch.empty(*TABLE_SIDES, HIDDEN))
    patches.pos_emb, patches.proj = table, nn.Conv2d(3, HIDDEN, PATCH_SIZE, PATCH_SIZE)
    encoder.blocks = nn.ModuleList(_block() for _ in range(LAYERS))
    encoder.final_layernorm = nn.LayerNorm(HIDDEN)
    return nn.ModuleDict({"patch_embed": patches, "encoder": encoder})


def _block() -> nn.Module:
    return nn.ModuleDict(
        {
            "norm0": nn.LayerNorm(HIDDEN),
            "norm1": nn.LayerNorm(HIDDEN),
            "wqkv": nn.Linear(HIDDEN, 3 * HIDDEN),
            "wo": nn.Linear(HIDDEN, HIDDEN),
            "mlp": nn.ModuleDict(
                {"fc0": nn.Linear(HIDDEN, INTERMEDIATE), "fc1": nn.Linear(INTERMEDIATE, HIDDEN)}
            ),
        }
    )
