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

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import gcd, prod

import numpy as np
import numpy.typing as npt
import torch

from vllm.utils.math_utils import round_up

RowSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a buffer."""

Shapes = Mapping[str, RowSpec]
HostRows = npt.NDArray[np.signedinteger]

_ALIGNMENT = 256
"""Bytes; what CUDA's allocator gives, so that kernels find a view as well aligned as a tensor."""

_AREAS = 2
"""Staging areas of an arena, used in turn, so that a budget that comes twice in a batch is filled
while its first replay still waits."""


class HostArena:
    """Integer buffers on a device, and a staging area on the host with the same layout.

    Args:
        shapes: Shape and dtype of each buffer.
        device: Where the buffers lie.

    Attributes:
        buffers: Views on the device, by name. They are 0 at first.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        places, size = {}, 0
        for name, (shape, dtype) in shapes.items():
            places[name] = size
            size += round_up(prod(shape) * dtype.itemsize, _ALIGNMENT)
        on_gpu = device.type == "cuda"
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)

        def views(area: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: area[places[name] : places[name] + prod(shape) * dtype.itemsize]
                .view(dtype)
                .view(shape)
                for name, (shape, dtype) in shapes.items()
            }

        self.buffers = views(self._device)
        self._areas = [_Staging(size, on_gpu, views) for _ in range(_AREAS)]
        self._turn = 0

    @property
    def staged(self) -> dict[str, HostRows]:
        """Rows that the next :meth:`send` copies; writable once :meth:`wait` has returned."""
        return self._areas[self._turn].rows

    def wait(self) -> None:
        """Until the copy before last has read its staging area, which is then written again."""
        if (sent := self._areas[self._turn].sent) is not None:
            sent.synchronize()  # no cover: needs a GPU

    def send(self) -> None:
        """Copy the staging area to the device, behind all work that is queued there."""
        area = self._areas[self._turn]
        self._device.copy_(area.memory, non_blocking=True)
        if area.sent is not None:
            area.sent.record()  # no cover: needs a GPU
        self._turn = (self._turn + 1) % _AREAS


class _Staging:
    """One staging area, and the event behind its last copy."""

    def __init__(
        self, size: int, pinned: bool, views: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    ) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self.rows: dict[str, HostRows] = {
            name: view.numpy() for name, view in views(self.memory).items()
        }
        self.sent = torch.cuda.Event() if pinned else None


class FlatArena:
    """Row buffers of one dtype on a device, one behind the other.

    Where rows of all of them have one shape, pieces are written as they are; else each is flattened
    first, a microsecond or two of the host's time for each.

    Args:
        shapes: Shape and dtype of each buffer; the dtype is the same for all.
        device: Where the buffers lie.

    Attributes:
        buffers: Views, by name. They are 0 at first.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        (dtype,) = {dtype for _, dtype in shapes.values()}
        kinds = {shape[1:] for shape, _ in shapes.values()}
        self._alike = len(kinds) == 1
        row = kinds.pop() if self._alike else ()
        # The fewest rows that end where the next buffer may begin.
        step = _ALIGNMENT // gcd(_ALIGNMENT, prod(row) * dtype.itemsize)
        used = {
            name: shape[0] if self._alike else prod(shape) for name, (shape, _) in shapes.items()
        }
        self._sizes = {name: round_up(count, step) for name, count in used.items()}
        self._flat = torch.zeros((sum(self._sizes.values()), *row), dtype=dtype, device=device)
        self._zeros = torch.zeros((max(self._sizes.values()), *row), dtype=dtype, device=device)
        areas = self._flat.split(list(self._sizes.values()))
        self.buffers = {
            name: area[: used[name]].view(shape)
            for area, (name, (shape, _)) in zip(areas, shapes.items(), strict=True)
        }

    def load(self, rows: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Write each buffer: its pieces from the front, 0 behind them.

        Args:
            rows: Pieces ``[n, *row]`` of every buffer, on its device, at most as many rows as it
                has.
        """
        parts: list[torch.Tensor] = []
        for name, size in self._sizes.items():
            pieces = rows[name]
            if not self._alike:
                pieces = [piece.reshape(-1) for piece in pieces]
            used = count_rows(pieces)
            parts += pieces
            if used < size:
                parts.append(self._zeros[: size - used])
        torch.cat(parts, out=self._flat)


def count_rows(pieces: Iterable[torch.Tensor]) -> int:
    """Of all pieces. One that follows itself, as those of like items do, is asked once: that is
    the slow part, and this runs a few times a replay."""
    last, length, rows = None, 0, 0
    for piece in pieces:
        if piece is not last:
            last, length = piece, piece.size(0)
        rows += length
    return rows


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
