# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL, dense and MoE: full attention within each frame, learned positions, deepstack."""

from vllm.model_executor.models import qwen3_vl, qwen3_vl_moe
from vllm.vit_cudagraph.geometry import ViTGeometry, offset_rows, position_rows
from vllm.vit_cudagraph.positions import LearnedPositionsMixin, table_rows
from vllm.vit_cudagraph.pruning import VideoPruningMixin


class _Qwen3VLTower(LearnedPositionsMixin, VideoPruningMixin):
    def vit_geometry(self) -> ViTGeometry:
        return ViTGeometry.of_tower(
            self.vit_tower(),
            position_rows("rotary_pos_emb_cos", "rotary_pos_emb_sin"),
            table_rows(),
            offset_rows("sequences", "cu_seqlens", "max_seqlen", "sequence_lengths"),
        )


class Qwen3VLForConditionalGeneration(_Qwen3VLTower, qwen3_vl.Qwen3VLForConditionalGeneration):
    pass


class Qwen3VLMoeForConditionalGeneration(
    _Qwen3VLTower, qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration
):
    pass
