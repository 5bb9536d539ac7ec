# SPDX-License-Identifier: Apache-2.0
"""Hooks of the towers of Qwen2.5-VL and Qwen3-VL, which further families have too."""

from typing import Any

from vllm.vit_cudagraph.geometry import ViTGeometry, offset_rows, position_rows, window_rows
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin
from vllm.vit_cudagraph.positions import LearnedPositionsMixin, table_rows
from vllm.vit_cudagraph.pruning import VideoPruningMixin


class Qwen2_5TowerMixin(WindowedViTCudaGraphMixin):
    """Most layers attend within windows, some within each frame."""

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


class Qwen2_5VLTower(Qwen2_5TowerMixin, VideoPruningMixin):
    """In a model whose upstream class prunes videos."""


class Qwen3VLTower(LearnedPositionsMixin, VideoPruningMixin):
    """Full attention within each frame, learned positions, deepstack."""

    def vit_geometry(self) -> ViTGeometry:
        return qwen3_geometry(self.vit_tower())


def qwen3_geometry(tower: Any) -> ViTGeometry:
    return ViTGeometry.of_tower(
        tower,
        position_rows("rotary_pos_emb_cos", "rotary_pos_emb_sin"),
        table_rows(),
        offset_rows("sequences", "cu_seqlens", "max_seqlen", "sequence_lengths"),
    )
