# SPDX-License-Identifier: Apache-2.0
"""A small vision model of any declared geometry, and the same arithmetic written a second time.

vLLM's small models cover few geometries. :func:`make_synthetic` builds a model on the mixin for any
of them: sequences of a frame or of an item, windows of any side, any merge size, frames that are
merged after the tower, and a ``vit_finish`` that shows when it runs twice or not at all.

:func:`reference` computes what that model must give out of its weights alone. It works on one item
at a time with the coordinates of its patches, and calls nothing of this package: no offsets, no
window order, no metadata. An error in those shows as a difference, and cannot cancel out.

Letters: ``N`` patches, ``T`` merged tokens, ``C`` width of the tower, ``D`` width of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

# Importing it defines the operator that `cpu_attention` calls.
import vllm.vit_cudagraph.testing.reference_attention  # noqa: F401
from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.geometry import (
    Grid,
    ViTGeometry,
    learned_rows,
    offset_rows,
    position_rows,
    window_rows,
)
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin
from vllm.vit_cudagraph.testing.models import place

HIDDEN, HEADS, OUT = 32, 2, 24
PATCH, CHANNELS = 2, 3
TABLE = 5
"""Side of the table of learned positions."""
EPSILON = 1e-5
RATES = (1.0, 0.3, 0.1, 0.03)
PIXEL_MEAN, PIXEL_STD = (0.48, 0.41, 0.36), (0.27, 0.22, 0.31)

Attention: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor
]
"""``(q [N, H, d], k, v, offsets int32 [S + 1], longest 0-d on the host, scale) -> [N, H, d]``."""


@dataclass(frozen=True)
class SyntheticShape:
    """What a synthetic tower is like.

    Attributes:
        merge_size, window_side, sequences, temporal_merge, output_rows: As in ``ViTGeometry``.
        depth: Layers. With windows every other one has them, and the last one has not.
        learned: Whether positions interpolated from a weight are added.
        uint8: Whether the tower takes uint8 pixels and normalises them itself.

    Raises:
        ValueError: Frames are merged inside the tower, whose output shape would depend on grids;
            no layers.
    """

    merge_size: int = 2
    window_side: int | None = None
    sequences: Literal["frame", "item"] = "frame"
    temporal_merge: Literal["none", "halve", "pool"] = "none"
    output_rows: Literal["tokens", "patches"] = "tokens"
    depth: int = 2
    learned: bool = False
    uint8: bool = True

    def __post_init__(self) -> None:
        if self.temporal_merge != "none" and self.output_rows != "patches":
            raise ValueError(
                f"temporal_merge={self.temporal_merge!r} cannot be captured inside the tower: set "
                "output_rows='patches', and vit_project merges the frames"
            )
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1, got {self.depth}")

    def windowed(self, layer: int) -> bool:
        """Whether a layer attends within windows."""
        return self.window_side is not None and (self.depth - layer) % 2 == 0


def synthetic_options() -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments of :func:`make_synthetic`: any valid :class:`SyntheticShape`. They shrink
    to one layer of full attention within frames."""
    merges = st.sampled_from(
        [("none", "tokens"), ("none", "patches"), ("halve", "patches"), ("pool", "patches")]
    )
    drawn = st.fixed_dictionaries(
        {
            "merge_size": st.integers(1, 3),
            "window_side": st.sampled_from([None, 1, 2, 3, 4]),
            "sequences": st.sampled_from(["frame", "item"]),
            "merges": merges,
            "depth": st.integers(1, 3),
            "learned": st.booleans(),
            "uint8": st.booleans(),
        }
    )
    return drawn.map(_with_both_merges)


def _with_both_merges(drawn: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in drawn.items() if name != "merges"}
    return rest | dict(zip(("temporal_merge", "output_rows"), drawn["merges"], strict=True))


def make_synthetic(
    *, config: Any, seed: int = 0, attention: Attention | None = None, **shape: Any
) -> SyntheticModel:
    """A synthetic model with weights from a seed, in evaluation mode.

    Args:
        config: A ``VllmConfig``; the model takes its dtype and its limits from
            ``config.model_config``. Groups of one rank must stand, as for any model of vLLM.
        seed: Of the weights.
        attention: What the tower computes attention with; None takes the reference attention on
            the CPU and vLLM's FlashAttention on a GPU.
        shape: Fields of :class:`SyntheticShape`.

    Raises:
        ValueError: As :class:`SyntheticShape`.
    """
    device = place().torch_device
    attention = attention or (cpu_attention if device.type == "cpu" else gpu_attention)
    model = SyntheticModel(SyntheticShape(**shape), config.model_config, attention)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1 + 0.1 * noise
        elif name.endswith("bias"):
            noise = 0.1 * noise
        elif weight.dim() == 2:
            noise = noise / weight.shape[1] ** 0.5
        weight.data.copy_(noise)
    return model.requires_grad_(False).to(device, config.model_config.dtype).eval()


