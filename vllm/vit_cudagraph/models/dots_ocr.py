# SPDX-License-Identifier: Apache-2.0
"""dots.ocr: images only; a tower whose forward makes its metadata itself."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm.model_executor.models import dots_ocr
from vllm.vit_cudagraph.geometry import Grid, ViTGeometry, offset_rows, position_rows
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin


class DotsOCRForCausalLM(WindowedViTCudaGraphMixin, dots_ocr.DotsOCRForCausalLM):
    def vit_tower(self) -> Any:
        return self.vision_tower

    def vit_geometry(self) -> ViTGeometry:
        patches = self.vision_tower.patch_embed.patchifier
        # No single lengths: the tower does not lay offsets out for FlashInfer, which wants them.
        sequences = offset_rows("sequences", "cu_seqlens", "max_seqlen")
        return ViTGeometry(
            patch_size=patches.patch_size,
            temporal_patch_size=patches.temporal_patch_size,
            in_channels=patches.num_channels,
            merge_size=self.vision_tower.spatial_merge_size,
            rows=position_rows("rotary_pos_emb") | sequences,
            modalities=("image",),
        )

    def vit_output_width(self) -> int:
        return min(self.config.hidden_size, self.vision_tower.out_hidden_size)

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        return {"rotary_pos_emb": self.vision_tower.rot_pos_emb([list(grid)])}

    def vit_forward(self, pixels: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        tower = self.vision_tower
        rows = tower.patch_embed(pixels.to(tower.dtype))
        for block in tower.blocks:
            rows = block(rows, **metadata)
        if tower.post_trunk_norm is not None:
            rows = tower.post_trunk_norm(rows)
        return tower.merger(rows)[:, : self.vit_output_width()]
