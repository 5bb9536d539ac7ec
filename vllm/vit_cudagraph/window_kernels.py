# SPDX-License-Identifier: Apache-2.0
"""Kernels for a vision tower's attention that read Q, K and V where the projection wrote them.

Upstream copies Q and K together, turns them (rotary positions), and calls a varlen attention whose
tiles are made for sequences of thousands of rows. A window has 64 rows at most: here it is one
tile, and Q and K are turned on their way in. An unused slot is an empty window and costs one load.

Figures are in ``docs/performance.md``.
"""

from __future__ import annotations

import torch

from vllm.triton_utils import tl, triton

LARGEST_WINDOW = 64
"""Rows of one tile: a sequence above it does not fit :func:`window_attention`."""

_LOG2_E = 1.4426950408889634


def rotated(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, size: int
) -> torch.Tensor:
    """Q and K with rotary positions, contiguous.

    Args:
        qkv: Rows ``[N, 3 * heads * size]``, contiguous: Q, K and V, each head by head.
        cos, sin: ``[N, size / 2]``, contiguous.
        heads, size: Of attention on this rank; size is even.

    Returns:
        ``[2, N, heads, size]`` in the dtype of ``qkv``; computed in 32 bits, rounded once, as
        upstream does.
    """
    rows = qkv.shape[0]
    out = qkv.new_empty((2, rows, heads, size))
    if rows:
        tile = triton.next_power_of_2(2 * heads), triton.next_power_of_2(size // 2)
        _rotate[(rows,)](qkv, out, cos, sin, rows, heads, size, *tile, num_warps=4)
    return out


def window_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    heads: int,
    size: int,
    scale: float,
) -> None:
    """Attention within windows, rotary positions included.

    Args:
        qkv, cos, sin, heads, size: As for :func:`rotated`.
        cu_seqlens: Offsets ``[W + 1]``, int32, which never decrease; no window is longer than
            :data:`LARGEST_WINDOW`.
        out: ``[N, heads * size]``, contiguous; rows that lie in no window are not written.
        scale: Of the scores.
    """
    windows = cu_seqlens.shape[0] - 1
    if windows > 0 and qkv.shape[0]:
        _attend[(windows, heads)](
            qkv,
            cos,
            sin,
            cu_seqlens,
            out,
            scale * _LOG2_E,
            heads,
            size,
            LARGEST_WINDOW,
            max(16, triton.next_power_of_2(size)),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["rows"])
def _rotate(  # type: ignore[no-untyped-def]
    qkv,
    out,
    cos,
    sin,
    rows,
    heads: tl.constexpr,
    size: tl.constexpr,
    head_tile: tl.constexpr,
    half_tile: tl.constexpr,
):
    half: tl.constexpr = size // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, head_tile)[:, None]  # Q's, then K's
    column = tl.arange(0, half_tile)[None, :]
    here = (head < 2 * heads) & (column < half)
    read = qkv + row * (3 * heads * size) + head * size + column
    a = tl.load(read, mask=here, other=0.0).to(tl.float32)
    b = tl.load(read + half, mask=here, other=0.0).to(tl.float32)
    c = tl.load(cos + row * half + column, mask=column < half, other=0.0).to(tl.float32)
    s = tl.load(sin + row * half + column, mask=column < half, other=0.0).to(tl.float32)
    first = (head // heads).to(tl.int64) * rows * heads * size
    write = out + first + row * (heads * size) + (head % heads) * size + column
    tl.store(write, (a * c - b * s).to(out.dtype.element_ty), mask=here)
    tl.store(write + half, (a * s + b * c).to(out.dtype.element_ty), mask=here)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    cu_seqlens,
    out,
    scale,
    heads: tl.constexpr,
    size: tl.constexpr,
    row_tile: tl.constexpr,
    size_tile: tl.constexpr,
):
    window, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu_seqlens + window)
    length = tl.load(cu_seqlens + window + 1) - start
    if length > 0:
        half: tl.constexpr = size // 2
        index = tl.arange(0, row_tile)
        column = tl.arange(0, size_tile)
        row = (start + index).to(tl.int64)[:, None]
        here = (index[:, None] < length) & (column[None, :] < size)
        # A column is turned together with the one half a head away.
        low = column < half
        other = tl.where(low, column + half, column - half)[None, :]
        angle = row * half + tl.where(low, column, column - half)[None, :]
        c = tl.load(cos + angle, mask=here, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=here, other=0.0).to(tl.float32)
        s = tl.where(low[None, :], -s, s)
        read = qkv + row * (3 * heads * size) + head * size
        kind = qkv.dtype.element_ty
        a = tl.load(read + column[None, :], mask=here, other=0.0).to(tl.float32)
        b = tl.load(read + other, mask=here, other=0.0).to(tl.float32)
        q = (a * c + b * s).to(kind)
        read += heads * size
        a = tl.load(read + column[None, :], mask=here, other=0.0).to(tl.float32)
        b = tl.load(read + other, mask=here, other=0.0).to(tl.float32)
        k = (a * c + b * s).to(kind)
        v = tl.load(read + heads * size + column[None, :], mask=here, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(index[None, :] < length, scores, float("-inf"))
        weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
        total = tl.sum(weights, 1)[:, None]
        rows = tl.dot(weights.to(kind), v) / total
        write = out + row * (heads * size) + head * size + column[None, :]
        tl.store(write, rows.to(out.dtype.element_ty), mask=here)
