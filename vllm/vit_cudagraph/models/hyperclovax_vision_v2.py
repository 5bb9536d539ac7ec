# SPDX-License-Identifier: Apache-2.0
"""HyperCLOVAX SEED Think: Qwen2.5-VL's tower, and a projector of the model's own behind it."""

from collections.abc import Sequence
from typing import Any

import torch

from vllm.model_executor.models import hyperclovax_vision_v2
from vllm.vit_cudagraph.models._qwen import Qwen2_5TowerMixin


class HCXVisionV2ForCausalLM(Qwen2_5TowerMixin, hyperclovax_vision_v2.HCXVisionV2ForCausalLM):
    def vit_modules(self) -> Sequence[Any]:
        return (self.visual, self.mm_projector)

    def vit_output_width(self) -> int:
        return self.mm_projector.out_features

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        return self.mm_projector(super().vit_forward(pixels, metadata))
