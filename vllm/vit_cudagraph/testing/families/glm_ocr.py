# SPDX-License-Identifier: Apache-2.0
"""GLM-OCR: rotary positions alone, norms of Q and K, a merger as wide as the text model's MLP."""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing.families import _glm

PROCESSOR = "real"
WEIGHTS = False


def make(path: Path, seed: int) -> None:
    _glm.make_without_weights("glm_ocr", path, processor="Glm46V")
