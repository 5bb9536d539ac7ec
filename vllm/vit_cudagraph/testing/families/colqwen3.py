# SPDX-License-Identifier: Apache-2.0
"""ColQwen3: Qwen3-VL with an embedding of each token for an answer; pooling, no generation."""

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
        "colqwen3",
        tokenizer,
        vision_config=_qwen.qwen3_vision(),
        text_config=_qwen.text(tokenizer, num_hidden_layers=3),
        embed_dim=16,
    )
    _qwen.rename(path, "ColQwen3")
    checkpoints.make_processor("qwen3_vl", tokenizer).save_pretrained(path)
