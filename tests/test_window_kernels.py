# SPDX-License-Identifier: Apache-2.0
"""Attention in fewer passes: the kernels, and the module that calls them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import towers
from managers import CPU

from vllm.config import set_current_vllm_config
from vllm.vit_cudagraph import attention
from vllm.vit_cudagraph.attention import FusedVisionAttention
from vllm.vit_cudagraph.testing import models
from vllm.vit_cudagraph.testing.profiles import examples  # noqa: F401  (registers profiles)

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
OFF = {"additional_config": {"vit_cudagraph": {"tower": False}}}
GRIDS = [(1, 8, 8), (1, 6, 10), (2, 2, 4)]
SCRIPT = Path(__file__).parent / "interpreted_kernels.py"


def test_kernels_under_tritons_interpreter() -> None:
    number = {"nightly": "1000", "dev": "5"}.get(os.environ.get("HYPOTHESIS_PROFILE", ""), "25")
    ran = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | {"EXAMPLES": number},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.split("\n")[:3] == ["windows holds", "rotary holds", "gate holds"]


def fused(model: Any) -> list[FusedVisionAttention]:
    return [m for m in model.visual.modules() if isinstance(m, FusedVisionAttention)]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_keep_their_names(family: str) -> None:
    ours = models.build_model(models.make_config(family))
    plain = models.build_model(models.make_config(family, **OFF))
    assert len(fused(ours)) == len(ours.visual.blocks) and not fused(plain)
    named = [{n: w.shape for n, w in model.named_parameters()} for model in (ours, plain)]
    assert named[0] == named[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_was_not_made_for_goes_to_upstreams_module(family: str) -> None:
    """On a CPU that is everything."""
    values = []
    for engine in ({}, OFF):
        config = models.make_config(family, **engine)
        model = models.build_model(config)
        pixels = towers.random_pixels(model, [list(grid) for grid in GRIDS])
        with torch.inference_mode(), set_current_vllm_config(config):
            values.append(model.vit_forward(pixels, model.vit_metadata(GRIDS, CPU)))
    assert torch.equal(*values)


def test_the_kernels_stand_where_upstreams_passes_stood() -> None:
    """The module as on a GPU, its kernels replaced by what they are to compute."""
    config = models.make_config("qwen2_5_vl")
    model = models.build_model(config)
    pixels = towers.random_pixels(model, [list(grid) for grid in GRIDS])
    called: list[str] = []

    def rotated(
        qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, size: int
    ) -> torch.Tensor:
        called.append("rotated")
        qk = qkv.view(-1, 3, heads, size)[:, :2].transpose(0, 1)
        a, b = qk.chunk(2, dim=-1)
        c, s = cos[None, :, None], sin[None, :, None]
        return torch.cat([a * c - b * s, a * s + b * c], dim=-1)

    def windows(
        qkv: Any, cos: Any, sin: Any, cu: Any, out: Any, heads: int, size: int, scale: float
    ) -> None:
        (q, k), v = rotated(qkv, cos, sin, heads, size), qkv.view(-1, 3, heads, size)[:, 2]
        called[-1] = "windows"
        assert int(cu.diff().max()) <= attention.LARGEST_WINDOW
        longest = cu.diff().max().cpu()
        rows = torch.ops.vit_cudagraph.varlen_attention(q, k, v, cu, longest, scale)
        out.copy_(rows.flatten(1))

    with torch.inference_mode(), set_current_vllm_config(config):
        metadata = model.vit_metadata(GRIDS, CPU)
        expected = model.vit_forward(pixels, metadata)
        with (
            mock.patch.object(FusedVisionAttention, "_made_for", lambda *_: True),
            mock.patch.object(attention, "rotated", rotated),
            mock.patch.object(attention, "window_attention", windows),
        ):
            for module in fused(model):
                module.attn.attn_backend = model.visual.attn_backend
            given = model.vit_forward(pixels, metadata)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    # Windows in two blocks; in the two others whole frames, of which one has more than 64 patches.
    full = "windows" if int(metadata["max_seqlen_full"]) <= attention.LARGEST_WINDOW else "rotated"
    assert called == ["windows", full] * 2


def test_another_class_or_other_arguments_are_left_alone() -> None:
    model = models.build_model(models.make_config("qwen2_5_vl", **OFF))
    block = model.visual.blocks[0]
    kind = type(block.attn)
    block.attn.__class__ = type("Other", (kind,), {})
    assert attention.install(block) == 0
    block.attn.__class__ = kind
    with mock.patch.object(kind, "forward", lambda self, x, more: x):
        assert attention.install(block) == 0
    assert attention.install(block) == 1
