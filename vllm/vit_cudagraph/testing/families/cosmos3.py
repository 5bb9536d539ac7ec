# SPDX-License-Identifier: Apache-2.0
"""Cosmos3: the tower and the text model of Qwen3-VL."""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _qwen

PROCESSOR = "real"
WEIGHTS = False


def make(path: Path, seed: int) -> None:
    tokenizer = checkpoints.make_tokenizer()
    _qwen.write_config(
        path,
        "cosmos3_omni",
        tokenizer,
        vision_config=_qwen.qwen3_vision(),
        text_config=_qwen.text(tokenizer, num_hidden_layers=3),
    )
    _qwen.rename(path, "Cosmos3ForConditionalGeneration")
    checkpoints.make_processor("qwen3_vl", tokenizer).save_pretrained(path)
