# SPDX-License-Identifier: Apache-2.0
"""The synthetic model equals its reference, eagerly and through graphs, whatever its geometry; and
the comparison notices what it is there for."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import managers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.vit_cudagraph.manager import EncoderGraphManager
from vllm.vit_cudagraph.testing import synthetic
from vllm.vit_cudagraph.testing.profiles import examples
from vllm.vit_cudagraph.testing.synthetic import (
    SyntheticModel,
    make_synthetic,
    reference,
    synthetic_options,
)

BUDGETS = (8, 30, 90)
RAGGED = ((1, 6, 10), (1, 2, 2), (1, 14, 4), (1, 8, 8))
CLIPS = ((3, 4, 6), (1, 6, 2), (4, 4, 4))


def make(seed: int = 0, **shape: Any) -> SyntheticModel:
    managers.model("qwen2_vl")  # groups of one rank, as any model of vLLM wants them
    return make_synthetic(config=managers.config("qwen2_vl"), seed=seed, **shape)


def captured(model: SyntheticModel, **given: Any) -> EncoderGraphManager:
    given.setdefault("budgets", BUDGETS)
    manager = managers.make_manager("qwen2_vl", of=model, **given)
    assert list(manager.captured) == sorted(given["budgets"])
    return manager


def assert_reference(
    outputs: Sequence[torch.Tensor], model: SyntheticModel, kwargs: dict[str, Any]
) -> None:
    expected = reference(model, kwargs)
    assert len(outputs) == len(expected)
    for ours, exact in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


def check_replayed(manager: EncoderGraphManager, kwargs: dict[str, Any]) -> None:
    """One batch, all of it through graphs, equal to the reference."""
    replayed = manager.statistics.replayed
    outputs = managers.run(manager, kwargs)
    assert manager.statistics.replayed - replayed == len(outputs), manager.statistics
    assert_reference(outputs, manager.model, kwargs)


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[str, Any], str, list[list[int]], int]:
    """A model's options, a modality, grids that suit them, a seed."""
    options = draw(synthetic_options())
    modality = draw(st.sampled_from(["image", "video"]))
    frames = 1 if modality == "image" else 5
    grid = managers.grids_of(merge=options["merge_size"], side=6, frames=frames)
    grids = draw(st.lists(grid, min_size=1, max_size=5))
    return options, modality, grids, draw(st.integers(0, 2**16))


@given(drawn=batches())
@examples(30)
def test_eager_equals_the_reference(drawn: tuple[Any, ...]) -> None:
    options, modality, grids, seed = drawn
    model = make(seed, **options)
    kwargs = managers.batch(model, grids, modality, seed)
    assert_reference(managers.eager(model, kwargs), model, kwargs)


@given(drawn=batches(), seed=st.integers(0, 2**16))
@examples(30)
def test_graphs_equal_the_reference(drawn: tuple[Any, ...], seed: int) -> None:
    """Hits are counted without this package's arithmetic where that is simple: a batch of images
    that each fit the largest graph is replayed whole."""
    options, modality, grids, first_seed = drawn
    model = make(seed, **options)
    manager = captured(model, items=4)
    for batch_seed, some in ((first_seed, grids), (first_seed + 1, grids[::-1][:1])):
        before = manager.statistics.replayed
        kwargs = managers.batch(model, some, modality, batch_seed)
        with torch.inference_mode():
            for graph in manager.captured.values():
                for owned in graph.graph.pool_tensors():
                    if owned.is_floating_point():
                        owned.fill_(float("nan"))
        assert_reference(managers.run(manager, kwargs), model, kwargs)
        fits = [replayable(manager, tuple(grid)) for grid in some]
        assert manager.statistics.replayed - before == sum(fits)
        if modality == "image" and options["window_side"] is None:
            merge = options["merge_size"]
            assert fits == [h * w <= BUDGETS[-1] * merge**2 for _, h, w in some]


def replayable(manager: EncoderGraphManager, grid: Any) -> bool:
    largest = manager.captured[BUDGETS[-1]].capacity
    use = manager.model.vit_declared.usage(grid)
    return manager.model.vit_capturable(grid) and largest.holds(1, use)


