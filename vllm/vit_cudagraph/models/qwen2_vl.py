# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL: full attention within each frame."""

from vllm.model_executor.models import qwen2_vl
from vllm.vit_cudagraph.geometry import ViTGeometry, offset_rows, position_rows
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin


class Qwen2VLForConditionalGeneration(
    WindowedViTCudaGraphMixin, qwen2_vl.Qwen2VLForConditionalGeneration
):
    def vit_geometry(self) -> ViTGeometry:
        return ViTGeometry.of_tower(
            self.visual,
            position_rows("rotary_pos_emb_cos", "rotary_pos_emb_sin"),
            offset_rows("sequences", "cu_seqlens", "max_seqlen"),
        )
