# SPDX-License-Identifier: Apache-2.0
"""From grids to the tensors that a tower reads: exact, unpadded, one function for every path.

Eager runs, capture and replay all take their metadata from :meth:`MetadataBuilder.build`, so they
cannot drift apart. How offsets are laid out for an attention backend is upstream's business, and
upstream's functions are called for it (:class:`AttentionLayout`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import TypeIs

from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.geometry import Grid, Pad, Rows, ViTGeometry

Offsets = npt.NDArray[np.int32]

Exact = torch.Tensor | npt.NDArray[Any] | list[torch.Tensor] | tuple[torch.Tensor, ...]
"""One tensor of the metadata, exact and unpadded: whole, still on the host, or in pieces whose
rows follow each other."""

_HOST = torch.device("cpu")

CACHE_BYTES = 64 << 20
"""Device memory that cached position rows may take; the least recently used grid goes first."""


HOST_CACHE_BYTES = 16 << 20
"""Host memory that cached integers (offsets, window order) may take: once for grids, once for
batches."""


@dataclass(frozen=True)
class AttentionLayout:
    """How one attention backend wants offsets, lengths and their bound.

    Attributes:
        backend: The tower's attention backend.
        hidden_size, tp_size, fp8_padded_hidden_size: What FlashInfer's element offsets need; other
            backends ignore them.
    """

    backend: AttentionBackendEnum
    hidden_size: int = 0
    tp_size: int = 1
    fp8_padded_hidden_size: int | None = None

    @classmethod
    def of_tower(cls, tower: Any) -> AttentionLayout:
        return cls(
            backend=tower.attn_backend,
            hidden_size=getattr(tower, "hidden_size", 0),
            tp_size=getattr(tower, "tp_size", 1),
            fp8_padded_hidden_size=getattr(tower, "fp8_padded_hidden_size", None),
        )

    @property
    def sectioned(self) -> bool:
        """FlashInfer's offsets come in two sections of equal length (Q/K/O and V)."""
        return self.backend == AttentionBackendEnum.FLASHINFER

    def offsets(self, cumulative: Offsets) -> npt.NDArray[Any]:
        """Offsets in patches, shape ``[S + 1]``, laid out as the backend reads them."""
        return MMEncoderAttention.maybe_recompute_cu_seqlens(
            self.backend,
            cumulative,
            self.hidden_size,
            self.tp_size,
            _HOST,
            fp8_padded_hidden_size=self.fp8_padded_hidden_size,
        ).numpy()

    def lengths(self, cumulative: Offsets) -> npt.NDArray[Any] | None:
        """Single lengths, or None where the backend does not read them."""
        lengths = MMEncoderAttention.maybe_compute_seq_lens(self.backend, cumulative, _HOST)
        return None if lengths is None else lengths.numpy()

    def longest(self, cumulative: Offsets) -> npt.NDArray[np.int32]:
        """The longest sequence, 0-d int32 (0 where no backend reads it). It stays on the host,
        since attention reads it as a Python number."""
        return np.array(
            MMEncoderAttention.compute_max_seqlen(self.backend, cumulative), dtype=np.int32
        )


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SizedCache(Generic[K, V]):
    """Least-recently-used cache, bounded in bytes.

    Args:
        size: Bytes of a key and its value.
        max_bytes: Of all values; the least recently used goes first. A value above it is not kept.
    """

    def __init__(self, size: Callable[[K, V], int], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._size = size
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[K], V]) -> V:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry
        entry = make(key)
        size = self._size(key, entry)
        if size <= self.max_bytes:
            self._entries[key] = entry
            self.bytes += size
        while self.bytes > self.max_bytes:
            self.bytes -= self._size(*self._entries.popitem(last=False))
        return entry

    def clear(self) -> None:
        self._entries.clear()
        self.bytes = 0


