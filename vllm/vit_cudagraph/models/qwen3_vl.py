# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL, dense and MoE: full attention within each frame, learned positions, deepstack."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.model_executor.models import qwen3_vl, qwen3_vl_moe
from vllm.vit_cudagraph.geometry import (
    Grid,
    ViTGeometry,
    learned_rows,
    offset_rows,
    position_rows,
)
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin


class _Qwen3VLTower(WindowedViTCudaGraphMixin):
    visual: Any

    def vit_geometry(self) -> ViTGeometry:
        return ViTGeometry.of_tower(
            self.visual,
            position_rows("rotary_pos_emb_cos", "rotary_pos_emb_sin"),
            learned_rows("pos_embeds"),
            offset_rows("sequences", "cu_seqlens", "max_seqlen", "sequence_lengths"),
        )

    def vit_learned_rows(self, grids: Sequence[Grid]) -> Mapping[str, Any]:
        return {"pos_embeds": self.visual.fast_pos_embed_interpolate(grids)}


class Qwen3VLForConditionalGeneration(_Qwen3VLTower, qwen3_vl.Qwen3VLForConditionalGeneration):
    pass


class Qwen3VLMoeForConditionalGeneration(
    _Qwen3VLTower, qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration
):
    pass
