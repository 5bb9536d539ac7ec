# SPDX-License-Identifier: Apache-2.0
"""A model under test: managers over it, batches for it, and the checks of one batch.

:class:`WatchedManager` is the product's manager with eyes: it counts the replays that really ran,
looks at the tails of all buffers after each, and runs the tower once more, eagerly, on the very
buffers that the graph has read. :func:`check_batch` holds one batch against everything that is
known about it, and raises :class:`~vllm.vit_cudagraph.testing.oracles.Mismatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.vit_cudagraph.captured import CapturedBudget
from vllm.vit_cudagraph.costs import CostLines
from vllm.vit_cudagraph.geometry import PIXELS, Grid, ViTGeometry
from vllm.vit_cudagraph.manager import EncoderGraphManager
from vllm.vit_cudagraph.mixin import ViTInputs, normed_dtype
from vllm.vit_cudagraph.planning import Step
from vllm.vit_cudagraph.testing.models import place
from vllm.vit_cudagraph.testing.oracles import Mismatch, assert_close, capture_faults, tail_faults
from vllm.vit_cudagraph.testing.pool import PoolPoison
from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings

MakeKwargs = Callable[[Any, Batch], dict[str, Any]]


def make_kwargs(model: Any, batch: Batch) -> dict[str, Any]:
    """One modality's kwargs as vLLM's runners hand them over, under vLLM's usual names.

    Pixels ``[N, *pixel_row]`` are random, on the model's device, uint8 where the tower normalises
    on the device; grids ``[items, 3]`` are on the host.
    """
    geometry: ViTGeometry = model.vit_declared
    tower = model.vit_tower()
    weight = next(tower.parameters())
    rows = (sum(geometry.patches(grid) for grid in batch.grids), *geometry.pixel_row)
    generator = torch.Generator().manual_seed(batch.seed)
    if normed_dtype(tower) is torch.uint8:
        pixels = torch.randint(0, 256, rows, generator=generator, dtype=torch.uint8)
    else:
        pixels = torch.randn(rows, generator=generator).to(weight.dtype)
    suffix = "" if batch.modality == "image" else f"_{batch.modality}s"
    return {
        f"pixel_values{suffix}": pixels.to(weight.device),
        f"{batch.modality}_grid_thw": torch.tensor([list(grid) for grid in batch.grids]),
    }


@dataclass
class _CountedGraph:
    """A graph that counts its replays."""

    graph: Any
    replays: int = 0

    def replay(self) -> None:
        self.graph.replay()
        self.replays += 1

    def pool_tensors(self) -> Any:
        # A CUDA graph has no list of them; see PoolPoison.
        return getattr(self.graph, "pool_tensors", tuple)()


class WatchedManager(EncoderGraphManager):
    """``EncoderGraphManager`` that looks at every replay; what it finds is in ``violations``.

    Attributes:
        replays: Replays of graphs that really ran.
        violations: A sentence for each rule that a replay broke, oldest first.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.violations: list[str] = []

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self._counted)

    def capture(self, graph_pool: Any) -> None:
        self._counted: list[_CountedGraph] = []
        self._poison: PoolPoison | None = None
        super().capture(graph_pool)
        if self.captured and self.device.type == "cuda":
            self._poison = PoolPoison(graph_pool)

    def _known_costs(self) -> CostLines:
        """Any replay is cheaper than any eager run, so that what fits a graph must go through one.
        The suite is about values; what is worth replaying is the planner's own tests' business."""
        captured = list(self.captured)
        return CostLines.of(dict(CostLines.modelled(captured).replay_ms), {1: 1e6})

    @contextmanager
    def priced(self, costs: CostLines) -> Iterator[None]:
        """While open, batches are planned by these costs."""
        kept, self.costs = self.costs, costs
        self._planners.clear()
        try:
            yield
        finally:
            self.costs = kept
            self._planners.clear()

    def _capture(self, budget: int) -> CapturedBudget:
        captured = super()._capture(budget)
        counted = _CountedGraph(captured.graph)
        captured.graph = counted
        self._counted.append(counted)
        return captured

    def _run(self, captured: CapturedBudget) -> None:
        """A replay leaves the metadata as it was: the next one may read it again."""
        before = {n: b.clone() for n, b in captured.buffers.items() if n != PIXELS and b.ndim}
        super()._run(captured)
        self.violations += [
            f"the replay wrote into {name}"
            for name, buffer in before.items()
            # As bytes: NaN differs from itself.
            if not torch.equal(buffer.view(torch.uint8), captured.buffers[name].view(torch.uint8))
        ]

    def _replay(self, step: Step, inputs: ViTInputs, ends: Sequence[int]) -> torch.Tensor | None:
        before = self.replays
        rows = super()._replay(step, inputs, ends)
        if rows is not None:
            if self.replays != before + 1:
                self.violations.append("a hit was counted though no graph ran")
            else:
                self._look_at(step, inputs, rows)
        return rows

    def _look_at(self, step: Step, inputs: ViTInputs, rows: torch.Tensor) -> None:
        assert step.budget is not None
        captured, grids = self.captured[step.budget], [inputs.grids[i] for i in step.items]
        self.violations += tail_faults(self.model.vit_declared, captured, grids)
        self.violations += capture_faults(self.model, captured, grids, rows)
        self.violations += self._limit_faults(step, inputs.modality, grids)

    def _limit_faults(self, step: Step, modality: str, grids: Sequence[Grid]) -> list[str]:
        """The user's limits, which hold for every step whatever the buffers have room for."""
        faults, limits = [], self.settings.limits
        if len(step.items) > limits.items:
            faults.append(f"{len(step.items)} items in a step where {limits.items} are allowed")
        frames = sum(grid[0] for grid in grids)
        if modality == "video" and limits.frames is not None and frames > limits.frames:
            faults.append(f"{frames} frames in a step where {limits.frames} are allowed")
        return faults

    def disturb(self) -> None:
        """Leave the worst behind that earlier batches could have left.

        NaN in every output and in what the graphs own; the largest value in all pixel rows; in
        metadata buffers NaN, and on the CPU indices that are out of range. (On a GPU a replay that
        used such an index would end the process.)
        """
        with torch.inference_mode():
            for captured in self.captured.values():
                _spoil(captured.output)
                captured.holds = None  # no batch leaves another's metadata there under its key
                for name, buffer in captured.buffers.items():
                    if name != PIXELS and buffer.ndim:
                        _spoil(buffer, integers=buffer.device.type == "cpu")
            for counted in self._counted:
                for tensor in counted.pool_tensors():
                    _spoil(tensor)
            if self._poison is not None:
                self._poison.replay()
            if self._pixels is not None:
                rows = self._pixels.rows
                rows.fill_(1e4 if rows.is_floating_point() else 255)
                self._pixels.dirty = len(rows)


