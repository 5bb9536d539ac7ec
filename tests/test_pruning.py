# SPDX-License-Identifier: Apache-2.0
"""Video pruning behind encoder graphs equals upstream's ``embed_multimodal``.

Which rows of a video stay is a choice by similarity, and a rounding of the tower may turn a close
one. So output is held against upstream's in two parts that cannot turn: the tower's rows, before
anything is done to them, equal those of upstream's tower within rounding; and what ``execute``
gives equals, bit for bit, what ``embed_multimodal`` makes of those very rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import managers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_data_parallel import Ranks
from transformers import BatchFeature

from vllm.config import VllmConfig
from vllm.model_executor.models import qwen2_5_vl, qwen3_vl, qwen3_vl_moe
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.vit_cudagraph.manager import EncoderGraphManager
from vllm.vit_cudagraph.testing import photos, strategies
from vllm.vit_cudagraph.testing.oracles import assert_close
from vllm.vit_cudagraph.testing.profiles import examples
from vllm.vit_cudagraph.testing.strategies import Batch
from vllm.vit_cudagraph.testing.subject import fits

UPSTREAM: dict[str, Any] = {
    "qwen2_5_vl": qwen2_5_vl.Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": qwen3_vl.Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration,
}
METHODS = [
    (family, method)
    for family, upstream in UPSTREAM.items()
    for method in upstream.supported_video_pruning_methods
]
each_method = pytest.mark.parametrize("family, method", METHODS)
CHANNELS = {"qwen2_5_vl": 4, "qwen3_vl": 5, "qwen3_vl_moe": 5}
RATES = (0.3, 0.5, 0.9)
BUDGETS = (16, 40, 100)


@cache
def config(family: str) -> VllmConfig:
    return managers.towers.make_config(family, video_pruning_rate=0.5)


@cache
def model(family: str) -> Any:
    return managers.towers.build_model(family, config=config(family))


def make_manager(family: str, budgets: Sequence[int] = BUDGETS) -> EncoderGraphManager:
    return managers.make_manager(
        family, budgets=budgets, items=8, of=model(family), base=config(family)
    )


captured = cache(make_manager)


@cache
def processor(family: str) -> Any:
    return MULTIMODAL_REGISTRY.create_processor(config(family).model_config)


@contextmanager
def pruning(family: str, method: str, rate: float) -> Iterator[None]:
    """The model and its processor as ``--video-pruning-method`` and ``-rate`` set them."""
    with ExitStack() as stack:
        for holder in (model(family), config(family).model_config.multimodal_config):
            for name, value in (("rate", rate), ("method", method)):
                patch = mock.patch.object(holder, f"video_pruning_{name}", value, create=True)
                stack.enter_context(patch)
        yield


def batch(
    family: str,
    grids: managers.Grids,
    modality: str = "image",
    fps: Sequence[float] = (2.0,),
    seed: int = 0,
) -> dict[str, Any]:
    """One modality's kwargs, of random pixels, as the processor and the runner hand them over.

    Args:
        fps: Frames a second of each video, repeated as needed; they decide its time stamps.
    """
    served, info = model(family), processor(family).info
    inputs = managers.batch(served, grids, modality, seed)
    if modality == "video":
        rates = [fps[i % len(fps)] for i in range(len(grids))]
        pairs = served.config.vision_config.temporal_patch_size
        if family == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = torch.tensor([pairs / rate for rate in rates])
        else:
            inputs["timestamps"] = [
                info._calculate_timestamps(list(range(pairs * grid[0])), rate, pairs)
                for grid, rate in zip(grids, rates, strict=True)
            ]
    fields = processor(family)._get_mm_fields_config(BatchFeature(inputs), {})
    return grouped(MultiModalKwargsItems.from_hf_inputs(BatchFeature(inputs), fields), modality)


def grouped(items: Any, modality: str) -> dict[str, Any]:
    """Items of one modality as both runners batch them."""
    ((_, _, kwargs),) = group_and_batch_mm_kwargs([(modality, item) for item in items[modality]])
    return kwargs


# -- the comparison ----------------------------------------------------------------------------


@contextmanager
def before_finishing(manager: EncoderGraphManager) -> Iterator[list[torch.Tensor]]:
    """Fills a list with the rows of each item as they were when all steps had run."""
    rows: list[torch.Tensor] = []
    inside = manager._execute_ranks

    def spy(*args: Any) -> list[torch.Tensor]:
        outputs = inside(*args)
        rows.extend(output.clone() for output in outputs)
        return outputs

    with mock.patch.object(manager, "_execute_ranks", spy):
        yield rows


@contextmanager
def counting(served: Any) -> Iterator[Callable[[], int]]:
    """Counts how often upstream's post-processing has run, for images and for videos."""
    names = [f"_postprocess_{modality}_embeds_evs" for modality in ("image", "video")]
    with ExitStack() as stack:
        spies = [
            stack.enter_context(mock.patch.object(served, name, wraps=getattr(served, name)))
            for name in names
        ]
        yield lambda: sum(spy.call_count for spy in spies)


