# SPDX-License-Identifier: Apache-2.0
"""A worker with a planted fault, to prove that the tests of answers would notice it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from vllm.vit_cudagraph.captured import CapturedBudget
from vllm.vit_cudagraph.metadata import Exact
from vllm.vit_cudagraph.testing.cpu_worker import TwinWorker


class StaleOffsets(CapturedBudget):
    """Refreshes the sequence offsets for the first batch alone, everything else for each."""

    is_loaded = False

    def load(self, values: Mapping[str, Exact | None], key: Hashable | None = None) -> None:
        stale = {name: buffer.clone() for name, buffer in self.buffers.items() if "cu_" in name}
        assert stale, "the tower has no offsets under the name that this fault looks for"
        super().load(values, key)
        if self.is_loaded:
            for name, offsets in stale.items():
                self.buffers[name].copy_(offsets)
        self.is_loaded = True


class StaleOffsetsWorker(TwinWorker):
    """The twin's worker; its graphs keep the offsets of the first batch that they see."""

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        captured = self.model_runner.encoder_cudagraph_manager.captured
        for budget, good in captured.items():
            held = {f.name: getattr(good, f.name) for f in dataclasses.fields(good) if f.init}
            captured[budget] = StaleOffsets(**held)
        return times
