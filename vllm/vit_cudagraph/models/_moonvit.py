# SPDX-License-Identifier: Apache-2.0
"""MoonViT, the tower of the Kimi models: full attention within each item, a resized table of
positions, patches that come row by row and are merged by an index."""

from typing import Any

from vllm.vit_cudagraph.geometry import ViTGeometry, merge_rows, offset_rows, position_rows
from vllm.vit_cudagraph.positions import ResizedPositionsMixin, table_rows


class MoonViTMixin(ResizedPositionsMixin):
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
