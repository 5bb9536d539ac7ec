# SPDX-License-Identifier: Apache-2.0
"""Any settings: the engine either starts, or ends as stock vLLM does with the same ones.

An error of this package's own would be allowed if it named a setting and a value that works; the
warnings that say why nothing is captured must do that, and here their advice is taken. What starts
gives stock vLLM's rows. A start is the real one as far as one process goes: ``EngineArgs``, the
budget of the scheduler, the model, the runner's own way to a manager, capture on the twin, media
through vLLM's processor, one batch. Servers stand behind the worst of them at the end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

# Upstream's CPU worker must be imported before the rest of vLLM's workers.
from vllm.vit_cudagraph.testing.cpu_worker import capture_encoder_graphs  # isort: skip

import hf_tower
import managers
import numpy as np
import pytest
import stock
import torch
import towers
from hypothesis import event, example, given
from hypothesis import strategies as st
from PIL import Image
from test_serve import QUESTION, assert_equal, picture, running, twin

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.vit_cudagraph import budgets
from vllm.vit_cudagraph.planning import CHEAPER_EAGERLY
from vllm.vit_cudagraph.plugin import register
from vllm.vit_cudagraph.testing import models
from vllm.vit_cudagraph.testing.checkpoints import make_checkpoint
from vllm.vit_cudagraph.testing.profiles import examples
from vllm.vit_cudagraph.testing.serving import STOCK, RequestError, Server, text_part

Settings = dict[str, Any]
"""Arguments of ``EngineArgs``."""

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
OFF = "Encoder CUDA graphs are off: "

# No budget between: zeroed pages are free until a forward writes them, and Linux would end the
# test. These cannot even be asked for.
TOO_LARGE = (10**10, 2**62, 2**64)
GRAPHS_ON = {"cudagraph_mm_encoder": True}


# -- one start -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Media:
    """What is sent: sizes of images (width, height) in pixels, and frames of one video."""

    images: tuple[tuple[int, int], ...] = ((84, 140),)
    frames: int = 4

    def of(self, modality: str, limit: int) -> list[Any]:
        """As many as a prompt may hold."""
        noise = np.random.default_rng(0)
        if modality == "video":
            pixels = noise.integers(0, 256, (self.frames, 56, 84, 3), dtype=np.uint8)
            return [pixels][:limit]
        sizes = [(height, width, 3) for width, height in self.images]
        pixels_of = [noise.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        return [Image.fromarray(pixels) for pixels in pixels_of][:limit]


@dataclass
class Outcome:
    """How a start ended.

    Attributes:
        error: What it raised, or None.
        rows: Embeddings by modality.
        manager: Ours, where the runner made one.
    """

    error: Exception | None = None
    rows: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    manager: Any = None


class Runner:
    """As much of vLLM's V1 runner as decides on a manager and makes it."""

    _create_encoder_cudagraph_manager = GPUModelRunner._create_encoder_cudagraph_manager
    _maybe_init_encoder_cudagraph_manager = GPUModelRunner._maybe_init_encoder_cudagraph_manager

    def __init__(self, config: VllmConfig, model: Any) -> None:
        self.vllm_config, self.model = config, model
        self.compilation_config = config.compilation_config
        self.supports_mm_inputs = config.model_config.supports_multimodal_inputs
        self.device, self.dtype = managers.CPU, config.model_config.dtype
        self.encoder_cudagraph_manager: Any = None

    def get_model(self) -> Any:
        return self.model

    def encode(self, modality: str, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """As the runner does: by the manager, or by the model where that says None."""
        manager, outputs = self.encoder_cudagraph_manager, None
        with torch.inference_mode():
            if manager is not None and manager.supports_modality(modality):
                outputs = manager.execute(kwargs)
            return list(self.model.embed_multimodal(**kwargs) if outputs is None else outputs)


@cache
def stock_entry(family: str) -> Any:
    return registry._RegisteredModel.from_model_cls(stock.CLASSES[family])


@contextlib.contextmanager
def classes_of(family: str, *, by_stock: bool) -> Iterator[None]:
    """While open, vLLM's registry has upstream's class of the family, or ours."""
    register()
    name = stock.CLASSES[family].__name__
    theirs = {name: stock_entry(family)} if by_stock else {}
    with mock.patch.dict(registry.ModelRegistry.models, theirs):
        yield


def start(family: str, settings: Settings, media: Media, *, by_stock: bool = False) -> Outcome:
    """Start and run one batch a modality, by this package or by stock vLLM (eagerly)."""
    outcome = Outcome()
    try:
        with classes_of(family, by_stock=by_stock):
            _start(family, settings, media, by_stock, outcome)
    except Exception as error:
        outcome.error = error
    return outcome


def _start(family: str, settings: Settings, media: Media, by_stock: bool, outcome: Outcome) -> None:
    folder = str(towers.checkpoint(family, shallow=True))
    # EngineArgs keeps parts of what it is given.
    given_ = json.loads(json.dumps(settings))
    config = EngineArgs(model=folder, dtype="float32", **given_).create_engine_config()
    MultiModalBudget(config, MULTIMODAL_REGISTRY)
    model = models.build_model(config)
    runner = Runner(config, model)
    if not by_stock:
        with set_current_vllm_config(config):
            capture_encoder_graphs(runner)
        outcome.manager = runner.encoder_cudagraph_manager
    if config.compilation_config.compile_mm_encoder:
        return  # a minute of compiling, and nothing of ours
    processor = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    tokens = SimpleNamespace(tokenizer=processor.info.get_tokenizer())
    sender = hf_tower.Twins(model, config, None, tokens)
    for modality, limit in processor.info.allowed_mm_limits.items():
        if limit:
            kwargs = sender.runner_kwargs(modality, media.of(modality, limit))
            outcome.rows[modality] = runner.encode(modality, kwargs)


# -- what is asked of it ---------------------------------------------------------------------------

ADVICE = re.compile(r"(?:set|give) [-\"]*([a-z][\w-]*)\"?(?:=|: | to )([^\s;,]+)")


def advised(text: str, settings: Settings) -> Settings:
    """The settings with what a message says; AssertionError if it names none that was set."""
    for name, value in ADVICE.findall(text):
        name = name.replace("-", "_")
        try:
            value = json.loads(value)
        except ValueError:
            continue  # prose: "to the largest"
        compilation = settings.get("compilation_config", {})
        if name in compilation:
            return settings | {"compilation_config": compilation | {name: value}}
        if name in settings:
            return settings | {name: value}
    raise AssertionError(f"names no setting of {settings} with a value: {text}")


TOWER_LORA = {"enable_lora": True, "enable_tower_connector_lora": True}


def follow(family: str, settings: Settings, media: Media, reason: str) -> None:
    """Advice leads to graphs, if need be past other obstacles that are each said with advice of
    their own: to graphs that are tried at least, since no machine has room for some budgets. Or to
    where stock vLLM ends as well."""
    followed: set[str] = set()
    while True:
        assert reason not in followed, f"its advice changes nothing: {reason}"
        followed.add(reason)
        settings = advised(reason, settings)
        with warnings_of_ours() as said:
            mended = start(family, settings, media)
        if mended.error is not None:
            theirs = start(family, settings, media, by_stock=True)
            assert str(theirs.error) == str(mended.error), reason
            return
        assert mended.manager is not None, reason
        if mended.manager.captured or mended.manager.left_out:
            return
        assert said, f"no graphs, and nobody says why, after the advice of: {reason}"
        reason = said[0]


def check(family: str, settings: Settings, media: Media = Media()) -> Outcome:
    """Hold one start against stock vLLM's; gives ours."""
    with warnings_of_ours() as said:
        ours = start(family, settings, media)
    theirs = start(family, settings, media, by_stock=True)
    if ours.error is not None and theirs.error is None:
        mended = start(family, advised(str(ours.error), settings), media)
        assert mended.error is None, f"{ours.error}: its advice ends with {mended.error!r}"
        return ours
    assert (type(ours.error), str(ours.error)) == (type(theirs.error), str(theirs.error))
    assert ours.rows.keys() == theirs.rows.keys()
    for modality, rows in ours.rows.items():
        managers.assert_same(rows, theirs.rows[modality])
    for reason in said:
        follow(family, settings, media, reason)
    if ours.manager is not None and ours.error is None:
        check_counts(ours)
    return ours


def check_counts(ours: Outcome) -> None:
    """Every item is counted; an image that fits went through a graph, or it was cheaper to run it
    eagerly beside items that must."""
    manager, captured = ours.manager, ours.manager.captured
    served = [rows for modality, rows in ours.rows.items() if manager.supports_modality(modality)]
    counted = manager.statistics.replayed + manager.statistics.eager.total()
    # Without any graph the manager gives batches back before it looks at them.
    assert counted == (sum(map(len, served)) if captured else 0)
    fitting = [rows for rows in ours.rows.get("image", []) if len(rows) <= max(captured, default=0)]
    planned = manager.statistics.replayed + manager.statistics.eager[CHEAPER_EAGERLY]
    assert planned >= len(fitting)


@contextlib.contextmanager
def warnings_of_ours() -> Iterator[list[str]]:
    """Fills a list with the reasons for which nothing is captured."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            _, off, reason = record.getMessage().partition(OFF)
            said.extend([reason] if off else [])

    handler, logger = Keep(), logging.getLogger("vllm.vit_cudagraph.capturing")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


# -- drawn settings --------------------------------------------------------------------------------

BUDGETS = "encoder_cudagraph_token_budgets"
ITEMS = "encoder_cudagraph_max_vision_items_per_batch"
FRAMES = "encoder_cudagraph_max_frames_per_batch"

# What stock vLLM takes, however odd.
sizes = st.integers(1, 200)
budget_lists = st.one_of(
    st.lists(sizes, max_size=4),
    st.lists(sizes | st.sampled_from(TOO_LARGE), max_size=4),
    sizes.map(lambda one: [one, one, one]),
    st.lists(st.sampled_from([64.0, "64", True, 2, 200]), min_size=1, max_size=3),
)
compilations = st.fixed_dictionaries(
    {"cudagraph_mm_encoder": st.sampled_from([True] * 7 + [False])},
    optional={
        BUDGETS: budget_lists,
        ITEMS: st.sampled_from([0, 1, 2, 7, 10**9, 2**64, "2"]),
        FRAMES: st.sampled_from([None, 0, 1, 2, 10**8, 2**64, "2"]),
        "cudagraph_mode": st.sampled_from(["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"]),
        "mode": st.sampled_from([0, 1, 2, 3]),
        "compile_mm_encoder": st.sampled_from([False] * 5 + [True]),
    },
)
counts = st.sampled_from([0, 1, 2, 999, 10**9, {"count": 1}])
engines = st.fixed_dictionaries(
    {"compilation_config": compilations},
    optional={
        "limit_mm_per_prompt": st.dictionaries(
            st.sampled_from(["image", "video", "audio"]), counts, max_size=3
        ),
        "max_num_batched_tokens": st.sampled_from([1, 3, 16, 63, 64, 100, 2048]),
        "max_num_seqs": st.just(1),
        "max_model_len": st.sampled_from([1, 2, 8, 63, 100, 2048, -1]),
        "mm_encoder_tp_mode": st.sampled_from(["weights", "data"]),
        "video_pruning_rate": st.sampled_from([None, 0, 0.3, 0.99]),
        "mm_processor_kwargs": st.sampled_from(
            [{"min_pixels": 784, "max_pixels": n} for n in (784, 50_000, 10**6)]
            + [{"min_pixels": 50_000, "max_pixels": 50_000}, {"nonsense": 1}]
        ),
        "enforce_eager": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
    },
)

# What it refuses, sooner or later, or one of these alone.
odd_budgets: list[Any] = [[0], [-1], [0.5], ["many"], [None], None, 64, "64", {}]
odd_compilation: list[tuple[str, Any]] = [
    *((BUDGETS, odd) for odd in odd_budgets),
    *((ITEMS, -1), (ITEMS, None), (ITEMS, "all"), (FRAMES, -1), (FRAMES, 1.5)),
    *(("cudagraph_mode", "?"), ("mode", 4), ("cudagraph_mm_encoder", "perhaps")),
]
odd_compilations = st.sampled_from(odd_compilation)
odd_engines: st.SearchStrategy[tuple[str, Any]] = st.sampled_from(
    [
        ("limit_mm_per_prompt", {"image": -1}),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 2048),
        ("max_model_len", 0),
        ("max_model_len", 10**7),
        ("mm_encoder_tp_mode", "both"),
        ("video_pruning_rate", 1),
        ("video_pruning_rate", -0.5),
        ("mm_processor_kwargs", {"min_pixels": 10**6, "max_pixels": 1}),
    ]
)
tower_lora = {"enable_lora": True, "enable_tower_connector_lora": True}


@st.composite
def any_settings(draw: st.DrawFn) -> Settings:
    """Settings that vLLM takes, and in some cases one that it may not."""
    settings: Settings = draw(engines)
    kind = draw(st.sampled_from(["compilation", "engine", "lora", *["nothing"] * 5]))
    if kind == "compilation":
        name, value = draw(odd_compilations)
        return settings | {"compilation_config": settings["compilation_config"] | {name: value}}
    if kind == "engine":
        name, value = draw(odd_engines)
        return settings | {name: value}
    return settings | (tower_lora if kind == "lora" else {})


pixels = st.integers(28, 300)
media_drawn = st.builds(
    Media,
    images=st.lists(st.tuples(pixels, pixels), min_size=1, max_size=3).map(tuple),
    frames=st.integers(2, 8),
)


def encoder(**settings: Any) -> Settings:
    """Encoder graphs on, with more of ``compilation_config``."""
    names = {"budgets": BUDGETS, "items": ITEMS, "frames": FRAMES}
    return {
        "compilation_config": GRAPHS_ON | {names.get(n, n): value for n, value in settings.items()}
    }


@given(st.sampled_from(FAMILIES), any_settings(), media_drawn)
@example("qwen2_5_vl", encoder(budgets=[100]) | {"max_num_batched_tokens": 3}, Media())
@example("qwen2_vl", encoder(budgets=[10**10]) | TOWER_LORA, Media())
@example("qwen2_vl", encoder(compile_mm_encoder=True) | TOWER_LORA, Media())
@example("qwen3_vl", encoder(budgets=[200, 3, 3, 2**64], items=10**9, frames=0), Media())
@pytest.mark.fuzz
@examples(60)
def test_a_start_is_stock_vllms_or_says_what_works(
    family: str, settings: Settings, media: Media
) -> None:
    outcome = check(family, settings, media)
    kind = "no manager" if outcome.manager is None else f"{len(outcome.manager.captured)} graphs"
    event(f"ended: {type(outcome.error).__name__}" if outcome.error else f"started: {kind}")


@pytest.mark.parametrize(
    ("settings", "captured", "replayed"),
    [
        # A step of the scheduler holds less than one image: 15 tokens, and 8 or 6 of the video.
        ({"max_num_batched_tokens": 3} | encoder(), [3], 0),
        ({"max_model_len": 1} | encoder(), [1], 0),
        ({"max_model_len": 8} | encoder(budgets=[100]), [100], 2),
        ({"limit_mm_per_prompt": {"image": 0}} | encoder(budgets=[100]), [100], 1),
        ({"limit_mm_per_prompt": {"video": 0}} | encoder(budgets=[100], frames=9), [100], 1),
        (encoder(budgets=[1, 3, 2]), [1, 2, 3], 0),
        (encoder(budgets=[100, 3, 100, 50]), [3, 50, 100], 2),
        (encoder(budgets=[2**64, 100, 10**10]), [100], 2),
        (encoder(budgets=[100], items=10**9, frames=10**9), [100], 2),
        (encoder(budgets=[100], frames=0), [100], 1),
        (encoder(budgets=["100"]), [100], 2),
    ],
)
def test_the_worst_start(settings: Settings, captured: list[int], replayed: int) -> None:
    outcome = check("qwen2_5_vl", settings)
    assert outcome.error is None
    assert list(outcome.manager.captured) == captured
    assert outcome.manager.statistics.replayed == replayed


def test_a_limit_on_frames_that_never_binds_costs_nothing() -> None:
    """The packer has a table entry for each count up to a limit."""
    outcome = check("qwen2_5_vl", encoder(budgets=[100], frames=10**7))
    assert outcome.manager.statistics.replayed == 2
    assert len(outcome.manager._planners["video"]._packer._table) < 10**4


def test_limits_of_zero_make_no_manager() -> None:
    outcome = check("qwen2_5_vl", {"limit_mm_per_prompt": {"image": 0, "video": 0}} | encoder())
    assert (outcome.error, outcome.manager, outcome.rows) == (None, None, {})


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_lora": True, "enable_tower_connector_lora": True} | encoder(budgets=[64]),
        {"compilation_config": GRAPHS_ON | {"compile_mm_encoder": True}},
    ],
)
def test_a_refusal_names_what_gives_graphs(settings: Settings) -> None:
    with warnings_of_ours() as said:
        outcome = check("qwen2_5_vl", settings)
    assert len(said) >= 1 and not outcome.manager.captured


# -- what these tests are worth --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("too odd", "names no setting"),
        ("set encoder_cudagraph_token_budgets=[3]", "its advice ends with"),
        ("set cudagraph_mode=[64]", "names no setting"),
        ("set encoder_cudagraph_token_budgets=[64]", None),
    ],
)
def test_an_error_of_ours_must_give_a_value_that_works(message: str, complaint: str | None) -> None:
    right = budgets.Settings.of

    def refusing(config: VllmConfig, model: Any) -> budgets.Settings:
        if min(config.compilation_config.encoder_cudagraph_token_budgets) < 64:
            raise ValueError(message)
        return right(config, model)

    with mock.patch.object(budgets.Settings, "of", refusing):
        if complaint is None:
            assert str(check("qwen2_5_vl", encoder(budgets=[2])).error) == message
        else:
            with pytest.raises(AssertionError, match=complaint):
                check("qwen2_5_vl", encoder(budgets=[2]))


def test_other_rows_than_stocks_are_noticed() -> None:
    right = Runner.encode

    def off(self: Runner, modality: str, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        rows = right(self, modality, kwargs)
        return rows if self.encoder_cudagraph_manager is None else [row + 0.01 for row in rows]

    with mock.patch.object(Runner, "encode", off), pytest.raises(AssertionError):
        check("qwen2_5_vl", encoder(budgets=[64]))


# -- servers ---------------------------------------------------------------------------------------


@pytest.mark.serve
def test_servers_with_the_worst_settings_answer_as_stock_does(tmp_path: Path) -> None:
    """A step below one image, budgets below one image (and one that no memory holds), no media."""
    checkpoint = make_checkpoint("qwen2_5_vl", tmp_path / "model")

    def server(name: str, settings: Mapping[str, Any], **more: Any) -> Server:
        return Server(checkpoint, log_path=tmp_path / f"{name}.log", **settings, **more)

    below = {"arguments": ["--max-num-batched-tokens=64"]}
    expected = server("stock", STOCK)
    small_step = server("small-step", twin(), **below)
    small_budgets = server("small-budgets", twin(**small_budgets_of_engine()))
    no_media = server("no-media", twin(), limits={"image": 0, "video": 0})
    with running(expected, small_step, small_budgets, no_media):
        for name in ("rocket", "coffee"):
            content = [picture(name), QUESTION]
            answer = expected.chat(content)
            assert_equal(small_step.chat(content), answer, name)
            assert_equal(small_budgets.chat(content), answer, name)
        check_no_media(no_media, expected)
        assert (small_step.statistics().replayed, small_step.statistics().eager) == (2, 0)
        # The smaller photograph has 4 tokens.
        assert (small_budgets.statistics().replayed, small_budgets.statistics().eager) == (0, 2)
        assert "larger than every token budget: 2" in small_budgets.statistics().reasons
        assert "of [10000000000] tokens are left out" in small_budgets.log()


def small_budgets_of_engine() -> dict[str, Any]:
    given_ = encoder(budgets=[3, 10**10, 1, 3], items=10**6, frames=0)
    return dict(given_["compilation_config"])


def check_no_media(server: Server, expected: Server) -> None:
    """Text is answered, a picture is refused, and no graph is captured."""
    text = [text_part("What is in the picture?")]
    assert_equal(server.chat(text), expected.chat(text), "text")
    with pytest.raises(RequestError) as refused:
        server.chat([picture("coffee"), QUESTION])
    assert refused.value.status == 400
    assert_equal(server.chat(text), expected.chat(text), "text after the refusal")
    assert "Captured" not in server.log()
