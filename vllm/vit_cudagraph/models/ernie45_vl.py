# SPDX-License-Identifier: Apache-2.0
"""Ernie4.5-VL: full attention within each frame; a resampler merges patches and pairs of frames."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm.model_executor.models import ernie45_vl
from vllm.vit_cudagraph.geometry import Grid, ViTGeometry, offset_rows, position_rows
from vllm.vit_cudagraph.mixin import ViTInputs, WindowedViTCudaGraphMixin


class Ernie4_5_VLMoeForConditionalGeneration(
    WindowedViTCudaGraphMixin, ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration
):
    def vit_geometry(self) -> ViTGeometry:
        return ViTGeometry.of_tower(
            self.vision_model,
            position_rows("rotary_pos_emb"),
            offset_rows("sequences", "cu_seqlens", "max_seqlen"),
            temporal_merge="halve",
            frame_step=2,
            output_rows="patches",
        )

    def vit_tower(self) -> Any:
        return self.vision_model

    def vit_inputs(self, mm_kwargs: Mapping[str, Any]) -> ViTInputs:
        # The processor makes pixels of the checkpoint's dtype, whatever the model's is.
        inputs = super().vit_inputs(mm_kwargs)
        return replace(inputs, pixels=inputs.pixels.type(self.vision_model.dtype))

    def vit_project(self, rows: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        return self.resampler_model(rows, torch.tensor(grids))
