# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner, piece by piece, with our manager under it and the CPU twin below.

V2 is the default on GPUs and never runs whole on the CPU. Real here, as installed: the model state
(``init_model_state``, ``DefaultModelState`` with its positions and its pruner), ``EncoderRunner``,
``EncoderCache``, and of ``GPUModelRunner`` the methods that drive them: ``profile_run``,
``needs_cudagraph_capture``, ``capture_model``, and ``_teardown_profiling_state`` between its two
captures. The model's weights are random, its items are made by vLLM's own processor classes.

Not driven, and why:

- ``GPUModelRunner.__init__`` makes CUDA streams; ``execute_model`` prepares its batch, and samples,
  by Triton kernels. The runner here is made without ``__init__`` and has only what the methods
  above read.
- ``profile_cudagraph_memory`` captures the decoder's graphs. Here its two steps for the encoder
  are called one after the other.
- ``StagedWriteTensor.apply_write`` and ``RopeState.prepare_positions`` are Triton kernels. So
  prompts and their positions are written into those tensors directly.

Patched around them (``on_the_cpu``): ``graph_capture`` opens a CUDA stream, the graph pool and
``torch.accelerator`` need a device, and pinned memory is refused by a torch that has none, where
vLLM has a fallback.
"""

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import managers
import pytest
import test_pruning as pruned
import torch
from transformers import BatchFeature

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker import encoder_cudagraph
from vllm.v1.worker.gpu import buffer_utils, cudagraph_utils, model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.model_states import init_model_state, interface
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.states import RequestState
from vllm.vit_cudagraph import plugin, stock_safety
from vllm.vit_cudagraph.manager import EncoderGraphManager
from vllm.vit_cudagraph.testing import photos

FAMILY = "qwen2_5_vl"
BUDGETS = (16, 40, 100)
Entry = tuple[str, MultiModalKwargsItem]


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    """What the pieces ask of a GPU, answered. Configuration is made first: see ``vllm_log``."""
    for family in managers.FAMILIES:
        managers.model(family)
    for options in ({}, {"enable_mm_embeds": True}):
        no_items(**options)
    with (
        mock.patch.object(buffer_utils, "is_uva_available", lambda: False),
        mock.patch.object(parallel_state, "graph_capture", lambda device: nullcontext()),
        mock.patch.object(type(current_platform), "graph_pool_handle", object, create=True),
        mock.patch.multiple(
            torch.accelerator,
            synchronize=lambda: None,
            empty_cache=lambda: None,
            get_memory_info=lambda: (0, 0),
        ),
        mock.patch.object(model_runner, "lock_workspace"),
    ):
        yield


@pytest.fixture(autouse=True)
def nothing_said_yet(on_the_cpu: None) -> Iterator[None]:
    """Refusals are said once a model, and this one is shared with other files."""
    shared = managers.model(FAMILY).__dict__
    with mock.patch.dict(shared):
        shared.pop("_vit_refusal_said", None)
        yield


# -- the pieces --------------------------------------------------------------------------------


def v2_config(base: VllmConfig, enforce_eager: bool = False, **settings: Any) -> VllmConfig:
    """A configuration as V2 gets it. ``enforce_eager`` decides on the encoder's graphs as well, and
    is on in every configuration of the tests."""
    given = {
        "encoder_cudagraph_token_budgets": list(BUDGETS),
        "encoder_cudagraph_max_vision_items_per_batch": 8,
    }
    config = managers.with_settings(base, **(given | settings))
    config.model_config = copy.copy(config.model_config)
    config.model_config.enforce_eager = enforce_eager
    config.cache_config = copy.copy(config.cache_config)
    return config


def make_state(config: VllmConfig, served: Any) -> Any:
    """The model state as ``GPUModelRunner.load_model`` makes it."""
    encoder_cache = EncoderCache() if config.model_config.supports_multimodal_inputs else None
    with set_current_vllm_config(config):
        return init_model_state(config, served, encoder_cache, managers.CPU)


def new_state(family: str = FAMILY, capture: bool = True, **settings: Any) -> Any:
    """A state over the family's shared model, captured as V2 does."""
    state = make_state(v2_config(managers.config(family), **settings), managers.model(family))
    if capture:
        state.encoder_runner.capture()
    return state


