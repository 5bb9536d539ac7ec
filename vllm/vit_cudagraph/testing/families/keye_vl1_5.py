# SPDX-License-Identifier: Apache-2.0
"""Keye-VL 1.5: SigLIP with stretched positions; a frame is one sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.vit_cudagraph.testing.families import _remote, _siglip_rows
from vllm.vit_cudagraph.testing.strategies import Batch

PROCESSOR = (
    "ours, of the form that vLLM's class reads (patches row by row, one grid a frame), since the "
    "family's own is code on the hub"
)
WEIGHTS = False
ENGINE = _remote.ENGINE


def make(path: Path, seed: int) -> None:
    architecture = "KeyeVL1_5ForConditionalGeneration"
    _siglip_rows.write_keye(path, architecture, _siglip_rows.Keye1_5Processor)


def make_kwargs(model: Any, batch: Batch) -> dict[str, Any]:
    """Each grid is a video."""
    made = _siglip_rows.make_kwargs(model, batch)
    if batch.modality == "video":
        made["num_frames"] = made["video_grid_thw"][:, 0].clone()
    return made
