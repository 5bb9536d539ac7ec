# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni: Qwen2.5-VL's tower beside an audio tower, which stays out of the graphs."""

import pytest
import torch
from families import FamilyConformance

from vllm.vit_cudagraph.geometry import NotCapturable


class TestQwen2_5Omni(FamilyConformance):
    family = "qwen2_5_omni"

    def test_audio_stays_out(self) -> None:
        """vLLM's runners ask for each batch's modality; a batch that came all the same is refused
        before anything runs."""
        manager = self.manager()
        assert [manager.supports_modality(m) for m in ("image", "video", "audio")] == [1, 1, 0]
        audio = {"input_audio_features": torch.zeros(16, 40), "audio_feature_lengths": [40]}
        with pytest.raises(NotCapturable, match="no grids"):
            self.subject().model.vit_inputs(audio)
