# SPDX-License-Identifier: Apache-2.0
"""PaddleOCR-VL: images, full attention within each."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm.model_executor.models import paddleocr_vl
from vllm.vit_cudagraph.geometry import ViTGeometry
from vllm.vit_cudagraph.models._siglip_rows import SiglipRowsMixin


class _PaddleOCRTower(SiglipRowsMixin):
    def vit_geometry(self) -> ViTGeometry:
        return replace(super().vit_geometry(), modalities=("image",))

    def vit_layers(
        self, layers: Any, x: torch.Tensor, metadata: Mapping[str, torch.Tensor | None]
    ) -> torch.Tensor:
        names = {"cu_seqlens": "cu_seqlens", "rotary_pos_emb": "rotary", "max_seqlen": "max_seqlen"}
        for layer in layers:
            x = layer(x, **{name: metadata[ours] for name, ours in names.items()})
        return x


class PaddleOCRVLForConditionalGeneration(
    _PaddleOCRTower, paddleocr_vl.PaddleOCRVLForConditionalGeneration
):
    pass
