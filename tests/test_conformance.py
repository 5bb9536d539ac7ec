# SPDX-License-Identifier: Apache-2.0
"""The conformance suite over the models of this package, with transformers' towers as reference."""

from functools import cache
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.vit_cudagraph.testing import models, strategies, synthetic
from vllm.vit_cudagraph.testing.conformance import EncoderGraphConformance
from vllm.vit_cudagraph.testing.oracles import TransformersTower
from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings
from vllm.vit_cudagraph.testing.subject import Subject


@cache
def family_config(family: str) -> VllmConfig:
    return models.make_config(family)


@cache
def transformers_tower(family: str) -> TransformersTower:
    folder = models.checkpoint(family, shallow=True)
    return TransformersTower(folder, models.place().torch_device)


class QwenConformance(EncoderGraphConformance):
    """A family of the tiny checkpoints, with the checkpoint's weights in both projects."""

    family: str
    vision: ClassVar[dict[str, Any] | None] = None

    @classmethod
    def variants(cls) -> st.SearchStrategy[dict[str, Any]]:
        return strategies.vision_configs(cls.family)

    @classmethod
    def make_model(cls) -> Subject:
        config = models.make_config(models.checkpoint(cls.family, shallow=True))
        model = models.build_model(config, fill=models.load_weights(config))
        return Subject(model, config)

    @classmethod
    def make_variant(cls, options: dict[str, Any]) -> Subject:
        config = models.with_vision(family_config(cls.family), options)
        return Subject(models.build_model(config), config)

    def reference(
        self, subject: Subject, batch: Batch, mm_kwargs: dict[str, Any]
    ) -> list[torch.Tensor] | None:
        if subject is not self.subject():
            return None  # a variant has weights of its own
        return transformers_tower(self.family).reference(batch, mm_kwargs)


class TestQwen2VL(QwenConformance):
    family = "qwen2_vl"


class TestQwen25VL(QwenConformance):
    family = "qwen2_5_vl"


class TestQwen3VL(QwenConformance):
    family = "qwen3_vl"


class TestQwen3VLMoe(QwenConformance):
    family = "qwen3_vl_moe"


class TestSynthetic(EncoderGraphConformance):
    """Geometries that no small model of vLLM has, against a tower that knows coordinates alone."""

    @staticmethod
    def make_model() -> Subject:
        return synthetic_subject(window_side=3, learned=True, depth=3)

    @staticmethod
    def variants() -> st.SearchStrategy[dict[str, Any]]:
        return synthetic.synthetic_options()

    @staticmethod
    def make_variant(options: dict[str, Any]) -> Subject:
        return synthetic_subject(**options)

    def reference(
        self, subject: Subject, batch: Batch, mm_kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        return synthetic.reference(subject.model, mm_kwargs)


def synthetic_subject(**shape: Any) -> Subject:
    config = family_config("qwen2_vl")
    with set_current_vllm_config(config):
        models.one_rank()
    return Subject(synthetic.make_synthetic(config=config, **shape), config)


# -- full-size towers, on a GPU --------------------------------------------------------------------

LARGE = GraphSettings((64, 256, 1024, 2560), items=16)


class FullSize(QwenConformance):
    """A tower at its published size with random weights, over a tiny text model.

    Its transformers twin would need the same weights; ``tests/test_window_regression.py`` has that
    comparison at tiny size.
    """

    settings = LARGE
    variants = None

    @classmethod
    def make_model(cls) -> Subject:
        return cls.make_variant(cls.vision)

    def reference(self, subject: Subject, batch: Batch, mm_kwargs: dict[str, Any]) -> None:
        return None


if models.place().device == "cuda":

    class TestQwen2VL7B(FullSize):
        family = "qwen2_vl"
        vision = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4}

    class TestQwen25VL7B(FullSize):
        family = "qwen2_5_vl"
        vision = {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "fullatt_block_indexes": [7, 15, 23, 31],
        }

    class TestQwen3VL8B(FullSize):
        family = "qwen3_vl"
        vision = {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        }
