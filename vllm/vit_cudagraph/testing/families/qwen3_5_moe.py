# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 and Qwen3.6 with experts in the text model."""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing.families import _qwen, qwen3_5

PROCESSOR = "real"
WEIGHTS = True


def make(path: Path, seed: int) -> None:
    qwen3_5.write(path, seed, "qwen3_5_moe", **_qwen.experts())
