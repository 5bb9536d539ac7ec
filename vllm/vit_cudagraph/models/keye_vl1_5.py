# SPDX-License-Identifier: Apache-2.0
"""Keye-VL 1.5: full attention within each frame; a video may have frames of several sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm.model_executor.models import keye_vl1_5
from vllm.vit_cudagraph.geometry import ViTGeometry
from vllm.vit_cudagraph.mixin import ViTInputs
from vllm.vit_cudagraph.models._siglip_rows import KeyeMixin


class KeyeVL1_5ForConditionalGeneration(KeyeMixin, keye_vl1_5.KeyeVL1_5ForConditionalGeneration):
    """A grid is some frames of one size, and goes through a graph by itself; those of one video
    are joined at the end."""

    def vit_geometry(self) -> ViTGeometry:
        return replace(super().vit_geometry(), sequences="frame")

    def vit_repack(self, mm_kwargs: Mapping[str, Any], items: Sequence[int]) -> dict[str, Any]:
        chosen = super().vit_repack(mm_kwargs, items)
        # Each grid as a video of its own.
        frames = torch.tensor([grid[0] for grid in self.vit_inputs(chosen).grids])
        return {**chosen, "num_frames": frames} if "num_frames" in mm_kwargs else chosen

    def vit_items(self, inputs: ViTInputs, mm_kwargs: Mapping[str, Any]) -> list[int]:
        frames = mm_kwargs.get("num_frames")
        if frames is None:
            return super().vit_items(inputs, mm_kwargs)
        ends = torch.tensor([grid[0] for grid in inputs.grids]).cumsum(0)
        last = torch.searchsorted(ends, frames.flatten().cumsum(0)) + 1
        return last.diff(prepend=last.new_zeros(1)).tolist()

    def vit_finish(
        self, outputs: list[torch.Tensor], mm_kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        parts = iter(outputs)
        counts = self.vit_items(self.vit_inputs(mm_kwargs), mm_kwargs)
        return [torch.cat([next(parts) for _ in range(count)]) for count in counts]
