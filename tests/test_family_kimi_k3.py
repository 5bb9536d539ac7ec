# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3: the conformance suite over the real class, whose text model is a stand-in on the CPU:
vLLM's is written for GPUs alone."""

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from families import FamilyConformance, family_subject

from vllm.vit_cudagraph.positions import interpolated
from vllm.vit_cudagraph.testing import models
from vllm.vit_cudagraph.testing.subject import Subject

GRIDS = [(1, 8, 6), (1, 2, 2), (1, 4, 10), (1, 20, 4)]
TEXT_MODEL = "vllm.models.kimi_k3.nvidia.model.init_vllm_registered_model"


class NoText(torch.nn.Module):
    """In the place of the text model, with what the whole model asks it for when it is built."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def make_empty_intermediate_tensors(self, *_: Any) -> Any:
        raise NotImplementedError

    def process_weights_after_loading(self) -> None:
        pass


def without_text() -> Any:
    """Its GPU kernels want the package cutlass as well."""
    buildable = models.place().device == "cuda" and find_spec("cutlass")
    return nullcontext() if buildable else mock.patch(TEXT_MODEL, NoText)


def subject() -> Subject:
    with without_text():
        return family_subject("kimi_k3")


class TestKimiK3(FamilyConformance):
    family = "kimi_k3"
    share = 0.05  # Kimi-K2.5's tower

    @classmethod
    def make_model(cls) -> Subject:
        return subject()

    def upstream_model(self) -> Any:
        with without_text():
            return super().upstream_model()


def test_what_differs_from_kimi_k25_is_there() -> None:
    model: Any = subject().model
    tower, block = model.vision_tower, model.vision_tower.encoder.blocks[0]
    assert tower.patch_embed.pos_emb.interpolation_mode == "bilinear"
    assert isinstance(block.norm0, torch.nn.RMSNorm) and block.wo.input_size == 128
    assert model.mm_projector.mm_projector_type == "patchmergerv2"
    assert model.vit_declared.modalities == ("image",)


def test_positions_are_the_towers_own() -> None:
    model: Any = subject().model
    ours = model.vit_metadata(GRIDS, torch.device("cpu"))
    table = model.vision_tower.patch_embed.pos_emb
    theirs = table.get_pos_embeds([list(grid) for grid in GRIDS])
    torch.testing.assert_close(interpolated(table.weight.flatten(0, 1), ours), theirs)


def test_offsets_for_flashinfer_count_in_the_attentions_width() -> None:
    """Which is not the tower's."""
    tower: Any = subject().model.vision_tower
    assert tower.hidden_size // tower.tp_size == 128 and tower.config.hidden_size == 64
