# SPDX-License-Identifier: Apache-2.0
"""One captured token budget: its buffers, and how fresh values get into them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch

from vllm.vit_cudagraph.arena import HostArena, HostRows, fill_host
from vllm.vit_cudagraph.buffers import Buffers
from vllm.vit_cudagraph.geometry import PIXELS, Capacity, NotCapturable
from vllm.vit_cudagraph.graphs import CapturedGraph
from vllm.vit_cudagraph.metadata import Exact, fill, is_pieces, joined


class BufferMoved(RuntimeError):
    """A buffer that a graph reads lies at another address than at capture."""


@dataclass
class CapturedBudget:
    """A graph and the buffers that it reads and writes.

    Attributes:
        capacity: What the buffers hold; ``capacity.budget`` is the token budget.
        graph: Reads ``buffers``, writes ``output``.
        memory: Where the buffers lie.
        output: The tower's output rows, a prefix of rows that all graphs share: the next replay of
            this graph or of another one overwrites them.
        holds: Key of the metadata that lies in the buffers, None where it is not known. A step with
            the same metadata has only its pixels loaded: images of one size are common, and each
            copy costs the host as much as many kernels of the graph.
    """

    capacity: Capacity
    graph: CapturedGraph
    memory: Buffers
    output: torch.Tensor
    holds: Hashable | None = field(default=None, init=False)
    buffers: dict[str, torch.Tensor] = field(init=False)
    _addresses: dict[str, int] = field(init=False)
    _longest: dict[str, int] = field(init=False)
    _staged: dict[str, HostRows] = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = self.memory.named
        self._staged = {} if self.memory.host is None else self.memory.host.staged
        self._longest = {name: int(b) for name, b in self.buffers.items() if not b.ndim}
        self._addresses = {name: buffer.data_ptr() for name, buffer in self.buffers.items()}

    def check(self, values: Mapping[str, Exact | None], kept: bool = False) -> None:
        """Hold values against buffers before anything is copied.

        Args:
            values: Pixels and metadata by name.
            kept: The metadata stays as it lies in the buffers; ``values`` are the pixels alone.

        Raises:
            NotCapturable: A value has another dtype or trailing shape than its buffer, or more
                rows, or is missing.
            BufferMoved: A hook rebound a buffer.
        """
        buffers = self.buffers
        for name, address in self._addresses.items():
            buffer = buffers.get(name)
            if buffer is None or buffer.data_ptr() != address:
                raise BufferMoved(
                    f"buffer {name} moved since capture; a hook must never rebind or resize "
                    "what a graph reads"
                )
            if kept and name != PIXELS:
                continue
            value = values.get(name)
            if value is None:
                raise NotCapturable("a tensor is missing from the metadata", name)
            if name in self._longest:
                _check_longest(name, value, self._longest[name])
            elif isinstance(value, np.ndarray) and _fits(value, self._staged.get(name)):
                continue  # as nearly always
            else:
                _check_rows(name, value if is_pieces(value) else (joined(value),), buffer)

    def load(self, values: Mapping[str, Exact | None], key: Hashable | None = None) -> None:
        """Write values into the buffers and pad their tails.

        Args:
            values: Held against the buffers by :meth:`check` before; where they are the pixels
                alone, the metadata stays. Longest lengths are baked and are not written.
            key: Of the metadata, for :attr:`holds`.
        """
        memory, left = self.memory, dict(values)
        pixels = left.pop(PIXELS)
        assert pixels is not None
        pieces = pixels if is_pieces(pixels) else [joined(pixels)]
        memory.pixels.load(pieces, self.capacity.patches)
        if left:
            self.holds = None  # should a copy fail half way
            self._load_metadata(left)
            self.holds = key

    def _load_metadata(self, left: dict[str, Exact | None]) -> None:
        memory = self.memory
        if memory.host is not None:
            self._load_host(memory.host, left)
        for flat in memory.flat:
            rows = {name: value for name in flat.buffers if is_pieces(value := left[name])}
            if len(rows) == len(flat.buffers):
                flat.load(rows)
                left = {name: value for name, value in left.items() if name not in rows}
        for name, value in left.items():
            buffer = self.buffers.get(name)
            if buffer is not None and buffer.ndim:
                assert value is not None
                fill(buffer, joined(value), memory.pads[name])

    def _load_host(self, arena: HostArena, left: dict[str, Exact | None]) -> None:
        """Values that lie on the host go through the staging area; others are left."""
        arena.wait()
        for name, staged in arena.staged.items():
            value = left[name]
            if isinstance(value, np.ndarray):
                fill_host(staged, value, self.memory.pads[name])
                del left[name]
        arena.send()


def _fits(value: HostRows, staged: HostRows | None) -> bool:
    """Whether rows on the host can be written into their staging area, which has the dtype and the
    shape of the buffer. Where not, the slower check says why."""
    return (
        staged is not None
        and value.dtype == staged.dtype
        and value.shape[1:] == staged.shape[1:]
        and value.ndim > 0
        and len(value) <= len(staged)
    )


def _check_rows(name: str, pieces: Iterable[torch.Tensor], buffer: torch.Tensor) -> None:
    # Plain loops over attributes read once: this runs for each item of each replay.
    dtype, shape = buffer.dtype, buffer.shape
    dims, trailing, rows = len(shape), shape[1:], 0
    last, length = None, 0
    for piece in pieces:
        if piece is not last:  # items of one grid share their piece
            size = piece.shape
            if piece.dtype != dtype or len(size) != dims or size[1:] != trailing:
                _say_what_differs(name, piece, buffer)
            last, length = piece, size[0]
        rows += length
    if rows > shape[0]:
        raise NotCapturable(f"{name} has more rows than its buffer", f"{rows} > {shape[0]}")


def _say_what_differs(name: str, piece: torch.Tensor, buffer: torch.Tensor) -> NoReturn:
    if piece.dtype != buffer.dtype:
        kind = "pixel" if name == PIXELS else name
        raise NotCapturable(
            f"{kind} dtype differs from the buffer", f"{piece.dtype}, not {buffer.dtype}"
        )
    raise NotCapturable(
        f"{name} rows differ in shape from the buffer's",
        f"{tuple(piece.shape[1:])}, not {tuple(buffer.shape[1:])}",
    )


def _check_longest(name: str, value: Exact, baked: int) -> None:
    """A longest length is a host number that the graph has baked."""
    if is_pieces(value) or value.ndim:
        raise NotCapturable(
            f"{name} rows differ in shape from the buffer's", "rows, not one number"
        )
    if int(value) > baked:
        raise NotCapturable(f"{name} is above what the graph covers", f"{int(value)} > {baked}")
