# SPDX-License-Identifier: Apache-2.0
"""Layers that work out their longest length get the metadata's instead."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import nn

from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.vit_cudagraph.geometry import ViTGeometry, offset_rows, window_rows
from vllm.vit_cudagraph.lengths import longest_from_metadata
from vllm.vit_cudagraph.testing.strategies import Batch
from vllm.vit_cudagraph.testing.subject import Subject


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


def told_lengths(subject: Subject) -> tuple[list[Any], list[Any]]:
    """What attention is told in one run of a model's ``vit_forward``, layer by layer, and the
    metadata's own numbers. The twin's attention would read a device's number without a word."""
    model, batch = subject.model, Batch("image", ((1, 4, 6),), 0)
    inputs = model.vit_inputs(subject.kwargs(batch))
    metadata = model.vit_metadata(inputs.grids, model.vit_tower().device)
    rows = model.vit_declared.rows.items()
    own = [metadata[name] for name, row in rows if row.value == "longest"]
    layers = [m for m in model.vit_tower().modules() if isinstance(m, MMEncoderAttention)]
    told = []
    with ExitStack() as patches, torch.inference_mode():
        for layer in layers:
            spy = mock.Mock(side_effect=layer._forward_method)
            patches.enter_context(mock.patch.object(layer, "_forward_method", spy))
            told.append(spy)
        model.vit_forward(inputs.pixels, metadata)
    return [spy.call_args.kwargs["max_seqlen"] for spy in told], own


class TakesLongest:
    """For the conformance class of a family whose layers work out their longest length."""

    def test_attention_is_told_the_metadatas_length(self) -> None:
        told, own = told_lengths(self.subject())  # type: ignore[attr-defined]
        assert told
        assert all(any(length is mine for mine in own) for length in told)
