# SPDX-License-Identifier: Apache-2.0
"""A clock in vLLM's worker, for ``--worker-extension-cls encoder_clock.EncoderClock``.

It times what the runner asks of the encoder, whichever way that goes: ``execute`` of the manager,
``embed_multimodal`` of the model. On a GPU by events on the stream, so nothing waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class EncoderClock:
    """Methods that vLLM adds to its worker, called by ``collective_rpc``."""

    model_runner: Any

    def start_encoder_clock(self) -> dict[str, Any]:
        """Put the clock in; a second time is as once."""
        if not hasattr(self, "_encoder_times"):
            self._encoder_times: list[Callable[[], float]] = []
            model, manager = self.model_runner.get_model(), manager_of(self.model_runner)
            model.embed_multimodal = self._timed(model.embed_multimodal)
            if manager is not None:
                manager.execute = self._timed(manager.execute)
        return {"graphs": len(getattr(manager_of(self.model_runner), "captured", ()) or ())}

    def read_encoder_clock(self) -> dict[str, Any]:
        """Calls and milliseconds since the last reading."""
        taken, self._encoder_times = self._encoder_times, []
        return {"batches": len(taken), "ms": sum(finish() for finish in taken)}

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        on_gpu = torch.cuda.is_available()

        def timed(*args: Any, **kwargs: Any) -> Any:
            if on_gpu:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                outputs = call(*args, **kwargs)
                end.record()
                finish: Callable[[], float] = lambda: _elapsed(start, end)  # noqa: E731
            else:
                began = time.perf_counter()
                outputs = call(*args, **kwargs)
                took = (time.perf_counter() - began) * 1e3
                finish = lambda: took  # noqa: E731
            if outputs is not None:  # None: nothing ran here, the model is asked next
                self._encoder_times.append(finish)
            return outputs

        return timed


def _elapsed(start: Any, end: Any) -> float:
    end.synchronize()
    return float(start.elapsed_time(end))


def manager_of(runner: Any) -> Any:
    """The encoder manager of either model runner, or None."""
    if hasattr(runner, "model_state"):
        return runner.model_state.encoder_runner.cudagraph_manager
    return getattr(runner, "encoder_cudagraph_manager", None)
