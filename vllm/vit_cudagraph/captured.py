# SPDX-License-Identifier: Apache-2.0
"""One captured token budget: its buffers, and how fresh values get into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from vllm.vit_cudagraph.geometry import PIXELS, Capacity, NotCapturable
from vllm.vit_cudagraph.graphs import CapturedGraph

Padding = Mapping[str, Callable[[torch.Tensor, torch.Tensor], None]]


class BufferMoved(RuntimeError):
    """A buffer that a graph reads lies at another address than at capture."""


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

    def load(self, exact: torch.Tensor, capacity: int) -> None:
        """Write ``exact`` at the front, and 0 behind it as far as a graph of ``capacity`` rows
        reads. Only rows that are not 0 already are written."""
        used, dirty = len(exact), self.dirty
        self.dirty = max(used, dirty)  # holds if a copy fails half way
        self.rows[:used].copy_(exact)
        self.rows[used : min(dirty, capacity)].zero_()
        if dirty <= capacity:
            self.dirty = used


@dataclass
class CapturedBudget:
    """A graph and the buffers that it reads and writes.

    Attributes:
        capacity: What the buffers hold; ``capacity.budget`` is the token budget.
        graph: Reads ``buffers``, writes ``output``.
        buffers: Pixels and metadata; a name without a buffer is None in the tower's metadata.
        pixels: The rows whose first ``capacity.patches`` are the pixel buffer.
        output: The tower's output rows. They lie in the pool that the graphs share, so the next
            replay of this graph or of another one overwrites them.
    """

    capacity: Capacity
    graph: CapturedGraph
    buffers: dict[str, torch.Tensor]
    pixels: SharedRows
    output: torch.Tensor
    _addresses: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._addresses = {name: buffer.data_ptr() for name, buffer in self.buffers.items()}

    def check(self, values: Mapping[str, torch.Tensor | None]) -> None:
        """Hold values against buffers before anything is copied.

        Raises:
            NotCapturable: A value has another dtype or trailing shape than its buffer, or more
                rows, or is missing.
            BufferMoved: A hook rebound a buffer.
        """
        for name, address in self._addresses.items():
            buffer = self.buffers.get(name)
            if buffer is None or buffer.data_ptr() != address:
                raise BufferMoved(
                    f"buffer {name} moved since capture; a hook must write into buffers, "
                    "never rebind or resize them"
                )
            value = values.get(name)
            if value is None:
                raise NotCapturable("a tensor is missing from the metadata", name)
            if value.dtype != buffer.dtype and buffer.ndim:
                kind = "pixel" if name == PIXELS else name
                raise NotCapturable(
                    f"{kind} dtype differs from the buffer", f"{value.dtype}, not {buffer.dtype}"
                )
            if value.ndim != buffer.ndim or value.shape[1:] != buffer.shape[1:]:
                raise NotCapturable(
                    f"{name} rows differ in shape from the buffer's",
                    f"{tuple(value.shape[1:])}, not {tuple(buffer.shape[1:])}",
                )
            if buffer.ndim and len(value) > len(buffer):
                raise NotCapturable(
                    f"{name} has more rows than its buffer", f"{len(value)} > {len(buffer)}"
                )
            if not buffer.ndim and value > buffer:
                raise NotCapturable(
                    f"{name} is above what the graph covers", f"{int(value)} > {int(buffer)}"
                )

    def load(self, values: Mapping[str, torch.Tensor | None], padding: Padding) -> None:
        """Copy values into the buffers and pad their tails.

        Args:
            values: Held against the buffers by :meth:`check` before.
            padding: How each metadata buffer is filled. Longest lengths are baked and are not
                written.
        """
        for name, buffer in self.buffers.items():
            value = values[name]
            assert value is not None
            if name == PIXELS:
                self.pixels.load(value, self.capacity.patches)
            else:
                padding[name](buffer, value)
