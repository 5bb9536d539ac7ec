# SPDX-License-Identifier: Apache-2.0
"""Layers that work out their longest length get the metadata's instead."""

from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.vit_cudagraph.geometry import ViTGeometry, offset_rows, window_rows
from vllm.vit_cudagraph.lengths import longest_from_metadata


class Told(MMEncoderAttention):
    """Gives back the longest length that it is told."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, **kwargs: Any) -> Any:
        return kwargs["max_seqlen"]


GEOMETRY = ViTGeometry(
    14,
    2,
    offset_rows("sequences", "full", "full_longest")
    | offset_rows("windows", "windows", "window_longest")
    | window_rows("order", "inverse"),
    window_side=2,
)


def test_each_longest_goes_with_its_own_offsets() -> None:
    full, windows = torch.tensor([0, 8]), torch.tensor([0, 4, 8])
    metadata = {
        "full": full,
        "windows": windows,
        "full_longest": torch.tensor(64),
        "window_longest": torch.tensor(16),
    }
    layer, theirs = Told(), torch.tensor(8)
    tower = nn.Sequential(nn.Linear(2, 2), layer)
    with longest_from_metadata(tower, GEOMETRY, metadata):
        assert layer(cu_seqlens=full, max_seqlen=theirs) is metadata["full_longest"]
        assert layer(cu_seqlens=windows, max_seqlen=theirs) is metadata["window_longest"]
        assert layer(cu_seqlens=full.clone(), max_seqlen=theirs) is theirs
    assert layer(cu_seqlens=full, max_seqlen=theirs) is theirs
