# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M3 on the mixin: items as attention sequences, long clips in parts."""

from families import FamilyConformance

from vllm.triton_utils import HAS_TRITON
from vllm.vit_cudagraph.testing.families import minimax_m3
from vllm.vit_cudagraph.testing.strategies import Batch
from vllm.vit_cudagraph.testing.subject import Subject


class TestMiniMaxM3(FamilyConformance):
    family = "minimax_m3"

    @classmethod
    def make_model(cls) -> Subject:
        if not HAS_TRITON:
            minimax_m3.use_plain_kernels()
        return super().make_model()

    def test_a_long_clip_is_several_sequences(self) -> None:
        subject, manager = self.subject(), self.manager()
        geometry = subject.geometry
        assert geometry.sequence_frames == 3
        assert geometry.sequence_lengths((7, 4, 2)) == [24, 24, 8]
        assert geometry.usage((7, 4, 2)).sequences == 3
        self.check(Batch("video", ((7, 4, 2), (3, 2, 4), (1, 2, 2))), manager)
