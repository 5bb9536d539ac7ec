# SPDX-License-Identifier: Apache-2.0
"""Learned positions that a tower interpolates from a square table, bilinearly or bicubically.

Which entries a patch takes, and how much of each, depends on its grid alone and is cached. The sum
itself is part of the forward, so no device work is left around a replay, a change of the table is
seen at once, and a patch takes 24 bytes of buffers (in 16 bits; 96 where it is bicubic) instead of
a row of the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.vit_cudagraph.geometry import Grid, Rows, position_rows
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin

TABLE_ROWS, TABLE_WEIGHTS = "pos_table_rows", "pos_table_weights"
"""Names of the two tensors in the metadata."""


class LearnedPositionsMixin(WindowedViTCudaGraphMixin):
    """The mixin of a model whose tower stretches a square table of positions over each frame.

    The tower has the table as ``pos_embed``, ``num_grid_per_side`` entries along each side, and
    reads the position rows as ``pos_embeds`` in its metadata. The model declares
    :func:`table_rows` among its geometry's rows.
    """

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        return {**super().vit_position_rows(grid), **self._table_rows(grid)}

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        positions = interpolated(self._table(), metadata)
        return super().vit_forward(pixels, {**metadata, "pos_embeds": positions})

    def _table(self) -> torch.Tensor:
        return self.vit_tower().pos_embed.weight

    def _table_rows(self, grid: Grid) -> dict[str, torch.Tensor]:
        tower = self.vit_tower()
        side, merge_size = tower.num_grid_per_side, tower.spatial_merge_size
        return bilinear_rows(grid, side, merge_size, self._table())


class BicubicPositionsMixin(LearnedPositionsMixin):
    """The same for a tower that stretches its table, ``embeddings.position_embedding``, edge on
    edge and bicubically."""

    def _table(self) -> torch.Tensor:
        return self.vit_tower().embeddings.position_embedding.weight

    def _table_rows(self, grid: Grid) -> dict[str, torch.Tensor]:
        table = self._table()
        side, merge_size = math.isqrt(len(table)), self.vit_tower().spatial_merge_size
        return bicubic_rows(grid, side, merge_size, table)


def table_rows() -> dict[str, Rows]:
    """What :class:`LearnedPositionsMixin` and :class:`BicubicPositionsMixin` read."""
    return position_rows(TABLE_ROWS, TABLE_WEIGHTS)


def bilinear_rows(
    grid: Grid, side: int, merge_size: int, like: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The four table entries around each patch, and their weights.

    The table is stretched over the frame, corner on corner; patches come in the order of merged
    tokens, and each frame of the item has the same.

    Args:
        grid: The item's.
        side: Entries along each side of the table.
        merge_size: Of the tower.
        like: The table, ``[side ** 2, width]``: says dtype and device.

    Returns:
        Entries, int32, and weights, in the table's dtype; ``[patches, 4]`` each.
    """
    frames, height, width = grid
    (top, down), (left, right) = _along(height, side), _along(width, side)
    corners = [(0, 0), (0, 1), (1, 0), (1, 1)]
    entries = [
        np.minimum(top + below, side - 1)[:, None] * side + np.minimum(left + beside, side - 1)
        for below, beside in corners
    ]
    weights = [
        (down if below else 1 - down)[:, None] * (right if beside else 1 - right)
        for below, beside in corners
    ]
    return {
        TABLE_ROWS: _of_patches(entries, frames, merge_size, torch.int32, like.device),
        TABLE_WEIGHTS: _of_patches(weights, frames, merge_size, like.dtype, like.device),
    }


def _along(patches: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Table entry at or before each patch of one side of a frame, and how far it lies behind."""
    exact = np.linspace(0, side - 1, patches)
    first = exact.astype(np.int64)
    return first, exact - first


def bicubic_rows(
    grid: Grid, side: int, merge_size: int, like: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The sixteen table entries around each patch, and their weights, which may be negative.

    The table is stretched over the frame, edge on edge; past its border the nearest entry counts.
    Arguments and order are those of :func:`bilinear_rows`; gives ``[patches, 16]`` each.
    """
    frames, height, width = grid
    (rows, down), (columns, right) = _cubic_along(height, side), _cubic_along(width, side)
    taps = [(below, beside) for below in range(4) for beside in range(4)]
    entries = [rows[i][:, None] * side + columns[j] for i, j in taps]
    weights = [down[i][:, None] * right[j] for i, j in taps]
    return {
        TABLE_ROWS: _of_patches(entries, frames, merge_size, torch.int32, like.device),
        TABLE_WEIGHTS: _of_patches(weights, frames, merge_size, like.dtype, like.device),
    }


def _cubic_along(patches: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Four table entries around each patch of one side of a frame, and their weights; ``[4,
    patches]`` each."""
    exact = (np.arange(patches) + 0.5) * side / patches - 0.5
    taps = np.floor(exact) + np.arange(-1, 3)[:, None]
    return np.clip(taps, 0, side - 1).astype(np.int64), _cubic(np.abs(exact - taps))


def _cubic(distance: np.ndarray) -> np.ndarray:
    """Keys' cubic convolution with the constant that torch takes."""
    a, x = -0.75, distance
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    return np.where(x <= 1, near, a * (x - 1) * (x - 2) ** 2)


def _of_patches(
    corners: list[np.ndarray],
    frames: int,
    merge_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """``[height, width]`` for each corner to ``[patches, 4]`` in the order of merged tokens. The
    copy to the device waits for nothing that is queued there."""
    frame = np.stack(corners, axis=-1)
    height, width, _ = frame.shape
    blocks = frame.reshape(height // merge_size, merge_size, width // merge_size, merge_size, -1)
    merged = blocks.transpose(0, 2, 1, 3, 4).reshape(height * width, -1)
    rows = torch.from_numpy(np.tile(merged, (frames, 1))).to(dtype)
    return async_tensor_h2d(rows, device)


def interpolated(table: torch.Tensor, metadata: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
    """Position rows ``[patches, width]``: the weighted sum of each patch's table entries."""
    rows, weights = metadata[TABLE_ROWS], metadata[TABLE_WEIGHTS]
    assert rows is not None and weights is not None
    return torch.nn.functional.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)
