# SPDX-License-Identifier: Apache-2.0
"""OpenPangu-VL: windows in most layers, tokens merged from several of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm.model_executor.models import openpangu_vl
from vllm.vit_cudagraph.geometry import (
    Grid,
    ViTGeometry,
    offset_rows,
    position_rows,
    window_rows,
)
from vllm.vit_cudagraph.lengths import longest_from_metadata
from vllm.vit_cudagraph.mixin import ViTInputs, WindowedViTCudaGraphMixin


class OpenPanguVLForConditionalGeneration(
    WindowedViTCudaGraphMixin, openpangu_vl.OpenPanguVLForConditionalGeneration
):
    def vit_geometry(self) -> ViTGeometry:
        tower = self.visual
        return ViTGeometry.of_tower(
            tower,
            position_rows("cos", "sin"),
            window_rows("window_index", "reverse_indices"),
            offset_rows("sequences", "cu_seqlens", "max_seqlen_full"),
            offset_rows("windows", "cu_window_seqlens", "max_seqlen_window"),
            window_side=tower.window_size // tower.spatial_merge_size // tower.patch_size,
        )

    def vit_inputs(self, mm_kwargs: Mapping[str, Any]) -> ViTInputs:
        """Images come as the camera made them, one frame a patch; videos are normalised already."""
        inputs = super().vit_inputs(mm_kwargs)
        if inputs.modality != "image":
            return inputs
        embed = self.visual.patch_embed
        pixels = openpangu_vl.rescale_and_normalize(
            inputs.pixels.type(self.visual.dtype).unflatten(-1, (self.channel, -1, 1)),
            self.do_rescale,
            self.rescale_factor,
            self.do_normalize,
            self.image_mean,
            self.image_std,
        )
        frames = pixels.mT.expand(-1, -1, embed.temporal_patch_size, -1)
        return replace(inputs, pixels=frames.flatten(1))

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        tower, grids = self.visual, torch.tensor([grid])
        order, _ = tower.get_window_index(grids)
        rows = tower.rot_pos_emb(grids).unflatten(0, (-1, tower.spatial_merge_unit))[order]
        cos, sin = tower.cal_cos_sin(rows.flatten(0, 1).to(tower.dtype))
        return {"cos": cos, "sin": sin}

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        tower, levels, read = self.visual, [], metadata
        x = tower.patch_embed(pixels).unflatten(0, (-1, tower.spatial_merge_unit))
        x = x[read["window_index"]].flatten(0, 1)
        with longest_from_metadata(tower, self.vit_declared, metadata):
            for index, block in enumerate(tower.blocks):
                full = index in tower.fullatt_block_indexes
                offsets = read["cu_seqlens" if full else "cu_window_seqlens"]
                x = block(x, cu_seqlens=offsets, cos=read["cos"], sin=read["sin"])
                if index in tower.take_indices:
                    levels.append(tower.final_layernorm(x))
        merged = zip(tower.merger, tower.select_layer, strict=True)
        tokens = sum(merger(levels[level]) for merger, level in merged)
        return tower.vision_projection(tokens[read["reverse_indices"]])
