# SPDX-License-Identifier: Apache-2.0
"""Kanana-V: images alone, Qwen2-VL's tower up to the layer that its projector reads.

The projector convolves each image in its own shape, so it stays outside the graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm.model_executor.models import kanana_v
from vllm.vit_cudagraph.geometry import Grid, ViTGeometry, offset_rows, position_rows
from vllm.vit_cudagraph.mixin import ViTInputs, WindowedViTCudaGraphMixin


class KananaVForConditionalGeneration(
    WindowedViTCudaGraphMixin, kanana_v.KananaVForConditionalGeneration
):
    def vit_geometry(self) -> ViTGeometry:
        return ViTGeometry.of_tower(
            self.vision_model,
            position_rows("rotary_pos_emb_cos", "rotary_pos_emb_sin"),
            offset_rows("sequences", "cu_seqlens", "max_seqlen"),
            output_rows="patches",
            modalities=("image",),
        )

    def vit_tower(self) -> Any:
        return self.vision_model

    def vit_inputs(self, mm_kwargs: Mapping[str, Any]) -> ViTInputs:
        keys = "pixel_values", "vision_grid_thw"
        named = {"pixel_values": mm_kwargs.get(keys[0]), "image_grid_thw": mm_kwargs.get(keys[1])}
        inputs = super().vit_inputs(named)
        # The processor makes float32 whatever the model's dtype is.
        return replace(inputs, keys=keys, pixels=inputs.pixels.to(self.vision_model.dtype))

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        tower, index = self.vision_model, self.config.projector_config.feature_layer_index
        x = tower.patch_embed(pixels).unsqueeze(1)
        # Upstream keeps what goes into each block, and the last one's output: 0 to all of them.
        for block in tower.blocks[: range(len(tower.blocks) + 1)[index]]:
            x = block(x, **metadata)
        return x.squeeze(1)

    def vit_project(self, rows: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        return self.abstractor(rows, grid_thw=torch.tensor(grids))["last_hidden_state"]
