# SPDX-License-Identifier: Apache-2.0
"""A faster tower with the same values: aligned MLP rows, and attention in fewer passes.

Attention is in ``attention.py``. As to the MLP: matrix kernels of recent GPUs want rows that start
at multiples of 16 bytes. Qwen2.5-VL's MLP is 3,420 wide, in 16 bits 6,840 bytes, so its down
projection falls to a kernel of an older generation that takes four times as long
(``docs/performance.md``). Tensor parallelism makes more such widths: 3,420 over four ranks is 855.

Padded is the memory behind a weight, not the weight: a parameter keeps upstream's shape, as a view
of wider rows, so whatever loads, reloads or updates weights writes where it did before. The columns
behind it are zeros, and so is what they are multiplied with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.utils.math_utils import round_up
from vllm.vit_cudagraph.attention import install as fuse_attention
from vllm.vit_cudagraph.failures import brief
from vllm.vit_cudagraph.gated import silu_and_mul
from vllm.vit_cudagraph.settings import tower_work

logger = init_logger(__name__)

ROW_BYTES = 16
"""What matrix kernels want the start of a row to be a multiple of."""

PADDED_TO = 32
"""Elements to whose next multiple a width is padded where its rows are not aligned."""

_LOADS_FLAT = ("sharded_state", "runai_streamer_sharded", "tensorizer")
"""Load formats that want parameters without gaps between their rows."""

_NAMES = (
    ("gate_up_proj", "act_fn", "down_proj"),
    ("linear_fc1", "act_fn", "linear_fc2"),
    ("fc1", "act", "fc2"),
)
"""What vLLM's vision MLPs call their three parts."""


@dataclass(frozen=True)
class _MLP:
    """``down(act(up(x)))``, as found in a tower."""

    module: nn.Module
    up: ColumnParallelLinear
    act: Any
    down: RowParallelLinear
    act_name: str

    @property
    def width(self) -> int:
        """Between the two projections, on this rank."""
        return int(self.down.weight.shape[1])

    @property
    def gated(self) -> bool:
        return int(self.up.weight.shape[0]) == 2 * self.width


