# SPDX-License-Identifier: Apache-2.0
"""PaddleOCR-VL: images, stretched positions, a projector over patches that come row by row."""

from families import FamilyConformance
from test_lengths import TakesLongest


class TestPaddleOCRVL(TakesLongest, FamilyConformance):
    family = "paddleocr_vl"
