# SPDX-License-Identifier: Apache-2.0
"""``CapturingManager``: which graphs of a tower there are, and how they come about.

The half of ``manager.py`` that runs at start-up: it chooses token budgets by what can win, captures
them, and times what was captured. Both model runners drive it: V2 makes one manager and calls
``capture``, ``clear``, ``capture``; V1 makes one to measure memory and another to keep. So buffers
live from ``capture`` to ``clear``, in the pool handed in each time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from typing import Any

import torch
from tqdm import tqdm

from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.logger import init_logger
from vllm.vit_cudagraph import budgets, ranks
from vllm.vit_cudagraph.buffers import Buffers, SharedRows
from vllm.vit_cudagraph.captured import CapturedBudget
from vllm.vit_cudagraph.costs import CostLines
from vllm.vit_cudagraph.eligibility import config_refusal, model_refusal
from vllm.vit_cudagraph.failures import AgreedFailure, RankFailure, brief, poisons_the_process
from vllm.vit_cudagraph.geometry import Capacity
from vllm.vit_cudagraph.graphs import backend_for
from vllm.vit_cudagraph.ladder import thinned
from vllm.vit_cudagraph.measuring import AUTOMATIC_MARGIN, Bench, last_winner, measure
from vllm.vit_cudagraph.mixin import WindowedViTCudaGraphMixin
from vllm.vit_cudagraph.stock_safety import StockSafety

logger = init_logger(__name__)


class CapturingManager(StockSafety):
    """Captures the graphs of a model on the mixin; upstream's own for any other.

    Args:
        vllm_config, device, dtype, model: As upstream's manager takes them.

    Attributes:
        on_mixin: Whether the model is; nothing below is there where it is not.
        captured: Graphs by token budget, ascending.
        left_out: Token budgets that could not be captured, by error.
        costs: What replays and eager runs take.
        refusal: Why nothing is captured at all, or None.
    """

    def __init__(
        self, vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any
    ) -> None:
        self.on_mixin = isinstance(model, WindowedViTCudaGraphMixin)
        if not self.on_mixin:
            super().__init__(vllm_config, device, dtype, model)
            return
        settings = budgets.Settings.of(vllm_config, model)
        super().__init__(settings.acceptable_upstream(vllm_config), device, dtype, model)
        self.vllm_config = vllm_config
        self.settings = settings
        self.token_budgets = list(settings.token_budgets)
        self.max_batch_size = settings.limits.items
        self.captured: dict[int, CapturedBudget] = {}
        self.left_out: dict[str, list[int]] = {}
        self._pixels: SharedRows | None = None
        self._outputs: torch.Tensor | None = None
        self.costs: CostLines = CostLines.modelled(self.token_budgets)
        self.refusal = self._why_nothing_is_captured()
        self.path_token_budgets = {"default": [] if self.refusal else self.token_budgets}
        if self.refusal and getattr(model, "_vit_refusal_said", None) != self.refusal:
            # The V1 runner makes two managers of one model: say it once.
            model._vit_refusal_said = self.refusal
            logger.warning("Encoder CUDA graphs are off: %s", self.refusal)

    def _why_nothing_is_captured(self) -> str | None:
        """From configuration alone; chooses the graph backend on the way."""
        refusal = config_refusal(self.vllm_config)
        refusal = refusal or model_refusal(self.model, self.model.vit_tower())
        if refusal is not None:
            return refusal
        try:
            self.backend = backend_for(self.device)
        except ValueError as error:
            return str(error)
        return self.backend.refusal(self.vllm_config)

    def is_captured(self) -> bool:
        """Whether ``execute`` has work to do. Under encoder data parallelism the ranks must agree,
        so there a rank whose own captures failed still takes part, eagerly."""
        if not self.on_mixin:
            return super().is_captured()
        round_open = self.graph_pool is not None and self.refusal is None
        return round_open and (bool(self.captured) or self.use_dp)

    def clear(self) -> None:
        """Give back all graphs and buffers; ``capture`` makes them anew."""
        super().clear()
        if self.on_mixin:
            self.captured.clear()
            self._pixels = self._outputs = None

    def capture(self, graph_pool: Any) -> None:
        """Capture every token budget, largest first; one that fails is left out.

        Args:
            graph_pool: The runner's memory pool for this round.

        Raises:
            RankFailure: A failure under tensor-parallel weights: ranks would disagree.
            RuntimeError: CUDA's own, where the context is lost.
        """
        if not self.on_mixin:
            self.capture_stock(graph_pool)
            return
        self.clear()
        self.graph_pool = graph_pool
        if self.refusal:
            return
        start, free = time.perf_counter(), self._free_memory()
        self.left_out = {}
        self._capture_all(self._chosen_budgets())
        for error_text, budgets_out in self.left_out.items():
            logger.warning(
                "Encoder CUDA graphs of %s tokens are left out: %s", budgets_out, error_text
            )
        self.budget_graphs["default"] = self.captured
        self.costs = self._known_costs()
        logger.info(
            "Captured %d encoder CUDA graphs (token budgets %s; at most %d items; %s) in %.1f s, "
            "%.0f MiB",
            len(self.captured),
            list(self.captured),
            self.max_batch_size,
            self.settings.frames_text,
            time.perf_counter() - start,
            (free - self._free_memory()) / 2**20,
        )

    def _capture_all(self, token_budgets: Iterable[int]) -> None:
        ordered = sorted(token_budgets, reverse=True)
        hidden = not is_global_first_rank() or len(ordered) < 2
        for budget in tqdm(ordered, desc="Capturing encoder CUDA graphs", disable=hidden):
            try:
                self.captured[budget] = self._capture(budget)
            except Exception as error:
                self._survive(error, f"capturing token budget {budget}")
                self.left_out.setdefault(brief(error), []).append(budget)
            if budget not in self.captured:
                self._drop_failed()  # before the next one is tried
                # torch may refuse the old one from now on.
                self.graph_pool = self.backend.new_pool()
        self.captured = dict(sorted(self.captured.items()))

    def _drop_failed(self) -> None:
        """Give back what a failed capture held; after its ``except``, whose traceback holds it too,
        and with a collection, since it may lie in a cycle. That takes half a second in a process
        with vLLM, so it is not done where nothing failed."""
        gc.collect()
        self.backend.give_back()

    def _capture(self, budget: int) -> CapturedBudget:
        capacity = self.model.vit_declared.capacity(budget, self.settings.limits)
        # Buffers are written outside inference mode too, so they must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            memory = self._allocate_on_all_ranks(capacity)
        graph, output = self.backend.capture(lambda: self._forward(memory.named), self.graph_pool)
        expected = self.model.vit_declared.tower_rows_capacity(capacity)
        if expected not in (None, len(output)):
            raise ValueError(
                f"the tower gave {len(output)} rows where vit_geometry() asks for {expected}"
            )
        return CapturedBudget(capacity, graph, memory, output)

    def _allocate(self, capacity: Capacity) -> Buffers:
        if not self.captured:
            # The largest graph that can be captured has room for all others.
            rows = self.model.vit_pixel_buffer(capacity.patches, self.device, self.dtype)
            self._pixels, self._outputs = SharedRows(rows), None
        return self.model.vit_buffers(capacity, self._pixels)

    def _allocate_on_all_ranks(self, capacity: Capacity) -> Buffers:
        """Buffers, if every rank that shares the tower's weights could allocate its own.

        Raises:
            AgreedFailure: One of them could not; all of them leave this graph out.
        """
        if not self._shares_weights():
            return self._allocate(capacity)
        memory, cause = None, None
        try:
            memory = self._allocate(capacity)
        except Exception as error:
            if poisons_the_process(error):
                raise
            cause = error
        if not ranks.agreed(cause is None) or memory is None:
            reason = "another rank could not allocate it" if cause is None else brief(cause)
            raise AgreedFailure(reason) from cause
        return memory

    def _shares_weights(self) -> bool:
        """Whether the tower is split over ranks, with collectives inside its forward."""
        return not self.use_dp and get_tensor_model_parallel_world_size() > 1

    def _forward(self, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        """What is captured: the tower, and its rows into the output that all graphs share."""
        rows = self.model.encoder_cudagraph_forward(dict(buffers))
        if self._outputs is None:  # the warm-up of the largest graph, outside of its capture
            with torch.inference_mode(False):
                self._outputs = torch.zeros_like(rows)
        output = self._outputs[: len(rows)]
        output.copy_(rows)
        return output

    # -- what is worth capturing ---------------------------------------------------------------

    def _chosen_budgets(self) -> list[int]:
        """The user's budgets as they stand; else those of the ladder that can win.

        Both are found once a model: runners capture more than once, with one manager or several.
        """
        if self.settings.given:
            return self.token_budgets
        chosen = self._remembered().get("budgets")
        if chosen is None:
            largest = self._largest_winner()
            winning = [b for b in self.token_budgets if b <= (largest or 0)]
            chosen = thinned(winning, self.backend.most_graphs)
            if chosen or not self.left_out:
                self._remembered()["budgets"] = chosen
            if not chosen and not self.left_out:
                logger.warning(
                    "Encoder CUDA graphs are off: eager is as fast at every size; give "
                    "encoder_cudagraph_token_budgets to capture graphs all the same"
                )
        if self._shares_weights():
            chosen = ranks.of_first_rank(chosen)
        self.path_token_budgets = {"default": chosen}
        return chosen

    def _largest_winner(self) -> int | None:
        """Measured where there is a clock; by the model of costs elsewhere, and under
        tensor-parallel weights, where ranks must choose the same."""
        try:
            if self._may_time() and self._bench().eager_ms(self.token_budgets[0]) is not None:
                return last_winner(self.token_budgets, self._wins)
        except Exception as error:
            self._survive(error, "timing the vision tower")
            logger.warning("Encoder CUDA graphs are not timed: %s", brief(error))
        return max(self.costs.winning(self.token_budgets, AUTOMATIC_MARGIN), default=None)

    def _wins(self, budget: int) -> bool:
        """Capture one graph for a moment and time it against an eager run of as many tokens. What
        cannot be captured, for lack of memory too, does not win, and is reported as left out."""
        bench, pool, failed = self._bench(), self.graph_pool, False
        try:
            self.graph_pool = self.backend.new_pool()
            replay = bench.replay_ms(self._capture(budget))
            eager = bench.eager_ms(budget)
            assert replay is not None and eager is not None
            return replay <= (1 - AUTOMATIC_MARGIN) * eager
        except Exception as error:
            self._survive(error, f"timing token budget {budget}")
            self.left_out.setdefault(brief(error), []).append(budget)
            failed = True
        finally:
            self.graph_pool, self._pixels, self._outputs = pool, None, None
            if not failed:
                self.backend.give_back()
        self._drop_failed()
        return False

    def _known_costs(self) -> CostLines:
        """Measured once a model for the graphs that were captured; modelled where nothing can be
        timed."""
        known = self._remembered().get("costs")
        captured = list(self.captured)
        if known is not None and {budget for budget, _ in known.replay_ms}.issuperset(captured):
            return known
        costs, failed = None, False
        try:
            if captured and self._may_time():
                _, most = self.model.get_encoder_cudagraph_budget_range(self.vllm_config)
                costs = measure(self._bench(), self.captured, most)
        except Exception as error:
            self._survive(error, "timing the graphs")
            logger.warning("Encoder CUDA graphs are not timed: %s", brief(error))
            failed = True
        if failed:
            gc.collect()
        self.backend.give_back()  # before the runner looks how much memory graphs take
        costs = costs or CostLines.modelled(captured)
        if self._shares_weights():
            costs = CostLines.from_dict(ranks.of_first_rank(costs.as_dict()))
        self._remembered()["costs"] = costs
        return costs

    def _remembered(self) -> dict[str, Any]:
        """What was measured of this model under these settings, by whichever manager."""
        of_model: dict[Any, dict[str, Any]] = self.model.__dict__.setdefault("_vit_measured", {})
        return of_model.setdefault(self.settings, {})

    def _may_time(self) -> bool:
        """Not under tensor-parallel weights. Runners capture within vLLM's ``graph_capture``, and
        custom all-reduce hands out the peers' addresses only when that ends: until then a replay
        reads from nowhere, and an eager run does not communicate. Modelled costs are the same on
        every rank."""
        return not self._shares_weights()

    def _bench(self) -> Bench:
        items = self.settings.limits.items
        return Bench(self.model, self.backend, self.device, self.dtype, items)

    def _free_memory(self) -> int:
        """Free device memory in bytes; on the twin, what the buffers take, negated."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]  # no cover: needs a GPU
        held = (b for c in self.captured.values() for b in (*c.buffers.values(), c.output))
        storages = (buffer.untyped_storage() for buffer in held)
        return -sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    # -- failures ------------------------------------------------------------------------------

    def _survive(self, error: Exception, doing: str, alone: bool = True) -> None:
        """Return if this process can go on without the other ranks noticing; raise otherwise.

        Args:
            alone: Whether, under encoder data parallelism, only this rank's share is concerned.
                A failure around the gather is not: the others wait in it.
        """
        if poisons_the_process(error) or isinstance(error, RankFailure):
            raise error
        if isinstance(error, AgreedFailure):
            return
        if get_tensor_model_parallel_world_size() > 1 and not (self.use_dp and alone):
            raise RankFailure(
                f"{doing} failed on one rank while the others may wait for it in a collective; "
                "set cudagraph_mm_encoder=false to run the tower eagerly"
            ) from error