class PaddedLinear(UnquantizedLinearMethod):
    """The linear method of a layer whose weight is a view of wider memory.

    Attributes:
        weight: ``[out, in]`` of the layer, with the padding of one of the two.
        bias: Padded as ``out`` is, or None.
    """

    def __init__(self, layer: Any, *, outputs: int | None = None, inputs: int | None = None):
        # Not upstream's __init__: it chooses among matrix routines, which `install` has ruled out.
        weight = layer.weight.data
        self.real = weight.shape
        padded = (outputs or weight.shape[0], inputs or weight.shape[1])
        self.weight = weight.new_zeros(padded)
        self.bias = None
        _place(layer.weight, self.weight[: weight.shape[0], : weight.shape[1]])
        if layer.bias is not None:
            self.bias = layer.bias.data.new_zeros(padded[0])
            _place(layer.bias, self.bias[: weight.shape[0]])

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.clear_padding()

    def clear_padding(self) -> None:
        """Zeros behind the weight: memory that slept may come back with anything in it."""
        with torch.no_grad():
            self.weight[self.real[0] :].zero_()
            self.weight[:, self.real[1] :].zero_()
            if self.bias is not None:
                self.bias[self.real[0] :].zero_()

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``, both padded.

        A weight that was moved elsewhere (offloaded, replaced) is right, only slower.
        """
        weight = self.weight
        if layer.weight.data_ptr() != weight.data_ptr():
            weight = _padded(layer.weight, weight.shape)
        if bias is not None:
            ours = self.bias
            stands = ours is not None and bias.data_ptr() == ours.data_ptr()
            bias = ours if stands else _padded(bias, weight.shape[:1])
        return F.linear(x, weight, bias)


def _place(parameter: nn.Parameter, where: torch.Tensor) -> None:
    where.copy_(parameter.data)
    parameter.data = where


def _padded(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    wider = tensor.new_zeros(shape)
    wider[tuple(slice(0, n) for n in tensor.shape)] = tensor
    return wider


class AlignedSiluAndMul(nn.Module):
    """``silu(gate) * up``, from rows with any padding behind them to rows with zeros behind."""

    def __init__(self, width: int, padded: int):
        super().__init__()
        self.width, self.padded = width, padded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x, self.width, self.padded)


def install(tower: Any, vllm_config: Any) -> int:
    """Change the layers of a tower that was built and whose weights are not loaded yet.

    Args:
        tower: A module; where there is none, nothing is done.
        vllm_config: Says whether it is wanted (``settings.tower_work``).

    Returns:
        How many MLPs were changed.

    Raises:
        ValueError: The setting is malformed. Anything else costs the faster layers, not the server.
    """
    if not isinstance(tower, nn.Module) or not _wanted(vllm_config):
        return 0
    try:
        fuse_attention(tower)
        changed = [mlp for mlp in _mlps(tower) if _align(mlp)]
    except Exception as error:
        logger.warning("Vision tower: upstream's layers stay as they are: %s", brief(error))
        return 0
    if changed:
        widths = sorted({mlp.width for mlp in changed})
        logger.info_once(
            "Vision tower: %d MLPs of width %s have their rows padded to a multiple of %d",
            len(changed),
            ", ".join(map(str, widths)),
            PADDED_TO,
        )
    return len(changed)


def complete(tower: Any) -> None:
    """Note the attention backend at a tower that leaves it to its layers."""
    if not isinstance(tower, nn.Module) or hasattr(tower, "attn_backend"):
        return
    for module in tower.modules():
        if isinstance(module, MMEncoderAttention):
            tower.attn_backend = module.attn_backend
            return


def clear_padding(tower: Any) -> None:
    """After weights were loaded: see :meth:`PaddedLinear.clear_padding`."""
    for module in tower.modules() if isinstance(tower, nn.Module) else ():
        method = getattr(module, "quant_method", None)
        if isinstance(method, PaddedLinear):
            method.clear_padding()


def _wanted(vllm_config: Any) -> bool:
    """Where encoder graphs are asked for, and nothing else has plans for the same layers."""
    lora = vllm_config.lora_config
    compilation = vllm_config.compilation_config
    return (
        compilation.cudagraph_mm_encoder
        and vllm_config.load_config.load_format not in _LOADS_FLAT
        and tower_work(vllm_config)
        and vllm_config.device_config.device_type in ("cuda", "cpu")
        and vllm_config.kernel_config.linear_backend == "auto"
        and not (lora is not None and lora.enable_tower_connector_lora)
        and not compilation.compile_mm_encoder
        and not envs.VLLM_BATCH_INVARIANT
    )


def _mlps(tower: Any) -> Iterator[_MLP]:
    for module in tower.modules():
        for names in _NAMES:
            up, act, down = (getattr(module, name, None) for name in names)
            parts = {name for name, _ in module.named_children()}
            linear = isinstance(up, ColumnParallelLinear) and isinstance(down, RowParallelLinear)
            if linear and parts <= set(names):
                yield _MLP(module, up, act, down, names[1])


def _align(mlp: _MLP) -> bool:
    """Pad one MLP, if its rows are misaligned and it is of a kind that stays right."""
    if not all(map(_is_plain, (mlp.up, mlp.down))):
        return False
    width, itemsize = mlp.width, mlp.down.weight.element_size()
    if width * itemsize % ROW_BYTES == 0:
        return False
    if mlp.up.gather_output or not mlp.down.input_is_parallel:
        return False
    padded = round_up(width, PADDED_TO)
    if mlp.gated:
        if type(mlp.act) is not SiluAndMul:
            return False
        setattr(mlp.module, mlp.act_name, AlignedSiluAndMul(width, padded))
        outputs = round_up(2 * width, PADDED_TO)
    else:
        if not _keeps_zero(mlp.act, mlp.up.weight):
            return False
        outputs = padded
    mlp.up.quant_method = PaddedLinear(mlp.up, outputs=outputs)
    mlp.down.quant_method = PaddedLinear(mlp.down, inputs=padded)
    return True


def _is_plain(layer: Any) -> bool:
    """Not quantised (such a layer may have no ``weight`` at all), and its weights lie here."""
    if type(layer.quant_method) is not UnquantizedLinearMethod or layer.weight.is_meta:
        return False
    # Set by vLLM's offloading of weights to the host: they are to stay there.
    return not any(hasattr(p, "_vllm_is_uva_offloaded") for p in layer.parameters())


def _keeps_zero(act: Any, like: torch.Tensor) -> bool:
    """Whether an activation gives 0 for 0, element by element, so that padding stays 0."""
    zeros = like.new_zeros(1, 3)
    with torch.no_grad():
        given = act(zeros)
    return given.shape == zeros.shape and not given.any()
