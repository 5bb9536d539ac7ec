# SPDX-License-Identifier: Apache-2.0
"""Memory of one graph's metadata, laid out so that one device operation refreshes all of a kind.

A replay of a small graph takes a few milliseconds, and each device operation around it some
microseconds of the host's time, so buffers that are refreshed alike lie side by side:

* :class:`HostArena`: integers that the host computes (offsets, lengths, window order). They are
  written into a staging area, pinned on a GPU machine, and go to the device in one copy.
* :class:`FlatArena`: rows that lie on the device already, in pieces, one an item (positions). One
  concatenation writes all pieces and the zeros behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
HostRows = npt.NDArray[np.signedinteger]

_ALIGNMENT = 256
"""Bytes; what CUDA's allocator gives, so that kernels find a view as well aligned as a tensor."""


class HostArena:
    """Integer buffers on a device, and a staging area on the host with the same layout.

    Args:
        shapes: Shape and dtype of each buffer.
        device: Where the buffers lie.

    Attributes:
        buffers: Views on the device, by name. They are 0 at first.
        staged: The same on the host; :meth:`send` copies them all.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        places, size = {}, 0
        for name, (shape, dtype) in shapes.items():
            places[name] = size
            size += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        on_gpu = device.type == "cuda"
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._staging = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._sent = torch.cuda.Event() if on_gpu else None
        self.buffers: dict[str, torch.Tensor] = {}
        self.staged: dict[str, HostRows] = {}
        for name, (shape, dtype) in shapes.items():
            piece = slice(places[name], places[name] + prod(shape) * dtype.itemsize)
            self.buffers[name] = self._device[piece].view(dtype).view(shape)
            self.staged[name] = self._staging[piece].view(dtype).view(shape).numpy()

    def wait(self) -> None:
        """Until the last copy has read the staging area, which may then be written again."""
        if self._sent is not None:
            self._sent.synchronize()  # no cover: needs a GPU

    def send(self) -> None:
        """Copy the staging area to the device, behind all work that is queued there."""
        self._device.copy_(self._staging, non_blocking=True)
        if self._sent is not None:
            self._sent.record()  # no cover: needs a GPU


class FlatArena:
    """Row buffers of one dtype on a device, one behind the other.

    Args:
        shapes: Shape and dtype of each buffer; the dtype is the same for all.
        device: Where the buffers lie.

    Attributes:
        buffers: Views, by name. They are 0 at first.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        (dtype,) = {dtype for _, dtype in shapes.values()}
        self._sizes = {name: prod(shape) for name, (shape, _) in shapes.items()}
        self._flat = torch.zeros(sum(self._sizes.values()), dtype=dtype, device=device)
        self._zeros = torch.zeros(max(self._sizes.values()), dtype=dtype, device=device)
        pieces = self._flat.split(list(self._sizes.values()))
        self.buffers = {
            name: piece.view(shape)
            for piece, (name, (shape, _)) in zip(pieces, shapes.items(), strict=True)
        }

    def load(self, rows: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Write each buffer: its pieces from the front, 0 behind them.

        Args:
            rows: Pieces ``[n, *trailing]`` of every buffer, on its device, at most as many rows as
                it has.
        """
        parts: list[torch.Tensor] = []
        for name, size in self._sizes.items():
            flat = [piece.reshape(-1) for piece in rows[name]]
            used = sum(map(len, flat))
            parts += flat
            if used < size:
                parts.append(self._zeros[: size - used])
        torch.cat(parts, out=self._flat)


def fill_host(staged: HostRows, exact: HostRows, pad: str) -> None:
    """Write ``exact`` into the head of ``staged`` and pad the tail; see ``metadata.fill``, of which
    this is the twin for the host."""
    if pad == "sections":
        half_staged, half = len(staged) // 2, len(exact) // 2
        fill_host(staged[:half_staged], exact[:half], "last")
        fill_host(staged[half_staged:], exact[half:], "last")
        return
    used = len(exact)
    staged[:used] = exact
    if pad == "last":
        staged[used:] = exact[-1]
    elif pad == "identity":
        staged[used:] = np.arange(used, len(staged))
    else:
        staged[used:] = 0
