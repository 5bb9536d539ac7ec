# SPDX-License-Identifier: Apache-2.0
"""LLaVA-OneVision-2: its processor gives a position (frame, row, column) for every patch.

Positions are data, not derived from grids. They go into the graphs beside the pixels, as columns of
the pixel rows: digits to the base 256, which 16-bit floats hold exactly. A video has a grid for
each frame. Frames attend to each other only in videos of the codec backend, which run eagerly."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm.model_executor.models import llava_onevision2
from vllm.vit_cudagraph.geometry import MALFORMED, Grid, NotCapturable, ViTGeometry, offset_rows
from vllm.vit_cudagraph.mixin import ViTInputs, WindowedViTCudaGraphMixin

DIGITS = 9
"""Columns of a patch's position: three digits for each of its three numbers, lowest first."""


class LlavaOnevision2ForConditionalGeneration(
    WindowedViTCudaGraphMixin, llava_onevision2.LlavaOnevision2ForConditionalGeneration
):
    def vit_geometry(self) -> ViTGeometry:
        patches = self.visual.embeddings
        return ViTGeometry(
            patch_size=patches.patch_size,
            in_channels=patches.in_channels,
            merge_size=self.visual.spatial_merge_size,
            rows=offset_rows("sequences", "cu_seqlens", "max_seqlen"),
            pixel_row_shape=(patches.in_channels * patches.patch_size**2 + DIGITS,),
        )

    def vit_output_width(self) -> int:
        return self.config.text_config.hidden_size

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        return {}

    def vit_inputs(self, mm_kwargs: Mapping[str, Any]) -> ViTInputs:
        inputs = super().vit_inputs(mm_kwargs)
        positions = mm_kwargs.get(_beside(inputs))
        if positions is None:
            raise NotCapturable(MALFORMED, f"no {_beside(inputs)}")
        still = inputs.modality == "image"
        frames = [1] * len(inputs.grids) if still else mm_kwargs["video_num_frames"]
        digits = torch.cat([positions % 256, positions // 256 % 256, positions // 65536], dim=1)
        pixels = torch.cat([inputs.pixels, digits.to(inputs.pixels)], dim=1)
        return replace(inputs, pixels=pixels, grids=_items(inputs.grids, frames))

    def vit_repack(self, mm_kwargs: Mapping[str, Any], items: Sequence[int]) -> dict[str, Any]:
        inputs = self.vit_inputs(mm_kwargs)
        ends, grids = self.vit_ends(inputs.grids), [inputs.grids[i] for i in items]
        made: dict[str, Any] = {
            name: torch.cat(
                [mm_kwargs[name][ends[i] : ends[i + 1]] for i in items] or [mm_kwargs[name][:0]]
            )
            for name in (inputs.keys[0], _beside(inputs))
        }
        if inputs.modality == "video":
            made["video_num_frames"] = [t for t, _, _ in grids]
        return made | {inputs.keys[1]: [(1, h, w) for t, h, w in grids for _ in range(t)]}

    def vit_forward(self, pixels: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        tower, (low, middle, high) = self.visual, pixels[:, -DIGITS:].float().split(3, dim=1)
        rotary = tower.rotary_pos_emb.forward_from_positions(low + 256 * middle + 65536 * high)
        rows = tower.embeddings(pixels[:, :-DIGITS].to(tower.dtype).contiguous())
        rows = tower.layernorm_pre(rows)
        for block in tower.encoder.layers:
            rows = block(rows, rotary_pos_emb=rotary, **metadata)
        return tower.merger(rows)


def _beside(inputs: ViTInputs) -> str:
    """Name of the positions beside the pixels."""
    return inputs.keys[0].replace("pixel_values", "patch_positions")


def _items(rows: list[Grid], frames: Iterable[int]) -> list[Grid]:
    """One grid an item, of as many grids of single frames as the item has frames."""
    items, first = [], 0
    for count in map(int, frames):
        alike = set(rows[first : first + count])
        if len(alike) != 1 or rows[first][0] != 1:
            raise NotCapturable("frames attend to each other, or differ in size", f"{alike}")
        items.append((count, *rows[first][1:]))
        first += count
    if first != len(rows):
        raise NotCapturable(MALFORMED, f"{len(rows)} grids for {first} frames")
    return items
