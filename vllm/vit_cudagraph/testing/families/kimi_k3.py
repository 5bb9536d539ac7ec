# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3: Kimi-K2.5's tower with other norms, widths and positions; images alone.

vLLM has its text model for GPUs alone, so on a CPU a test puts something else in its place.
"""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _kimi
from vllm.vit_cudagraph.testing.families.kimi_k25 import make_kwargs as make_kwargs
from vllm.vit_cudagraph.testing.families.kimi_k25 import save_processor

PROCESSOR = "real"
WEIGHTS = False


def make(path: Path, seed: int) -> None:
    placeholder = "<|kimi_image_placeholder|>"
    tokenizer = _kimi.make_tokenizer(placeholder)
    text_config = {
        "model_type": "kimi_linear",
        "vocab_size": len(tokenizer),
        "hidden_size": checkpoints.TEXT_HIDDEN,
        "intermediate_size": 2 * checkpoints.TEXT_HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "max_position_embeddings": 32768,
        **_kimi.token_ids(tokenizer),
    }
    _kimi.write_config(
        path,
        {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "media_placeholder_token_id": tokenizer.convert_tokens_to_ids(_kimi.MEDIA_PAD),
            "image_placeholder": placeholder,
            "dtype": "float32",
            "text_config": text_config,
            "vision_config": {
                "model_type": "kimi_k3_vision",
                "patch_size": _kimi.PATCH_SIZE,
                "init_pos_emb_height": _kimi.TABLE_SIDES[0],
                "init_pos_emb_width": _kimi.TABLE_SIDES[1],
                "vt_num_attention_heads": checkpoints.VISION_HEADS,
                "vt_num_hidden_layers": _kimi.LAYERS,
                "vt_hidden_size": _kimi.HIDDEN,
                "vt_intermediate_size": _kimi.INTERMEDIATE,
                "qkv_hidden_size": 2 * _kimi.HIDDEN,
                "merge_kernel_size": [checkpoints.MERGE_SIZE] * 2,
            },
        },
    )
    tokenizer.save_pretrained(path)
    save_processor(path)
