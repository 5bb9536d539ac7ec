# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 and Qwen3.6: the tower of Qwen3-VL.

The text model has full attention alone: linear attention runs on a CPU in bfloat16 only, and
answers are compared in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _qwen

PROCESSOR = "real"
WEIGHTS = True


def make(path: Path, seed: int) -> None:
    write(path, seed, "qwen3_5")


def write(path: Path, seed: int, model_type: str, **text: Any) -> None:
    """A checkpoint of one of the two model types, dense and with experts."""
    from transformers import AutoConfig

    tokenizer = checkpoints.make_tokenizer()
    rope = {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    }
    sizes = {
        "layer_types": ["full_attention"] * 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "rope_parameters": rope,
        "partial_rotary_factor": 0.5,
    }
    config = AutoConfig.for_model(
        model_type,
        vision_config=_qwen.qwen3_vision(deepstack_visual_indexes=[]),
        text_config=_qwen.text(tokenizer, **(sizes | text)),
        tie_word_embeddings=False,
        **_qwen.token_ids(tokenizer),
    )
    _qwen.write_weights(path, seed, config, tokenizer)
    checkpoints.make_processor("qwen3_vl", tokenizer).save_pretrained(path)
