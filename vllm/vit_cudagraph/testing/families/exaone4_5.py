# SPDX-License-Identifier: Apache-2.0
"""EXAONE-4.5: the tower of Qwen2.5-VL with half as many heads for keys and values."""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _qwen

PROCESSOR = "real"
WEIGHTS = True
# vLLM 0.32 takes uint8 pixels for this model, as for Qwen2.5-VL, and has no layer that normalises
# them. 0.33 has one.
ENGINE = {"mm_device_do_normalize": False}


def make(path: Path, seed: int) -> None:
    from transformers import AutoConfig
    from transformers.models.exaone4_5 import Exaone4_5_Processor

    tokenizer = checkpoints.make_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    config = AutoConfig.for_model(
        "exaone4_5",
        vision_config=_qwen.qwen2_5_vision(num_key_value_heads=2),
        text_config=_qwen.text(
            tokenizer,
            rope_parameters=rope,
            sliding_window=None,
            layer_types=["full_attention"] * 2,
        ),
        tie_word_embeddings=False,
        **_qwen.token_ids(tokenizer),
    )
    _qwen.write_weights(path, seed, config, tokenizer)
    parts = checkpoints.make_processor("qwen2_vl", tokenizer)
    Exaone4_5_Processor(
        parts.image_processor, tokenizer, parts.video_processor, parts.chat_template
    ).save_pretrained(path)
