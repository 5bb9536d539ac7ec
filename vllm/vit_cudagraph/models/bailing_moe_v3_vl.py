# SPDX-License-Identifier: Apache-2.0
"""Ling-VL (Bailing): the tower of Qwen3-VL, images alone, and a projector behind it."""

from dataclasses import replace
from typing import Any

import torch

from vllm.model_executor.models import bailing_moe_v3_vl
from vllm.vit_cudagraph.geometry import ViTGeometry
from vllm.vit_cudagraph.models._qwen import qwen3_geometry
from vllm.vit_cudagraph.positions import LearnedPositionsMixin


class BailingMoeV3VLForConditionalGeneration(
    LearnedPositionsMixin, bailing_moe_v3_vl.BailingMoeV3VLForConditionalGeneration
):
    def vit_geometry(self) -> ViTGeometry:
        return replace(qwen3_geometry(self.visual), modalities=("image",))

    def vit_modules(self) -> tuple[Any, ...]:
        return (self.visual, self.linear_proj)

    def vit_output_width(self) -> int:
        return self.config.text_config.hidden_size

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        return self.linear_proj(super().vit_forward(pixels, metadata))
