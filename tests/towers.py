# SPDX-License-Identifier: Apache-2.0
"""Tiny models of the real vLLM, built in the test process: no server, no GPU, no download.

The model is what ``vllm serve`` would build from a tiny checkpoint: vLLM's own configuration and
layers, in a group of one rank (gloo), with weights filled from a seed.
"""

import atexit
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    init_distributed_environment,
    initialize_model_parallel,
    parallel_state,
)
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.testing import reference_attention
from vllm.vit_cudagraph.testing.checkpoints import make_checkpoint

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

CPU = torch.device("cpu")


@cache
def _scratch() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="vit-cudagraph-tests-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def checkpoint(family: str) -> Path:
    """A tiny checkpoint of ``family``, made once a process."""
    return make_checkpoint(family, _scratch() / family)


def make_config(family: str, *, vision: dict[str, Any] | None = None, **engine: Any) -> VllmConfig:
    """vLLM's configuration for a tiny checkpoint, as ``vllm serve`` would make it.

    Args:
        vision: entries of the checkpoint's ``vision_config`` to replace.
        engine: arguments of ``EngineArgs``; eager mode and no decoder graphs by default.
    """
    settings: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "max_model_len": 2048}
    if vision is not None:
        settings["hf_overrides"] = {"vision_config": vision}
    return EngineArgs(model=str(checkpoint(family)), **(settings | engine)).create_engine_config()


def build_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    vision: dict[str, Any] | None = None,
    model_class: type[torch.nn.Module] | None = None,
    flash: bool = True,
    seed: int = 0,
    config: VllmConfig | None = None,
    fill: Callable[[Any], object] | None = None,
    **engine: Any,
) -> Any:
    """The whole model of ``family`` with small random weights, in evaluation mode.

    Args:
        dtype: of weights and activations.
        vision: entries of ``vision_config`` to replace, for instance ``{"depth": 8}``.
        model_class: class to build; None takes the one that vLLM's registry names.
        flash: whether the tower has the reference attention and is told FLASH_ATTN, as the CPU
            twin's worker does. False builds what vLLM itself builds on the CPU.
        seed: of the weights, so that two models with one seed have the same.
        config: a configuration of :func:`make_config` to build from, instead of a new one.
        fill: gives the model its weights, instead of random ones from the seed.
        engine: as for :func:`make_config`.
    """
    if config is None:
        name = str(dtype).removeprefix("torch.")
        config = make_config(family, vision=vision, dtype=name, **engine)
    with set_current_vllm_config(config), attention_layer(reference=flash):
        _one_rank(experts=config.model_config.is_moe)
        with set_default_torch_dtype(dtype):
            model = initialize_model(vllm_config=config, model_class=model_class)
        if fill is None:
            _fill_weights(model, seed)
        else:
            fill(model)
        process_weights_after_loading(model, config.model_config, CPU)
    if flash:
        # The CPU platform says TORCH_SDPA, for which maximum lengths would be 0.
        model.visual.attn_backend = AttentionBackendEnum.FLASH_ATTN
    return model.eval()


@contextmanager
def attention_layer(*, reference: bool) -> Iterator[None]:
    """While open, vLLM builds the reference attention (or its own); the registry is restored."""
    with mock.patch.dict(op_registry_oot):
        op_registry_oot.pop("MMEncoderAttention", None)
        if reference:
            reference_attention.register()
        yield


def grid_rows(grids: list[list[int]]) -> int:
    """Patch rows of some items."""
    return sum(t * h * w for t, h, w in grids)


def random_pixels(model: Any, grids: list[list[int]], seed: int = 0) -> torch.Tensor:
    """Pixel rows as the image processor makes them for these grids, (patches, row width).

    uint8 where the tower normalises on the device, else the model's dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config.vision_config
    channels = getattr(config, "in_channels", None) or config.in_chans
    width = channels * config.temporal_patch_size * config.patch_size**2
    norm = getattr(model.visual, "input_norm", None)
    if getattr(norm, "input_dtype", None) is torch.uint8:
        rows = (grid_rows(grids), width)
        return torch.randint(0, 256, rows, generator=generator, dtype=torch.uint8)
    return torch.randn(grid_rows(grids), width, generator=generator).to(model.visual.dtype)


def _one_rank(experts: bool) -> None:
    """Process groups of one rank. A model with experts wants a group more, which vLLM makes only
    when such a model is the current one: then all are made anew."""
    if model_parallel_is_initialized():
        if not experts or parallel_state._EP is not None:
            return
        parallel_state.destroy_model_parallel()
    if not torch.distributed.is_initialized():
        rendezvous = f"file://{_scratch() / 'rendezvous'}"
        init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=rendezvous, local_rank=0, backend="gloo"
        )
    initialize_model_parallel(1, 1)


def _fill_weights(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep activations near 1, so that a wrong row is seen in the output."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        if weight.dim() >= 2:
            noise = noise / weight[0].numel() ** 0.5
        elif name.endswith("weight"):
            noise = 1 + 0.1 * noise
        else:
            noise = 0.1 * noise
        weight.data.copy_(noise)
