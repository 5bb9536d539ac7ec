# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL's tower, which several families have: most layers attend within windows, some within
each frame."""

from vllm.vit_cudagraph.geometry import ViTGeometry, offset_rows, position_rows, window_rows
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin


class Qwen2_5TowerMixin(WindowedViTCudaGraphMixin):
    def vit_geometry(self) -> ViTGeometry:
        tower = self.vit_tower()
        return ViTGeometry.of_tower(
            tower,
            position_rows("rotary_pos_emb_cos", "rotary_pos_emb_sin"),
            window_rows("window_index", "reverse_indices"),
            offset_rows("sequences", "cu_seqlens", "max_seqlen_full", "sequence_lengths_full"),
            offset_rows(
                "windows", "cu_window_seqlens", "max_seqlen_window", "sequence_lengths_window"
            ),
            window_side=tower.window_size // tower.spatial_merge_size // tower.patch_size,
        )
