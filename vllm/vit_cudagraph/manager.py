# SPDX-License-Identifier: Apache-2.0
"""``EncoderGraphManager``: captures a tower's graphs, runs batches through them, counts.

WHY. It takes the place of vLLM's ``EncoderCudaGraphManager`` (``plugin.py``). For models on the
mixin it sizes graphs by capacity, packs by every capacity, checks before it copies, and turns any
survivable failure into an eager run. For all other models it only adds the last of these.

FRAGILITY. It subclasses upstream's class and relies on the pieces that ``contract.py`` names and
compares at start-up.

SCOPE. Both model runners drive it: V2 makes one manager and calls ``capture``, ``clear``,
``capture``; V1 makes one to measure memory and another to keep. So buffers live from ``capture``
to ``clear``, in the pool handed in each time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.logger import init_logger
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.vit_cudagraph import budgets, metrics, ranks
from vllm.vit_cudagraph.buffers import Buffers, SharedRows
from vllm.vit_cudagraph.captured import BufferMoved, CapturedBudget
from vllm.vit_cudagraph.costs import CostLines
from vllm.vit_cudagraph.eligibility import config_refusal, model_refusal
from vllm.vit_cudagraph.failures import AgreedFailure, RankFailure, brief, poisons_the_process
from vllm.vit_cudagraph.geometry import PIXELS, Capacity, Grid, NotCapturable, Usage
from vllm.vit_cudagraph.graphs import backend_for
from vllm.vit_cudagraph.ladder import thinned
from vllm.vit_cudagraph.measuring import AUTOMATIC_MARGIN, Bench, last_winner, measure
from vllm.vit_cudagraph.mixin import ViTInputs, WindowedViTCudaGraphMixin
from vllm.vit_cudagraph.planning import CHEAPER_EAGERLY, Plan, Planner, Step
from vllm.vit_cudagraph.statistics import Statistics, log_interval
from vllm.vit_cudagraph.stock_safety import StockSafety

logger = init_logger(__name__)


class EncoderGraphManager(StockSafety, EncoderCudaGraphManager):
    """Encoder CUDA graphs that are never wrong and never down.

    Args:
        vllm_config, device, dtype, model: As upstream's manager takes them.
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
        self._planners: dict[str, Planner] = {}
        self.costs = CostLines.modelled(self.token_budgets)
        self.statistics = Statistics()
        self._log_interval = log_interval()
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

    # -- capture -------------------------------------------------------------------------------

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
            self._planners.clear()
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
        self._weights = (self._weight_loads(), self.model.vit_weight_addresses())
        self.costs = self._known_costs()
        self._publish()
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

    # -- service -------------------------------------------------------------------------------

    def execute(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Embeddings of one modality's items, in order, or None for upstream's own eager path.

        None is said before anything has run: nothing is captured, or the input has no pixels or
        does not fit its grids (upstream then meets it as it would without us). It is also said
        where even the eager run fails, so that upstream's own error is the one that is seen.
        """
        if not self.on_mixin:
            return self.execute_stock(mm_kwargs)
        if not self.is_captured():
            return None
        self._retire_all_if_weights_moved()
        try:
            inputs = self.model.vit_checked_inputs(mm_kwargs)
        except NotCapturable as refused:
            self._count_eager(refused.reason, _item_count(mm_kwargs), str(refused))
            outputs = None
        except Exception as error:
            # Nothing has run, and every rank reads the same input: all of them say None.
            if poisons_the_process(error):
                raise
            self._count_eager("input could not be read", _item_count(mm_kwargs), brief(error))
            outputs = None
        else:
            outputs = self._execute_checked(mm_kwargs, inputs)
        self.statistics.log(self._log_interval)
        self._publish()
        return outputs

    def _execute_checked(
        self, mm_kwargs: dict[str, Any], inputs: ViTInputs
    ) -> list[torch.Tensor] | None:
        if not inputs.grids:
            return []
        try:
            outputs = self._execute_ranks(mm_kwargs, inputs)
            items = len(self.model.vit_items(inputs, mm_kwargs))
            return _checked(self.model.vit_finish(outputs, mm_kwargs), items)
        except Exception as error:
            self._survive(error, "running the vision tower", alone=False)
            self._count_eager("an error outside the graphs", len(inputs.grids), brief(error))
            return None

    def _execute_ranks(self, mm_kwargs: dict[str, Any], inputs: ViTInputs) -> list[torch.Tensor]:
        """All items here, or this rank's share and the others' by upstream's gather."""
        if not self.use_dp:
            return self._execute_steps(mm_kwargs, inputs)
        tokens = [self.model.vit_declared.output_tokens(grid) for grid in inputs.grids]
        local_kwargs, assignment, counts, most_tokens = self._dp_shard(mm_kwargs, tokens)
        local = self._execute_steps(local_kwargs, self.model.vit_inputs(local_kwargs))
        return self._dp_gather(local, tokens, assignment, counts, most_tokens)

    def _execute_steps(self, mm_kwargs: dict[str, Any], inputs: ViTInputs) -> list[torch.Tensor]:
        outputs: dict[int, torch.Tensor] = {}
        ends = self.model.vit_ends(inputs.grids)
        for step in self._plan(inputs).steps:
            grids = [inputs.grids[i] for i in step.items]
            rows = self._replay(step, inputs, ends)
            if rows is None:
                with torch.inference_mode():
                    rows = self.model.encoder_eager_forward(
                        self.model.vit_repack(mm_kwargs, step.items)
                    )
            items = self.model.vit_split(rows, grids)
            for index, item in zip(step.items, items, strict=True):
                outputs[index] = item
        return [outputs[i] for i in range(len(inputs.grids))]

    def _plan(self, inputs: ViTInputs) -> Plan:
        # A limit on frames given by the user holds for videos; a modality that has both kinds of
        # items (vision_chunk) tells its images by their one frame.
        frames = None if inputs.modality == "image" else self.settings.limits.frames
        usage = self.model.vit_declared.usage
        if frames is not None and inputs.modality != "video":
            usage = partial(_images_without_frames, usage)
        kind = inputs.modality if frames is not None else "image"
        if kind not in self._planners:
            capacities = [_with_frames(c.capacity, frames) for c in self.captured.values()]
            self._planners[kind] = Planner(capacities, self.costs, usage, self.model.vit_capturable)
        return self._planners[kind].plan(inputs.grids)

    def _replay(self, step: Step, inputs: ViTInputs, ends: Sequence[int]) -> torch.Tensor | None:
        """A copy of the graph's output rows, or None for an eager run.

        Args:
            step: Its items, and which graph.
            inputs: Of the whole batch.
            ends: Patches before each item of the batch, and of all.
        """
        captured = None if step.budget is None else self.captured.get(step.budget)
        if captured is None:
            for reason, items in step.reasons or (("its graph was retired", len(step.items)),):
                self._count_eager(reason, items, warn=reason != CHEAPER_EAGERLY)
            return None
        grids = [inputs.grids[i] for i in step.items]
        try:
            values = {PIXELS: inputs.pieces(ends, step.items)}
            key = self.model.vit_metadata_key(grids)
            kept = key is not None and captured.holds == key
            if not kept:
                values.update(self.model.vit_metadata_parts(grids, self.device))
            captured.check(values, kept)
        except NotCapturable as refused:
            self._count_eager(refused.reason, len(step.items), str(refused))
            return None
        except Exception as error:
            self._give_up(captured, error, len(step.items), retire=isinstance(error, BufferMoved))
            return None
        try:
            captured.load(values, key)
            self._run(captured)
            # The next replay overwrites the output; what is handed out must stay as it is.
            rows = captured.output[: self.model.vit_declared.tower_rows(grids)].clone()
        except Exception as error:
            # Lack of memory passes; an eager run needs more of it than a replay.
            retire = not isinstance(error, torch.OutOfMemoryError)
            self._give_up(captured, error, len(step.items), retire)
            return None
        tokens = sum(map(self.model.vit_declared.output_tokens, grids))
        budget = captured.capacity.budget
        predicted = self.costs.measured(budget)
        self.statistics.count_replay(budget, len(step.items), tokens, predicted)
        self.graph_hits += len(step.items)
        return rows

    def _run(self, captured: CapturedBudget) -> None:
        """Replay, and time it now and then."""
        budget = captured.capacity.budget
        if not self.statistics.wants_time(budget):
            captured.graph.replay()
            return
        watch = self.backend.stopwatch()
        watch.start()
        captured.graph.replay()
        watch.stop()
        self.statistics.count_time(budget, watch)

    # -- failures and counts -------------------------------------------------------------------

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

    def _give_up(
        self, captured: CapturedBudget, error: Exception, items: int, retire: bool
    ) -> None:
        """Leave a step to an eager run, and its graph out of all later plans if it is broken."""
        budget = captured.capacity.budget
        self._survive(error, f"replaying token budget {budget}")
        if not retire:
            self._count_eager("an error before the replay", items, brief(error))
            return
        del self.captured[budget]
        self._planners.clear()
        self._count_eager("its graph was retired", items, warn=False)
        logger.warning(
            "Encoder CUDA graph of %d tokens is retired after an error; its batches run "
            "eagerly or in other graphs: %s",
            budget,
            brief(error),
            exc_info=error,
        )

    def _weight_loads(self) -> int:
        return getattr(self.model, "vit_weight_loads", 0)

    def _retire_all_if_weights_moved(self) -> None:
        """Graphs read weights at the addresses of capture. Loading in place is fine; loading into
        new memory would leave the graphs with the old values, without a sign of it."""
        loads, addresses = self._weights
        if loads == self._weight_loads():
            return
        now = self.model.vit_weight_addresses()
        self._weights = (self._weight_loads(), addresses)
        if now != addresses and self.captured:
            self.captured.clear()
            self._planners.clear()
            logger.warning(
                "Encoder CUDA graphs are off: weights were loaded into new memory after capture; "
                "restart the engine to have graphs again"
            )

    def _count_eager(self, reason: str, items: int, detail: str = "", warn: bool = True) -> None:
        """Count, and warn once a reason."""
        self.graph_misses += items
        if self.statistics.count_eager(reason, items) and warn:
            logger.warning("Encoder batch runs eagerly: %s (said once)", detail or reason)

    def _publish(self) -> None:
        """Hand the counts to whoever serves ``/metrics``."""
        self.statistics.read_watches()
        parallel, served = self.vllm_config.parallel_config, self.vllm_config.model_config
        metrics.publish(
            self.statistics.snapshot(len(self.captured)),
            parallel.rank,
            model_name=served.served_model_name,
            engine=parallel.data_parallel_index,
        )

    def get_cumulative_stats(self) -> dict[str, Any]:
        """Upstream's figures, and ours where the model is on the mixin."""
        stats = super().get_cumulative_stats()
        if self.on_mixin:
            stats.update(
                eager_items=dict(self.statistics.eager),
                replays=dict(self.statistics.replays),
                padding_tokens=self.statistics.padding,
            )
        return stats


def _checked(outputs: Any, items: int) -> list[torch.Tensor]:
    """What ``vit_finish`` gave, if it is one tensor an item."""
    outputs = list(outputs)
    if len(outputs) != items or not all(isinstance(out, torch.Tensor) for out in outputs):
        raise TypeError(f"vit_finish() must give one tensor for each of {items} items")
    return outputs


def _with_frames(capacity: Capacity, frames: int | None) -> Capacity:
    """With a user's limit on frames. A frame has a patch at least, so a larger limit than patches
    never binds; and the packer's tables have an entry for each count up to the limit."""
    return replace(capacity, frames=None if frames is None else min(frames, capacity.patches))


def _images_without_frames(usage: Callable[[Grid], Usage], grid: Grid) -> Usage:
    use = usage(grid)
    return use if grid[0] > 1 else replace(use, frames=0)


def _item_count(mm_kwargs: dict[str, Any]) -> int:
    """Items of a batch that could not be read: as many as it has grids, at least one."""
    grids = (value for name, value in mm_kwargs.items() if "grid" in name)
    try:
        return max((len(grid) for grid in grids), default=1) or 1
    except TypeError:
        return 1
