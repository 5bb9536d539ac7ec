# SPDX-License-Identifier: Apache-2.0
"""Real CUDA graphs."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vllm.utils.torch_utils import current_stream
from vllm.vit_cudagraph.failures import poisons_the_process
from vllm.vit_cudagraph.graphs import no_collection

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_TIMED_RUNS = 4
"""The first one warms up what a capture does not; the least of the others is what counts."""


class CudaBackend:
    """Captures with ``torch.cuda.CUDAGraph`` on the stream that vLLM runs the model on."""

    name = "cuda"
    most_graphs: int | None = None

    def refusal(self, vllm_config: "VllmConfig") -> str | None:
        """Nothing in the settings stops a CUDA capture as such."""
        return None

    def capture(
        self, forward: Callable[[], torch.Tensor], pool: Any
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """See :class:`vllm.vit_cudagraph.graphs.GraphBackend`. CUDA's errors pass unchanged."""
        stream = current_stream()  # no cover: needs a GPU
        graph = torch.cuda.CUDAGraph()  # no cover: needs a GPU
        with torch.inference_mode(), torch.cuda.stream(stream):  # no cover: needs a GPU
            # Kernels are loaded, workspaces allocated and autotuned here: none of it is legal
            # while capturing. The first wait keeps it off work that is still in flight elsewhere,
            # the second brings a failure of the warm-up to light before capture begins.
            torch.cuda.synchronize()  # no cover: needs a GPU
            forward()  # no cover: needs a GPU
            torch.cuda.synchronize()  # no cover: needs a GPU
            output = _capture_into(graph, forward, pool, stream)  # no cover: needs a GPU
        return graph, output  # no cover: needs a GPU

    def milliseconds(self, run: Callable[[], object]) -> float:
        """See :class:`vllm.vit_cudagraph.graphs.GraphBackend`."""
        times = []  # no cover: needs a GPU
        for _ in range(_TIMED_RUNS):  # no cover: needs a GPU
            torch.cuda.synchronize()  # no cover: needs a GPU
            start = time.perf_counter()  # no cover: needs a GPU
            run()  # no cover: needs a GPU
            torch.cuda.synchronize()  # no cover: needs a GPU
            times.append(time.perf_counter() - start)  # no cover: needs a GPU
        return min(times[1:]) * 1e3  # no cover: needs a GPU

    def stopwatch(self) -> "EventWatch":
        """See :class:`vllm.vit_cudagraph.graphs.GraphBackend`."""
        return EventWatch()  # no cover: needs a GPU

    def new_pool(self) -> Any:
        """See :class:`vllm.vit_cudagraph.graphs.GraphBackend`."""
        return torch.cuda.graph_pool_handle()  # no cover: needs a GPU

    def give_back(self) -> None:
        """See :class:`vllm.vit_cudagraph.graphs.GraphBackend`."""
        torch.cuda.empty_cache()  # no cover: needs a GPU


class EventWatch:
    """Two events on the stream that replays run on."""

    def __init__(self) -> None:
        timed = {"enable_timing": True}  # no cover: needs a GPU
        self._events = torch.cuda.Event(**timed), torch.cuda.Event(**timed)  # no cover: needs a GPU

    def start(self) -> None:
        self._events[0].record()  # no cover: needs a GPU

    def stop(self) -> None:
        self._events[1].record()  # no cover: needs a GPU

    def milliseconds(self) -> float | None:
        """See :class:`vllm.vit_cudagraph.statistics.Stopwatch`."""
        start, stop = self._events  # no cover: needs a GPU
        return start.elapsed_time(stop) if stop.query() else None  # no cover: needs a GPU


def _capture_into(
    graph: torch.cuda.CUDAGraph,
    forward: Callable[[], torch.Tensor],
    pool: Any,
    stream: torch.cuda.Stream,
) -> torch.Tensor:
    cause: Exception | None = None
    try:
        with no_collection(), torch.cuda.graph(graph, pool=pool, stream=stream):
            try:
                return forward()
            except Exception as exc:
                cause = exc
                raise
    except Exception as exc:
        if not poisons_the_process(exc):
            close_failed_capture(pool, graph)
        # Ending an invalidated capture raises too, and would hide what went wrong inside it.
        if cause is None or cause is exc:
            raise
        raise cause from exc
    finally:
        # Its traceback holds this frame, and so the graph, its pool and its buffers.
        cause = None


_NEVER_ENDED: list[torch.cuda.CUDAGraph] = []
"""The allocators still ask these which stream they were capturing."""


def close_failed_capture(pool: Any, graph: torch.cuda.CUDAGraph | None = None) -> None:
    """Finish what torch leaves open where it could not end a capture.

    An operation that CUDA forbids in a capture invalidates it. ``CUDAGraph.capture_end`` then
    raises before it has told anybody that the capture is over (seen with torch 2.11): no cached
    memory is given back any more, the next random number is an error ("Offset increment outside
    graph capture"), and the pool counts as being recorded into. torch has no public function for
    this; those called here are the ones behind ``torch.cuda.use_mem_pool``.

    The allocator of pinned host memory has none at all: it refuses ``pool`` for ever ("already
    recording"), so what is captured next needs another one.

    Does nothing after a capture that was ended, by an error inside it too, and without a GPU.

    Args:
        pool: The handle that was captured into.
        graph: The graph, if it is at hand.
    """
    if not torch.cuda.is_available():  # tests of stock graphs have none
        return
    device = torch.cuda.current_device()  # no cover: needs a GPU
    try:  # no cover: needs a GPU
        torch._C._cuda_endAllocateToPool(device, pool)  # no cover: needs a GPU
    except (RuntimeError, AttributeError):  # no cover: needs a GPU
        return  # no cover: needs a GPU
    torch._C._cuda_releasePool(device, pool)  # no cover: needs a GPU
    if graph is not None:  # no cover: needs a GPU
        _NEVER_ENDED.append(graph)  # no cover: needs a GPU
    # A capture that ends well also ends what generators were told.
    flag = torch.zeros(1, device="cuda")  # no cover: needs a GPU
    torch.cuda.synchronize()  # no cover: needs a GPU
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # no cover: needs a GPU
        flag.zero_()  # no cover: needs a GPU
