# SPDX-License-Identifier: Apache-2.0
"""Ovis2.5 and Ovis2.6: SigLIP2 with windows and learned positions, and a visual vocabulary whose
embeddings are mixed by probability."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from vllm.model_executor.models import ovis2_5
from vllm.vit_cudagraph.geometry import (
    Grid,
    ViTGeometry,
    offset_rows,
    position_rows,
    window_rows,
)
from vllm.vit_cudagraph.lengths import longest_from_metadata
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin, of_items
from vllm.vit_cudagraph.positions import bicubic_rows, interpolated, table_rows


class Ovis2_5(WindowedViTCudaGraphMixin, ovis2_5.Ovis2_5):
    def vit_tower(self) -> Any:
        return self.visual_tokenizer

    def vit_modules(self) -> Sequence[Any]:
        return (self.visual_tokenizer, self.vte)

    def vit_geometry(self) -> ViTGeometry:
        config = self.config.vit_config
        learned = table_rows() if config.preserve_original_pe else {}
        return ViTGeometry(
            config.patch_size,
            config.hidden_stride,
            position_rows("cos", "sin")
            | learned
            | window_rows("window_index", "reverse_indices")
            | offset_rows("sequences", "cu_seqlens", "max_seqlen_full")
            | offset_rows("windows", "cu_window_seqlens", "max_seqlen_window"),
            temporal_patch_size=config.temporal_patch_size,
            in_channels=config.num_channels,
            window_side=config.window_size // config.hidden_stride // config.patch_size,
        )

    def vit_keys(self, modality: str) -> tuple[str, str]:
        prefix = "video_" if modality == "video" else ""
        return f"{prefix}pixel_values", f"{prefix}grids"

    def vit_repack(self, mm_kwargs: Mapping[str, Any], items: Sequence[int]) -> dict[str, Any]:
        name = _indicators(mm_kwargs)
        return super().vit_repack(mm_kwargs, items) | {name: of_items(mm_kwargs[name], items)}

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        tower, grids = self.visual_tokenizer.vit.vision_model, torch.tensor([grid])
        encoder, embeddings = tower.encoder, tower.embeddings
        order, _ = encoder.get_window_index(grids)
        rows = encoder.rot_pos_emb(grids).unflatten(0, (-1, encoder.spatial_merge_unit))
        rows = rows[order].flatten(0, 1).repeat(1, 2)
        made = {"cos": rows.cos(), "sin": rows.sin()}
        if embeddings.preserve_original_pe:
            side, table = embeddings.position_embedding_size, embeddings.position_embedding.weight
            made |= bicubic_rows(grid, side, embeddings.hidden_stride, table.float())
        return made

    def vit_forward(self, pixels: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        tokenizer, tower = self.visual_tokenizer, self.visual_tokenizer.vit.vision_model
        encoder, embeddings = tower.encoder, tower.embeddings
        x = embeddings(pixels, ())  # without grids no positions are added
        if embeddings.preserve_original_pe:
            # In float32, as upstream's interpolation sums, and rounded once.
            x = x + interpolated(embeddings.position_embedding.weight.float(), metadata).to(x.dtype)
        x = x.unflatten(0, (-1, encoder.spatial_merge_unit))
        x = x[metadata["window_index"]].flatten(0, 1)
        full = encoder.fullatt_block_indexes or range(len(encoder.layers))
        with longest_from_metadata(encoder, self.vit_declared, metadata):
            for index, layer in enumerate(encoder.layers):
                offsets = metadata["cu_seqlens" if index in full else "cu_window_seqlens"]
                x = layer(x, offsets, (metadata["cos"], metadata["sin"]))
        x = x.unflatten(0, (-1, encoder.spatial_merge_unit))[metadata["reverse_indices"]]
        words = tokenizer.tokenize(tokenizer.head(x.flatten(1)))
        return self.vte(F.pad(words, (0, len(ovis2_5.INDICATOR_IDS))))

    def vit_finish(
        self, outputs: list[torch.Tensor], mm_kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Each item between the embeddings of its indicator tokens."""
        marks = map(self.vte, mm_kwargs[_indicators(mm_kwargs)])
        marked = zip(marks, outputs, strict=True)
        return [torch.cat([mark[:1], rows, mark[1:]]) for mark, rows in marked]


def _indicators(mm_kwargs: Mapping[str, Any]) -> str:
    return next(name for name in mm_kwargs if name.endswith("indicator_tokens"))
