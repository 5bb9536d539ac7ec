# SPDX-License-Identifier: Apache-2.0
"""Kanana-V: the conformance suite. Upstream's module wants the package timm."""

from typing import Any

import pytest
from families import FamilyConformance

from vllm.v1.attention.backends.registry import AttentionBackendEnum

pytest.importorskip("timm")


class TestKananaV(FamilyConformance):
    family = "kanana_v"

    def upstream_model(self) -> Any:
        model = super().upstream_model()
        model.vision_model.attn_backend = AttentionBackendEnum.FLASH_ATTN  # as our tower was told
        return model
