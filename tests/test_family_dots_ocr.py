# SPDX-License-Identifier: Apache-2.0
"""dots.ocr: images only, in a tower that made its metadata in its forward."""

from unittest import mock

from families import FamilyConformance

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.eligibility import model_refusal


class TestDotsOCR(FamilyConformance):
    family = "dots_ocr"

    def test_images_alone(self) -> None:
        manager = self.manager()
        assert [manager.supports_modality(m) for m in ("image", "video")] == [True, False]

    def test_flashinfer_is_refused(self) -> None:
        """The tower does not make FlashInfer's offsets."""
        model = self.subject().model
        tower = model.vit_tower()
        with mock.patch.object(tower, "attn_backend", AttentionBackendEnum.FLASHINFER):
            assert "FLASHINFER reads single lengths" in str(model_refusal(model, tower))
