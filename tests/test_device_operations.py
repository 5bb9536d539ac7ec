# SPDX-License-Identifier: Apache-2.0
"""Device operations around a replay: few, and as many for one item as for many.

Each costs the host some microseconds, which is what small graphs are made to save. On the twin the
host's own work is numpy, so all that PyTorch dispatches stands for an operation on a device.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import managers
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.vit_cudagraph.manager import EncoderGraphManager

MOST = 6
MOST_OF_THE_SAME_GRIDS = 2
"""Pixels in, rows out."""


class Operations(TorchDispatchMode):
    """Counts what is dispatched, views aside: they touch no device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.counting = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if self.counting and not func.is_view:
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def operations(manager: EncoderGraphManager) -> Iterator[Counter[str]]:
    """What is dispatched outside the graphs while open."""
    counted = Operations()
    graph_class = type(next(iter(manager.captured.values())).graph)
    replay = graph_class.replay

    def uncounted(graph: Any) -> None:
        counted.counting = False
        replay(graph)
        counted.counting = True

    with mock.patch.object(graph_class, "replay", uncounted), counted:
        yield counted.seen


def grids(items: int) -> list[list[int]]:
    """Small images of several shapes."""
    return [[1, 4, 4 + 2 * (i % 3)] for i in range(items)]


def of_second_run(
    manager: EncoderGraphManager, mm_kwargs: dict[str, Any], first: dict[str, Any]
) -> Counter[str]:
    """Operations of a batch whose grids were seen before, after another batch; it is one replay."""
    managers.run(manager, mm_kwargs)
    managers.run(manager, first)
    before = manager.statistics.replays.total()
    with operations(manager) as seen:
        outputs = managers.run(manager, mm_kwargs)
    assert manager.statistics.replays.total() == before + 1
    managers.assert_same(outputs, managers.eager(manager.model, mm_kwargs))
    return seen


@pytest.mark.parametrize("items", [1, 3, 32])
@pytest.mark.parametrize("family", managers.FAMILIES)
def test_few_operations_a_replay(family: str, items: int) -> None:
    manager = managers.make_manager(family, budgets=[256], items=32)
    mm_kwargs = managers.batch(manager.model, grids(items))
    # What came before was larger, so that there is a dirty tail to be cleared.
    larger = managers.batch(manager.model, [[1, 32, 32]])
    seen = of_second_run(manager, mm_kwargs, larger)
    assert seen.total() <= MOST, seen


@pytest.mark.parametrize("family", managers.FAMILIES)
def test_grids_of_the_step_before_cost_nothing(family: str) -> None:
    """Their metadata lies in the buffers already."""
    manager = managers.make_manager(family, budgets=[256], items=32)
    first = managers.batch(manager.model, grids(3), seed=1)
    second = managers.batch(manager.model, grids(3), seed=2)
    seen = of_second_run(manager, second, first)
    assert seen.total() <= MOST_OF_THE_SAME_GRIDS, seen


def test_videos_and_reordered_items() -> None:
    """Packing sorts by size: pixels of items out of order are gathered by the one copy."""
    manager = managers.make_manager("qwen2_5_vl", budgets=[40, 256], items=32)
    shapes = [[1, 4, 4], [1, 24, 32], [1, 4, 6], [1, 24, 36], [1, 6, 6]]
    mm_kwargs = managers.batch(manager.model, shapes, "video")
    managers.run(manager, mm_kwargs)
    for captured in manager.captured.values():
        captured.holds = None
    before = manager.statistics.replays.total()
    with operations(manager) as seen:
        managers.run(manager, mm_kwargs)
    replays = manager.statistics.replays.total() - before
    assert replays > 1
    assert seen.total() <= MOST * replays, seen


def test_more_operations_would_be_noticed() -> None:
    manager = managers.make_manager("qwen2_5_vl", budgets=[256], items=32)
    mm_kwargs = managers.batch(manager.model, grids(4))
    larger = managers.batch(manager.model, [[1, 32, 32]])
    few = of_second_run(manager, mm_kwargs, larger)

    def split(rows: torch.Tensor, of: Any) -> list[torch.Tensor]:
        return [item.clone() for item in type(manager.model).vit_split(manager.model, rows, of)]

    with mock.patch.object(manager.model, "vit_split", split):
        more = of_second_run(manager, mm_kwargs, larger)
    assert more.total() == few.total() + 4