class RowCache(SizedCache[Grid, dict[str, torch.Tensor]]):
    """Rows that depend on one grid alone."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        super().__init__(lambda _, rows: _nbytes(rows), max_bytes)


def _nbytes(entry: Mapping[str, torch.Tensor]) -> int:
    return sum(rows.numel() * rows.element_size() for rows in entry.values())


HostArrays = Mapping[str, npt.NDArray[Any] | None]


_ARRAY_OVERHEAD = 256
"""Bytes that an array takes besides its numbers, its share of the key and of the cache included."""


_GRID_BYTES = 128
"""What a grid of a key takes: a tuple and three numbers."""


def _array_bytes(key: Any, arrays: HostArrays) -> int:
    """Of a grid, or of a layout and the grids of a batch, and what it stands for."""
    grids = len(key[1]) if isinstance(key[1], tuple) else 1
    kept = [array for array in arrays.values() if array is not None]
    return grids * _GRID_BYTES + sum(array.nbytes + _ARRAY_OVERHEAD for array in kept)


def _host_cache() -> SizedCache[Any, HostArrays]:
    return SizedCache(_array_bytes, HOST_CACHE_BYTES)


@dataclass
class MetadataBuilder:
    """Builds a tower's metadata from grids.

    Attributes:
        geometry: What the tower declared.
        tower: Read for its attention backend, each time: it may be told another after loading.
        position_rows: Rows of one grid by name, made by the tower; called once a grid.
        learned_rows: Rows of several grids in order, by name; called each time, since weights may
            have been replaced in place.
    """

    geometry: ViTGeometry
    tower: Any
    position_rows: Callable[[Grid], Mapping[str, Any]]
    learned_rows: Callable[[Sequence[Grid]], Mapping[str, Any]]
    cache: RowCache = field(default_factory=RowCache)
    _of_grids: SizedCache[Any, HostArrays] = field(default_factory=_host_cache)
    _of_batches: SizedCache[Any, HostArrays] = field(default_factory=_host_cache)
    _since: object = field(default_factory=object)

    def forget(self) -> None:
        """Empty all caches; no key of before is given again."""
        self._since = object()
        for cache in (self.cache, self._of_grids, self._of_batches):
            cache.clear()

    @property
    def layout(self) -> AttentionLayout:
        return AttentionLayout.of_tower(self.tower)

    def key(self, grids: Sequence[Grid]) -> Hashable | None:
        """Equal keys stand for equal :meth:`parts`; None where weights have a say in them. Order
        counts, and so does what the attention backend wants."""
        if self.geometry.learns_rows:
            return None
        return self._since, self.layout, tuple(grids)

    def build(self, grids: Sequence[Grid], device: torch.device) -> dict[str, torch.Tensor | None]:
        """The exact, unpadded metadata of some items as tensors: :meth:`parts`, joined and moved.

        Args:
            grids: At least one item; a window never spans two of them.
            device: Where tensors go. Longest lengths stay on the host, since attention reads them
                as Python numbers.

        Returns:
            A tensor for every name in the geometry's rows; None where the attention backend does
            not read that tensor.
        """
        made: dict[str, torch.Tensor | None] = {}
        for name, part in self.parts(grids).items():
            if isinstance(part, np.ndarray):
                # A copy: arrays are cached, and what is made here is the caller's.
                part = torch.from_numpy(part.copy())
                if self.geometry.rows[name].kind != "longest":
                    part = async_tensor_h2d(part, device)
                made[name] = part
            else:
                made[name] = None if part is None else joined(part).to(device)
        return made

    def parts(self, grids: Sequence[Grid]) -> dict[str, Exact | None]:
        """The exact, unpadded metadata of some items, each part where it was made.

        Returns:
            Arrays on the host for what the grids alone give (offsets, lengths, window order, and
            0-d the longest length), which are cached and not to be written to; pieces on the
            tower's device, one an item, for positions.
        """
        parts: dict[str, Exact | None] = {}
        if any(row.value not in ("position", "learned") for row in self.geometry.rows.values()):
            key = (self.layout, tuple(grids))
            parts.update(self._of_batches.get(key, self._make_integers))
        kinds = dict.fromkeys(grids)
        of_kind = {grid: self.cache.get(grid, self._make_positions) for grid in kinds}
        positions = [of_kind[grid] for grid in grids]
        learned = self._learned(grids)
        for name, row in self.geometry.rows.items():
            if row.value == "position":
                parts[name] = [rows[name] for rows in positions]
            elif row.value == "learned":
                parts[name] = [learned[name]]
        return {name: parts[name] for name in self.geometry.rows}

    def _make_integers(self, key: tuple[AttentionLayout, tuple[Grid, ...]]) -> HostArrays:
        """What the grids alone give, by name."""
        layout, grids = key
        rows = self.geometry.rows.items()
        offsets = {name: self._offsets(row, grids) for name, row in rows if row.value == "offsets"}
        made: dict[str, npt.NDArray[Any] | None] = {}
        for name, row in rows:
            match row.value:
                case "offsets":
                    made[name] = layout.offsets(offsets[name])
                case "lengths":
                    made[name] = layout.lengths(offsets[str(row.covers)])
                case "longest":
                    made[name] = layout.longest(offsets[str(row.covers)])
        made.update(self._window_index(grids))
        for name, row in rows:
            if row.value == "merge":
                made[name] = self._joined_index("merge", grids)
        return made

    def _offsets(self, row: Rows, grids: Sequence[Grid]) -> Offsets:
        """Cumulative lengths in patches, int32, from 0; shape ``[S + 1]`` or ``[W + 1]``."""
        parts = [self._of_grid(grid)[row.kind] for grid in grids]
        return np.concatenate([np.zeros(1, np.int32), *parts]).cumsum(dtype=np.int32)

    def _of_grid(self, grid: Grid) -> dict[str, npt.NDArray[Any]]:
        """Lengths of one item's sequences and windows, its window order and its merge order."""
        return self._of_grids.get(grid, self._make_of_grid)  # type: ignore[return-value]

    def _make_of_grid(self, grid: Grid) -> HostArrays:
        geometry = self.geometry
        made: dict[str, npt.NDArray[Any]] = {
            "sequences": np.asarray(geometry.sequence_lengths(grid), dtype=np.int32)
        }
        if any(row.value == "merge" for row in geometry.rows.values()):
            made["merge"] = geometry.merge_order(grid)
        if geometry.window_side is None:
            return made
        windows = geometry.window_lengths(grid).astype(np.int32)
        return made | {"windows": windows, "order": geometry.window_order(grid)}

    def _make_positions(self, grid: Grid) -> dict[str, torch.Tensor]:
        if all(row.value != "position" for row in self.geometry.rows.values()):
            return {}
        made = self.position_rows(grid)
        # A hook may make rows on the host. A stand-in for a tower need be no module.
        weight = next(iter(getattr(self.tower, "parameters", tuple)()), None)
        device = _HOST if weight is None else weight.device
        return {
            name: made[name].to(device)
            for name, row in self.geometry.rows.items()
            if row.value == "position"
        }

    def _learned(self, grids: Sequence[Grid]) -> Mapping[str, Any]:
        return self.learned_rows(grids) if self.geometry.learns_rows else {}

    def _window_index(self, grids: Sequence[Grid]) -> dict[str, npt.NDArray[np.int64]]:
        """Window order of all items' tokens and its inverse, int64, shape ``[T]`` each."""
        named = {row.value: name for name, row in self.geometry.rows.items()}
        if "order" not in named:
            return {}
        order = self._joined_index("order", grids)
        return {named["order"]: order, named["inverse"]: self.geometry.inverse_order(order)}

    def _joined_index(self, kind: str, grids: Sequence[Grid]) -> npt.NDArray[np.int64]:
        """An index of one item's rows for each item, moved past the rows of those before it."""
        parts, first = [], 0
        for grid in grids:
            index = self._of_grid(grid)[kind]
            parts.append(index + first)
            first += len(index)
        return np.concatenate(parts)


