# SPDX-License-Identifier: Apache-2.0
"""OpenCUA."""

from unittest import mock

from families import FamilyConformance

from vllm.model_executor.models.opencua import OpenCUAProcessor


class TestOpenCUA(FamilyConformance):
    family = "opencua"

    def test_images_alone(self) -> None:
        assert self.manager().config.modalities == ["image"]

    def test_real_inputs(self) -> None:
        """vLLM 0.32 does not say which parts its processor has, and transformers 5 then keeps none;
        0.33 says what is said here."""
        parts = ["image_processor", "tokenizer", "video_processor"]
        with mock.patch.object(OpenCUAProcessor, "get_attributes", classmethod(lambda _: parts)):
            super().test_real_inputs()
