# SPDX-License-Identifier: Apache-2.0
"""Kimi-K2.5: one modality for images and for chunks of videos, of which images are captured."""

from dataclasses import replace

from vllm.model_executor.models import kimi_k25
from vllm.vit_cudagraph.geometry import ViTGeometry
from vllm.vit_cudagraph.models._moonvit import MoonViT3dMixin


class KimiK25ForConditionalGeneration(MoonViT3dMixin, kimi_k25.KimiK25ForConditionalGeneration):
    def vit_geometry(self) -> ViTGeometry:
        return replace(super().vit_geometry(), modalities=("vision_chunk",))
