# SPDX-License-Identifier: Apache-2.0
"""SigLIP over images of any size, as PaddleOCR-VL and Keye have it: patches come row by row, a
square table of positions is stretched over each frame, and ``mlp_AR`` merges after the tower."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm.vit_cudagraph.geometry import (
    Grid,
    ViTGeometry,
    merge_rows,
    offset_rows,
    position_rows,
)
from vllm.vit_cudagraph.lengths import longest_from_metadata
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin
from vllm.vit_cudagraph.positions import interpolated, resized_rows, table_rows


class SiglipRowsMixin(WindowedViTCudaGraphMixin):
    """Hooks for a tower ``visual.vision_model`` and a projector ``mlp_AR``."""

    mlp_AR: Any

    def vit_modules(self) -> Sequence[Any]:
        return (self.visual, self.mlp_AR)

    def vit_geometry(self) -> ViTGeometry:
        embeddings = self.visual.vision_model.embeddings
        size = embeddings.patch_size
        return ViTGeometry(
            patch_size=size,
            merge_size=self.mlp_AR.merge_kernel_size[0],
            rows=position_rows("rotary")
            | table_rows()
            | merge_rows("merge_order")
            | offset_rows("sequences", "cu_seqlens", "max_seqlen"),
            sequences="item",
            pixel_row_shape=(embeddings.config.num_channels, size, size),
        )

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        tower, (frames, height, width) = self.visual.vision_model, grid
        turns = tower.encoder.rotary_pos_emb(max(height, width))
        frame = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        rows = turns[frame.repeat(frames, 1).to(turns.device)].flatten(1)
        table = self._table()
        side = round(len(table) ** 0.5)
        return {"rotary": rows, **resized_rows(grid, table.unflatten(0, (side, side)), "bilinear")}

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        tower, table = self.visual.vision_model, self._table()
        x = tower.embeddings.patch_embedding(pixels).flatten(1)
        # In 32 bits, as torch's interpolation computes, and rounded once.
        x = x + interpolated(table.float(), metadata).to(table.dtype)
        with longest_from_metadata(tower, self.vit_declared, metadata):
            x = self.vit_layers(tower.encoder.layers, x.unsqueeze(0), metadata)
        x = tower.post_layernorm(x).squeeze(0)[metadata["merge_order"]]
        # In the order of merged tokens each of these is a picture of its own, one token in size.
        side, _ = self.mlp_AR.merge_kernel_size
        return self.mlp_AR([x], [(len(x) // side**2, side, side)])[0]

    def vit_layers(
        self, layers: Any, x: torch.Tensor, metadata: Mapping[str, torch.Tensor | None]
    ) -> torch.Tensor:
        """The encoder's layers, one after the other; rows are ``[1, N, width]``."""
        raise NotImplementedError

    def _table(self) -> torch.Tensor:
        return self.visual.vision_model.embeddings.position_embedding.weight


class KeyeMixin(SiglipRowsMixin):
    """Layers that take cosines and sines, each twice, and work out their longest length."""

    def vit_layers(
        self, layers: Any, x: torch.Tensor, metadata: Mapping[str, torch.Tensor | None]
    ) -> torch.Tensor:
        rotary = metadata["rotary"]
        assert rotary is not None
        twice = rotary.repeat(1, 2)
        turns = twice.cos(), twice.sin()
        for layer in layers:
            x = layer(x, None, cu_seqlens=metadata["cu_seqlens"], rope_emb=turns)
        return x
