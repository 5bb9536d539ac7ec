# SPDX-License-Identifier: Apache-2.0
"""Jina VL reranker: Qwen2-VL with a score for an answer; pooling, no generation."""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _qwen

PROCESSOR = "real"
WEIGHTS = False


def make(path: Path, seed: int) -> None:
    checkpoints.make_checkpoint("qwen2_vl", path, seed=seed, shallow=True)
    _qwen.rename(path, "JinaVLForRanking", num_labels=1)
