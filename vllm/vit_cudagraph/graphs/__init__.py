# SPDX-License-Identifier: Apache-2.0
"""Graph backends: how one encoder forward is captured once and replayed many times.

Two backends keep one protocol, so that everything above them is the same code on every machine:

* ``cuda.py``: real CUDA graphs, on a GPU.
* ``recorded.py``: the CPU twin. It records the operators of a forward and runs them again into the
  same storages, under the rules of a CUDA graph. For tests and demonstrations; it is not fast.

Both live under the same contract, which is a CUDA graph's own:

* Python numbers, and 0-dim tensors on the host, keep the value that they had at capture.
* Addresses are fixed: every replay reads the buffers that capture read, and writes the output
  tensor that capture returned. Fresh data reaches a graph only through its buffers.
* The host takes no part in a replay, so nothing in ``forward`` may depend on a device value that
  the host reads, and no shape may depend on data.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.vit_cudagraph.statistics import Stopwatch


class GraphCaptureError(RuntimeError):
    """``forward`` does something that a CUDA graph cannot replay; it says which operator."""


class CapturedGraph(Protocol):
    """One captured forward."""

    def replay(self) -> None:
        """Run the captured work again: reads the buffers of capture, overwrites its output."""


class GraphBackend(Protocol):
    """What the manager needs from a way to capture graphs."""

    name: str
    """Short name for log lines: ``"cuda"`` or ``"recorded"``."""

    most_graphs: int | None
    """Most graphs to capture where the user names no budgets; None leaves it to what can win."""

    def refusal(self, vllm_config: "VllmConfig") -> str | None:
        """Why nothing can be captured under these settings, or None if something can.

        The reason names the setting to change and a value that works.
        """

    def capture(
        self, forward: Callable[[], torch.Tensor], pool: Any
    ) -> tuple[CapturedGraph, torch.Tensor]:
        """Call ``forward`` once to warm up and once to capture it, in inference mode.

        Args:
            forward: takes nothing, reads its buffers, returns one tensor of any shape.
            pool: memory pool handle that the graphs of a manager share (CUDA); the twin has no use
                for one.

        Returns:
            The graph, and the tensor that capture computed: its address is fixed and each replay
            overwrites it, so clone what must outlive the next one.

        Raises:
            GraphCaptureError: ``forward`` cannot be captured (the twin says which operator and
                why; CUDA's own errors are passed on as they are).
        """

    def milliseconds(self, run: Callable[[], object]) -> float | None:
        """How long ``run`` takes from its call until the device has finished: the least of a few.

        None where that says nothing about a GPU, as on the twin.
        """

    def stopwatch(self) -> "Stopwatch":
        """For one replay; see :class:`vllm.vit_cudagraph.statistics.Stopwatch`."""

    def new_pool(self) -> Any:
        """A memory pool of its own, for graphs that are dropped again."""

    def give_back(self) -> None:
        """Return memory that dropped graphs held to the device."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of a capture: finalisers of others run where they must not.

    A CUDA graph that is dropped by a cycle frees device memory, which breaks a capture that is
    under way; vLLM's handles of packed weights read theirs (``item()``), and the twin would take
    that for a part of ``forward``.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def backend_for(device: torch.device) -> GraphBackend:
    """The backend that captures graphs on ``device``; imported only when it is asked for.

    Raises:
        ValueError: no backend captures on this type of device.
    """
    if device.type == "cuda":
        from vllm.vit_cudagraph.graphs.cuda import CudaBackend

        return CudaBackend()
    if device.type == "cpu":
        from vllm.vit_cudagraph.graphs.recorded import RecordedBackend

        return RecordedBackend()
    raise ValueError(
        f"Encoder graphs cannot be captured on a device of type {device.type!r}: set "
        '"cudagraph_mm_encoder": false in --compilation-config, or use a "cuda" device (or "cpu", '
        "for tests)."
    )
