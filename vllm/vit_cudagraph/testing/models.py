# SPDX-License-Identifier: Apache-2.0
"""Tiny models of the real vLLM, built in this process: no server and no download.

The model is what ``vllm serve`` would build from the checkpoint: vLLM's own configuration, layers
and loader, in a group of one rank. Where it runs is one setting:

    VIT_CUDAGRAPH_TEST_DEVICE     cpu (default) | cuda
    VIT_CUDAGRAPH_TEST_DTYPE      float32 (default on the CPU) | bfloat16 (on a GPU) | float16
    VIT_CUDAGRAPH_TEST_ATTENTION  FLASH_ATTN (default) | TRITON_ATTN; on the CPU the reference
                                  attention stands for FLASH_ATTN
    VIT_CUDAGRAPH_TEST_FLASH      FlashAttention's version on a GPU, 2 or 3; vLLM's choice if unset

Nothing is asked of a device when this module is imported.
"""

from __future__ import annotations

import atexit
import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.plugin import register
from vllm.vit_cudagraph.testing import reference_attention
from vllm.vit_cudagraph.testing.checkpoints import make_checkpoint

Fill = Callable[[Any], object]


@dataclass(frozen=True)
class Place:
    """Where models are built and graphs are captured.

    Attributes:
        device: Its type, ``cpu`` or ``cuda``.
        dtype: Of weights and activations, a torch name.
        attention: vLLM's name of the tower's attention backend.
        flash: FlashAttention's version, or "" for vLLM's choice.
    """

    device: str
    dtype: str
    attention: str
    flash: str = ""

    @property
    def torch_device(self) -> torch.device:
        if self.device == "cpu":
            return torch.device("cpu")
        # With its index, since buffers are compared with what lies on "cuda:0"; the current one,
        # since each of several ranks has its own.
        return torch.device("cuda", torch.cuda.current_device())


