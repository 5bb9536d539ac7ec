# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni: learned positions and deepstack in a tower that made its metadata in its forward."""

from unittest import mock

import pytest
import torch
from families import FamilyConformance

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.eligibility import model_refusal
from vllm.vit_cudagraph.geometry import NotCapturable


class TestQwen3Omni(FamilyConformance):
    family = "qwen3_omni_moe"

    def test_each_level_is_beside_the_others(self) -> None:
        manager = self.manager()
        assert manager.config.out_hidden_size == 3 * 64

    def test_audio_stays_out(self) -> None:
        manager = self.manager()
        assert [manager.supports_modality(m) for m in ("image", "video", "audio")] == [1, 1, 0]
        audio = {"input_audio_features": torch.zeros(16, 40), "audio_feature_lengths": [40]}
        with pytest.raises(NotCapturable, match="no grids"):
            self.subject().model.vit_inputs(audio)

    def test_refusals(self) -> None:
        """FlashInfer, whose offsets the tower does not make; a tower without learned positions."""
        model = self.subject().model
        with mock.patch.object(model.visual, "attn_backend", AttentionBackendEnum.FLASHINFER):
            assert "FLASHINFER reads single lengths" in str(model_refusal(model, model.visual))
        kept = model.__dict__.pop("vit_declared", None)
        with mock.patch.object(model.visual, "apply_vit_abs_pos_embed", False):
            assert "no learned positions" in str(model_refusal(model, model.visual))
        if kept is not None:
            model.vit_declared = kept