def new_runner(state: Any) -> Any:
    """V2's runner with this state, as far as its methods about the encoder read it. Its decoder
    has nothing to run and no graphs."""
    config, none = state.vllm_config, torch.empty(0)
    runner: Any = model_runner.GPUModelRunner.__new__(model_runner.GPUModelRunner)
    runner.__dict__.update(
        vllm_config=config,
        model_config=config.model_config,
        compilation_config=config.compilation_config,
        cache_config=config.cache_config,
        lora_config=None,
        mm_registry=MULTIMODAL_REGISTRY,
        model=state.model,
        model_state=state,
        supports_mm_inputs=state.supports_mm_inputs,
        encoder_cache=getattr(state, "encoder_cache", None),
        cudagraph_manager=SimpleNamespace(needs_capture=lambda: False),
        is_first_pp_rank=True,
        is_last_pp_rank=False,  # no sampler
        max_num_tokens=state.max_num_tokens,
        pooling_runner=None,
        _dummy_run=lambda *args, **kwargs: (none, none),
    )
    return runner


def manager_of(state: Any) -> EncoderGraphManager:
    return state.encoder_runner.cudagraph_manager


# -- items and steps ---------------------------------------------------------------------------


@cache
def processor(family: str) -> Any:
    return MULTIMODAL_REGISTRY.create_processor(managers.config(family).model_config)


def entries(
    family: str,
    grids: managers.Grids,
    modality: str = "image",
    seed: int = 0,
    fps: Sequence[float] = (2.0,),
) -> list[Entry]:
    """Items of random pixels, each as a request brings it."""
    served = managers.model(family)
    inputs = managers.batch(served, grids, modality, seed)
    if modality == "video":
        pairs = served.config.vision_config.temporal_patch_size
        rates = [fps[i % len(fps)] for i in range(len(grids))]
        if family == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = torch.tensor([pairs / rate for rate in rates])
        elif family.startswith("qwen3"):
            inputs["timestamps"] = [
                [2 * frame / rate for frame in range(grid[0])]
                for grid, rate in zip(grids, rates, strict=True)
            ]
    return made(family, inputs, modality)


def made(family: str, inputs: dict[str, Any], modality: str) -> list[Entry]:
    """Items out of the inputs of all, split as the family's processor declares its fields."""
    fields = processor(family)._get_mm_fields_config(BatchFeature(inputs), {})
    items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(inputs), fields)
    return [(modality, item) for item in items[modality]]


def precomputed(family: str, rows: Sequence[int], seed: int = 0) -> list[Entry]:
    """Images that a client has embedded itself, of so many rows each."""
    width = managers.model(family).visual.out_hidden_size
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "image_embeds": torch.randn(sum(rows), width, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2, 2 * n] for n in rows]),
    }
    return made(family, inputs, "image")


def encode(state: Any, *requests: Sequence[Entry]) -> list[list[torch.Tensor]]:
    """One step of the state over new requests; what the cache then has of each, in order."""
    held: dict[str, list[MultiModalFeatureSpec]] = state.encoder_cache.mm_features
    names = [f"request {len(held) + i}" for i in range(len(requests))]
    for name, items in zip(names, requests, strict=True):
        features = [
            MultiModalFeatureSpec(item, modality, f"{name}, item {i}", PlaceholderRange(0, 1))
            for i, (modality, item) in enumerate(items)
        ]
        state.encoder_cache.add_request(name, features)
    state.execute_mm_encoder({name: list(range(len(held[name]))) for name in names})
    outputs = state.encoder_cache.encoder_outputs
    return [[outputs[feature.identifier] for feature in held[name]] for name in names]


def kwargs_of(items: Sequence[Entry]) -> dict[str, Any]:
    ((_, _, kwargs),) = group_and_batch_mm_kwargs(list(items))
    return kwargs


