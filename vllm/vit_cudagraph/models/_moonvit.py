# SPDX-License-Identifier: Apache-2.0
"""MoonViT, the tower of the Kimi models: full attention within each item, a resized table of
positions, patches that come row by row and are merged by an index."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm.model_executor.models.kimi_k25_vit import mm_projector_forward, vision_tower_forward
from vllm.vit_cudagraph.geometry import Grid, ViTGeometry, merge_rows, offset_rows, position_rows
from vllm.vit_cudagraph.positions import ResizedPositionsMixin, table_rows


class MoonViTMixin(ResizedPositionsMixin):
    vision_tower: Any
    mm_projector: Any

    def vit_tower(self) -> Any:
        return self.vision_tower

    def vit_geometry(self) -> ViTGeometry:
        tower = self.vit_tower()
        (merge_size,) = set(tower.merge_kernel_size)
        return ViTGeometry(
            patch_size=tower.patch_embed.patch_size[0],
            merge_size=merge_size,
            rows=position_rows("rope_freqs_cis")
            | table_rows()
            | merge_rows("merge_gather_idx")
            | offset_rows("sequences", "cu_seqlens", "max_seqlen"),
            sequences="item",
            modalities=("image",),
            pixel_row_shape=(3, *tower.patch_embed.patch_size),
        )


class MoonViT3dMixin(MoonViTMixin):
    """With the frames of an item pooled at the end of the tower, which is captured for one frame;
    items of several run through upstream's own forward."""

    def vit_geometry(self) -> ViTGeometry:
        images = super().vit_geometry()
        lengths = offset_rows("sequences", "cu_seqlens", "max_seqlen", "sequence_lengths")
        return replace(images, rows={**images.rows, **lengths}, temporal_merge="pool")

    def vit_modules(self) -> Sequence[Any]:
        return (self.vision_tower, self.mm_projector)

    def vit_keys(self, modality: str) -> tuple[str, str]:
        return "pixel_values", "grid_thws"

    def vit_capturable(self, grid: Grid) -> bool:
        return grid[0] == 1

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        tower = self.vision_tower
        device = tower.patch_embed.proj.weight.device
        rotary = tower.encoder.rope_2d.get_freqs_cis([list(grid)], device)
        return {**super().vit_position_rows(grid), "rope_freqs_cis": rotary}

    def vit_eager(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        if all(map(self.vit_capturable, grids)):
            return super().vit_eager(pixels, grids)
        tower, projector, numbers = self.vision_tower, self.mm_projector, torch.tensor(grids)
        return torch.cat(vision_tower_forward(tower, pixels, numbers, projector, False))

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        index = metadata["merge_gather_idx"]
        assert index is not None
        by_token = index.view(-1, self.vit_declared.merge_unit)
        rows = super().vit_forward(pixels, {**metadata, "merge_gather_idx": by_token})
        return mm_projector_forward(self.mm_projector, [rows])[0]