def _spoil(tensor: torch.Tensor, integers: bool = False) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif integers:
        tensor.fill_(2**30)


@dataclass(frozen=True)
class Subject:
    """A model under test.

    Attributes:
        model: On the mixin, built and filled.
        config: vLLM's configuration of it, encoder graphs on.
        make_kwargs: Gives the model a batch under its own names; see :func:`make_kwargs`.
    """

    model: Any
    config: VllmConfig
    make_kwargs: MakeKwargs = make_kwargs

    @property
    def geometry(self) -> ViTGeometry:
        return self.model.vit_declared

    @property
    def dtype(self) -> torch.dtype:
        return self.config.model_config.dtype

    def manager(self, settings: GraphSettings, *, capture: bool = True) -> WatchedManager:
        """A manager with vLLM's three encoder settings, captured unless told otherwise."""
        config = with_settings(
            self.config,
            encoder_cudagraph_token_budgets=list(settings.budgets),
            encoder_cudagraph_max_vision_items_per_batch=settings.items,
            encoder_cudagraph_max_frames_per_batch=settings.frames,
        )
        with set_current_vllm_config(config):
            manager = WatchedManager(config, place().torch_device, self.dtype, self.model)
            if capture:
                manager.capture(new_pool())
        return manager

    def kwargs(self, batch: Batch) -> dict[str, Any]:
        return self.make_kwargs(self.model, batch)

    def reordered(self, mm_kwargs: Mapping[str, Any], items: Sequence[int]) -> dict[str, Any]:
        """The same kwargs with their items in another order, as the scheduler may send them."""
        with torch.inference_mode():
            chosen = self.model.vit_repack(mm_kwargs, items)
        # Repacked grids may be tuples; a runner hands over what the processor made.
        return {
            name: mm_kwargs[name].new_tensor(value)
            if isinstance(mm_kwargs[name], torch.Tensor) and not isinstance(value, torch.Tensor)
            else value
            for name, value in chosen.items()
        }

    def eager(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """What the model's own ``embed_multimodal`` (upstream's code) gives."""
        with torch.inference_mode():
            return list(self.model.embed_multimodal(**mm_kwargs))

    def execute(
        self, manager: EncoderGraphManager, mm_kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """``execute`` as a runner calls it.

        Raises:
            Mismatch: It said None, or a replay broke a rule.
        """
        with torch.inference_mode():
            outputs = manager.execute(mm_kwargs)
        if isinstance(manager, WatchedManager) and manager.violations:
            found, manager.violations = manager.violations, []
            raise Mismatch("; ".join(dict.fromkeys(found)))
        if outputs is None:
            raise Mismatch(f"execute gave the batch back; eager runs: {manager.statistics.eager}")
        return outputs


def with_settings(base: VllmConfig, **compilation: Any) -> VllmConfig:
    """The same configuration with other ``compilation_config`` fields."""
    import copy

    changed = copy.copy(base)
    changed.compilation_config = copy.copy(base.compilation_config)
    for name, value in compilation.items():
        setattr(changed.compilation_config, name, value)
    return changed


def new_pool() -> Any:
    """What a runner hands to ``capture``."""
    return torch.cuda.graph_pool_handle() if place().device == "cuda" else object()


def fits(manager: EncoderGraphManager, batch: Batch) -> list[bool]:
    """Whether each item of a batch belongs into a graph.

    Tokens and the limit on frames decide, and nothing else: every other capacity is a bound that no
    step within these two can exceed. So it is not asked for here; a bound that is too small shows.
    """
    geometry, limits = manager.model.vit_declared, manager.settings.limits
    budget = max(manager.settings.token_budgets)
    # Where frames are merged a token is made of several.
    slots = limits.sequences(budget * geometry.frames_per_token)
    frames = limits.frames if batch.modality == "video" and limits.frames is not None else 2**31
    if geometry.sequences == "item" and geometry.sequence_frames is None:
        slots = 1
    return [
        manager.model.vit_capturable(grid)
        and geometry.output_tokens(grid) <= budget
        and geometry.usage(grid).sequences <= slots
        and grid[0] <= frames
        for grid in batch.grids
    ]


def check_batch(
    subject: Subject,
    manager: WatchedManager,
    batch: Batch,
    reference: Callable[[Batch, dict[str, Any]], list[torch.Tensor] | None] | None = None,
    mm_kwargs: dict[str, Any] | None = None,
) -> list[torch.Tensor]:
    """Hold one batch against all that is known about it; gives its outputs.

    Every item that fits went through a graph and no other did; each replay kept the rules of
    :class:`WatchedManager`; the outputs equal those of upstream's eager path and, where there is
    one, of a tower written by others.

    Args:
        subject, manager: The model, and a manager of it.
        batch: What is run.
        reference: Gives the outputs by other means, or None where it has none for this batch.
        mm_kwargs: The batch's kwargs, if they have been made already.

    Raises:
        Mismatch: Any of these does not hold.
    """
    mm_kwargs = mm_kwargs if mm_kwargs is not None else subject.kwargs(batch)
    replayed, eager_items = manager.statistics.replayed, manager.statistics.eager.total()
    outputs = subject.execute(manager, mm_kwargs)
    assert_close(outputs, subject.eager(mm_kwargs), "the eager path")
    theirs = reference(batch, mm_kwargs) if reference is not None else None
    if theirs is not None:
        assert_close(outputs, theirs, "the reference")
    expected = fits(manager, batch)
    counts = (
        manager.statistics.replayed - replayed,
        manager.statistics.eager.total() - eager_items,
    )
    if counts != (sum(expected), len(expected) - sum(expected)):
        raise Mismatch(
            f"{counts[0]} items replayed and {counts[1]} eager, where {sum(expected)} of "
            f"{len(expected)} fit a graph; eager runs so far: {dict(manager.statistics.eager)}"
        )
    return outputs
