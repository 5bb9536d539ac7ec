# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL, dense and MoE: full attention within each frame, learned positions, deepstack."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm.model_executor.models import qwen3_vl, qwen3_vl_moe
from vllm.vit_cudagraph.geometry import Grid, ViTGeometry, offset_rows, position_rows
from vllm.vit_cudagraph.positions import TABLE_ROWS, TABLE_WEIGHTS, bilinear_rows, interpolated
from vllm.vit_cudagraph.pruning import VideoPruningMixin


class _Qwen3VLTower(VideoPruningMixin):
    visual: Any

    def vit_geometry(self) -> ViTGeometry:
        return ViTGeometry.of_tower(
            self.visual,
            position_rows("rotary_pos_emb_cos", "rotary_pos_emb_sin", TABLE_ROWS, TABLE_WEIGHTS),
            offset_rows("sequences", "cu_seqlens", "max_seqlen", "sequence_lengths"),
        )

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        tower, table = self.visual, self.visual.pos_embed.weight
        taken = bilinear_rows(grid, tower.num_grid_per_side, tower.spatial_merge_size, table)
        return {**super().vit_position_rows(grid), **taken}

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        positions = interpolated(self.visual.pos_embed.weight, metadata)
        return super().vit_forward(pixels, {**metadata, "pos_embeds": positions})


class Qwen3VLForConditionalGeneration(_Qwen3VLTower, qwen3_vl.Qwen3VLForConditionalGeneration):
    pass


class Qwen3VLMoeForConditionalGeneration(
    _Qwen3VLTower, qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration
):
    pass