# -- tensors whole and in pieces ---------------------------------------------------------------


def is_pieces(value: Exact | None) -> TypeIs[list[torch.Tensor] | tuple[torch.Tensor, ...]]:
    """Whether rows come in pieces that follow each other."""
    # Not by collections.abc's Sequence: that takes a microsecond, ten times a replay.
    return isinstance(value, (list, tuple))


def joined(value: Exact) -> torch.Tensor:
    """One tensor; nothing is copied where it is one already."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        return value
    return value[0] if len(value) == 1 else torch.cat(list(value))


def pad_of(builder: MetadataBuilder, row: Rows) -> Pad | str:
    """How the row's tail is filled; ``sections`` where offsets come in two sections."""
    if row.value == "offsets" and builder.layout.sectioned:
        return "sections"
    return row.pad


def fill(buffer: torch.Tensor, exact: torch.Tensor, pad: Pad | str) -> None:
    """Write ``exact`` into the head of ``buffer`` and pad the tail.

    Offsets repeat the last one, so that unused slots are empty sequences and offsets never
    decrease; two sections are padded each on its own. An index stays in range: its tail maps rows
    past the end to themselves. Everything else is 0.
    """
    if pad == "bound":
        return  # a host number, baked at capture; it already covers every step
    if pad == "sections":
        half_buffer, half = len(buffer) // 2, len(exact) // 2
        fill(buffer[:half_buffer], exact[:half], "last")
        fill(buffer[half_buffer:], exact[half:], "last")
        return
    used = len(exact)
    buffer[:used].copy_(exact)
    tail = buffer[used:]
    if not len(tail):
        return
    if pad == "last":
        tail.copy_(exact[-1].expand_as(tail))
    elif pad == "identity":
        torch.arange(used, len(buffer), out=tail)
    else:
        tail.zero_()
