# SPDX-License-Identifier: Apache-2.0
"""InternS1-Pro and InternS2."""

from typing import Any
from unittest import mock

from families import FamilyConformance

from vllm.model_executor.models import interns1_pro


class TestInternS1Pro(FamilyConformance):
    family = "interns1_pro"

    def upstream_model(self) -> Any:
        """vLLM 0.32's class reads an attribute that nobody sets; 0.33 sets it first."""
        upstream = interns1_pro.InternS1ProForConditionalGeneration
        model_config = self.subject().config.model_config
        with mock.patch.object(upstream, "model_config", model_config, create=True):
            return super().upstream_model()


class TestInternS2Preview(FamilyConformance):
    family = "interns2_preview"


class TestInternS2Mobius(FamilyConformance):
    family = "interns2_mobius"
