# SPDX-License-Identifier: Apache-2.0
"""Cosmos3-Edge: a SigLIP2 encoder over each frame, and a projector over squares of patches."""

from collections.abc import Mapping, Sequence

import torch

from vllm.model_executor.models import cosmos3_edge
from vllm.vit_cudagraph.geometry import Grid, Rows, ViTGeometry, learned_rows, offset_rows
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin

# vLLM 0.32's processor gives patches row by row, 0.33's square by square. Within a frame attention
# does not mind the order, so patches stay as they come, and positions go with them.
BY_ROW = not hasattr(cosmos3_edge, "_merge_windows_to_raster")


class Cosmos3EdgeForConditionalGeneration(
    WindowedViTCudaGraphMixin, cosmos3_edge.Cosmos3EdgeForConditionalGeneration
):
    def vit_geometry(self) -> ViTGeometry:
        return ViTGeometry(
            patch_size=self.visual.encoder.config.patch_size,
            in_channels=self.visual.encoder.config.num_channels,
            merge_size=self.visual.spatial_merge_size,
            rows={
                **learned_rows("positions"),
                "squares": Rows("patches", "learned", tail="identity"),
                **offset_rows("sequences", "cu_seqlens", "max_seqlen"),
            },
        )

    def vit_learned_rows(self, grids: Sequence[Grid]) -> Mapping[str, torch.Tensor]:
        embeddings = self.visual.encoder.embeddings
        frames = torch.tensor([grid[1:] for grid in grids for _ in range(grid[0])])
        side = embeddings.position_embedding_size
        positions = embeddings.resize_positional_embeddings_packed(
            embeddings.position_embedding.weight.reshape(side, side, -1),
            frames,
            frames.prod(-1).tolist(),
        )
        by_row = torch.arange(len(positions))
        squares = cosmos3_edge.patch_merging_by_param(
            by_row[:, None], torch.tensor(grids), self.visual.spatial_merge_size
        ).flatten()
        if BY_ROW:
            return {"positions": positions, "squares": squares}
        return {"positions": positions[squares], "squares": by_row}

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        tower, encoder = self.visual, self.visual.encoder
        patches = encoder.embeddings.patch_embedding(pixels.to(tower.dtype))
        hidden = encoder.encoder(
            (patches + metadata["positions"])[None], metadata["cu_seqlens"], metadata["max_seqlen"]
        )
        return tower.projector(encoder.post_layernorm(hidden)[0, metadata["squares"]])
