# SPDX-License-Identifier: Apache-2.0
"""OpenCUA."""

import pytest
from families import FamilyConformance

from vllm.model_executor.models.opencua import OpenCUAProcessor


class TestOpenCUA(FamilyConformance):
    family = "opencua"

    def test_images_alone(self) -> None:
        assert self.manager().config.modalities == ["image"]

    @pytest.fixture(autouse=True)
    def parts_of_the_processor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """vLLM 0.32 does not say which parts its processor has, and transformers 5 then keeps none;
        0.33 says what is said here."""
        parts = ["image_processor", "tokenizer", "video_processor"]
        monkeypatch.setattr(OpenCUAProcessor, "get_attributes", classmethod(lambda _: parts))
