# SPDX-License-Identifier: Apache-2.0
"""Learned positions that a tower interpolates from a table.

Which entries a patch takes, and how much of each, depends on its grid alone and is cached. The sum
itself is part of the forward, so no device work is left around a replay, a change of the table is
seen at once, and a patch takes 24 bytes of buffers (in 16 bits) instead of a row of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
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
        tower = self.vit_tower()
        taken = bilinear_rows(
            grid, tower.num_grid_per_side, tower.spatial_merge_size, tower.pos_embed.weight
        )
        return {**super().vit_position_rows(grid), **taken}

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        positions = interpolated(self.vit_tower().pos_embed.weight, metadata)
        return super().vit_forward(pixels, {**metadata, "pos_embeds": positions})


def table_rows() -> dict[str, Rows]:
    """What :class:`LearnedPositionsMixin` reads."""
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


class ResizedPositionsMixin(WindowedViTCudaGraphMixin):
    """The mixin of a model whose tower resizes a table of positions to each frame by torch's
    ``interpolate``.

    The patch embedding has the table as ``pos_emb``, a module with a ``weight`` of
    ``[height, width, features]`` and an ``interpolation_mode``, and the tower reads the position
    rows as ``pos_embeds`` in its metadata. Patches come row by row. The model declares
    :func:`table_rows` among its geometry's rows, and adds its other position rows to
    :meth:`vit_position_rows`, which gives those of the table alone.
    """

    def vit_position_rows(self, grid: Grid) -> Mapping[str, Any]:
        table = self.vit_tower().patch_embed.pos_emb
        return resized_rows(grid, table.weight, table.interpolation_mode)

    def vit_forward(
        self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor | None]
    ) -> torch.Tensor:
        table = self.vit_tower().patch_embed.pos_emb.weight
        # In 32 bits, as torch's interpolation computes, and rounded once.
        positions = interpolated(table.flatten(0, 1).float(), metadata).to(table.dtype)
        return super().vit_forward(pixels, {**metadata, "pos_embeds": positions})


def resized_rows(grid: Grid, table: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
    """The table entries that each patch takes when the table is resized to a frame, and how much
    of each.

    Args:
        grid: The item's.
        table: ``[height, width, features]``.
        mode: Of ``torch.nn.functional.interpolate``, ``bilinear`` or ``bicubic``.

    Returns:
        Entries, int32, and weights, float32; ``[patches, 4]`` or ``[patches, 16]`` each, row by
        row, the same for every frame.
    """
    frames, height, width = grid
    (rows, down), (columns, across) = (
        _taps(patches, side, mode)
        for patches, side in ((height, table.shape[0]), (width, table.shape[1]))
    )
    entries = rows[:, None, :, None] * table.shape[1] + columns[None, :, None, :]
    weights = down[:, None, :, None] * across[None, :, None, :]
    taken = {TABLE_ROWS: entries.to(torch.int32), TABLE_WEIGHTS: weights}
    return {
        name: async_tensor_h2d(made.reshape(height * width, -1).repeat(frames, 1), table.device)
        for name, made in taken.items()
    }


@lru_cache(maxsize=1024)
def _taps(patches: int, side: int, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of ``side`` entries along an axis each of so many patches takes, and how much of each:
    what torch makes of unit vectors. Indices and float32, ``[patches, 2 or 4]`` each."""
    with torch.inference_mode(False), torch.device("cpu"):
        units = torch.eye(side)[None, :, :, None]
        shares = torch.nn.functional.interpolate(units, size=(patches, 1), mode=mode)[0, :, :, 0].T
        entries = shares.abs().topk(min(side, 4 if mode == "bicubic" else 2), dim=1).indices
        return entries, shares.gather(1, entries)
