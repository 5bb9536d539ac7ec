# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni's thinker: a tower like Qwen3-VL's whose forward makes its metadata itself. Audio has
a tower of its own and runs eagerly."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm.model_executor.models import qwen3_omni_moe_thinker
from vllm.vit_cudagraph.geometry import Grid, ViTGeometry, offset_rows, position_rows
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin
from vllm.vit_cudagraph.positions import LearnedPositionsMixin, table_rows

ROTARY = ("rotary_pos_emb_cos", "rotary_pos_emb_sin")


class _Qwen3OmniTower(WindowedViTCudaGraphMixin):
    def vit_geometry(self) -> ViTGeometry:
        tower = self.visual
        if not tower.apply_vit_abs_pos_embed:
            raise ValueError("the tower has no learned positions")
        # No single lengths: the tower does not lay offsets out for FlashInfer, which wants them.
        sequences = offset_rows("sequences", "cu_seqlens", "max_seqlen")
        return ViTGeometry.of_tower(tower, position_rows(*ROTARY), table_rows(), sequences)

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        return dict(zip(ROTARY, self.visual.rot_pos_emb(torch.tensor([grid])), strict=True))

    def vit_forward(self, pixels: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        tower = self.visual
        rows = (tower.patch_embed(pixels.to(tower.dtype)) + metadata["pos_embeds"]).unsqueeze(1)
        attention = {name: metadata[name] for name in (*ROTARY, "cu_seqlens", "max_seqlen")}
        levels, found = tower.deepstack_visual_indexes or (), []
        for number, block in enumerate(tower.blocks):
            rows = block(rows, **attention, sequence_lengths=None)
            if number in levels:
                found.append(rows)
        merged = [tower.merger_list[n](level) for n, level in enumerate(found)]
        return torch.cat([tower.merger(rows), *merged], dim=1)


class Qwen3OmniMoeThinkerForConditionalGeneration(
    LearnedPositionsMixin,
    _Qwen3OmniTower,
    qwen3_omni_moe_thinker.Qwen3OmniMoeThinkerForConditionalGeneration,
):
    def vit_output_width(self) -> int:
        return self.visual_dim + self.multiscale_dim
