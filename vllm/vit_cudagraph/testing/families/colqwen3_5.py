# SPDX-License-Identifier: Apache-2.0
"""ColQwen3.5: Qwen3.5 with an embedding of each token for an answer; pooling, no generation."""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing.families import _qwen, qwen3_5

PROCESSOR = "real"
WEIGHTS = False


def make(path: Path, seed: int) -> None:
    qwen3_5.write(path, seed, "qwen3_5")
    _qwen.rename(path, "ColQwen3_5", retrieval_attention_contract="causal", embed_dim=16)
