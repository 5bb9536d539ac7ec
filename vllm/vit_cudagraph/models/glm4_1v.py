# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V and GLM-4.5V: full attention within each frame, learned positions."""

from vllm.model_executor.models import glm4_1v
from vllm.vit_cudagraph.geometry import ViTGeometry, offset_rows, position_rows
from vllm.vit_cudagraph.positions import BicubicPositionsMixin, table_rows


class _Glm4vTower(BicubicPositionsMixin):
    def vit_geometry(self) -> ViTGeometry:
        return ViTGeometry.of_tower(
            self.visual,
            position_rows("rotary_pos_emb_cos", "rotary_pos_emb_sin"),
            table_rows(),
            offset_rows("sequences", "cu_seqlens", "max_seqlen"),
        )


class Glm4vForConditionalGeneration(_Glm4vTower, glm4_1v.Glm4vForConditionalGeneration):
    pass


class Glm4vMoeForConditionalGeneration(_Glm4vTower, glm4_1v.Glm4vMoeForConditionalGeneration):
    pass
