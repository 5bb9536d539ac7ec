# SPDX-License-Identifier: Apache-2.0
"""OpenCUA: the tower of Qwen2.5-VL, images alone.

Its configuration and tokenizer are code on the model hub. A Qwen2.5-VL configuration has all that
vLLM reads; the tokenizer gets OpenCUA's placeholder.
"""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _qwen

PROCESSOR = "real"  # vLLM's own, around transformers' Qwen2-VL image processor
WEIGHTS = True
ENGINE = {"limit_mm_per_prompt": {"image": 8}}

_PLACEHOLDER = "<|media_placeholder|>"


def make(path: Path, seed: int) -> None:
    from transformers import AutoConfig

    tokenizer = checkpoints.make_tokenizer()
    tokenizer.add_tokens([_PLACEHOLDER], special_tokens=True)
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        vision_config=_qwen.qwen2_5_vision(),
        text_config=_qwen.text(tokenizer, rope_parameters=rope),
        tie_word_embeddings=False,
        **_qwen.token_ids(tokenizer),
    )
    _qwen.write_weights(path, seed, config, tokenizer)
    _qwen.rename(path, "OpenCUAForConditionalGeneration")
    parts = checkpoints.make_processor("qwen2_5_vl", tokenizer)
    parts.image_processor.save_pretrained(path)
    template = parts.chat_template.replace(
        "<|vision_start|><|image_pad|><|vision_end|>", _PLACEHOLDER
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
