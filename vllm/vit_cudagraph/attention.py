# SPDX-License-Identifier: Apache-2.0
"""Vision attention with fewer passes over Q and K; see ``window_kernels.py``.

Takes the place of the attention module that Qwen2.5-VL's and Qwen3-VL's blocks share, keeps its
parts under their names, and hands everything that it was not made for to the module it replaced.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.window_kernels import LARGEST_WINDOW, rotated, window_attention

_IN_ROWS = frozenset({AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN})
"""Backends whose offsets count rows, as the window kernel's do."""

_REPLACED = "vllm.model_executor.models.qwen2_5_vl.Qwen2_5_VisionAttention"
"""By name: no model is imported for it."""

_DTYPES = (torch.bfloat16, torch.float16)


class FusedVisionAttention(nn.Module):
    """Upstream's vision attention, its projections and its attention layer as they are.

    Args:
        replaced: The module whose place this one takes.
    """

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.qkv, self.proj, self.attn = replaced.qkv, replaced.proj, replaced.attn
        self.heads = replaced.num_attention_heads_per_partition
        self.size = replaced.hidden_size_per_attention_head
        # In a tuple: as a submodule it would name every weight twice.
        self._replaced = (replaced,)

    def forward(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor,
        rotary_pos_emb_cos: torch.Tensor,
        rotary_pos_emb_sin: torch.Tensor,
        max_seqlen: torch.Tensor | None,
        sequence_lengths: torch.Tensor | None,
    ) -> torch.Tensor:
        """Rows ``[N, 1, width]`` to the same; arguments as upstream's block gives them."""
        cos, sin = rotary_pos_emb_cos, rotary_pos_emb_sin
        if not self._made_for(x, cos):
            return self._replaced[0](x, cu_seqlens, cos, sin, max_seqlen, sequence_lengths)
        qkv, _ = self.qkv(x)
        rows, cos, sin = (part.contiguous() for part in (qkv.flatten(0, 1), cos, sin))
        if self._are_windows(max_seqlen):
            context = self._empty(rows)
            window_attention(
                rows, cos, sin, cu_seqlens, context, self.heads, self.size, self.attn.scale
            )
        else:
            q, k = rotated(rows, cos, sin, self.heads, self.size).unsqueeze(1).unbind(0)
            v = rows.view(1, -1, 3, self.heads, self.size)[:, :, 2]
            context = self.attn(
                query=q,
                key=k,
                value=v,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                sequence_lengths=sequence_lengths,
            )
        output, _ = self.proj(context.reshape(-1, 1, self.heads * self.size))
        return output

    def _made_for(self, x: torch.Tensor, cos: torch.Tensor | None) -> bool:
        return (
            HAS_TRITON
            and x.is_cuda
            and x.dtype in _DTYPES
            and x.shape[1] == 1
            and cos is not None
            and cos.shape == (x.shape[0], self.size // 2)
        )

    def _are_windows(self, max_seqlen: torch.Tensor | None) -> bool:
        """From the bound that a graph bakes: what is replayed is never longer."""
        layer = self.attn
        if max_seqlen is None or max_seqlen.device.type != "cpu":
            return False
        in_rows = layer.attn_backend in _IN_ROWS and not layer.fp8_enabled
        return in_rows and 0 < int(max_seqlen) <= LARGEST_WINDOW

    def _empty(self, rows: torch.Tensor) -> torch.Tensor:
        """Room for the context. In a graph rows past the last window are 0, as upstream has them:
        nothing writes there, and what memory held would flow on."""
        shape = (rows.shape[0], self.heads * self.size)
        capturing = rows.is_cuda and torch.cuda.is_current_stream_capturing()
        return rows.new_zeros(shape) if capturing else rows.new_empty(shape)


def install(tower: Any) -> int:
    """Replace a tower's attention modules of the kind this was written for; returns how many."""
    found = [
        (module, name)
        for module in tower.modules()
        for name, child in module.named_children()
        if _is_replaced(child)
    ]
    for module, name in found:
        setattr(module, name, FusedVisionAttention(getattr(module, name)))
    return len(found)


def _is_replaced(module: nn.Module) -> bool:
    """Exactly upstream's class, since a subclass may do something else, with the arguments that it
    had when this was written."""
    kind = type(module)
    if f"{kind.__module__}.{kind.__qualname__}" != _REPLACED:
        return False
    theirs, ours = (
        list(inspect.signature(c.forward).parameters) for c in (kind, FusedVisionAttention)
    )
    layer: Any = module.attn
    return theirs == ours and layer.num_kv_heads == layer.num_heads