# -- the model ---------------------------------------------------------------------------------


def cpu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    longest: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The reference attention, see ``reference_attention.varlen_attention``."""
    return torch.ops.vit_cudagraph.varlen_attention(q, k, v, offsets, longest, scale)


def gpu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    longest: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """vLLM's own FlashAttention for vision towers."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.ops.vit_attn_wrappers import vit_flash_attn_wrapper

    version = get_flash_attn_version(head_size=q.shape[-1])
    rows = (x.unsqueeze(0) for x in (q, k, v))
    return vit_flash_attn_wrapper(*rows, 1, False, version, scale, offsets, longest).view(q.shape)


class InputNorm(nn.Module):
    """uint8 pixel rows, channel by channel, to numbers around 0. A row of zeros is not zero
    afterwards."""

    input_dtype = torch.uint8
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(PIXEL_MEAN).repeat_interleave(PATCH**2))
        self.register_buffer("std", torch.tensor(PIXEL_STD).repeat_interleave(PATCH**2))

    def forward(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (pixels.to(dtype) / 255 - self.mean) / self.std


class Block(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.attn_norm = nn.LayerNorm(HIDDEN, EPSILON)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.mlp_norm = nn.LayerNorm(HIDDEN, EPSILON)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(
        self, rows: torch.Tensor, offsets: torch.Tensor, longest: torch.Tensor
    ) -> torch.Tensor:
        qkv = self.qkv(self.attn_norm(rows)).view(-1, 3, HEADS, HIDDEN // HEADS)
        q, k, v = qkv.unbind(1)
        attended = self.attention(q, k, v, offsets, longest, (HIDDEN // HEADS) ** -0.5)
        rows = rows + self.proj(attended.flatten(1))
        return rows + self.down(F.gelu(self.up(self.mlp_norm(rows))))


class Merger(nn.Module):
    """The patches of a token, side by side, to its output row."""

    def __init__(self, merge_size: int) -> None:
        super().__init__()
        self.join = nn.Linear(merge_size**2 * HIDDEN, OUT)
        self.out = nn.Linear(OUT, OUT)

    def forward(self, joined: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.join(joined)))


class SyntheticTower(nn.Module):
    """A vision tower with the attributes that vLLM's towers have.

    Its output is ``[T, D]``, or ``[N, C]`` where the shape says that rows are patches.
    """

    hidden_size, out_hidden_size, tp_size = HIDDEN, OUT, 1

    def __init__(self, shape: SyntheticShape, attention: Attention) -> None:
        super().__init__()
        self.shape = shape
        self.attn_backend = AttentionBackendEnum.FLASH_ATTN
        if shape.uint8:
            self.input_norm = InputNorm()
        self.embed = nn.Linear(CHANNELS * PATCH**2, HIDDEN)
        if shape.learned:
            self.table = nn.Parameter(torch.empty(HIDDEN, TABLE, TABLE))
        self.blocks = nn.ModuleList(Block(attention) for _ in range(shape.depth))
        self.last_norm = nn.LayerNorm(HIDDEN, EPSILON)
        if shape.output_rows == "tokens":
            self.merger = Merger(shape.merge_size)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def prepare_encoder_metadata(self, grids: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Position rows ``[N, C]`` of some items by name, and learned ones where there are any."""
        rows = {"positions": torch.cat([self._positions(*grid) for grid in grids])}
        if self.shape.learned:
            rows["pos_embeds"] = torch.cat([self._interpolated(*grid) for grid in grids])
        return {name: made.to(self.device, self.dtype) for name, made in rows.items()}

    def _merge_order(self, rows: torch.Tensor) -> torch.Tensor:
        """``[t, h, w, ...]`` to ``[N, ...]`` with the patches of a token next to each other."""
        m = self.shape.merge_size
        blocks = rows.unflatten(2, (-1, m)).unflatten(1, (-1, m)).transpose(2, 3)
        return blocks.flatten(0, 4)

    def _positions(self, t: int, h: int, w: int) -> torch.Tensor:
        ranges = [torch.arange(n, dtype=torch.float64) for n in (t, h, w)]
        frame, row, col = torch.meshgrid(*ranges, indexing="ij")
        share = 2 * frame / t + 7 * row / h + 3 * col / w
        features = torch.stack([frame, row, col, share], dim=-1)
        angles = (features[..., None] * torch.tensor(RATES, dtype=torch.float64)).flatten(-2)
        return self._merge_order(torch.cat([angles.sin(), angles.cos()], dim=-1))

    def _interpolated(self, t: int, h: int, w: int) -> torch.Tensor:
        table = self.table.float()[None]
        frame = F.interpolate(table, size=(h, w), mode="bilinear", align_corners=True)
        return self._merge_order(frame.permute(0, 2, 3, 1).expand(t, -1, -1, -1))

    def forward(
        self,
        pixels: torch.Tensor,
        grid_thw: Any = None,
        *,
        encoder_metadata: Mapping[str, torch.Tensor | None],
    ) -> torch.Tensor:
        metadata: Any = encoder_metadata
        rows = self.input_norm(pixels, self.dtype) if self.shape.uint8 else pixels
        rows = self.embed(rows) + metadata["positions"]
        if self.shape.learned:
            rows = rows + metadata["pos_embeds"]
        if self.shape.window_side is not None:
            rows = self._reordered(rows, metadata["window_index"])
        full = metadata["cu_seqlens"], metadata["max_seqlen"]
        for layer, block in enumerate(self.blocks):
            within = full
            if self.shape.windowed(layer):
                within = metadata["cu_window_seqlens"], metadata["max_window_seqlen"]
            rows = block(rows, *within)
        if self.shape.window_side is not None:
            rows = self._reordered(rows, metadata["reverse_indices"])
        rows = self.last_norm(rows)
        return rows if self.shape.output_rows == "patches" else self.merger(self._joined(rows))

    def _joined(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(-1, self.shape.merge_size**2 * HIDDEN)

    def _reordered(self, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return self._joined(rows)[order].view(-1, HIDDEN)


class _Upstream(nn.Module, SupportsEncoderCudaGraph):
    """What the class behind the mixin is in vLLM: a module that loads weights in place."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy weights in by their names; gives the names that were loaded."""
        named, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            named[name].data.copy_(weight)
            loaded.add(name)
        return loaded


class SyntheticModel(WindowedViTCudaGraphMixin, _Upstream):
    """A model on the mixin: a tower, what follows it, and nothing else.

    Attributes:
        visual: The tower.
        shape: What it is like.
        model_config: vLLM's.
        config: Its ``vision_config`` has the sizes of a pixel row under Qwen's names.
    """

    def __init__(self, shape: SyntheticShape, model_config: Any, attention: Attention) -> None:
        super().__init__()
        self.shape, self.model_config = shape, model_config
        self.config = _Config(_VisionConfig())
        self.visual = SyntheticTower(shape, attention)
        if shape.output_rows == "patches":
            self.merger = Merger(shape.merge_size)
        self.delimiter = nn.Parameter(torch.empty(OUT))

    def vit_geometry(self) -> ViTGeometry:
        shape = self.shape
        rows = position_rows("positions") | offset_rows(
            "sequences", "cu_seqlens", "max_seqlen", "sequence_lengths"
        )
        if shape.learned:
            rows |= learned_rows("pos_embeds")
        if shape.window_side is not None:
            rows |= window_rows("window_index", "reverse_indices")
            rows |= offset_rows("windows", "cu_window_seqlens", "max_window_seqlen")
        return ViTGeometry(
            patch_size=PATCH,
            in_channels=CHANNELS,
            merge_size=shape.merge_size,
            rows=rows,
            window_side=shape.window_side,
            temporal_merge=shape.temporal_merge,
            sequences=shape.sequences,
            output_rows=shape.output_rows,
        )

    def vit_capturable(self, grid: Grid) -> bool:
        """Where all frames are pooled no number of tokens bounds the patches of a video."""
        return self.shape.temporal_merge != "pool" or grid[0] == 1

    def vit_project(self, rows: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Where rows are patches: frames to fewer frames, then patches to tokens. Its shapes depend
        on the grids, so no graph can hold it. A last odd frame goes with the two before it."""
        if self.shape.output_rows == "tokens":
            return rows
        merged, first = [], 0
        for t, h, w in grids:
            frames = rows[first : first + t * h * w].view(t, h * w, HIDDEN)
            first += t * h * w
            fewer = {"none": t, "halve": max(1, t // 2), "pool": 1}[self.shape.temporal_merge]
            size = t // fewer
            for i in range(fewer):
                end = t if i == fewer - 1 else (i + 1) * size
                merged.append(frames[i * size : end].mean(0))
        joined = torch.cat(merged).view(-1, self.shape.merge_size**2 * HIDDEN)
        return self.merger(joined)

    def vit_finish(
        self, outputs: list[torch.Tensor], mm_kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Shift each item by a number of its grid, and append the delimiter, stronger with each
        item of the batch."""
        finished = []
        for i, (rows, grid) in enumerate(
            zip(outputs, self.vit_inputs(mm_kwargs).grids, strict=True)
        ):
            t, h, w = grid
            delimiter = self.delimiter * (1 + i / len(outputs))
            finished.append(torch.cat([rows + math.cos(t + 2 * h + 5 * w), delimiter[None]]))
        return finished

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        """The mixin's eager path: one tensor ``[T + 1, D]`` an item."""
        grids = self.vit_inputs(mm_kwargs).grids
        rows = self.vit_project(self.encoder_eager_forward(mm_kwargs), grids)
        tokens = [self.vit_declared.output_tokens(grid) for grid in grids]
        return self.vit_finish(list(rows.split(tokens)), mm_kwargs)


@dataclass(frozen=True)
class _VisionConfig:
    in_channels: int = CHANNELS
    temporal_patch_size: int = 1
    patch_size: int = PATCH


@dataclass(frozen=True)
class _Config:
    vision_config: _VisionConfig


# -- the same, a second time -------------------------------------------------------------------

Place = tuple[int, int, int]
"""Frame, row and column of a patch."""


def reference(model: SyntheticModel, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """What ``model`` must give for one modality's ``mm_kwargs``, in float64 on the CPU.

    Patches are known by their coordinates alone: which of them attend to each other, which make a
    token, which frames are merged. Time and memory grow with the square of a sequence.

    Returns:
        One tensor ``[T + 1, D]`` an item.
    """
    suffix, grids_key = ("", "image_grid_thw")
    if "video_grid_thw" in mm_kwargs:
        suffix, grids_key = ("_videos", "video_grid_thw")
    grids = [[int(n) for n in grid] for grid in mm_kwargs[grids_key]]
    pixels = mm_kwargs[f"pixel_values{suffix}"].cpu().double()
    weights = {name: w.detach().cpu().double() for name, w in model.named_parameters()}
    outputs: list[torch.Tensor] = []
    for number, (t, h, w) in enumerate(grids):
        item, pixels = pixels[: t * h * w], pixels[t * h * w :]
        places = _places(model.shape.merge_size, t, h, w)
        tokens = _tokens(
            model.shape, weights, _tower(model.shape, weights, item, places, (t, h, w)), places
        )
        shifted = [row + math.cos(t + 2 * h + 5 * w) for row in tokens]
        outputs.append(
            torch.stack([*shifted, weights["delimiter"] * (len(grids) + number) / len(grids)])
        )
    return outputs


def _places(merge: int, t: int, h: int, w: int) -> list[Place]:
    """Coordinates of the item's patches in the order of its pixel rows."""
    return [
        (frame, top + down, left + right)
        for frame in range(t)
        for top in range(0, h, merge)
        for left in range(0, w, merge)
        for down in range(merge)
        for right in range(merge)
    ]


def _tower(
    shape: SyntheticShape,
    weights: Mapping[str, torch.Tensor],
    pixels: torch.Tensor,
    places: Sequence[Place],
    grid: tuple[int, int, int],
) -> torch.Tensor:
    if shape.uint8:
        columns = []
        for column, values in enumerate(pixels.T):
            channel = column // PATCH**2
            columns.append((values / 255 - PIXEL_MEAN[channel]) / PIXEL_STD[channel])
        pixels = torch.stack(columns, dim=1)
    rows = _linear(weights, "visual.embed", pixels)
    rows = rows + torch.tensor([_sinusoids(place, grid) for place in places], dtype=torch.float64)
    if shape.learned:
        table = weights["visual.table"]
        rows = rows + torch.stack([_from_table(table, place, grid) for place in places])
    for layer in range(shape.depth):
        name = f"visual.blocks.{layer}"
        sets = _attending(shape, layer, places)
        rows = rows + _attention(weights, name, _norm(weights, f"{name}.attn_norm", rows), sets)
        inner = _linear(weights, f"{name}.up", _norm(weights, f"{name}.mlp_norm", rows))
        rows = rows + _linear(weights, f"{name}.down", _gelu(inner))
    return _norm(weights, "visual.last_norm", rows)


def _attending(shape: SyntheticShape, layer: int, places: Sequence[Place]) -> list[list[int]]:
    """Sets of patches that attend to each other in one layer."""
    sets: dict[tuple[int, ...], list[int]] = {}
    for patch, (frame, row, col) in enumerate(places):
        key: tuple[int, ...] = () if shape.sequences == "item" else (frame,)
        if shape.window_side is not None and (shape.depth - layer) % 2 == 0:
            side = shape.window_side * shape.merge_size
            key = (frame, row // side, col // side)
        sets.setdefault(key, []).append(patch)
    return list(sets.values())


def _attention(
    weights: Mapping[str, torch.Tensor], name: str, rows: torch.Tensor, sets: list[list[int]]
) -> torch.Tensor:
    q, k, v = _linear(weights, f"{name}.qkv", rows).chunk(3, dim=1)
    width = HIDDEN // HEADS
    out = torch.empty_like(rows)
    for patches in sets:
        for first in range(0, HIDDEN, width):
            head = slice(first, first + width)
            scores = q[patches, head] @ k[patches, head].T / width**0.5
            shares = (scores - scores.max(dim=1, keepdim=True).values).exp()
            out[patches, head] = shares / shares.sum(1, keepdim=True) @ v[patches, head]
    return _linear(weights, f"{name}.proj", out)


def _tokens(
    shape: SyntheticShape,
    weights: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    places: Sequence[Place],
) -> torch.Tensor:
    """Output rows of one item ``[T, D]``, token by token."""
    last = max(frame for frame, _, _ in places)
    squares: dict[Place, dict[int, list[int]]] = {}
    for patch, (frame, row, col) in enumerate(places):
        target = {"none": frame, "halve": frame // 2, "pool": 0}[shape.temporal_merge]
        if shape.temporal_merge == "halve" and frame == last and frame and frame % 2 == 0:
            target -= 1
        token = (target, row // shape.merge_size, col // shape.merge_size)
        squares.setdefault(token, {}).setdefault(frame, []).append(patch)
    joined = []
    for token in sorted(squares):
        frames = [rows[patches].flatten() for patches in squares[token].values()]
        joined.append(torch.stack(frames).mean(0))
    merger = "visual.merger" if shape.output_rows == "tokens" else "merger"
    inner = _gelu(_linear(weights, f"{merger}.join", torch.stack(joined)))
    return _linear(weights, f"{merger}.out", inner)


def _sinusoids(place: Place, grid: tuple[int, int, int]) -> list[float]:
    frame, row, col = place
    share = 2 * frame / grid[0] + 7 * row / grid[1] + 3 * col / grid[2]
    angles = [rate * number for number in (frame, row, col, share) for rate in RATES]
    return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]


def _from_table(table: torch.Tensor, place: Place, grid: tuple[int, int, int]) -> torch.Tensor:
    """The table at a patch, between the four entries around it; corners lie on corners."""
    ends = []
    for at, size in zip(place[1:], grid[1:], strict=True):
        exact = at * (TABLE - 1) / (size - 1) if size > 1 else 0.0
        low = min(int(exact), TABLE - 2)
        ends.append([(low, 1 - (exact - low)), (low + 1, exact - low)])
    parts = [table[:, row, col] * (a * b) for row, a in ends[0] for col, b in ends[1]]
    return torch.stack(parts).sum(0)


def _linear(weights: Mapping[str, torch.Tensor], name: str, rows: torch.Tensor) -> torch.Tensor:
    return rows @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _norm(weights: Mapping[str, torch.Tensor], name: str, rows: torch.Tensor) -> torch.Tensor:
    centred = rows - rows.mean(1, keepdim=True)
    scale = (centred.square().mean(1, keepdim=True) + EPSILON).sqrt()
    return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _gelu(rows: torch.Tensor) -> torch.Tensor:
    return rows * (1 + torch.erf(rows / math.sqrt(2))) / 2
