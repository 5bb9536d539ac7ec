# SPDX-License-Identifier: Apache-2.0
"""Longest lengths for towers whose layers work them out themselves.

Some of vLLM's towers subtract offsets on the device in every layer, and the attention kernel's
wrapper then reads the largest back. In a graph nothing can be read back. Here the host number that
goes with the offsets takes its place, so that upstream's layers run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.vit_cudagraph.geometry import ViTGeometry


@contextmanager
def longest_from_metadata(
    tower: nn.Module, geometry: ViTGeometry, metadata: Mapping[str, torch.Tensor | None]
) -> Iterator[None]:
    """While open, attention in ``tower`` takes the longest length of its offsets from the metadata.

    Args:
        tower: Its attention layers are called with ``cu_seqlens=`` and ``max_seqlen=``; offsets
            that are not the metadata's own tensors are left alone.
        geometry: Says which longest length covers which offsets.
        metadata: What the tower reads.
    """
    of_offsets = {
        id(metadata[row.covers]): metadata[name]
        for name, row in geometry.rows.items()
        if row.value == "longest" and row.covers is not None
    }

    def take(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        longest = of_offsets.get(id(kwargs.get("cu_seqlens")))
        return args, kwargs if longest is None else {**kwargs, "max_seqlen": longest}

    layers = [module for module in tower.modules() if isinstance(module, MMEncoderAttention)]
    hooks = [layer.register_forward_pre_hook(take, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
