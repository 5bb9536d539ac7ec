# SPDX-License-Identifier: Apache-2.0
"""``silu(gate) * up`` with padded rows in and out.

vLLM's kernel wants rows without padding, so that half of its loads are misaligned where the width
is; this one is told the widths when it is compiled, and reads as much at once as they allow.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vllm.triton_utils import HAS_TRITON, tl, triton

_BLOCK = 2048
"""Columns of one program; measured in ``docs/performance.md``."""


def silu_and_mul(x: torch.Tensor, width: int, padded: int) -> torch.Tensor:
    """One row ``[gate, up, ...]`` to one row ``[silu(gate) * up, 0, ...]``.

    Args:
        x: ``[..., n]`` with ``n >= 2 * width``, contiguous; columns from ``2 * width`` on are not
            read.
        width: Columns of ``gate`` and of ``up``.
        padded: Columns of the result.

    Returns:
        ``[..., padded]``, rounded where vLLM's kernel rounds: after ``silu`` and at the end.
    """
    if not (x.is_cuda and HAS_TRITON):
        product = F.silu(x[..., :width]) * x[..., width : 2 * width]
        return F.pad(product, (0, padded - width))
    out = x.new_empty((*x.shape[:-1], padded))  # no cover: needs a GPU
    launch(x, out, width)  # no cover: needs a GPU
    return out  # no cover: needs a GPU


def launch(x: torch.Tensor, out: torch.Tensor, width: int) -> None:
    """Write every row of ``out`` ``[..., padded]``; ``x`` and ``width`` as above."""
    columns, padded = x.shape[-1], out.shape[-1]  # no cover: needs a GPU
    rows = out.numel() // padded  # no cover: needs a GPU
    if rows:  # no cover: needs a GPU
        grid = (rows, triton.cdiv(padded, _BLOCK))  # no cover: needs a GPU
        _silu_and_mul[grid](x, out, width, padded, columns, _BLOCK)  # no cover: needs a GPU


@triton.jit
def _silu_and_mul(  # type: ignore[no-untyped-def]
    x,
    out,
    width: tl.constexpr,
    padded: tl.constexpr,
    stride: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    real = column < width
    gate = tl.load(x + row * stride + column, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + width + column, mask=real, other=0.0).to(tl.float32)
    # exp of a large number is inf, and 1 / inf the 0 that silu tends to
    silu = (gate / (1.0 + tl.exp(-gate))).to(x.dtype.element_ty).to(tl.float32)
    product = (silu * up).to(x.dtype.element_ty)
    tl.store(out + row * padded + column, tl.where(real, product, 0.0), mask=column < padded)