def alone(served: Any, items: Sequence[Entry]) -> list[torch.Tensor]:
    """Each item by itself through upstream's ``embed_multimodal``: no batch, no order."""
    return [out for item in items for out in managers.eager(served, kwargs_of([item]))]


@contextmanager
def counting(holder: Any, name: str) -> Iterator[list[int]]:
    """Fills a list with the number of grids in each call of a method that takes kwargs."""
    own, calls = getattr(holder, name), []

    def spy(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs
        calls.append(sum(len(value) for key, value in given.items() if "grid_thw" in key))
        return own(*args, **kwargs)

    with mock.patch.object(holder, name, spy):
        yield calls


def check(state: Any, *requests: Sequence[Entry], eager: int = 0, passed_on: int = 0) -> None:
    """One step whose outputs are upstream's.

    Args:
        eager: Items of it that the manager counts as eager, itself or by ``embed_multimodal``.
        passed_on: Batches that ``embed_multimodal`` gets, because ``execute`` gave None.
    """
    manager, items = manager_of(state), [item for request in requests for item in request]
    replayed, before = manager.statistics.replayed, manager.statistics.eager.total()
    with counting(state.model, "embed_multimodal") as calls:
        outputs = [out for request in encode(state, *requests) for out in request]
    managers.assert_same(outputs, alone(state.model, items))
    assert len(calls) == passed_on, manager.statistics
    assert manager.statistics.eager.total() - before == eager, manager.statistics
    assert manager.statistics.replayed - replayed == len(items) - eager, manager.statistics


def said(records: list[Any], *loggers: str) -> list[str]:
    """Warnings of ours, and of the named loggers."""
    return [
        record.message
        for record in records
        if record.levelname == "WARNING" and record.name.startswith(("vllm.vit", *loggers))
    ]


# -- the model state and its manager -----------------------------------------------------------


def test_the_state_makes_our_manager_by_either_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name that ``interface`` bound before the plugin came, and the one it binds after."""
    stock = stock_safety.EncoderCudaGraphManager
    for module in (encoder_cudagraph, interface):
        monkeypatch.setattr(module, "EncoderCudaGraphManager", stock)
    assert type(manager_of(new_state(capture=False))) is stock
    plugin.register()
    assert type(manager_of(new_state(capture=False))) is EncoderGraphManager

    monkeypatch.setattr(sys.modules[interface.__package__], "interface", interface)
    monkeypatch.delitem(sys.modules, interface.__name__)
    later = importlib.import_module(interface.__name__)
    assert later is not interface and later.EncoderCudaGraphManager is EncoderGraphManager
    assert encoder_cudagraph.EncoderCudaGraphManager is EncoderGraphManager


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])  # a video's dummy, images' dummies
def test_profile_capture_clear_capture(family: str, vllm_log: list[Any]) -> None:
    """V2's start-up on one manager: a dummy batch of the largest items, graphs to measure, and
    graphs to keep. Batches between them run eagerly, and nobody counts or reports that."""
    state = new_state(family, capture=False)
    runner, manager = new_runner(state), manager_of(state)
    step = [*entries(family, [[1, 8, 8], [1, 4, 20]]), *entries(family, [[2, 4, 6]], "video")]
    assert isinstance(state, DefaultModelState) and state.encoder_runner.has_cudagraph()
    assert runner.needs_cudagraph_capture() and not manager.is_captured()

    with counting(state.model, "embed_multimodal") as calls:
        runner.profile_run()
    assert len(calls) == 1 and not state.encoder_cache.encoder_outputs

    for profile_only in (True, False):
        assert not manager.is_captured()
        managers.assert_same(encode(state, step)[0], alone(state.model, step))
        runner.capture_model(profile_only=profile_only)
        assert manager.is_captured() and list(manager.captured) == list(BUDGETS)
        check(state, step)
        if profile_only:
            cudagraph_utils._teardown_profiling_state(runner)
            runner.cudagraph_manager = SimpleNamespace(needs_capture=lambda: False)
            assert not manager.captured
    assert not manager.statistics.eager and not said(vllm_log)

    state.encoder_runner.clear()  # as shutdown does
    assert not manager.is_captured()
    managers.assert_same(encode(state, step)[0], alone(state.model, step))


def test_the_dummy_batch_is_embed_multimodals_own(vllm_log: list[Any]) -> None:
    """V2's profile of memory holds outputs of the largest items, and leaves no count behind."""
    state = new_state(capture=False)
    budget = model_runner.MultiModalBudget(
        state.vllm_config, MULTIMODAL_REGISTRY, enable_cache=False
    )
    dummy = budget.get_dummy_encoder_profile_inputs()
    state.encoder_runner.profile_encoder_cache(dummy, budget)
    held = state.encoder_cache.encoder_outputs
    assert dummy and set(held) == {f"tmp_{i}" for i in range(len(dummy))}
    managers.assert_same(list(held.values()), alone(state.model, dummy))
    manager = manager_of(state)
    assert not manager.statistics.eager and not manager.statistics.replayed
    assert manager.graph_hits == manager.graph_misses == 0 and not said(vllm_log)


def test_what_was_handed_out_outlives_later_steps_and_rounds() -> None:
    """V2's encoder cache holds outputs as they were given, for as long as a request lasts."""
    state = new_state()
    items = entries(FAMILY, [[1, 8, 8], [1, 4, 4], [1, 6, 6]])
    first = encode(state, items)[0]
    kept = [out.clone() for out in first]
    for seed in (1, 2):
        check(state, entries(FAMILY, [[1, 8, 8], [1, 4, 4], [1, 6, 6]], seed=seed))
        state.encoder_runner.clear()
        state.encoder_runner.capture()
    pruned.assert_identical(first, kept)


# -- steps -------------------------------------------------------------------------------------

IMAGES = [[1, 8, 8], [1, 4, 20], [1, 2, 2]]
VIDEOS = [[2, 4, 6], [4, 4, 4], [1, 8, 8]]


@pytest.mark.parametrize("family", managers.FAMILIES)
def test_images_videos_and_both(family: str) -> None:
    state = new_state(family)
    images, videos = entries(family, IMAGES), entries(family, VIDEOS, "video", seed=1)
    check(state, images)
    check(state, videos)
    with counting(manager_of(state), "execute") as batches:
        check(state, [videos[0], images[0]], [images[1], videos[1], videos[2]], [images[2]])
    assert batches == [3, 3]  # one a modality


def test_order_is_restored_whatever_the_packing_did() -> None:
    """Equal shapes, so that no size would tell two items apart."""
    state = new_state()
    grids = [[1, 4, 4], [1, 10, 10], [1, 4, 4], [1, 12, 16], [1, 10, 10], [1, 4, 4]]
    images = entries(FAMILY, grids)
    videos = entries(FAMILY, [[2, 4, 4], [3, 6, 6], [2, 4, 4]], "video", seed=2)
    mixed = [item for pair in zip(images, videos, strict=False) for item in pair] + images[3:]
    manager = manager_of(state)
    plan = manager._plan(state.model.vit_inputs(kwargs_of(images))).steps
    assert [i for step in plan for i in step.items] != list(range(len(images)))
    check(state, mixed[:4], mixed[4:])
    check(state, mixed[::-1])


@pytest.mark.parametrize("family", managers.FAMILIES)
def test_items_above_every_budget(family: str, vllm_log: list[Any]) -> None:
    """They run eagerly beside graphs, in the manager; the next ones have graphs again."""
    state = new_state(family)
    large = [*entries(family, [[1, 22, 20]]), *entries(family, [[5, 10, 10]], "video")]
    check(state, large, eager=2)
    # Beside an eager image a graph gains nothing; the video is another batch.
    small = [entries(family, [[1, 8, 8]]), entries(family, [[2, 4, 6]], "video")]
    check(state, large[:1], *small, eager=2)
    check(state, *small)
    assert said(vllm_log) == [
        "Encoder batch runs eagerly: larger than every token budget (said once)"
    ]


def test_precomputed_embeddings_go_to_embed_multimodal() -> None:
    """V2 batches them apart from pixels, wherever they stand among them."""
    state = new_state()
    images, embedded = entries(FAMILY, IMAGES), precomputed(FAMILY, [4, 9])
    (outputs,) = encode(state, embedded)
    pruned.assert_identical(outputs, [item["image_embeds"].data for _, item in embedded])
    mixed = [images[0], embedded[0]], [images[1], embedded[1], images[2]]
    check(state, *mixed, eager=2, passed_on=2)
    assert dict(manager_of(state).statistics.eager) == {"precomputed embeddings": 4}


def test_a_batch_that_fails_around_its_graphs_goes_to_embed_multimodal(vllm_log: list[Any]) -> None:
    """The other modality of the same step keeps its graphs."""
    state = new_state()
    images, videos = entries(FAMILY, IMAGES), entries(FAMILY, VIDEOS, "video")
    own = state.model.vit_finish

    def broken(outputs: Any, mm_kwargs: Any) -> Any:
        if "video_grid_thw" in mm_kwargs:
            raise RuntimeError("planted")
        return own(outputs, mm_kwargs)

    with mock.patch.object(state.model, "vit_finish", broken):
        outputs = encode(state, [images[0], *videos], images[1:])
    managers.assert_same(
        [out for request in outputs for out in request],
        alone(state.model, [images[0], *videos, *images[1:]]),
    )
    assert dict(manager_of(state).statistics.eager) == {"an error outside the graphs": 3}
    assert ["planted" in text for text in said(vllm_log)] == [True]
    check(state, [*images, *videos])


def test_a_graph_that_fails_is_retired_in_the_step(vllm_log: list[Any]) -> None:
    state = new_state()
    images = entries(FAMILY, [[1, 8, 8], [1, 8, 8]])
    failing = mock.patch.object(
        manager_of(state).captured[40].graph, "replay", side_effect=RuntimeError("planted")
    )
    with failing:
        check(state, images, eager=2)
    assert 40 not in manager_of(state).captured and manager_of(state).is_captured()
    check(state, images)
    assert ["is retired" in text for text in said(vllm_log)] == [True]


# -- malformed items ---------------------------------------------------------------------------

Spoil = Callable[[MultiModalKwargsItem, MultiModalKwargsItem], object]


def changed(name: str, change: Callable[[torch.Tensor], Any]) -> Spoil:
    def spoil(item: MultiModalKwargsItem, other: MultiModalKwargsItem) -> None:
        item[name] = replace(item[name], data=change(item[name].data))

    return spoil


def a_row_given_away(item: MultiModalKwargsItem, other: MultiModalKwargsItem) -> None:
    """The batch has as many rows as its grids ask for, and nobody can tell."""
    rows, others = item["pixel_values"].data, other["pixel_values"].data
    item["pixel_values"] = replace(item["pixel_values"], data=rows[:-1])
    other["pixel_values"] = replace(other["pixel_values"], data=torch.cat([rows[-1:], others]))


def all_too_narrow(*items: MultiModalKwargsItem) -> None:
    for item in items:
        item["pixel_values"] = replace(item["pixel_values"], data=item["pixel_values"].data[:, :-1])


MALFORMED: dict[str, tuple[str, Spoil]] = {
    "a row of pixels too few": ("pixels", changed("pixel_values", lambda rows: rows[:-1])),
    "no row of pixels": ("pixels", changed("pixel_values", lambda rows: rows[:0])),
    "a row of pixels in another item": ("pixels", a_row_given_away),
    "pixel rows too narrow": ("pixels", all_too_narrow),
    "pixel rows too narrow in one item": (  # vLLM fills them up with zeros
        "pixels",
        changed("pixel_values", lambda rows: rows[:, :-1]),
    ),
    "pixels of another dtype": ("pixels", changed("pixel_values", lambda rows: rows.half())),
    "a grid that does not merge": (
        "pixels",
        changed("image_grid_thw", lambda grid: torch.tensor([1, 3, 12])),
    ),
    "a grid of nothing": ("pixels", changed("image_grid_thw", lambda grid: grid * 0)),
    "a negative grid": ("pixels", changed("image_grid_thw", lambda grid: -grid)),
    "a grid of two numbers": ("pixels", changed("image_grid_thw", lambda grid: grid[:2])),
    "pixels and no grid": ("pixels", lambda item, other: item.pop("image_grid_thw")),
    "a grid and no pixels": ("pixels", lambda item, other: item.pop("pixel_values")),
    "an embedding too few": ("embeds", changed("image_embeds", lambda rows: rows[:-1])),
    "embeddings too narrow": ("embeds", changed("image_embeds", lambda rows: rows[:, :-1])),
}


def outcome(state: Any, items: Sequence[Entry]) -> list[torch.Tensor] | str:
    """Outputs, or the error that a step ends with."""
    try:
        return encode(state, items)[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_batch_is_as_in_stock_vllm(name: str) -> None:
    """The same error, or the same outputs where stock vLLM takes it; the next step is served."""
    kind, spoil = MALFORMED[name]
    state, stock = new_state(), new_state(capture=False, cudagraph_mm_encoder=False)
    items = precomputed(FAMILY, [9, 4]) if kind == "embeds" else entries(FAMILY, [[1, 6, 6]] * 2)
    spoil(items[0][1], items[1][1])
    ours, theirs = outcome(state, items), outcome(stock, items)
    if isinstance(theirs, str):
        assert ours == theirs and not manager_of(state).statistics.replays
    else:
        assert not isinstance(ours, str), ours
        managers.assert_same(ours, theirs)
    check(state, entries(FAMILY, IMAGES))


# -- video pruning -----------------------------------------------------------------------------

PRUNED = [(f, m) for f, m in pruned.METHODS if f in ("qwen2_5_vl", "qwen3_vl")]
each_method = pytest.mark.parametrize("family, method", PRUNED)


def pruning_state(family: str, graphs: bool = True) -> Any:
    config = v2_config(pruned.config(family), cudagraph_mm_encoder=graphs)
    state = make_state(config, pruned.model(family))
    if graphs:
        state.encoder_runner.capture()
    return state


@each_method
def test_pruned_videos_of_a_step_are_one_batch(family: str, method: str) -> None:
    """V1 encodes them one by one without asking the manager. Compared as in ``test_pruning.py``:
    which rows stay is upstream's choice by similarity, over rows that are equal up to rounding."""
    with pruned.pruning(family, method, 0.5):
        state = pruning_state(family)
        manager, served = manager_of(state), state.model
        grids = [[4, 6, 8], [2, 4, 6], [6, 4, 4]]
        videos = entries(family, grids, "video", fps=(2.0, 0.7, 24.0))
        images = entries(family, IMAGES, seed=4)
        with (
            pruned.before_finishing(manager) as rows,
            counting(manager, "execute") as batches,
            counting(served, "embed_multimodal") as passed_on,
        ):
            first, second = encode(state, [videos[0], images[0]], [videos[1], *images[1:]])
            (third,) = encode(state, [videos[2], *videos[:2]])
        assert batches == [3, 2, 3] and not passed_on
        assert manager.statistics.replayed == 8 and not manager.statistics.eager
        of_images, of_two, of_three = rows[:3], rows[3:5], rows[5:]
        pruned.hold(served, kwargs_of(images), of_images, [first[1], *second[1:]])
        pruned.hold(served, kwargs_of(videos[:2]), of_two, [first[0], second[0]])
        pruned.hold(served, kwargs_of([videos[2], *videos[:2]]), of_three, third)


@each_method
def test_what_reaches_the_decoder_of_pruned_prompts(family: str, method: str) -> None:
    """Two prompts of one step, through the state's gathering and its real pruner, give the decoder
    what upstream's embeddings give it: the rows in their places, and positions of what stayed.

    One clip a prompt: upstream's own positions fail for two pruned clips of Qwen2.5-VL in one.
    """
    with pruned.pruning(family, method, 0.5):
        state, stock = pruning_state(family), pruning_state(family, graphs=False)
        prompts = {
            "first": prompt(family, "first", clips=[("rocket", 6, (112, 84))]),
            "second": prompt(family, "second", ["chelsea"], [("coffee", 4, (84, 112))]),
        }
        with (
            pruned.before_finishing(manager_of(state)) as rows,
            counting(manager_of(state), "execute") as batches,
        ):
            ours = inputs_embeds(state, prompts)
        assert batches == [1, 2] and manager_of(state).statistics.replayed == 3
        stock.encoder_cache.encoder_outputs.update(upstreams(state.model, prompts, rows))
        with counting(stock.model, "embed_multimodal") as calls:
            theirs = inputs_embeds(stock, prompts)
        assert not calls  # they were found in the cache
    assert torch.equal(ours, theirs)
    for index, (tokens, _) in enumerate(prompts.values()):
        mine, stocks = (
            s.rope_state.read_prefill_positions(index, len(tokens)) for s in (state, stock)
        )
        assert torch.equal(mine, stocks) and mine.any()


Prompt = tuple[list[int], list[MultiModalFeatureSpec]]


def prompt(
    family: str,
    name: str,
    images: Sequence[str] = (),
    clips: Sequence[tuple[str, int, tuple[int, int]]] = (),
) -> Prompt:
    """Tokens and items of photographs and clips, from vLLM's own processor."""
    videos = [
        (photos.panning_frames(of, frames, size), photos.video_metadata(frames))
        for of, frames, size in clips
    ]
    pictures = [photos.photo(of, (120, 90)) for of in images]
    marks = ["image"] * len(pictures) + ["video"] * len(videos)
    # As a chat does, it opens with more text than a time stamp has: upstream counts back by that.
    text = 20 * "a " + "".join(f"<|vision_start|><|{mark}_pad|><|vision_end|>a" for mark in marks)
    reader = pruned.processor(family)
    given = {"image": pictures, "video": videos}
    done = reader(text, reader.info.parse_mm_data({key: v for key, v in given.items() if v}))
    features = [
        MultiModalFeatureSpec(item, modality, f"{name}, {modality} {i}", place)
        for modality, items in done["mm_kwargs"].items()
        for i, (item, place) in enumerate(
            zip(items, done["mm_placeholders"][modality], strict=True)
        )
    ]
    features.sort(key=lambda feature: feature.mm_position.offset)
    return done["prompt_token_ids"], features


def upstreams(
    served: Any, prompts: dict[str, Prompt], rows: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What ``embed_multimodal`` makes of the tower's rows, images first as they were encoded."""
    found, rest = {}, list(rows)
    for modality in ("image", "video"):
        own = [f for _, features in prompts.values() for f in features if f.modality == modality]
        mine, rest = rest[: len(own)], rest[len(own) :]
        outputs = pruned.finished(served, kwargs_of([(modality, f.data) for f in own]), mine)
        found.update({f.identifier: out for f, out in zip(own, outputs, strict=True)})
    return found


def inputs_embeds(state: Any, prompts: dict[str, Prompt]) -> torch.Tensor:
    """``prepare_inputs_embeds`` for a step that holds these prompts whole."""
    lengths, config = [len(tokens) for tokens, _ in prompts.values()], state.model_config
    count, total = len(lengths), sum(lengths)
    batch = InputBatch.make_dummy(count, total, InputBuffers(count, total, managers.CPU))
    batch.req_ids = list(prompts)
    batch.num_scheduled_tokens[:] = batch.prefill_len_np[:] = lengths
    batch.query_start_loc_np[1:] = list(accumulate(lengths))
    batch.input_ids.copy_(torch.tensor([t for tokens, _ in prompts.values() for t in tokens]))
    requests = RequestState(
        count, config.max_model_len, total, 0, config.get_vocab_size(), managers.CPU
    )
    for index, (name, (tokens, features)) in enumerate(prompts.items()):
        requests.all_token_ids.gpu[index, : len(tokens)] = torch.tensor(tokens)
        state.encoder_cache.add_request(name, features)
        places = state.model.get_mrope_input_positions(tokens, features)
        state.rope_state.update_prefill_positions(index, *places)
    asked = {name: list(range(len(features))) for name, (_, features) in prompts.items()}
    return state.prepare_inputs_embeds(asked, batch, requests).clone()


# -- where nothing is captured -----------------------------------------------------------------

RUNNER = "vllm.v1.worker.gpu.model_runner"


@pytest.mark.parametrize("off", [{"enforce_eager": True}, {"cudagraph_mm_encoder": False}], ids=str)
def test_without_graphs_no_manager_is_made(off: dict[str, Any], vllm_log: list[Any]) -> None:
    """We say nothing of what the user has switched off; V2 says it itself."""
    state = new_state(capture=False, **off)
    runner = new_runner(state)
    assert manager_of(state) is None and not state.encoder_runner.has_cudagraph()
    assert not runner.needs_cudagraph_capture()
    assert runner.capture_model() == 0 and not said(vllm_log)
    assert ["Skipping encoder and decoder" in text for text in said(vllm_log, RUNNER)] == [True]
    cudagraph_utils._teardown_profiling_state(runner)
    items = entries(FAMILY, IMAGES)
    pruned.assert_identical(encode(state, items)[0], managers.eager(state.model, kwargs_of(items)))


@cache
def no_items(**options: Any) -> tuple[VllmConfig, Any]:
    """A configuration whose limits are all 0, and its model, which vLLM builds without a tower."""
    limits = {"image": 0, "video": 0}
    config = managers.towers.make_config(FAMILY, limit_mm_per_prompt=limits, **options)
    return config, managers.towers.build_model(FAMILY, config=config)


def test_limits_of_zero_make_no_encoder(vllm_log: list[Any]) -> None:
    config, served = no_items()
    state = make_state(v2_config(config), served)
    assert not state.supports_mm_inputs and not hasattr(state, "encoder_runner")
    assert not new_runner(state).needs_cudagraph_capture() and not said(vllm_log)


def never_captures(state: Any, items: Sequence[Entry]) -> None:
    """V2's rounds over a manager that refuses: every step is upstream's."""
    runner, manager = new_runner(state), manager_of(state)
    expected = managers.eager(state.model, kwargs_of(items))
    for _ in range(2):
        assert runner.needs_cudagraph_capture()  # V2 asks whether there is a manager
        runner.capture_model()
        assert not manager.is_captured() and manager.get_num_graphs_to_capture() == 0
        pruned.assert_identical(encode(state, items)[0], expected)
        state.encoder_runner.clear()
    assert not manager.statistics.eager


def test_limits_of_zero_with_embeddings_say_so_once(vllm_log: list[Any]) -> None:
    """V2 makes a manager of a model without a tower, and serves a client's embeddings."""
    config, served = no_items(enable_mm_embeds=True)
    state = make_state(v2_config(config), served)
    with counting(state.model, "embed_multimodal") as calls:
        new_runner(state).profile_run()
    assert not calls  # there is no tower to profile
    never_captures(state, precomputed(FAMILY, [4, 9]))
    assert said(vllm_log) == ["Encoder CUDA graphs are off: this process has no vision tower"]


def test_attention_that_cannot_be_captured_says_so_once(vllm_log: list[Any]) -> None:
    with managers.backend(managers.model(FAMILY), AttentionBackendEnum.TORCH_SDPA):
        state = new_state(capture=False)
    never_captures(state, entries(FAMILY, IMAGES))
    assert ["TORCH_SDPA reads offsets" in text for text in said(vllm_log)] == [True]


def test_tower_lora_says_so_once(vllm_log: list[Any]) -> None:
    base = copy.copy(managers.config(FAMILY))
    base.lora_config = mock.Mock(enable_tower_connector_lora=True)
    state = make_state(v2_config(base), managers.model(FAMILY))
    never_captures(state, entries(FAMILY, IMAGES))
    assert ["set enable_tower_connector_lora=false" in t for t in said(vllm_log)] == [True]
