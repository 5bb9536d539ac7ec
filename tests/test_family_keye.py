# SPDX-License-Identifier: Apache-2.0
"""Keye-VL and Keye-VL 1.5: stretched positions; videos of one sequence, or of one a frame."""

from typing import Any

import torch
from families import FamilyConformance
from test_lengths import TakesLongest

from vllm.vit_cudagraph.testing.oracles import assert_close
from vllm.vit_cudagraph.testing.strategies import Batch


class TestKeye(TakesLongest, FamilyConformance):
    family = "keye"


class TestKeyeVL1_5(TakesLongest, FamilyConformance):
    family = "keye_vl1_5"

    def expected_rows(self, mm_kwargs: dict[str, Any], grids: Any) -> list[int]:
        rows = super().expected_rows(mm_kwargs, grids)
        if "num_frames" not in mm_kwargs:
            return rows
        return [
            sum(part.tolist())
            for part in torch.tensor(rows).split(mm_kwargs["num_frames"].tolist())
        ]

    def test_a_video_of_several_sizes(self) -> None:
        """Frames of one size go through a graph together; a video's are joined in order."""
        subject, manager = self.subject(), self.manager()
        grids = ((1, 4, 4), (2, 2, 2), (3, 2, 4), (1, 6, 2))
        mm_kwargs = subject.kwargs(Batch("video", grids, 5)) | {"num_frames": torch.tensor([6, 1])}
        before = manager.replays
        outputs = subject.execute(manager, mm_kwargs)
        assert [len(rows) for rows in outputs] == [4 + 2 + 6, 3]
        assert manager.replays > before
        assert_close(outputs, subject.eager(mm_kwargs), "the eager path")
