# SPDX-License-Identifier: Apache-2.0
"""Ernie4.5-VL on the mixin: a resampler after the graph, frames in pairs, pixels of any dtype."""

import pytest
import torch
from families import FamilyConformance

from vllm.vit_cudagraph.testing import models, processed
from vllm.vit_cudagraph.testing.oracles import assert_close
from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings
from vllm.vit_cudagraph.testing.subject import Subject


class TestErnie45VL(FamilyConformance):
    family = "ernie45_vl"

    def test_a_pair_of_frames_fills_a_budget(self) -> None:
        """The most patches that so many tokens can have: two frames of 8 tokens, 4 patches each."""
        manager = self.new_manager(GraphSettings((8,), items=2, frames=4))
        (captured,) = manager.captured.values()
        assert captured.capacity.patches == 2 * 8 * 4
        self.check(Batch("video", ((2, 4, 8),)), manager)
        self.check(Batch("video", ((4, 4, 4),)), manager)
        assert manager.replays == 2

    def test_an_odd_number_of_frames_is_upstreams_to_refuse(self) -> None:
        """Its processor never makes one, and its resampler cannot take it."""
        subject, manager = self.subject(), self.manager()
        mm_kwargs = subject.kwargs(Batch("video", ((3, 4, 4),)))
        assert manager.execute(mm_kwargs) is None
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            subject.eager(mm_kwargs)

    def test_pixels_of_the_checkpoints_dtype_are_replayed(self) -> None:
        """The processor makes them so whatever the model's dtype is; upstream casts them."""
        subject = self.subject()
        mm_kwargs = processed.image_kwargs(subject.config)
        assert mm_kwargs["pixel_values"].dtype is torch.bfloat16
        assert subject.model.vit_inputs(mm_kwargs).pixels.dtype is subject.dtype

    def test_the_checkpoints_own_weights(self) -> None:
        """Every weight of the published names has its place."""
        config = self.subject().config
        config = models.with_vision(config, {})
        model = models.build_model(config, fill=models.load_weights(config))
        subject = Subject(model, config)
        mm_kwargs = processed.video_kwargs(config)
        outputs = subject.execute(subject.manager(self.real_settings), mm_kwargs)
        assert_close(outputs, subject.eager(mm_kwargs), "the eager path")
        assert not torch.equal(outputs[0], self.subject().eager(mm_kwargs)[0])
