# SPDX-License-Identifier: Apache-2.0
"""GLM-OCR: the conformance suite."""

from families import FamilyConformance


class TestGlmOcr(FamilyConformance):
    family = "glm_ocr"
