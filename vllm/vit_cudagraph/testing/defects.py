# SPDX-License-Identifier: Apache-2.0
"""Explicit examples of what went wrong in hand-written encoder graphs.

The numbers are those of ``docs/testing.md``, where each kind has its story. They stand beside the
properties of ``conformance.py``, which cover the same ground by drawing; an example here stays the
same for ever, and says in its name what it is about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.buffers import SharedRows
from vllm.vit_cudagraph.eligibility import config_refusal, model_refusal
from vllm.vit_cudagraph.geometry import PIXELS, Limits, ViTGeometry
from vllm.vit_cudagraph.metadata import fill, pad_of
from vllm.vit_cudagraph.testing.oracles import Mismatch
from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings

if TYPE_CHECKING:
    from vllm.vit_cudagraph.testing.conformance import EncoderGraphConformance


@dataclass(frozen=True)
class Defect:
    """An example of one kind of defect.

    Attributes:
        name: Number and kind.
        check: Raises :class:`Mismatch` if the model under test shows it.
        applies: Whether a geometry can show it.
        needs: What it must have, in words.
    """

    name: str
    check: Callable[[Any], None]
    applies: Callable[[ViTGeometry], bool]
    needs: str


DEFECTS: dict[str, Defect] = {}


def _defect(
    name: str, applies: Callable[[ViTGeometry], bool] = lambda geometry: True, needs: str = ""
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def register(check: Callable[[Any], None]) -> Callable[[Any], None]:
        DEFECTS[name] = Defect(name, check, applies, needs)
        return check

    return register


def _has_video(geometry: ViTGeometry) -> bool:
    return "video" in geometry.modalities


def _has_lengths(geometry: ViTGeometry) -> bool:
    return any(row.value == "lengths" for row in geometry.rows.values())


def _still(geometry: ViTGeometry, *shapes: tuple[int, int], seed: int = 3) -> Batch:
    """Items of one frame, by rows and columns in merged tokens."""
    modality = "image" if "image" in geometry.modalities else geometry.modalities[0]
    m = geometry.merge_size
    return Batch(modality, tuple((1, rows * m, cols * m) for rows, cols in shapes), seed)


def _clip(geometry: ViTGeometry, *clips: tuple[int, int, int], seed: int = 3) -> Batch:
    """Clips by frames, rows and columns; fewer frames where the model wants a multiple."""
    m, step = geometry.merge_size, geometry.frame_step
    grids = ((t // step * step, rows * m, cols * m) for t, rows, cols in clips)
    return Batch("video", tuple(grids), seed)


@_defect("1: packing does not count frames", _has_video, "no videos")
def _frames_are_counted(suite: EncoderGraphConformance) -> None:
    """Long clips of few tokens a frame, alone and together, above the slots and below them."""
    geometry, manager = suite.subject().geometry, suite.new_manager(GraphSettings((8, 64)))
    for clips in ([(60, 1, 1)], [(8, 1, 1)], [(7, 1, 1), (6, 1, 1), (5, 1, 2)], [(40, 1, 1)] * 3):
        suite.check(_clip(geometry, *clips), manager)


@_defect("2: buffers sized by a dummy grid")
def _buffers_have_the_rows_of_their_budget(suite: EncoderGraphConformance) -> None:
    """Whatever the limits, a graph of B tokens has the patch rows of B tokens; one long strip may
    still use all of them."""
    geometry = suite.subject().geometry
    for items, frames in ((0, None), (1, 1), (4, 200), (64, 0)):
        chosen = GraphSettings((8, 64), items=items, frames=frames)
        manager = suite.new_manager(chosen)
        for budget, captured in manager.captured.items():
            declared = geometry.capacity(budget, Limits(items=1)).patches
            if len(captured.buffers[PIXELS]) != declared:
                raise Mismatch(
                    f"{len(captured.buffers[PIXELS])} pixel rows for {budget} tokens, {declared} "
                    f"are enough ({chosen})"
                )
        suite.check(_still(geometry, (1, 64)), manager)


@_defect("3: zeros after the last offset")
def _unused_slots_are_empty_sequences(suite: EncoderGraphConformance) -> None:
    """One small item where there are slots for many, after a batch that filled more of them."""
    geometry = suite.subject().geometry
    manager = suite.new_manager(GraphSettings((32,), items=16, frames=16))
    for shapes in ([(2, 2)] * 6, [(1, 1)], [(5, 6)], [(3, 1), (1, 3)]):
        suite.check(_still(geometry, *shapes), manager)


@_defect("4: a longest length that is too small for a later batch")
def _longest_lengths_cover_every_batch(suite: EncoderGraphConformance) -> None:
    """Small items first; then one item that fills the budget, in one row and nearly square."""
    geometry, manager = suite.subject().geometry, suite.new_manager(GraphSettings((64,)))
    for shapes in ([(1, 1)] * 3, [(8, 8)], [(1, 64)], [(64, 1)]):
        suite.check(_still(geometry, *shapes), manager)


@_defect("5: FlashInfer's sections padded as one", _has_lengths, "no single lengths")
def _sections_are_padded_each_on_its_own(suite: EncoderGraphConformance) -> None:
    """By layout, without a kernel: each half of the offsets repeats its own last one."""
    model = suite.subject().model
    geometry, tower = model.vit_declared, model.vit_tower()
    capacity = geometry.capacity(64, Limits(items=16))
    batch = _still(geometry, (2, 3), (1, 4))
    with mock.patch.object(tower, "attn_backend", AttentionBackendEnum.FLASHINFER):
        builder, device = model._vit_builder, torch.device("cpu")
        pixels = SharedRows(model.vit_pixel_buffer(capacity.patches, device, torch.float32))
        buffers = model.vit_buffers(capacity, pixels).named
        exact = model.vit_metadata(list(batch.grids), device)
        for name, row in geometry.rows.items():
            if row.value != "offsets":
                continue
            fill(buffers[name], exact[name], pad_of(builder, row))
            for half, part in zip(buffers[name].chunk(2), exact[name].chunk(2), strict=True):
                tail = half[len(part) :]
                if not len(tail) or (tail != part[-1]).any() or (half.diff() < 0).any():
                    raise Mismatch(f"a section of {name} is {half.tolist()} for {part.tolist()}")


@_defect("6: rows that no kernel writes flow on")
def _unwritten_rows_do_not_matter(suite: EncoderGraphConformance) -> None:
    """NaN in pool and output, one token in the largest graph: nothing of it arrives."""
    geometry = suite.subject().geometry
    manager = suite.new_manager(GraphSettings((96,)))
    for shapes in ([(1, 1)], [(9, 10), (1, 1)], [(1, 2)]):
        manager.disturb()
        outputs = suite.check(_still(geometry, *shapes), manager)
        if not all(bool(torch.isfinite(out).all()) for out in outputs):
            raise Mismatch("an embedding is not finite")


@_defect("7: finished twice, or not at all, in the eager fallback")
def _fallback_is_finished_once(suite: EncoderGraphConformance) -> None:
    """A batch of which some items replay and one runs eagerly, under a marking ``vit_finish``."""
    from vllm.vit_cudagraph.testing.conformance import hooks

    largest = max(suite.settings.budgets)
    hooks(suite, _still(suite.subject().geometry, (1, 2), (1, largest + 1), (2, 2)))


@_defect("9: views of the output overwritten by the next replay")
def _embeddings_outlive_replays(suite: EncoderGraphConformance) -> None:
    geometry, manager = suite.subject().geometry, suite.manager()
    first = suite.check(_still(geometry, (2, 3), (1, 5)), manager)
    bits = [out.clone() for out in first]
    for shapes in ([(1, 1)], [(2, 3), (1, 5)], [(9, 10)]):
        suite.check(_still(geometry, *shapes, seed=8), manager)
    if not all(torch.equal(*pair) for pair in zip(first, bits, strict=True)):
        raise Mismatch("embeddings changed after they were handed out")


@_defect("10: no guard before capture and before replay")
def _what_cannot_be_captured_runs_eagerly(suite: EncoderGraphConformance) -> None:
    """A backend that reads offsets on the host is refused; precomputed embeddings and rows that do
    not fit their grids are given back; a graph that is gone costs nothing but speed."""
    subject = suite.subject()
    model, geometry = subject.model, subject.geometry
    with mock.patch.object(model.vit_tower(), "attn_backend", AttentionBackendEnum.TORCH_SDPA):
        if model_refusal(model, model.vit_tower()) is None:
            raise Mismatch("TORCH_SDPA would be captured")
    manager = suite.new_manager(GraphSettings((8, 32)))
    batch = _still(geometry, (1, 2))
    mm_kwargs = subject.kwargs(batch)
    pixels = next(
        name
        for name, value in mm_kwargs.items()
        if (one := value[0]).is_floating_point() or one.dtype == torch.uint8
    )
    with torch.inference_mode():
        for wrong in ({pixels: mm_kwargs[pixels][1:]}, {pixels: None}):
            if manager.execute(mm_kwargs | wrong) is not None:
                raise Mismatch("input that does not fit its grids was encoded")
    del manager.captured[8]
    subject.execute(manager, mm_kwargs)  # the larger graph, or eager: no assertion


@_defect("11: LoRA adapters in the order of items that were moved")
def _tower_lora_is_refused(suite: EncoderGraphConformance) -> None:
    adapters = SimpleNamespace(enable_tower_connector_lora=True)
    if config_refusal(SimpleNamespace(lora_config=adapters)) is None:
        raise Mismatch("a tower with LoRA would be captured")


@_defect("13: one frame a video", _has_video, "no videos")
def _videos_of_many_frames_are_captured(suite: EncoderGraphConformance) -> None:
    """With nothing set, a clip of several frames goes through a graph."""
    geometry, manager = suite.subject().geometry, suite.new_manager(GraphSettings((96,)))
    suite.check(_clip(geometry, (8, 2, 3)), manager)
    if not manager.statistics.replayed:
        raise Mismatch("a clip of 8 frames ran eagerly")