SHAPES: dict[str, dict[str, Any]] = {
    "as Qwen2-VL": {},
    "as Qwen2.5-VL": {"window_side": 2},
    "as Qwen3-VL": {"learned": True},
    "as Kimi-VL": {"sequences": "item", "learned": True, "uint8": False},
    "as Ernie4.5-VL": {"temporal_merge": "halve", "output_rows": "patches", "uint8": False},
    "a resampler alone": {"output_rows": "patches"},
    "windows within items": {"sequences": "item", "window_side": 2},
    "windows of one token": {"window_side": 1, "depth": 3},
    "windows and a resampler": {"window_side": 3, "output_rows": "patches"},
}


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_are_replayed(name: str) -> None:
    model = make(**SHAPES[name])
    manager = captured(model, budgets=[16, 64, 400], items=8)
    check_replayed(manager, managers.batch(model, RAGGED, seed=1))
    check_replayed(manager, managers.batch(model, CLIPS, "video", seed=2))
    check_replayed(manager, managers.batch(model, RAGGED[1:2], seed=3))


def test_three_frames_to_one_fill_a_budget() -> None:
    """The most patches that so many tokens can have: 8 tokens of three frames, 4 patches each."""
    model = make(temporal_merge="halve", output_rows="patches")
    manager = captured(model, budgets=[8], items=1)
    check_replayed(manager, managers.batch(model, [(3, 4, 8)], "video", seed=1))


def test_pooled_videos_run_eagerly() -> None:
    """No number of tokens bounds the patches of a pooled video; an image is replayed."""
    model = make(temporal_merge="pool", output_rows="patches")
    manager = captured(model, items=8)
    check_replayed(manager, managers.batch(model, RAGGED, seed=1))
    kwargs = managers.batch(model, CLIPS, "video", seed=2)
    outputs = managers.run(manager, kwargs)
    assert_reference(outputs, model, kwargs)
    assert [len(out) for out in outputs] == [7, 4, 5]
    assert manager.statistics.eager == {"the model captures no such item": 2}


def test_merging_frames_inside_the_tower_is_an_error() -> None:
    with pytest.raises(ValueError, match="set output_rows='patches'"):
        make(temporal_merge="halve")


def test_no_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match="depth must be at least 1"):
        make(depth=0)


