# SPDX-License-Identifier: Apache-2.0
"""The oracles notice: each is shown a difference that it must report, close to its tolerance."""

import sys
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from vllm.vit_cudagraph.testing import models, oracles
from vllm.vit_cudagraph.testing.oracles import Mismatch, assert_close, error
from vllm.vit_cudagraph.testing.reference_attention import varlen_attention
from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings
from vllm.vit_cudagraph.testing.subject import Subject, WatchedManager, check_batch

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
BATCH = Batch("image", [(1, 8, 12), (1, 6, 20), (1, 2, 2)], seed=4)


@cache
def subject(family: str = "qwen2_5_vl") -> Subject:
    config = models.make_config(family)
    return Subject(models.build_model(config, fill=models.load_weights(config)), config)


@cache
def transformers_tower(family: str) -> oracles.TransformersTower:
    return oracles.TransformersTower(models.checkpoint(family), models.place().torch_device)


def replayed() -> tuple[WatchedManager, Any, torch.Tensor]:
    """A manager after one replay of the batch, the graph that ran, and its output rows."""
    manager = subject().manager(GraphSettings((128,), items=4))
    check_batch(subject(), manager, BATCH)
    captured = manager.captured[128]
    return manager, captured, captured.output


def test_error_is_of_the_worst_row() -> None:
    expected = torch.ones(100, 16)
    actual = expected.clone()
    assert error(actual, expected) == 0
    actual[7] += 1e-3
    assert error(actual, expected) == pytest.approx(1e-3, rel=1e-3)
    assert error(actual * 5, expected * 5) == pytest.approx(1e-3, rel=1e-3)  # scale falls out


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_tolerance_lets_a_number_pass_that_is_not_finite(bad: float) -> None:
    actual = torch.ones(3, 2)
    actual[1, 1] = bad
    assert error(actual, torch.ones(3, 2)) == float("inf")
    with pytest.raises(Mismatch, match="item 0"):
        assert_close([actual], [torch.ones(3, 2)], "eager")


def test_shapes_and_numbers_of_items_are_held() -> None:
    rows = torch.ones(3, 2)
    assert error(rows[:2], rows) == float("inf")
    with pytest.raises(Mismatch, match="1 items, eager has 2"):
        assert_close([rows], [rows, rows], "eager")
    assert error(rows[:0], rows[:0]) == 0


@pytest.mark.parametrize("dtype", oracles.TOLERANCE)
def test_tolerances_are_some_roundings_of_their_dtype(dtype: torch.dtype) -> None:
    rounding = torch.finfo(dtype).eps / 2
    assert 4 * rounding < oracles.TOLERANCE[dtype] < 400 * rounding


# -- one replay ------------------------------------------------------------------------------------


def test_a_graph_that_computed_something_else_is_noticed() -> None:
    """The smallest change of one number in one row."""
    manager, captured, rows = replayed()
    assert oracles.capture_faults(manager.model, captured, BATCH.grids, rows) == []
    wrong = rows.clone()
    wrong[3, 5] = torch.nextafter(wrong[3, 5], torch.tensor(1e9))
    assert oracles.capture_faults(manager.model, captured, BATCH.grids, wrong)
    used = manager.model.vit_declared.tower_rows(BATCH.grids)
    behind = rows.clone()
    behind[used:] = 7  # nobody's rows
    assert oracles.capture_faults(manager.model, captured, BATCH.grids, behind) == []


def test_padding_that_is_not_as_declared_is_noticed() -> None:
    """One row past the end, in each buffer in turn."""
    manager, captured, _ = replayed()
    geometry = manager.model.vit_declared
    assert oracles.tail_faults(geometry, captured, BATCH.grids) == []
    for name, buffer in captured.buffers.items():
        if not buffer.ndim:
            continue
        kept = buffer[-1].clone()
        buffer[-1] = kept + 1
        found = oracles.tail_faults(geometry, captured, BATCH.grids)
        assert len(found) == 1, name
        assert (name in found[0]) or name == "pixel_values"
        buffer[-1] = kept


def test_a_replay_that_writes_into_its_metadata_is_noticed() -> None:
    manager, captured, _ = replayed()
    replay = captured.graph.replay

    def writes() -> None:
        replay()
        captured.buffers["cu_seqlens"][-1] += 1

    with (
        mock.patch.object(captured.graph, "replay", writes),
        pytest.raises(Mismatch, match="wrote into cu_seqlens"),
    ):
        check_batch(subject(), manager, BATCH)


def test_a_hit_without_a_replay_is_noticed() -> None:
    manager, captured, _ = replayed()
    with (
        mock.patch.object(captured.graph, "replay", lambda: None),
        pytest.raises(Mismatch, match="no graph ran"),
    ):
        check_batch(subject(), manager, BATCH)


def test_an_eager_run_where_a_graph_was_due_is_noticed() -> None:
    manager, *_ = replayed()
    with (
        mock.patch.object(manager, "_replay", lambda *args: None),
        pytest.raises(Mismatch, match="0 items replayed and 0 eager, where 3 of 3"),
    ):
        check_batch(subject(), manager, BATCH)


# -- towers of others ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_tower_is_a_tight_reference(family: str) -> None:
    """It agrees, and one patch that is a shade brighter is far outside the tolerance."""
    tested, tower = subject(family), transformers_tower(family)
    kwargs = tested.kwargs(BATCH)
    ours = tested.eager(kwargs)
    assert_close(ours, tower.reference(BATCH, kwargs), "transformers")
    pixels = kwargs["pixel_values"]
    assert pixels.dtype == torch.uint8
    pixels[5] = torch.where(pixels[5] > 127, pixels[5] - 16, pixels[5] + 16)
    theirs = tower.reference(BATCH, kwargs)
    assert error(ours[0], theirs[0]) > 50 * oracles.TOLERANCE[torch.float32]
    with pytest.raises(Mismatch, match="item 0 .* differs from transformers"):
        assert_close(ours, theirs, "transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_tower_knows_videos(family: str) -> None:
    tested, tower = subject(family), transformers_tower(family)
    batch = Batch("video", [(3, 4, 6), (2, 8, 2)], seed=2)
    kwargs = tested.kwargs(batch)
    assert_close(tested.eager(kwargs), tower.reference(batch, kwargs), "transformers")


def test_flash_attention_takes_the_place_of_the_layers_own() -> None:
    """The plumbing, with the reference attention standing for the package's function."""
    calls = []

    def varlen(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
    ) -> torch.Tensor:
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
        calls.append(max_seqlen_q)
        return varlen_attention(q, k, v, cu_seqlens_q, torch.tensor(max_seqlen_q), softmax_scale)

    tested = subject()
    kwargs = tested.kwargs(BATCH)
    expected = tested.eager(kwargs)
    package = SimpleNamespace(flash_attn_varlen_func=varlen)
    with (
        mock.patch.dict(sys.modules, flash_attn=package),
        oracles.flash_attention(tested.model.visual),
    ):
        through_package = tested.eager(kwargs)
    assert len(calls) == len(tested.model.visual.blocks) and min(calls) > 0
    assert all(torch.equal(*pair) for pair in zip(through_package, expected, strict=True))
    calls.clear()
    tested.eager(kwargs)
    assert not calls  # the layers are as they were


def test_flash_attention_says_what_is_missing() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: see the conformance suite's own test")
    assert oracles.flash_attention_missing() == "flash-attn computes on a GPU only"
