# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V: learned positions from a table, stretched bicubically, and rotary ones."""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing.families import _glm

PROCESSOR = "real"
WEIGHTS = True


def make(path: Path, seed: int) -> None:
    _glm.make_with_weights("glm4v", path, seed)