def upstreams(served: Any, kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The rows of upstream's tower, and what its ``embed_multimodal`` makes of them."""
    modality, rows = served.get_input_modality(kwargs), []
    own = getattr(served, f"_process_{modality}_input")

    def spy(inputs: Any) -> Any:
        rows.extend(own(inputs))
        return tuple(rows)

    with mock.patch.object(served, f"_process_{modality}_input", spy):
        return rows, managers.eager(served, kwargs)


def finished(served: Any, kwargs: dict[str, Any], rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """What upstream's ``embed_multimodal`` makes of given rows."""
    name = f"_process_{served.get_input_modality(kwargs)}_input"
    with mock.patch.object(served, name, lambda inputs: tuple(row.clone() for row in rows)):
        return managers.eager(served, kwargs)


def assert_identical(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for item, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert ours.shape == theirs.shape, f"item {item} has another shape than upstream's"
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), f"item {item} has other values than upstream's"


def hold(
    served: Any, kwargs: dict[str, Any], rows: list[torch.Tensor], outputs: list[torch.Tensor]
) -> None:
    """Both parts, and the plain comparison wherever upstream kept the same rows."""
    assert_identical(outputs, finished(served, kwargs, rows))
    their_rows, theirs = upstreams(served, kwargs)
    assert_close(rows, their_rows, "upstream's tower")
    assert [out.shape for out in outputs] == [out.shape for out in theirs]
    extra = CHANNELS[served.model_config.hf_config.model_type]
    for ours, expected in zip(outputs, theirs, strict=True):
        same_rows = torch.equal(ours[:, -extra:], expected[:, -extra:])
        assert same_rows or served.get_input_modality(kwargs) == "video"
        if same_rows:
            assert_close([ours], [expected], "embed_multimodal")


def check(manager: EncoderGraphManager, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Runs a batch and holds it against upstream's; its outputs were finished exactly once."""
    with before_finishing(manager) as rows, counting(manager.model) as finishes:
        outputs = managers.run(manager, kwargs)
        times = finishes()
    hold(manager.model, kwargs, rows, outputs)
    assert times == 1, f"upstream's post-processing ran {times} times"
    return outputs


# -- batches -----------------------------------------------------------------------------------

CASES: dict[str, tuple[str, list[list[int]]]] = {
    "one image": ("image", [[1, 8, 8]]),
    "images": ("image", [[1, 4, 4], [1, 10, 6], [1, 4, 4]]),
    "images of many sizes": (
        "image",
        [[1, 2, 2], [1, 8, 20], [1, 40, 2], [1, 6, 6], [1, 2, 30], [1, 22, 20], [1, 12, 12]],
    ),
    "one video": ("video", [[4, 6, 8]]),
    "videos": ("video", [[2, 4, 6], [1, 8, 8], [6, 4, 4], [3, 2, 10], [1, 2, 2]]),
    "videos, one above every budget": ("video", [[5, 4, 4], [8, 10, 12], [1, 4, 6]]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rate", RATES)
@each_method
def test_equals_embed_multimodal(family: str, method: str, rate: float, case: str) -> None:
    manager, (modality, grids) = captured(family), CASES[case]
    replayed, eager = manager.statistics.replayed, manager.statistics.eager.total()
    with pruning(family, method, rate):
        outputs = check(manager, batch(family, grids, modality, fps=(2.0, 0.7, 24.0)))
    tokens = [t * h * w // 4 for t, h, w in grids]
    above = sum(n > max(BUDGETS) for n in tokens)
    assert manager.statistics.replayed - replayed == len(grids) - above
    assert manager.statistics.eager.total() - eager == above
    width = manager.model.visual.out_hidden_size
    assert {out.shape[1] for out in outputs} == {width + CHANNELS[family]}
    if modality == "image":
        assert [len(out) for out in outputs] == tokens
    elif family == "qwen2_5_vl":  # Qwen3-VL's have rows of text beside
        kept = [max(h * w // 4, int(t * h * w // 4 * (1 - rate))) for t, h, w in grids]
        assert [len(out) for out in outputs] == kept


@each_method
def test_what_runs_eagerly_is_embed_multimodal_bit_for_bit(family: str, method: str) -> None:
    """But for Qwen3-VL's learned positions, which are summed in another order here."""
    manager = make_manager(family, budgets=[1])
    same = managers.assert_same if family.startswith("qwen3") else assert_identical
    for modality, grids in (("image", [[1, 8, 8], [1, 4, 20]]), ("video", [[3, 6, 8], [1, 4, 4]])):
        with pruning(family, method, 0.5):
            kwargs = batch(family, grids, modality)
            same(managers.run(manager, kwargs), managers.eager(manager.model, kwargs))
    assert not manager.statistics.replays and manager.statistics.eager.total() == 4


@each_method
def test_order_and_one_finish_whatever_the_packing_did(family: str, method: str) -> None:
    manager = captured(family)
    grids = [[1, 10, 10], [7, 2, 4], [2, 12, 20], [1, 2, 2], [4, 6, 8], [2, 4, 6]]
    with pruning(family, method, 0.5):
        kwargs = batch(family, grids, "video", fps=(1.0, 2.0, 0.5, 3.0))
        plan = manager._plan(manager.model.vit_inputs(kwargs)).steps
        order = [item for step in plan for item in step.items]
        assert order != sorted(order) and len(plan) > 2
        assert {step.budget is None for step in plan} == {True, False}
        check(manager, kwargs)


@pytest.mark.fuzz
@each_method
@examples(10)
@given(data=st.data())
def test_any_batch(family: str, method: str, data: st.DataObject) -> None:
    """Any rate, grids and time stamps, images and videos."""
    manager = captured(family)
    drawn: Batch = data.draw(strategies.batches(manager.model.vit_declared), "batch")
    rate = data.draw(st.floats(0.01, 0.99), "rate")
    rates = st.sampled_from([1.0, 2.0, 0.25, 0.7, 24.0, 29.97])
    fps = data.draw(st.lists(rates, min_size=1, max_size=4), "fps")
    replayed = manager.statistics.replayed
    with pruning(family, method, rate):
        check(manager, batch(family, drawn.grids, drawn.modality, fps, drawn.seed))
    assert manager.statistics.replayed - replayed == sum(fits(manager, drawn))


@each_method
def test_the_prompt_has_room_for_what_the_real_processor_made(family: str, method: str) -> None:
    """Photographs and clips through vLLM's own processor: one row for each place in the prompt."""
    clips = [("rocket", 6, (112, 84)), ("coffee", 2, (84, 112)), ("rocket", 9, (56, 56))]
    videos = [
        (photos.panning_frames(name, frames, size), photos.video_metadata(frames))
        for name, frames, size in clips
    ]
    images = [photos.photo("chelsea", (120, 90)), photos.photo("coffee", (60, 200))]
    prompt = "".join(
        f"<|vision_start|><|{modality}_pad|><|vision_end|>"
        for modality in ["image", *["video"] * len(videos), "image"]
    )
    manager = captured(family)
    with pruning(family, method, 0.6):
        data = processor(family).info.parse_mm_data({"image": images, "video": videos})
        made = processor(family)(prompt, data)
        for modality in ("image", "video"):
            kwargs = grouped(made["mm_kwargs"], modality)
            outputs = check(manager, kwargs)
            places = [place.get_num_embeds() for place in made["mm_placeholders"][modality]]
            assert [len(out) for out in outputs] == places
            if modality == "video":
                by_hand = batch(family, kwargs["video_grid_thw"].tolist(), "video")
                assert {name: type(value) for name, value in by_hand.items()} == {
                    name: type(value) for name, value in kwargs.items()
                }


# -- several ranks -----------------------------------------------------------------------------


@each_method
def test_encoder_data_parallelism(family: str, method: str) -> None:
    """Each rank finishes all items, once, after the gather; none is left out of a collective."""
    ranks = [make_manager(family) for _ in range(2)]
    for manager in ranks:
        manager.use_dp = True
    served = ranks[0].model
    with pruning(family, method, 0.5):
        grids = [[3, 6, 8], [1, 4, 4], [2, 10, 22], [2, 12, 12], [6, 8, 8]]
        kwargs = batch(family, grids, "video", fps=(2.0, 0.5))
        with (
            before_finishing(ranks[0]) as rows,
            before_finishing(ranks[1]) as their_rows,
            counting(served) as finishes,
        ):
            first, second = Ranks(2).execute(ranks, kwargs)
            assert finishes() == 2
        assert_identical(rows, their_rows)
        hold(served, kwargs, rows, first)
        assert_identical(first, second)
    assert all(manager.statistics.replayed for manager in ranks)
    assert sum(manager.statistics.eager.total() for manager in ranks) == 1


# -- where nothing is pruned, or nothing can be -------------------------------------------------


def test_without_pruning_outputs_stay_as_they_are() -> None:
    served, outputs = model("qwen3_vl"), [torch.zeros(1, 1)]
    off = mock.patch.object(served, "is_multimodal_pruning_enabled", False)
    with off, counting(served) as finishes:
        assert served.vit_finish(outputs, {}) is outputs and finishes() == 0


@pytest.mark.parametrize("name", ["_postprocess_video_embeds_evs", "_postprocess_image_embeds_evs"])
def test_an_upstream_that_finishes_otherwise_is_not_captured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(UPSTREAM["qwen2_5_vl"], name)
    manager = make_manager("qwen2_5_vl")
    assert "video pruning" in str(manager.refusal)
    assert not manager.is_captured() and not manager.supports_modality("image")


@pytest.mark.parametrize("family", UPSTREAM)
def test_missing_time_stamps_are_upstreams_own_error(family: str) -> None:
    manager = make_manager(family, budgets=[40])
    kwargs = batch(family, [[2, 4, 6]], "video")
    del kwargs["second_per_grid_ts" if family == "qwen2_5_vl" else "timestamps"]
    with torch.inference_mode():
        assert manager.execute(kwargs) is None
    with pytest.raises((ValueError, AssertionError)):
        managers.eager(manager.model, kwargs)
    assert dict(manager.statistics.eager) == {"an error outside the graphs": 1}
    check(manager, batch(family, [[2, 4, 6]], "video"))  # the next one is served


# -- planted faults ----------------------------------------------------------------------------

Finish = Callable[..., list[torch.Tensor]]


def _not_at_all(finish: Finish, outputs: Any, kwargs: Any) -> Any:
    return outputs


def _twice(finish: Finish, outputs: Any, kwargs: Any) -> Any:
    return finish(finish(outputs, kwargs), kwargs)


def _twice_and_one_thrown_away(finish: Finish, outputs: Any, kwargs: Any) -> Any:
    finish(outputs, kwargs)
    return finish(outputs, kwargs)


def _one_item_at_a_time(finish: Finish, outputs: Any, kwargs: Any) -> Any:
    """With the whole batch's kwargs: every item gets what belongs to the first."""
    return [finish([output], kwargs)[0] for output in outputs]


def _time_stamps_of_others(finish: Finish, outputs: Any, kwargs: Any) -> Any:
    names = ("second_per_grid_ts", "timestamps")
    turned = {
        name: value.flip(0) if isinstance(value, torch.Tensor) else value[::-1]
        for name, value in kwargs.items()
        if name in names
    }
    return finish(outputs, {**kwargs, **turned})


SHAPE, VALUES, FAILED = "another shape", "other values", "an error outside the graphs"
PLANTED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "not at all, images": (_not_at_all, "image", SHAPE),
    "not at all, videos": (_not_at_all, "video", SHAPE),
    "twice, images": (_twice, "image", SHAPE),
    "twice, videos": (_twice, "video", f"{SHAPE}|{FAILED}"),
    "twice, and one thrown away": (_twice_and_one_thrown_away, "video", "ran 2 times"),
    "one item at a time": (_one_item_at_a_time, "image", f"{VALUES}|{SHAPE}|{FAILED}"),
    "time stamps of others": (_time_stamps_of_others, "video", f"{VALUES}|{SHAPE}"),
}


@pytest.mark.parametrize("fault", PLANTED)
@each_method
def test_planted_fault(family: str, method: str, fault: str) -> None:
    """Each is caught, by the part of the comparison that is there for it."""
    plant, modality, message = PLANTED[fault]
    manager = make_manager(family, budgets=[100])
    own = type(manager.model).vit_finish

    def planted(self: Any, outputs: Any, kwargs: Any) -> Any:
        return plant(lambda *args: own(self, *args), outputs, kwargs)

    grids = [[1, 4, 8], [1, 8, 4]] if modality == "image" else [[3, 4, 8], [3, 8, 4]]
    with pruning(family, method, 0.5):
        kwargs = batch(family, grids, modality, fps=(1.0, 0.25))
        check(manager, kwargs)
        with (
            mock.patch.object(type(manager.model), "vit_finish", planted),
            pytest.raises(AssertionError, match=message),
        ):
            check(manager, kwargs)
