# SPDX-License-Identifier: Apache-2.0
"""Ovis2.5: windows, learned positions, indicator tokens around each item."""

from typing import Any

import torch
from families import FamilyConformance
from test_lengths import TakesLongest

from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings

TWO_IMAGES = Batch("image", ((1, 4, 4), (1, 2, 6)))


class TestOvis2_5(TakesLongest, FamilyConformance):
    family = "ovis2_5"
    # The processor enlarges a picture to 448 x 448 pixels, and so each frame of a clip.
    real_settings = GraphSettings((256, 1024), items=8)

    def expected_rows(self, mm_kwargs: dict[str, Any], grids: Any) -> list[int]:
        """Two indicator tokens stand around each item."""
        return [rows + 2 for rows in super().expected_rows(mm_kwargs, grids)]

    def test_repacked_grids_stay_on_the_device_of_the_batch(self) -> None:
        """Upstream's tower makes its offsets from them, and an eager run goes through it."""
        model, mm_kwargs = self.subject().model, self.subject().kwargs(TWO_IMAGES)
        with torch.device("meta"):  # where a tensor lies that does not say where
            chosen = model.vit_repack(mm_kwargs, [1])
        assert chosen["grids"].device == mm_kwargs["grids"].device
        assert torch.equal(chosen["grids"], mm_kwargs["grids"][1:])
