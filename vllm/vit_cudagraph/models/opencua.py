# SPDX-License-Identifier: Apache-2.0
"""OpenCUA: the tower of Qwen2.5-VL, images alone."""

from dataclasses import replace

from vllm.model_executor.models import opencua
from vllm.vit_cudagraph.geometry import ViTGeometry
from vllm.vit_cudagraph.models._qwen import Qwen2_5VLTower


class OpenCUAForConditionalGeneration(Qwen2_5VLTower, opencua.OpenCUAForConditionalGeneration):
    def vit_geometry(self) -> ViTGeometry:
        return replace(super().vit_geometry(), modalities=("image",))
