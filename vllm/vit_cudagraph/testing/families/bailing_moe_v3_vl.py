# SPDX-License-Identifier: Apache-2.0
"""Ling-VL (Bailing): the tower of Qwen3-VL and a projector; images alone."""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _qwen

PROCESSOR = "Qwen3-VL's, since Ling-VL's is code on the model hub"
WEIGHTS = False
# On CPUs that have AMX vLLM would take a backend for latent attention that has no float32.
ENGINE = {
    "limit_mm_per_prompt": {"image": 8},
    "attention_backend": "CPU_MLA",
    "enable_prefix_caching": False,
}


def make(path: Path, seed: int) -> None:
    tokenizer = checkpoints.make_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": checkpoints.TEXT_HIDDEN,
        "intermediate_size": 2 * checkpoints.TEXT_HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": checkpoints.TEXT_HEAD_DIM,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "layer_group_size": 2,
        "no_kda_lora": True,
        # The sizes that GPU kernels of latent attention are made for.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    _qwen.write_config(
        path,
        "bailing_moe_v3_vl",
        tokenizer,
        vision_config=_qwen.qwen3_vision(out_hidden_size=4 * checkpoints.VISION_HIDDEN),
        text_config=text,
        mrope_section=[12, 10, 10],
    )
    checkpoints.make_processor("qwen3_vl", tokenizer).save_pretrained(path)
