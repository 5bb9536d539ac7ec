# SPDX-License-Identifier: Apache-2.0
"""Vision attention on the CPU that behaves as variable-length FlashAttention does.

vLLM's CPU platform computes vision attention with ``torch_sdpa_wrapper``, which is kinder than the
kernels of a GPU: it wants every row to lie in a sequence and ignores maximum lengths. A graph that
is wrong on a GPU can be right with it. The operator here keeps the rules of the kernels instead:

* Rows past the last offset are not written. The memory holds whatever it held; to make a use of
  such rows visible they are filled with :data:`UNWRITTEN`.
* Query rows of a sequence at or past ``max_seqlen`` are not written: FlashAttention 2 and Triton
  launch no thread block for them (they drop whole blocks of rows; here every such row is dropped).
  Keys are bounded by the offsets alone.
* A sequence may be empty.

Where a kernel would compute nonsense without a word (a decreasing offset), it raises.

Shape letters: ``N`` rows, ``S`` sequences, ``B`` sequences of one length, ``H`` heads, ``D`` head
size.
"""

import math
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F

from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.v1.attention.backends.registry import AttentionBackendEnum

UNWRITTEN = math.nan
"""What stands in output rows that no sequence writes. Finite values would hide a use of them."""

_OPERATOR = "vit_cudagraph::varlen_attention"
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? max_seqlen, float scale) -> Tensor"
)


def varlen_attention(
    q_NHD: torch.Tensor,
    k_NHD: torch.Tensor,
    v_NHD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention within each sequence, not causal.

    Args:
        q_NHD: queries, (N, H, D).
        k_NHD: keys, (N, H_kv, D); H must be a multiple of H_kv.
        v_NHD: values, (N, H_kv, D_v).
        cu_seqlens: (S + 1,) int32, rows before each sequence; starts at 0, never decreases.
        max_seqlen: 0-dim integer, rows of the longest sequence; None works it out.
        scale: factor on the scores.

    Returns:
        (N, H, D_v) in the dtype of the queries. Rows that no sequence writes are UNWRITTEN.

    Raises:
        ValueError: offsets that are not int32, do not start at 0, decrease or pass N; a
            ``max_seqlen`` of 0 with a sequence that is not empty.
    """
    offsets = _checked_offsets(cu_seqlens, q_NHD.shape[0])
    longest = max((end - start for start, end in pairwise(offsets)), default=0)
    bound = longest if max_seqlen is None else int(max_seqlen)
    if bound <= 0 < longest:
        raise ValueError(
            f"max_seqlen is {bound} but the longest sequence has {longest} rows: the tower was "
            "told of a backend that needs no maximum lengths. Set its attn_backend to FLASH_ATTN."
        )
    out_NHD = q_NHD.new_full((*q_NHD.shape[:2], v_NHD.shape[-1]), UNWRITTEN)
    for start, length, count in _runs(offsets):
        # [count, length, H, D]: views, since the sequences lie one behind the other.
        q, k, v, out = (
            x[start : start + count * length].unflatten(0, (count, length))
            for x in (q_NHD, k_NHD, v_NHD, out_NHD)
        )
        out[:, :bound] = _attend(q[:, :bound], k, v, scale)
    return out_NHD


def _runs(offsets: list[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring sequences of one length, as ``(start, length, count)``; empty ones left out."""
    lengths = [end - start for start, end in pairwise(offsets)]
    start = offsets[0]
    for length, same in groupby(lengths):
        count = len(list(same))
        if length:
            yield start, length, count
        start += length * count


def _attend(
    q_BNHD: torch.Tensor, k_BNHD: torch.Tensor, v_BNHD: torch.Tensor, scale: float
) -> torch.Tensor:
    # (B, N, H, D) -> (B, H, N, D) and back: the layout that vLLM's own CPU path gives to the same
    # function, so that both agree bit for bit.
    q, k, v = (x.transpose(1, 2) for x in (q_BNHD, k_BNHD, v_BNHD))
    grouped = q.shape[1] > k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _checked_offsets(cu_seqlens: torch.Tensor, num_rows: int) -> list[int]:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens must be int32 with one dimension, got {cu_seqlens.dtype} with shape "
            f"{tuple(cu_seqlens.shape)}."
        )
    offsets: list[int] = cu_seqlens.tolist()
    if not offsets or offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {offsets[:1]}.")
    for position, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise ValueError(
                f"cu_seqlens decreases from {start} to {end} at position {position + 1}: unused "
                "slots must repeat the last offset."
            )
    if offsets[-1] > num_rows:
        raise ValueError(f"cu_seqlens ends at {offsets[-1]}, but there are only {num_rows} rows.")
    return offsets


def _shapes_alone(
    q_NHD: torch.Tensor,
    k_NHD: torch.Tensor,
    v_NHD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    return q_NHD.new_empty((*q_NHD.shape[:2], v_NHD.shape[-1]))


def _define_operator() -> None:
    """Define the operator unless this process has it already (a module may be imported anew)."""
    if hasattr(torch.ops.vit_cudagraph, "varlen_attention"):
        return
    torch.library.define(_OPERATOR, _SCHEMA)
    torch.library.impl(_OPERATOR, "cpu", varlen_attention)
    torch.library.register_fake(_OPERATOR, _shapes_alone)


_define_operator()


class ReferenceAttention(MMEncoderAttention):
    """vLLM's layer for vision attention, computed by :func:`varlen_attention` on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # What a tower that asks its layers is to lay its metadata out for.
        self.attn_backend = AttentionBackendEnum.FLASH_ATTN

    def forward_native(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over the rows of a batch, (B, N, H * D) or (B, N, H, D); same shape out.

        Args:
            query, key, value: as above; key and value may have fewer heads.
            cu_seqlens: (S + 1,) int32 over all B * N rows; None makes each of B a sequence.
            max_seqlen: 0-dim integer tensor, see :func:`varlen_attention`.
            sequence_lengths: not used (FlashInfer's).
        """
        batch, rows = query.shape[:2]
        flat = query.dim() != 4
        q, k, v = self.view_qkv_to_4d(query, key, value, batch, rows, key.shape[1])
        if cu_seqlens is None:
            cu_seqlens = torch.arange(
                0, (batch + 1) * rows, rows, dtype=torch.int32, device=query.device
            )
        out = torch.ops.vit_cudagraph.varlen_attention(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens, max_seqlen, self.scale
        )
        return out.reshape(batch, rows, -1) if flat else out.unflatten(0, (batch, rows))

    # The CPU platform calls the first of these in eager mode and the other where custom operators
    # are switched off.
    forward_cpu = forward_native


def register() -> None:
    """Make vLLM build :class:`ReferenceAttention` wherever a model asks for vision attention.

    Must run in the process that builds the model, before it does. May run twice.

    Raises:
        RuntimeError: another class has been registered for the same layer.
    """
    registered = op_registry_oot.get(MMEncoderAttention.__name__)
    if registered is ReferenceAttention:
        return
    if registered is not None:
        raise RuntimeError(
            f"{registered.__module__}.{registered.__qualname__} is registered for vision attention "
            "already: only one class can be. Unset VLLM_PLUGINS entries that register it."
        )
    MMEncoderAttention.register_oot(ReferenceAttention)
