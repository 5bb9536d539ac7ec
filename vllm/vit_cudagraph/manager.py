# SPDX-License-Identifier: Apache-2.0
"""``EncoderGraphManager``: runs batches through a tower's graphs, and counts.

WHY. It takes the place of vLLM's ``EncoderCudaGraphManager`` (``plugin.py``). For models on the
mixin it sizes graphs by capacity, packs by every capacity, checks before it copies, and turns any
survivable failure into an eager run. For all other models it only adds the last of these.

FRAGILITY. It subclasses upstream's class and relies on the pieces that ``contract.py`` names and
compares at start-up.

SCOPE. Which graphs there are, and how they come about, is ``capturing.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.vit_cudagraph import metrics
from vllm.vit_cudagraph.captured import BufferMoved, CapturedBudget
from vllm.vit_cudagraph.capturing import CapturingManager
from vllm.vit_cudagraph.failures import brief, poisons_the_process
from vllm.vit_cudagraph.geometry import PIXELS, Capacity, Grid, NotCapturable, Usage
from vllm.vit_cudagraph.mixin import ViTInputs
from vllm.vit_cudagraph.planning import CHEAPER_EAGERLY, Plan, Planner, Step
from vllm.vit_cudagraph.statistics import Statistics, log_interval

logger = init_logger(__name__)


class EncoderGraphManager(CapturingManager):
    """Encoder CUDA graphs that are never wrong and never down.

    Args:
        vllm_config, device, dtype, model: As upstream's manager takes them.
    """

    def __init__(
        self, vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any
    ) -> None:
        self._planners: dict[str, Planner] = {}
        self.statistics = Statistics()
        self._log_interval = log_interval()
        super().__init__(vllm_config, device, dtype, model)

    def clear(self) -> None:
        super().clear()
        self._planners.clear()  # empty where the model is not on the mixin

    def capture(self, graph_pool: Any) -> None:
        super().capture(graph_pool)
        if self.on_mixin and not self.refusal:
            self._weights = (self._weight_loads(), self.model.vit_weight_addresses())
            self._publish()

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
