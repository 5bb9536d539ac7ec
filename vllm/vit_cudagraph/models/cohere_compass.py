# SPDX-License-Identifier: Apache-2.0
"""Cohere Compass: images alone, full attention, learned positions, deepstack."""

from vllm.model_executor.models import cohere_compass
from vllm.vit_cudagraph.geometry import ViTGeometry, offset_rows, position_rows
from vllm.vit_cudagraph.positions import LearnedPositionsMixin, table_rows


class CohereCompassForConditionalGeneration(
    LearnedPositionsMixin, cohere_compass.CohereCompassForConditionalGeneration
):
    def vit_geometry(self) -> ViTGeometry:
        return ViTGeometry.of_tower(
            self.visual,
            position_rows("rotary_pos_emb_cos", "rotary_pos_emb_sin"),
            table_rows(),
            offset_rows("sequences", "cu_seqlens", "max_seqlen", "sequence_lengths"),
            modalities=("image",),
        )
