# SPDX-License-Identifier: Apache-2.0
"""What graph output is held against, and how closely.

Four oracles, each of which can see what another cannot:

* the same model eagerly on exact shapes (:meth:`subject.Subject.eager`): the promise itself;
* the same model eagerly on the graph's own padded buffers (:func:`capture_faults`): bit for bit,
  so it tells faults of capture from faults of padding;
* transformers' tower with the same weights (:class:`TransformersTower`), or a plain loop over grid
  coordinates (``synthetic.reference``): code of other people, or of another kind, which does not
  share a mistake of the geometry;
* ``flash-attn``'s own varlen attention in the eager tower (:func:`flash_attention`), on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.vit_cudagraph.captured import CapturedBudget
from vllm.vit_cudagraph.geometry import PIXELS, Grid, ViTGeometry


class Mismatch(AssertionError):
    """Graph output, or the way it came about, is not what it must be."""


TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""Largest :func:`error` that rounding explains. The same sums in another order differ by some
roundings of the dtype (2**-24, 2**-11, 2**-8), which a few layers carry on."""


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest distance between two rows, over the usual length of a row of ``expected``.

    Args:
        actual, expected: ``[T, width]``.

    Returns:
        0 for equal tensors; infinity where shapes differ or a number is not finite.
    """
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    expected = expected.to(actual.device)
    distance = (actual.double() - expected.double()).norm(dim=-1).max()
    usual = expected.double().norm(dim=-1).square().mean().sqrt()
    worst = float(distance / usual)
    return worst if worst == worst else float("inf")


WORST: dict[tuple[str, torch.dtype], float] = {}
"""Largest :func:`error` that :func:`assert_close` has let pass in this process, by what the output
was held against and its dtype: how much of the tolerance is used."""


def assert_close(
    actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str
) -> None:
    """Item by item within :data:`TOLERANCE` of the dtype.

    Raises:
        Mismatch: Another number of items, or an item further away.
    """
    if len(actual) != len(expected):
        raise Mismatch(f"{len(actual)} items, {what} has {len(expected)}")
    for item, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        allowed, found = TOLERANCE[ours.dtype], error(ours, theirs)
        if not found <= allowed:
            raise Mismatch(
                f"item {item} {tuple(ours.shape)} differs from {what} {tuple(theirs.shape)} by "
                f"{found:.1e}, allowed are {allowed:.0e}"
            )
        seen = what, ours.dtype
        WORST[seen] = max(found, WORST.get(seen, 0.0))


# -- one replay --------------------------------------------------------------------------------


def capture_faults(
    model: Any, captured: CapturedBudget, grids: Sequence[Grid], rows: torch.Tensor
) -> list[str]:
    """Where a replay differs from an eager run over the buffers that it has just read.

    Both have the same shapes, so they must agree bit for bit. What differs here went wrong in
    capture; what agrees here and not with exact shapes went wrong in padding.
    """
    used = model.vit_declared.tower_rows(grids)
    if not bool(torch.isfinite(rows[:used]).all()):
        return ["the graph gave numbers that are not finite"]
    with torch.inference_mode(), as_while_capturing(rows.device):
        again = model.encoder_cudagraph_forward(dict(captured.buffers))
    if torch.equal(rows[:used], again[:used]):
        return []
    found = error(rows[:used], again[:used])
    return [f"the graph differs from an eager run over its own buffers by {found:.1e}"]


@contextmanager
def as_while_capturing(device: torch.device) -> Iterator[None]:
    """On a GPU vLLM hands FlashAttention an output of zeros while a stream is capturing, because
    the kernel writes no rows past the last offset and its next layer would multiply them by 0, NaN
    included. An eager run over padded buffers needs the same."""
    if device.type != "cuda":
        yield
        return
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        yield


def tail_faults(
    geometry: ViTGeometry, captured: CapturedBudget, grids: Sequence[Grid]
) -> list[str]:
    """Buffers whose unused rows are not what ``geometry`` declares, after a step of ``grids``."""
    patches = sum(geometry.patches(grid) for grid in grids)
    used = {
        "patches": patches,
        "tokens": patches // geometry.merge_unit,
        "sequences": sum(len(geometry.sequence_lengths(grid)) for grid in grids),
        "windows": sum(geometry.windows(grid) for grid in grids),
    }
    faults = []
    if captured.buffers[PIXELS][patches:].count_nonzero():
        faults.append("pixel rows past the end are not 0")
    for name, row in geometry.rows.items():
        buffer = captured.buffers.get(name)
        if buffer is None or row.kind == "longest":
            continue
        if row.value == "offsets":
            wrong = (buffer[used[row.kind] :] != patches).any()
        elif row.pad == "identity":
            first = used[row.kind]
            indices = torch.arange(first, len(buffer), device=buffer.device)
            wrong = (buffer[first:] != indices).any()
        else:
            wrong = buffer[used[row.kind] :].count_nonzero()
        if wrong:
            faults.append(f"{name} is not padded as declared")
    return faults


# -- towers of others --------------------------------------------------------------------------


class TransformersTower:
    """transformers' vision tower of a checkpoint, which shares no code with vLLM's.

    Args:
        folder: A checkpoint of the Qwen-VL families; vLLM's model must carry its weights too.
        device, dtype: Where and in what it computes. float32 is the better judge.
    """

    def __init__(
        self, folder: Any, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        from transformers import AutoImageProcessor, AutoModelForImageTextToText

        whole = AutoModelForImageTextToText.from_pretrained(
            str(folder), dtype=dtype, attn_implementation="sdpa"
        )
        self.tower = whole.model.visual.eval().to(device)
        self.processor = AutoImageProcessor.from_pretrained(str(folder))

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 pixel rows ``[N, C * tp * p * p]`` as the image processor normalises them."""
        if pixels.is_floating_point():
            return pixels.to(self.tower.dtype)
        mean = torch.tensor(self.processor.image_mean, dtype=torch.float64)
        std = torch.tensor(self.processor.image_std, dtype=torch.float64)
        scaled = pixels.cpu().double().unflatten(1, (len(mean), -1)) * self.processor.rescale_factor
        rows = (scaled - mean[:, None]) / std[:, None]
        return rows.flatten(1).to(self.tower.device, self.tower.dtype)

    def __call__(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Embeddings, one ``[T, width]`` an item; deepstack levels stand side by side."""
        grid_thw = torch.tensor([list(grid) for grid in grids], device=self.tower.device)
        with torch.inference_mode():
            outputs = self.tower(self.normalised(pixels), grid_thw=grid_thw)
        levels = getattr(outputs, "deepstack_features", None) or []
        rows = torch.cat([outputs.pooler_output, *levels], dim=1)
        tokens = grid_thw.prod(dim=1) // self.tower.spatial_merge_size**2
        return list(rows.split(tokens.tolist()))

    def reference(self, batch: Any, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """For ``EncoderGraphConformance.reference``: a batch under vLLM's usual names."""
        pixels = next(value for name, value in mm_kwargs.items() if name.startswith("pixel"))
        return self(pixels, batch.grids)


def flash_attention_missing() -> str | None:
    """Why :func:`flash_attention` cannot be used here, or None."""
    if not torch.cuda.is_available():
        return "flash-attn computes on a GPU only"
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return "the package flash-attn is not installed (extra: flash)"
    return None


@contextmanager
def flash_attention(tower: Any) -> Iterator[None]:
    """While open, the tower's attention is the ``flash-attn`` package's own varlen function.

    Raises:
        ImportError: The package is not installed; see :func:`flash_attention_missing`.
        ValueError: The tower has no attention layer of vLLM's.
    """
    from flash_attn import flash_attn_varlen_func

    layers = [m for m in tower.modules() if isinstance(m, MMEncoderAttention)]
    if not layers:
        raise ValueError(f"{type(tower).__name__} has no MMEncoderAttention layer")
    with ExitStack() as stack:
        for layer in layers:
            own = _varlen_layer(layer, flash_attn_varlen_func)
            stack.enter_context(mock.patch.object(layer, "_forward_method", own))
        yield


def _varlen_layer(
    layer: MMEncoderAttention, varlen: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """The layer's forward over a varlen function of flash-attn's signature."""

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: torch.Tensor,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, rows = query.shape[:2]
        flat = query.dim() != 4
        q, k, v = layer.view_qkv_to_4d(query, key, value, batch, rows, key.shape[1])
        longest = int(max_seqlen)
        out = varlen(
            *(x.flatten(0, 1) for x in (q, k, v)),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=layer.scale,
        )
        return out.reshape(batch, rows, -1) if flat else out.unflatten(0, (batch, rows))

    return forward