@given(options=synthetic_options())
@examples(20)
def test_every_drawn_option_makes_a_model(options: dict[str, Any]) -> None:
    model = make(**options)
    assert model.vit_declared.merge_size == options["merge_size"]
    assert ("cu_window_seqlens" in model.vit_declared.rows) == bool(options["window_side"])
    assert hasattr(model.visual, "input_norm") == options["uint8"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reduced_precision_is_near_the_reference(dtype: torch.dtype) -> None:
    model = make(window_side=2, learned=True).to(dtype)
    kwargs = managers.batch(model, RAGGED, seed=1)
    for ours, exact in zip(managers.eager(model, kwargs), reference(model, kwargs), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, rtol=0.05, atol=0.05)


def test_weights_loaded_in_place_reach_graph_and_reference() -> None:
    model = make(learned=True)
    manager = captured(model, items=8)
    kwargs = managers.batch(model, RAGGED, seed=1)
    before = managers.run(manager, kwargs)
    other = dict(make(seed=1, learned=True).named_parameters())
    assert model.load_weights(other.items()) == set(other)
    check_replayed(manager, kwargs)
    assert not torch.allclose(before[0], managers.run(manager, kwargs)[0], rtol=0.1, atol=0.1)


# -- negative controls: a fault in what the reference does not call must show -------------------


def shifted_offsets(name: str, by: int) -> Callable[[SyntheticModel], AbstractContextManager[Any]]:
    """The first inner offset of a name is off by some patches."""

    def plant(model: SyntheticModel) -> AbstractContextManager[Any]:
        builder = model._vit_builder
        exact, broken = builder._offsets, model.vit_declared.rows[name]

        def offsets(row: Any, grids: Any) -> Any:
            made = exact(row, grids)
            if row == broken:
                made[1] += by
            return made

        return mock.patch.object(builder, "_offsets", offsets)

    return plant


def declared(**fields: Any) -> Callable[[SyntheticModel], AbstractContextManager[Any]]:
    """The geometry says something else than the tower is."""

    def plant(model: SyntheticModel) -> AbstractContextManager[Any]:
        model._vit_builder.geometry = replace(model.vit_declared, **fields)
        return mock.patch.object(model, "vit_declared", model._vit_builder.geometry)

    return plant


def metadata(name: str, change: Any) -> Callable[[SyntheticModel], AbstractContextManager[Any]]:
    """One tensor of the exact metadata is changed."""

    def plant(model: SyntheticModel) -> AbstractContextManager[Any]:
        exact = model.vit_metadata

        def changed(grids: Any, device: Any) -> Any:
            made = exact(grids, device)
            return made | {name: change(made[name])}

        return mock.patch.object(model, "vit_metadata", changed)

    return plant


def finished(times: int) -> Callable[[SyntheticModel], AbstractContextManager[Any]]:
    def plant(model: SyntheticModel) -> AbstractContextManager[Any]:
        finish = model.vit_finish

        def other(outputs: Any, mm_kwargs: Any) -> Any:
            for _ in range(times):
                outputs = finish(outputs, mm_kwargs)
            return outputs

        return mock.patch.object(model, "vit_finish", other)

    return plant


def not_normalised(model: SyntheticModel) -> AbstractContextManager[Any]:
    return mock.patch.object(
        model.visual.input_norm, "forward", lambda pixels, dtype: pixels.to(dtype) / 255
    )


def projected_as_one_item(model: SyntheticModel) -> AbstractContextManager[Any]:
    """The resampler is told of one item that has all frames."""
    project = model.vit_project

    def together(rows: Any, grids: Any) -> Any:
        return project(rows, [(sum(t for t, _, _ in grids), *grids[0][1:])])

    return mock.patch.object(model, "vit_project", together)


SQUARE = ((1, 8, 8), (1, 12, 4))
FAULTS: dict[str, tuple[dict[str, Any], Any, str, Any]] = {
    "window offset shifted by a token": (
        {"window_side": 2}, shifted_offsets("cu_window_seqlens", 4), "image", SQUARE
    ),
    "window offset shifted by a patch": (
        {"window_side": 2}, shifted_offsets("cu_window_seqlens", -1), "image", SQUARE
    ),
    "sequence offset shifted by a patch": (
        {}, shifted_offsets("cu_seqlens", 1), "image", SQUARE
    ),
    "frames of a video as one sequence": (
        {}, declared(sequences="item"), "video", CLIPS
    ),
    "an item cut into frames": (
        {"sequences": "item"}, declared(sequences="frame"), "video", CLIPS
    ),
    "windows of another side": (
        {"window_side": 2}, declared(window_side=3), "image", SQUARE
    ),
    "window order forgotten": (
        {"window_side": 2},
        metadata("window_index", lambda order: torch.arange(len(order))),
        "image",
        SQUARE,
    ),
    "window order not undone": (
        {"window_side": 2},
        metadata("reverse_indices", lambda order: torch.arange(len(order))),
        "image",
        SQUARE,
    ),
    "positions of the row before": (
        {}, metadata("positions", lambda rows: rows.roll(1, 0)), "image", SQUARE
    ),
    "learned positions missing": (
        {"learned": True}, metadata("pos_embeds", torch.zeros_like), "image", SQUARE
    ),
    "longest sequence one short": (
        {}, metadata("max_seqlen", lambda longest: longest - 1), "image", SQUARE
    ),
    "finished twice": ({}, finished(2), "image", SQUARE),
    "not finished": ({}, finished(0), "image", SQUARE),
    "pixels not normalised": ({}, not_normalised, "image", SQUARE),
    "frames merged across grids": (
        {"temporal_merge": "halve", "output_rows": "patches"},
        projected_as_one_item,
        "video",
        ((1, 4, 4), (3, 4, 4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_eager_path_shows(name: str) -> None:
    shape, plant, modality, grids = FAULTS[name]
    model = make(**shape)
    kwargs = managers.batch(model, grids, modality, seed=4)
    assert_reference(managers.eager(model, kwargs), model, kwargs)
    model._vit_builder.forget()  # what was right before would hide the fault
    with (
        plant(model),
        pytest.raises(AssertionError, match="not close|shape' do not match"),
    ):
        assert_reference(managers.eager(model, kwargs), model, kwargs)
    model._vit_builder.forget()


STALE = {
    "cu_seqlens": {},
    "cu_window_seqlens": {"window_side": 2},
    "window_index": {"window_side": 2},
    "reverse_indices": {"window_side": 2},
    "positions": {},
    "pos_embeds": {"learned": True},
}


@pytest.mark.parametrize("name", STALE)
def test_a_stale_buffer_shows(name: str) -> None:
    """A buffer that keeps the batch before: the graph differs from the reference."""
    model = make(**STALE[name])
    manager = captured(model, budgets=[64], items=8)
    check_replayed(manager, managers.batch(model, RAGGED, seed=1))
    captured_graph = manager.captured[64]
    load, buffer = captured_graph.load, captured_graph.buffers[name]

    def stale(*args: Any) -> None:
        kept = buffer.clone()
        load(*args)
        buffer.copy_(kept)

    with (
        mock.patch.object(captured_graph, "load", stale),
        pytest.raises(AssertionError, match="Tensor-likes are not close"),
    ):
        check_replayed(manager, managers.batch(model, RAGGED[::-1], seed=1))
    captured_graph.holds = None  # the same metadata would not be loaded again
    check_replayed(manager, managers.batch(model, RAGGED[::-1], seed=1))


def test_order_of_the_grids_is_told_apart() -> None:
    """The same grids in another order, in one graph, one batch after the other."""
    manager = captured(make(window_side=2), budgets=[64], items=8)
    for grids in (RAGGED, RAGGED[::-1], RAGGED, RAGGED):
        check_replayed(manager, managers.batch(manager.model, grids, seed=1))
    assert manager.statistics.replays[64] == 4


class ReadsMore(SyntheticModel):
    """Its metadata depends on more than grids."""

    scale = 1.0

    def vit_metadata(self, grids: Any, device: torch.device) -> dict[str, torch.Tensor | None]:
        made = super().vit_metadata(grids, device)
        assert made["positions"] is not None
        return made | {"positions": made["positions"] * self.scale}


class MakesPartsOfItsOwn(SyntheticModel):
    scale = 1.0

    def vit_metadata_parts(self, grids: Any, device: torch.device) -> Mapping[str, Any]:
        made = dict(super().vit_metadata_parts(grids, device))
        return made | {"positions": [made["positions"] * self.scale]}


@pytest.mark.parametrize("kind", [ReadsMore, MakesPartsOfItsOwn])
def test_a_models_own_metadata_is_made_for_each_step(kind: type[SyntheticModel]) -> None:
    model = make()
    model.__class__ = kind
    manager = captured(model, budgets=[64], items=8)
    kwargs = managers.batch(model, RAGGED, seed=1)
    first = managers.run(manager, kwargs)
    model.scale = 3.0  # type: ignore[attr-defined]
    second = managers.run(manager, kwargs)
    assert manager.statistics.replays[64] == 2
    assert not any(torch.allclose(*pair) for pair in zip(first, second, strict=True))
    assert model.vit_metadata_key([(1, 4, 4)]) is None


def test_weights_that_change_in_place_are_followed_at_the_same_grids() -> None:
    """Rows that depend on weights are made anew, though the grids are those of the step before."""
    model = make(learned=True)
    manager = captured(model, budgets=[64], items=8)
    kwargs = managers.batch(model, RAGGED, seed=1)
    check_replayed(manager, kwargs)
    with torch.no_grad():
        model.visual.table.mul_(2)
    check_replayed(manager, kwargs)


def test_finishing_step_by_step_shows() -> None:
    """The delimiter counts items of the batch, so finishing each step alone is not the same."""
    model = make()
    kwargs = managers.batch(model, RAGGED, seed=1)
    parts = [managers.eager(model, model.vit_repack(kwargs, [i]))[0] for i in range(len(RAGGED))]
    assert_reference(parts[:1], model, model.vit_repack(kwargs, [0]))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_reference(parts, model, kwargs)


def test_the_reference_calls_nothing_of_the_geometry() -> None:
    """With the declaration and the metadata out of the way the reference gives the same."""
    model = make(window_side=2, learned=True)
    kwargs = managers.batch(model, RAGGED, seed=1)
    expected = reference(model, kwargs)
    refuse = mock.Mock(side_effect=AssertionError("called by the reference"))
    hooks = ("vit_geometry", "vit_inputs", "vit_metadata", "vit_project", "vit_finish")
    with (
        mock.patch.multiple(SyntheticModel, **dict.fromkeys(hooks, refuse)),
        mock.patch.object(synthetic.ViTGeometry, "__post_init__", refuse),
        mock.patch.object(synthetic.SyntheticTower, "forward", refuse),
    ):
        again = reference(model, kwargs)
        with pytest.raises(AssertionError, match="called by the reference"):
            managers.eager(model, kwargs)
    for first, second in zip(expected, again, strict=True):
        assert torch.equal(first, second)
