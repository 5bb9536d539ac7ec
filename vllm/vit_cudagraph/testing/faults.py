# SPDX-License-Identifier: Apache-2.0
"""Planted faults: one line of the product sabotaged, from outside, with the suite unchanged.

A suite that passes says little until it is known to fail. Each fault here is a mistake that was
made somewhere, or nearly was. ``EncoderGraphConformance.test_planted_fault`` plants each in turn;
one of the properties that it names must then find a mismatch, and the sabotaged line must have run.

A sabotage takes the original function and the arguments of the call::

    @fault("tail padded with zeros", "images")
    def _(plant, model):
        plant.patch(captured_module, "fill_host", lambda fill, staged, exact, pad: ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any
from unittest import mock

import numpy as np
import torch

from vllm.vit_cudagraph import captured as captured_module
from vllm.vit_cudagraph import manager as manager_module
from vllm.vit_cudagraph.arena import FlatArena, HostArena
from vllm.vit_cudagraph.buffers import SharedRows
from vllm.vit_cudagraph.captured import CapturedBudget
from vllm.vit_cudagraph.geometry import PIXELS, ViTGeometry
from vllm.vit_cudagraph.manager import EncoderGraphManager
from vllm.vit_cudagraph.metadata import MetadataBuilder, RowCache
from vllm.vit_cudagraph.mixin import ViTInputs
from vllm.vit_cudagraph.testing.models import place


class Plant:
    """Patches of one fault, and whether a sabotaged line ever ran."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.called = False

    def patch(self, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
        """Replace ``owner.name`` by ``wrong(original, *arguments)``."""
        original = getattr(owner, name)

        @wraps(original)
        def sabotaged(*args: Any, **kwargs: Any) -> Any:
            self.called = True
            return wrong(original, *args, **kwargs)

        self._stack.enter_context(mock.patch.object(owner, name, sabotaged))


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        name: What is wrong.
        caught_by: Properties of the conformance suite, one of which must fail.
        sabotage: Plants it for a model.
        applies: Whether a geometry has what is sabotaged.
        needs: What it must have, in words.
    """

    name: str
    caught_by: tuple[str, ...]
    sabotage: Callable[[Plant, Any], None]
    applies: Callable[[ViTGeometry], bool]
    needs: str

    @contextmanager
    def planted(self, model: Any) -> Iterator[Plant]:
        """While open the fault is in place."""
        with ExitStack() as stack:
            plant = Plant(stack)
            # What was computed before the fault would hide it, and what it computes would stay.
            stack.callback(model._vit_builder.forget)
            model._vit_builder.forget()
            self.sabotage(plant, model)
            yield plant


FAULTS: dict[str, Fault] = {}
_PLENTY = 2**40  # more of anything than a batch has


def _always(geometry: ViTGeometry) -> bool:
    return True


def _windowed(geometry: ViTGeometry) -> bool:
    return geometry.window_side is not None


def _frames(geometry: ViTGeometry) -> bool:
    return geometry.sequences == "frame" and "video" in geometry.modalities


def _positions(geometry: ViTGeometry) -> bool:
    return any(row.value == "position" for row in geometry.rows.values())


def _keyed(geometry: ViTGeometry) -> bool:
    return not geometry.learns_rows


def _drops_rows(geometry: ViTGeometry) -> bool:
    here = place()
    return here.device == "cpu" or here.attention == "TRITON_ATTN" or here.flash == "2"


def _on_the_twin(geometry: ViTGeometry) -> bool:
    return place().device == "cpu"


_NEEDS: dict[Callable[[ViTGeometry], bool], str] = {
    _always: "",
    _windowed: "the tower has no windows",
    _frames: "no attention sequence a frame, or no videos",
    _positions: "no position rows",
    _keyed: "some rows depend on weights and are made anew each time",
    _on_the_twin: "on a GPU it ends the CUDA context, or finds the graph's own numbers",
    _drops_rows: "FlashAttention 3 attends to all rows, whatever max_seqlen says",
}


def fault(
    name: str, *caught_by: str, applies: Callable[[ViTGeometry], bool] = _always
) -> Callable[[Callable[[Plant, Any], None]], Callable[[Plant, Any], None]]:
    """Register a fault; see the module's docstring."""

    def register(sabotage: Callable[[Plant, Any], None]) -> Callable[[Plant, Any], None]:
        FAULTS[name] = Fault(name, caught_by, sabotage, applies, _NEEDS[applies])
        return sabotage

    return register


# -- padding and buffers ---------------------------------------------------------------------------


@fault("tail not padded", "images", "videos")
def _(plant: Plant, model: Any) -> None:
    def stale(fill: Any, staged: Any, exact: Any, pad: str) -> None:
        staged[: len(exact)] = exact

    plant.patch(captured_module, "fill_host", stale)


@fault("tail of positions not padded", "images", "videos", applies=_positions)
def _(plant: Plant, model: Any) -> None:
    def load(original: Any, arena: FlatArena, rows: Any) -> None:
        for name, pieces in rows.items():
            exact = torch.cat(list(pieces))
            arena.buffers[name][: len(exact)].copy_(exact)

    plant.patch(FlatArena, "load", load)


@fault("tail padded with zeros", "images", "videos")
def _(plant: Plant, model: Any) -> None:
    plant.patch(
        captured_module,
        "fill_host",
        lambda fill, staged, exact, pad: fill(staged, exact, "zero"),
    )


@fault("offsets not refreshed", "images")
def _(plant: Plant, model: Any) -> None:
    def stale(fill: Any, staged: Any, exact: Any, pad: str) -> None:
        if pad != "last" or not staged.any():
            fill(staged, exact, pad)

    plant.patch(captured_module, "fill_host", stale)


@fault("the staging area not sent", "images")
def _(plant: Plant, model: Any) -> None:
    plant.patch(HostArena, "send", lambda send, arena: None)


@fault("dirty tails remembered per graph instead of per buffer", "turns", "histories")
def _(plant: Plant, model: Any) -> None:
    dirty: dict[Any, int] = {}

    def load(original: Any, rows: SharedRows, pieces: Any, capacity: int) -> None:
        rows.dirty = dirty.get((rows, capacity), 0)
        original(rows, pieces, capacity)
        dirty[rows, capacity] = rows.dirty

    plant.patch(SharedRows, "load", load)


@fault("a buffer rebound after each load", "images")
def _(plant: Plant, model: Any) -> None:
    def load(original: Any, captured: CapturedBudget, *args: Any) -> None:
        original(captured, *args)
        captured.buffers.update({n: b.clone() for n, b in captured.buffers.items() if b.ndim})

    plant.patch(CapturedBudget, "load", load)


@fault("a buffer rebound, and nobody looks", "images", applies=_on_the_twin)
def _(plant: Plant, model: Any) -> None:
    def load(original: Any, captured: CapturedBudget, *args: Any) -> None:
        # The arenas go on writing to where the buffers were; here the graph reads elsewhere.
        original(captured, *args)
        for name, buffer in captured.buffers.items():
            if name != PIXELS and buffer.ndim:
                kept = buffer.clone()
                buffer.zero_()
                captured.buffers[name] = kept

    plant.patch(CapturedBudget, "load", load)
    plant.patch(CapturedBudget, "check", lambda check, captured, *_: None)


@fault("metadata kept from a step of as many tokens", "partitions", "images", applies=_keyed)
def _(plant: Plant, model: Any) -> None:
    def by_tokens(original: Any, builder: MetadataBuilder, grids: Any) -> int:
        return sum(map(builder.geometry.output_tokens, grids))

    plant.patch(MetadataBuilder, "key", by_tokens)


# -- numbers that a graph bakes --------------------------------------------------------------------


@fault("max_seqlen baked from the first batch", "images")
def _(plant: Plant, model: Any) -> None:
    plant.patch(ViTGeometry, "longest_bound", lambda bound, geometry, *_: geometry.merge_unit)


@fault("max_seqlen baked from the first batch, and nobody looks", "images", applies=_drops_rows)
def _(plant: Plant, model: Any) -> None:
    plant.patch(ViTGeometry, "longest_bound", lambda bound, geometry, *_: geometry.merge_unit)
    plant.patch(CapturedBudget, "check", lambda check, captured, *_: None)


@fault("window bound for square images", "images", "edges", applies=_windowed)
def _(plant: Plant, model: Any) -> None:
    plant.patch(
        ViTGeometry,
        "_most_windows",
        lambda bound, geometry, budget, sequences: max(1, budget // geometry.window_side**2),
    )


@fault("a value read on the host in a hook", "images")
def _(plant: Plant, model: Any) -> None:
    def forward(original: Any, self: Any, pixels: torch.Tensor, metadata: Any) -> torch.Tensor:
        return original(self, pixels, metadata)[: int(pixels.count_nonzero()) + len(pixels)]

    plant.patch(_owner(model, "vit_forward"), "vit_forward", forward)


# -- metadata --------------------------------------------------------------------------------------


@fault("the graph keyed by the token total only", "partitions")
def _(plant: Plant, model: Any) -> None:
    made: dict[Any, Any] = {}

    def parts(original: Any, builder: MetadataBuilder, grids: Any) -> Any:
        key = builder, sum(builder.geometry.output_tokens(grid) for grid in grids)
        if key not in made:
            made[key] = original(builder, grids)
        return made[key]

    plant.patch(MetadataBuilder, "parts", parts)


@fault("windows taken from full-attention offsets", "images", applies=_windowed)
def _(plant: Plant, model: Any) -> None:
    plant.patch(
        ViTGeometry,
        "window_lengths",
        lambda lengths, geometry, grid: np.array(geometry.sequence_lengths(grid)),
    )


@fault("window order not moved past earlier items", "images", applies=_windowed)
def _(plant: Plant, model: Any) -> None:
    def index(original: Any, builder: MetadataBuilder, grids: Any) -> Any:
        parts = [original(builder, [grid]) for grid in grids]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    plant.patch(MetadataBuilder, "_window_index", index)


@fault("frames of a video as one sequence", "videos", applies=_frames)
def _(plant: Plant, model: Any) -> None:
    plant.patch(
        ViTGeometry, "sequence_lengths", lambda lengths, geometry, grid: [geometry.patches(grid)]
    )


@fault("stale positions", "partitions", "images", applies=_positions)
def _(plant: Plant, model: Any) -> None:
    first: dict[int, Any] = {}

    def get(original: Any, cache: RowCache, grid: Any, make: Any) -> Any:
        size = grid[0] * grid[1] * grid[2]
        return original(cache, first.setdefault(size, grid), make)

    plant.patch(RowCache, "get", get)


@fault("a dropped last row", "images")
def _(plant: Plant, model: Any) -> None:
    def offsets(original: Any, *args: Any) -> Any:
        exact = original(*args)
        exact[-1] -= 1
        return exact

    plant.patch(MetadataBuilder, "_offsets", offsets)


# -- packing ---------------------------------------------------------------------------------------


@fault("packing counts tokens alone", "videos", "edges", "graph_settings")
def _(plant: Plant, model: Any) -> None:
    def rows(original: Any, capacities: Any, *args: Any) -> Any:
        free = {"items": _PLENTY, "sequences": _PLENTY, "windows": _PLENTY, "frames": None}
        return original([replace(capacity, **free) for capacity in capacities], *args)

    plant.patch(manager_module, "Planner", rows)


@fault("the limit on items forgotten", "graph_settings")
def _(plant: Plant, model: Any) -> None:
    def rows(original: Any, capacities: Any, *args: Any) -> Any:
        return original([replace(capacity, items=_PLENTY) for capacity in capacities], *args)

    plant.patch(manager_module, "Planner", rows)


@fault("the limit on frames forgotten", "graph_settings", applies=_frames)
def _(plant: Plant, model: Any) -> None:
    def rows(original: Any, capacities: Any, *args: Any) -> Any:
        return original([replace(capacity, frames=None) for capacity in capacities], *args)

    plant.patch(manager_module, "Planner", rows)


@fault("order lost after packing", "images")
def _(plant: Plant, model: Any) -> None:
    plant.patch(
        EncoderGraphManager,
        "_execute_steps",
        lambda steps, manager, *args: sorted(steps(manager, *args), key=len),
    )


@fault("items of a step taken in another order than their grids", "images")
def _(plant: Plant, model: Any) -> None:
    def pieces(original: Any, inputs: ViTInputs, ends: Any, items: Any) -> Any:
        return original(inputs, ends, items[::-1])

    plant.patch(ViTInputs, "pieces", pieces)


# -- outputs ---------------------------------------------------------------------------------------


@fault("missing clone", "images", "histories")
def _(plant: Plant, model: Any) -> None:
    def replay(original: Any, manager: Any, step: Any, inputs: Any, ends: Any) -> Any:
        rows = original(manager, step, inputs, ends)
        return rows if rows is None else manager.captured[step.budget].output[: len(rows)]

    plant.patch(EncoderGraphManager, "_replay", replay)


@fault("finishing twice", "hooks")
def _(plant: Plant, model: Any) -> None:
    plant.patch(
        EncoderGraphManager,
        "_execute_ranks",
        lambda ranks, manager, mm_kwargs, inputs: manager.model.vit_finish(
            ranks(manager, mm_kwargs, inputs), mm_kwargs
        ),
    )


@fault("finishing not at all", "hooks")
def _(plant: Plant, model: Any) -> None:
    plant.patch(
        EncoderGraphManager,
        "_execute_checked",
        lambda checked, manager, mm_kwargs, inputs: manager._execute_ranks(mm_kwargs, inputs),
    )


@fault("input normaliser skipped", "images")
def _(plant: Plant, model: Any) -> None:
    def forward(original: Any, self: Any, pixels: torch.Tensor, metadata: Any) -> torch.Tensor:
        # Pixels are normalised already where the tower takes them as they are.
        wrong = pixels * 2 if pixels.is_floating_point() else pixels // 2
        return original(self, wrong, metadata)

    plant.patch(_owner(model, "vit_forward"), "vit_forward", forward)


@fault("an eager run counted as a replay", "images")
def _(plant: Plant, model: Any) -> None:
    def replay(original: Any, manager: Any, step: Any, inputs: Any, ends: Any) -> Any:
        if step.budget is None:
            return None
        grids = [inputs.grids[i] for i in step.items]
        tokens = sum(map(manager.model.vit_declared.output_tokens, grids))
        manager.statistics.count_replay(step.budget, len(step.items), tokens)
        pixels = torch.cat(inputs.pieces(ends, step.items))
        return manager.model.vit_forward(pixels, manager.model.vit_metadata(grids, pixels.device))

    plant.patch(EncoderGraphManager, "_replay", replay)


@fault("a read of memory that nothing wrote", "images", applies=_on_the_twin)
def _(plant: Plant, model: Any) -> None:
    def forward(original: Any, self: Any, pixels: torch.Tensor, metadata: Any) -> torch.Tensor:
        rows = original(self, pixels, metadata)
        return rows + torch.empty_like(rows) * 0

    plant.patch(_owner(model, "vit_forward"), "vit_forward", forward)


@fault("graphs kept after clear()", "histories")
def _(plant: Plant, model: Any) -> None:
    plant.patch(EncoderGraphManager, "clear", lambda clear, manager: None)


def _owner(model: Any, name: str) -> Any:
    """The class of a model's bases that defines a hook, so that the hook that runs is patched."""
    return next(base for base in type(model).__mro__ if name in vars(base))
