# SPDX-License-Identifier: Apache-2.0
"""Keye-VL: SigLIP with stretched positions; a video is one sequence."""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing.families import _remote, _siglip_rows
from vllm.vit_cudagraph.testing.families._siglip_rows import make_kwargs as make_kwargs

PROCESSOR = (
    "ours, of the form that vLLM's class reads (patches row by row, one grid a video), since the "
    "family's own is code on the hub"
)
WEIGHTS = False
ENGINE = _remote.ENGINE


def make(path: Path, seed: int) -> None:
    _siglip_rows.write_keye(path, "KeyeForConditionalGeneration", _siglip_rows.KeyeProcessor)
