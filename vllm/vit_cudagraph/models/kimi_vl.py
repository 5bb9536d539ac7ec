# SPDX-License-Identifier: Apache-2.0
"""Kimi-VL: images, whose grids have rows and columns alone; the projector is in the graph."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm.model_executor.models import kimi_vl
from vllm.vit_cudagraph.geometry import Grid
from vllm.vit_cudagraph.models._moonvit import MoonViTMixin


class KimiVLForConditionalGeneration(MoonViTMixin, kimi_vl.KimiVLForConditionalGeneration):
    def vit_modules(self) -> Sequence[Any]:
        return (self.vision_tower, self.multi_modal_projector)

    def vit_keys(self, modality: str) -> tuple[str, str]:
        return "pixel_values", "image_grid_hws"

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        rotary = self.vision_tower.encoder.get_rope_freqs_cis([grid[1:]])
        return {**super().vit_position_rows(grid), "rope_freqs_cis": rotary}

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        return self.multi_modal_projector(super().vit_forward(pixels, metadata))