def place() -> Place:
    """What the environment variables above say.

    Raises:
        ValueError: A device or attention backend that is not among those above.
    """
    device = os.environ.get("VIT_CUDAGRAPH_TEST_DEVICE", "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"VIT_CUDAGRAPH_TEST_DEVICE={device!r}: set it to cpu or cuda")
    dtype = os.environ.get("VIT_CUDAGRAPH_TEST_DTYPE")
    attention = os.environ.get("VIT_CUDAGRAPH_TEST_ATTENTION", "FLASH_ATTN")
    if attention not in ("FLASH_ATTN", "TRITON_ATTN") or (
        device == "cpu" and attention != "FLASH_ATTN"
    ):
        raise ValueError(
            f"VIT_CUDAGRAPH_TEST_ATTENTION={attention!r} on {device}: set it to FLASH_ATTN "
            "(or to TRITON_ATTN on cuda)"
        )
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    return Place(device, dtype, attention, os.environ.get("VIT_CUDAGRAPH_TEST_FLASH", ""))


@cache
def _scratch() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="vit-cudagraph-models-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def checkpoint(family: str, shallow: bool = False) -> Path:
    """A tiny checkpoint of ``family`` (``checkpoints.FAMILIES``), made once a process; ``shallow``
    as for ``make_checkpoint``."""
    folder = _scratch() / (f"{family}-shallow" if shallow else family)
    return make_checkpoint(family, folder, shallow=shallow)


def make_config(
    model: str | Path, *, vision: dict[str, Any] | None = None, **engine: Any
) -> VllmConfig:
    """vLLM's configuration of a checkpoint, as ``vllm serve`` would make it, encoder graphs on.

    Args:
        model: A family of ``checkpoints.FAMILIES``, or a folder with a checkpoint.
        vision: Entries of the checkpoint's ``vision_config`` to replace.
        engine: Arguments of ``EngineArgs``; no decoder graphs by default.
    """
    register()
    here = place()
    folder = model if isinstance(model, Path) else checkpoint(model)
    settings: dict[str, Any] = {
        "dtype": here.dtype,
        "max_model_len": 2048,
        "enforce_eager": True,
        "compilation_config": {"cudagraph_mm_encoder": True},
    }
    if here.device == "cuda":
        settings["mm_encoder_attn_backend"] = here.attention
    if vision is not None:
        settings["hf_overrides"] = {"vision_config": vision}
    config = EngineArgs(model=str(folder), **(settings | engine)).create_engine_config()
    # On a GPU `enforce_eager` switches encoder graphs off as well.
    wanted = (settings | engine)["compilation_config"]
    if isinstance(wanted, dict):
        config.compilation_config.cudagraph_mm_encoder = wanted.get("cudagraph_mm_encoder", False)
    if here.flash:
        config.attention_config.flash_attn_version = int(here.flash)
    return config


def with_vision(config: VllmConfig, vision: dict[str, Any]) -> VllmConfig:
    """A configuration with other entries of ``vision_config``; :func:`make_config` with ``vision``
    gives the same and takes twenty times as long."""
    changed = copy.copy(config)
    changed.model_config = copy.copy(config.model_config)
    changed.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
    for name, value in vision.items():
        setattr(changed.model_config.hf_config.vision_config, name, value)
    # vLLM notes a model's layers there by name, and refuses a second model's.
    changed.compilation_config = copy.copy(config.compilation_config)
    changed.compilation_config.static_forward_context = {}
    changed.compilation_config.static_all_moe_layers = []
    return changed


def build_model(
    config: VllmConfig,
    *,
    model_class: type[torch.nn.Module] | None = None,
    flash: bool = True,
    seed: int = 0,
    fill: Fill | None = None,
    tower: str = "visual",
) -> Any:
    """The whole model of a configuration, in evaluation mode.

    Args:
        config: As :func:`make_config` gives it.
        model_class: Class to build; None takes the one that vLLM's registry names.
        flash: On the CPU: whether the tower has the reference attention and is told FLASH_ATTN, as
            the twin's worker does. False builds what vLLM itself builds there.
        seed: Of the random weights, so that two models with one seed have the same.
        fill: Gives the model its weights, instead of random ones from the seed. See
            :func:`load_weights` for the checkpoint's own.
        tower: Name of the vision tower in a model that is not on the mixin.
    """
    here = place()
    reference = flash and here.device == "cpu"
    with set_current_vllm_config(config), attention_layer(reference=reference):
        one_rank(experts=config.model_config.is_moe)
        config.kernel_config.ir_op_priority.set_default()
        with set_default_torch_dtype(config.model_config.dtype), here.torch_device:
            model = initialize_model(vllm_config=config, model_class=model_class)
        if fill is None:
            _fill_weights(model, seed)
        else:
            fill(model)
        process_weights_after_loading(model, config.model_config, here.torch_device)
    if reference:
        # The CPU platform says TORCH_SDPA, for which maximum lengths would be 0.
        on_mixin = hasattr(model, "vit_tower")
        vision = model.vit_tower() if on_mixin else model.get_submodule(tower)
        vision.attn_backend = AttentionBackendEnum.FLASH_ATTN
    return model.eval()


def load_weights(config: VllmConfig) -> Fill:
    """For ``build_model(fill=...)``: the checkpoint's own weights, by vLLM's own loader."""
    loader = get_model_loader(config.load_config)
    return lambda model: loader.load_weights(model, config.model_config)


@contextmanager
def attention_layer(*, reference: bool) -> Iterator[None]:
    """While open, vLLM builds the reference attention (or its own); the registry is restored."""
    with mock.patch.dict(op_registry_oot):
        op_registry_oot.pop("MMEncoderAttention", None)
        if reference:
            reference_attention.register()
        yield


def one_rank(experts: bool = False) -> None:
    """Process groups of one rank, made where there are none, within a current configuration.

    A model with experts wants a group more, which vLLM makes only when such a model is the current
    one: then all are made anew.
    """
    if model_parallel_is_initialized():
        if not experts or parallel_state._EP is not None:
            return
        parallel_state.destroy_model_parallel()
    if not torch.distributed.is_initialized():
        init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{_scratch() / 'rendezvous'}",
            local_rank=0,
            backend="gloo",  # on a GPU as well: one rank sends nothing
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
