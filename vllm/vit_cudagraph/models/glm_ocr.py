# SPDX-License-Identifier: Apache-2.0
"""GLM-OCR: full attention within each frame.

Upstream's tower makes its metadata inside its forward and ignores what it is given, so its layers
are called here.
"""

from collections.abc import Mapping

import torch

from vllm.model_executor.models import glm_ocr
from vllm.vit_cudagraph.geometry import Grid, ViTGeometry, offset_rows, position_rows
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin


class GlmOcrForConditionalGeneration(
    WindowedViTCudaGraphMixin, glm_ocr.GlmOcrForConditionalGeneration
):
    def vit_geometry(self) -> ViTGeometry:
        return ViTGeometry.of_tower(
            self.visual,
            position_rows("rotary_pos_emb_cos", "rotary_pos_emb_sin"),
            offset_rows("sequences", "cu_seqlens", "max_seqlen"),
        )

    def vit_position_rows(self, grid: Grid) -> Mapping[str, torch.Tensor]:
        cos, sin, _ = self.visual.rot_pos_emb([list(grid)])
        return {"rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        tower, side = self.visual, self.visual.spatial_merge_size
        x = tower.patch_embed(tower.input_norm(pixels, tower.dtype)).unsqueeze(1)
        for block in tower.blocks:
            x = block(x, **metadata)
        squares = tower.post_layernorm(x).view(-1, side, side, tower.hidden_size)
        tokens = tower.downsample(squares.permute(0, 3, 1, 2)).view(-1, tower.out_hidden_size)
        return tower.merger(tokens)
