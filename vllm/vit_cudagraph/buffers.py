# SPDX-License-Identifier: Apache-2.0
"""The buffers that graphs read: sized by what rows count, laid out by how they are refreshed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm.vit_cudagraph.arena import FlatArena, HostArena, RowSpec, count_rows
from vllm.vit_cudagraph.geometry import PIXELS, Capacity, Rows
from vllm.vit_cudagraph.metadata import MetadataBuilder, joined, pad_of

_HOST_MADE = ("offsets", "lengths", "order", "inverse", "merge")


class SharedRows:
    """Pixel rows that all graphs of a manager read; a smaller graph reads a prefix of them.

    Attributes:
        rows: ``[N, *pixel_row]`` for the largest graph.
        dirty: Rows from here on are 0. It belongs to the rows, not to a graph: what one graph's
            batch left behind is what the next graph finds.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.dirty = 0

    def load(self, pieces: list[torch.Tensor] | tuple[torch.Tensor, ...], capacity: int) -> None:
        """Write ``pieces`` from the front, and 0 behind them as far as a graph of ``capacity`` rows
        reads. Only rows that are not 0 already are written."""
        used, dirty = count_rows(pieces), self.dirty
        self.dirty = max(used, dirty)  # holds if a copy fails half way
        if len(pieces) == 1 or pieces[0].device != self.rows.device:
            self.rows[:used].copy_(joined(pieces), non_blocking=True)
        else:
            torch.cat(list(pieces), out=self.rows[:used])
        if used < min(dirty, capacity):
            self.rows[used : min(dirty, capacity)].zero_()
        if dirty <= capacity:
            self.dirty = used


@dataclass
class Buffers:
    """What a graph reads.

    Attributes:
        named: Pixels and metadata by name; a name without a buffer is None in the tower's metadata.
        pixels: The rows whose first ``capacity.patches`` are the pixel buffer.
        pads: How the tail of each metadata buffer is filled.
        host: Holds the integer buffers, or None.
        flat: Hold the position buffers, one a dtype.
    """

    named: dict[str, torch.Tensor]
    pixels: SharedRows
    pads: Mapping[str, str]
    host: HostArena | None = None
    flat: Sequence[FlatArena] = ()


def allocate(
    builder: MetadataBuilder,
    probe: Mapping[str, torch.Tensor | None],
    capacity: Capacity,
    pixels: SharedRows,
) -> Buffers:
    """Buffers for any step within ``capacity``; metadata buffers are 0 at first.

    Leading sizes come from what the rows count. Longest lengths are the bound over all such steps,
    since a graph bakes them in.

    Args:
        builder: The tower's.
        probe: Metadata of the smallest item: tells dtypes and trailing shapes. Names that are None
            in it (the attention backend does not read them) get no buffer.
        capacity: What the buffers must hold.
        pixels: Rows that the pixel buffer is a prefix of.
    """
    geometry, device = builder.geometry, pixels.rows.device
    rows = {name: row for name, row in geometry.rows.items() if probe[name] is not None}
    named: dict[str, torch.Tensor] = {PIXELS: pixels.rows[: capacity.patches]}
    host: dict[str, RowSpec] = {}
    flat: dict[torch.dtype, dict[str, RowSpec]] = {}
    for name, row in rows.items():
        exact = probe[name]
        assert exact is not None
        if row.kind == "longest":
            bound = geometry.longest_bound(name, capacity)
            longest = builder.layout.longest(np.array([0, bound], dtype=np.int32))
            named[name] = torch.from_numpy(longest)
            continue
        shape = (_buffer_rows(builder, row, capacity), *exact.shape[1:])
        if row.value in _HOST_MADE:
            host[name] = shape, exact.dtype
        elif row.value == "position" and row.pad == "zero":
            flat.setdefault(exact.dtype, {})[name] = shape, exact.dtype
        else:
            named[name] = torch.zeros(shape, dtype=exact.dtype, device=device)
    arena = HostArena(host, device) if host else None
    flats = [FlatArena(shapes, device) for shapes in flat.values()]
    for part in ([arena] if arena else []) + flats:
        named.update(part.buffers)
    pads = {name: pad_of(builder, row) for name, row in rows.items()}
    return Buffers(named, pixels, pads, arena, flats)


def _buffer_rows(builder: MetadataBuilder, row: Rows, capacity: Capacity) -> int:
    count = builder.geometry.rows_capacity(row.kind, capacity)
    if row.value not in ("offsets", "lengths"):
        return count
    # The backend may round the number of slots up (FlashInfer does): ask it.
    empty = np.zeros(count + 1, dtype=np.int32)
    of_backend = builder.layout.offsets if row.value == "offsets" else builder.layout.lengths
    laid_out = of_backend(empty)
    assert laid_out is not None
    return len(laid_out)
