# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M3: full attention within each item, or parts of long ones; positions in three planes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm.models import minimax_m3
from vllm.vit_cudagraph.geometry import Grid, ViTGeometry, offset_rows, position_rows
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin

PLANES = ("rotary_cos", "rotary_sin")


class MiniMaxM3SparseForConditionalGeneration(
    WindowedViTCudaGraphMixin, minimax_m3.MiniMaxM3SparseForConditionalGeneration
):
    def vit_geometry(self) -> ViTGeometry:
        tower, positions = self.vit_tower(), position_rows(*PLANES)
        offsets = offset_rows("sequences", "cu_seqlens", "max_seqlen")
        parts = {"sequences": "item", "sequence_frames": tower.vision_segment_max_frames}
        return ViTGeometry.of_tower(tower, positions, offsets, embed=tower.embeddings, **parts)

    def vit_tower(self) -> Any:
        return self.vision_tower.vision_model

    def vit_modules(self) -> Sequence[Any]:
        return (self.vision_tower,)

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        # Its other entries, which alone go to the device that is named, are not used.
        made = self.vit_tower().prepare_encoder_metadata([list(grid)], device=torch.device("cpu"))
        return {name: made[name].transpose(0, 1) for name in PLANES}

    def vit_forward(self, pixels: torch.Tensor, metadata: Any) -> torch.Tensor:
        planes = {name: metadata[name].transpose(0, 1).contiguous() for name in PLANES}
        return self.vision_tower(pixels, encoder_metadata=metadata | planes)
