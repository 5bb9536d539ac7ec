# SPDX-License-Identifier: Apache-2.0
"""What every further family is held to: the conformance suite, and its real processor's inputs."""

import importlib
import os
from functools import cache
from typing import Any, ClassVar
from unittest import mock

import torch

from vllm.config import VllmConfig
from vllm.vit_cudagraph.testing import models, processed
from vllm.vit_cudagraph.testing.conformance import EncoderGraphConformance
from vllm.vit_cudagraph.testing.oracles import assert_close
from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings
from vllm.vit_cudagraph.testing.subject import Subject, check_batch
from vllm.vit_cudagraph.testing.subject import make_kwargs as usual_kwargs

UPSTREAM_MODELS = ("vllm.model_executor.models.", "vllm.models.")


def module(family: str) -> Any:
    return importlib.import_module(f"vllm.vit_cudagraph.testing.families.{family}")


def environment(family: str) -> Any:
    """While open, the environment variables that the family needs."""
    return mock.patch.dict(os.environ, getattr(module(family), "ENVIRONMENT", {}))


def engine_arguments(family: str) -> dict[str, Any]:
    """What ``EngineArgs`` needs; a text model's backend only where the family was tried with it."""
    arguments = dict(getattr(module(family), "ENGINE", {}))
    if models.place().device != "cpu":
        arguments.pop("attention_backend", None)
    return arguments


def serve_arguments(family: str) -> tuple[str, ...]:
    """What ``vllm serve`` needs besides the usual arguments."""
    arguments: tuple[str, ...] = getattr(module(family), "SERVE", ())
    return arguments


@cache
def family_config(family: str) -> VllmConfig:
    with environment(family):
        return models.make_config(family, **engine_arguments(family))


@cache
def family_subject(family: str) -> Subject:
    config = family_config(family)
    make = getattr(module(family), "make_kwargs", usual_kwargs)
    with environment(family):
        return Subject(models.build_model(config), config, make_kwargs=make)


def real_kwargs(config: VllmConfig, modality: str) -> dict[str, Any]:
    """What the family's processor makes of photographs, or of clips."""
    return getattr(processed, f"{modality}_kwargs")(config)


class FamilyConformance(EncoderGraphConformance):
    """The suite for one family of ``testing/families``, by its name.

    Planted faults try the suite itself, which the four Qwen classes have done.
    """

    family: ClassVar[str]
    share = 0.12
    real_settings: ClassVar[GraphSettings] = GraphSettings((64, 256, 512), items=8)
    test_planted_fault = None  # type: ignore[assignment]

    @classmethod
    def make_model(cls) -> Subject:
        return family_subject(cls.family)

    def test_real_inputs(self) -> None:
        """Photographs and clips through the family's processor: graphs equal the eager path."""
        subject = self.subject()
        manager = self.new_manager(self.real_settings)
        for modality in subject.geometry.modalities:
            mm_kwargs = real_kwargs(subject.config, modality)
            grids = subject.model.vit_inputs(mm_kwargs).grids
            before = manager.replays
            batch = Batch(modality, grids, 0)
            outputs = check_batch(subject, manager, batch, mm_kwargs=mm_kwargs)
            assert manager.replays > before
            assert all(torch.isfinite(rows).all() for rows in outputs)
            assert [len(rows) for rows in outputs] == self.expected_rows(mm_kwargs, grids)

    def test_pixels_have_the_models_dtype(self) -> None:
        """The processor makes what the model computes in, or the hook casts as upstream does;
        pixels of another dtype than the buffers' would never be replayed."""
        subject = self.subject()
        half = models.with_vision(subject.config, {})
        half.model_config.dtype = torch.float16
        for modality in subject.geometry.modalities:
            mm_kwargs = real_kwargs(half, modality)
            pixels = subject.model.vit_inputs(mm_kwargs).pixels
            if pixels.is_floating_point() and pixels.dtype != torch.float16:
                rows = subject.kwargs(Batch(modality, ((1, 4, 4),)))
                other = {k: _in_half(v) for k, v in rows.items()}
                assert subject.model.vit_inputs(other).pixels.dtype == subject.dtype

    def test_upstreams_own_class(self) -> None:
        """The same weights in upstream's class, whose layers nothing has replaced."""
        subject, upstream = self.subject(), self.upstream_model()
        manager = self.new_manager(self.real_settings)
        for modality in subject.geometry.modalities:
            mm_kwargs = real_kwargs(subject.config, modality)
            with torch.inference_mode():
                expected = list(upstream.embed_multimodal(**mm_kwargs))
            assert_close(subject.execute(manager, mm_kwargs), expected, "upstream's class")

    def upstream_model(self) -> Any:
        """Upstream's class, filled from the seed that the subject was."""
        model, config = self.subject().model, models.with_vision(self.subject().config, {})
        bases = type(model).__mro__
        upstream = next(c for c in bases if c.__module__.startswith(UPSTREAM_MODELS))
        tower = next(name for name, m in model.named_modules() if m is model.vit_tower())
        with environment(self.family):
            return models.build_model(config, model_class=upstream, tower=tower)

    def expected_rows(self, mm_kwargs: dict[str, Any], grids: Any) -> list[int]:
        """Rows of each item, by the processor rather than the geometry where they may differ."""
        return [self.subject().geometry.output_tokens(grid) for grid in grids]


def _in_half(value: Any) -> Any:
    """Tensors of floating-point numbers, of one or of several items, as float16."""
    if isinstance(value, list | tuple):
        return [_in_half(part) for part in value]
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.half() if floating else value
