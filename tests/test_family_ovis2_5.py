# SPDX-License-Identifier: Apache-2.0
"""Ovis2.5: windows, learned positions, indicator tokens around each item."""

from typing import Any

from families import FamilyConformance
from test_lengths import TakesLongest

from vllm.vit_cudagraph.testing.strategies import GraphSettings


class TestOvis2_5(TakesLongest, FamilyConformance):
    family = "ovis2_5"
    # The processor enlarges a picture to 448 x 448 pixels, and so each frame of a clip.
    real_settings = GraphSettings((256, 1024), items=8)

    def expected_rows(self, mm_kwargs: dict[str, Any], grids: Any) -> list[int]:
        """Two indicator tokens stand around each item."""
        return [rows + 2 for rows in super().expected_rows(mm_kwargs, grids)]
