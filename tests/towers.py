# SPDX-License-Identifier: Apache-2.0
"""Tiny models by family (``testing/models.py`` builds them), and random pixels for them."""

from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.vit_cudagraph.testing import models
from vllm.vit_cudagraph.testing.models import attention_layer, checkpoint, make_config

__all__ = ["attention_layer", "build_model", "checkpoint", "make_config", "random_pixels"]

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

CPU = torch.device("cpu")


def build_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    vision: dict[str, Any] | None = None,
    config: VllmConfig | None = None,
    **options: Any,
) -> Any:
    """A model of ``family``.

    Args:
        dtype: Of weights and activations.
        vision: Entries of ``vision_config`` to replace, for instance ``{"depth": 8}``.
        config: A configuration to build from, instead of a new one.
        options: As for ``models.build_model``.
    """
    if config is None:
        name = str(dtype).removeprefix("torch.")
        config = make_config(family, vision=vision, dtype=name)
    return models.build_model(config, **options)


def grid_rows(grids: list[list[int]]) -> int:
    """Patch rows of some items."""
    return sum(t * h * w for t, h, w in grids)


def random_pixels(model: Any, grids: list[list[int]], seed: int = 0) -> torch.Tensor:
    """Pixel rows as the image processor makes them for these grids, (patches, row width).

    uint8 where the tower normalises on the device, else the model's dtype. From the configuration,
    because the model may be upstream's own, which declares no geometry.
    """
    config = model.config.vision_config
    channels = getattr(config, "in_channels", None) or config.in_chans
    width = channels * config.temporal_patch_size * config.patch_size**2
    generator = torch.Generator().manual_seed(seed)
    norm = getattr(model.visual, "input_norm", None)
    if getattr(norm, "input_dtype", None) is torch.uint8:
        rows = (grid_rows(grids), width)
        return torch.randint(0, 256, rows, generator=generator, dtype=torch.uint8)
    return torch.randn(grid_rows(grids), width, generator=generator).to(model.visual.dtype)
