# SPDX-License-Identifier: Apache-2.0
"""The manager: settings that a user gives, input that does not fit, failures, rounds of capture."""

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import managers
import pytest
import torch

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.manager import EncoderGraphManager

FAMILY = "qwen2_5_vl"


def texts(records: list[Any]) -> list[str]:
    return [record.getMessage() for record in records]


def warnings(records: list[Any]) -> list[str]:
    return [record.getMessage() for record in records if record.levelname == "WARNING"]


def check(manager: EncoderGraphManager, grids: managers.Grids, modality: str = "image") -> None:
    """Outputs equal eager's, whatever ran."""
    kwargs = managers.batch(manager.model, grids, modality)
    managers.assert_same(managers.run(manager, kwargs), managers.eager(manager.model, kwargs))


# -- settings of the user ----------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "budgets": {"budgets": [100, 40, 300, 40]},
    "items": {"items": 2},
    "frames": {"frames": 3},
    "budgets and items": {"budgets": [50, 130], "items": 3},
    "budgets and frames": {"budgets": [50, 130], "frames": 2},
    "items and frames": {"items": 3, "frames": 5},
    "all": {"budgets": [7, 33, 130], "items": 4, "frames": 3},
    "item limit above the smallest budget": {"budgets": [4, 130], "items": 8},
    "budgets that do not divide by the item limit": {"budgets": [65, 131], "items": 8},
    "no frames": {"frames": 0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_given_settings_hold(name: str) -> None:
    given = SETTINGS[name]
    manager = managers.make_manager(FAMILY, **given)
    if "budgets" in given:
        assert list(manager.captured) == sorted(set(given["budgets"]))
    else:
        # A few of the ladder's, up to where eager catches up by the model of costs.
        assert len(manager.captured) == 8 and min(manager.captured) == 64
        assert 1800 < max(manager.captured) < 2100
    largest = manager.captured[max(manager.captured)].capacity
    if "items" in given:
        assert largest.items == given["items"]
    if "frames" in given:
        slots = max(given["frames"], manager.settings.limits.items)
        assert largest.sequences == min(slots, largest.budget)
    offsets = manager.captured[largest.budget].buffers["cu_seqlens"]
    assert len(offsets) == largest.sequences + 1

    check(manager, [[1, 8, 8], [1, 4, 4], [1, 2, 14], [1, 10, 6], [1, 2, 2]])
    assert manager.statistics.replayed == 5 and not manager.statistics.eager
    check(manager, [[3, 4, 6], [2, 6, 6]], "video")
    check(manager, [[9, 4, 4]], "video")
    limit = given.get("frames")
    replayed_videos = sum(limit is None or t <= limit for t in (3, 2, 9))
    if "budgets" not in given:  # user budgets may be too small for a clip; frames alone decide here
        assert manager.statistics.replayed == 5 + replayed_videos
    assert manager.statistics.replayed + manager.statistics.eager.total() == 8


def test_a_step_never_holds_more_items_than_the_user_allows() -> None:
    manager = managers.make_manager(FAMILY, budgets=[64], items=2)
    check(manager, [[1, 2, 2]] * 7)
    assert sum(manager.statistics.replays.values()) == 4 and manager.statistics.replayed == 7


def test_more_frames_than_the_users_limit_run_eagerly(vllm_log: list[Any]) -> None:
    manager = managers.make_manager(FAMILY, frames=4)
    check(manager, [[5, 4, 4]], "video")
    check(manager, [[6, 4, 4]], "video")
    reason = "more video frames than encoder_cudagraph_max_frames_per_batch"
    assert dict(manager.statistics.eager) == {reason: 2}
    assert sum(reason in text for text in warnings(vllm_log)) == 1


def test_a_batch_above_the_largest_budget_is_split() -> None:
    manager = managers.make_manager(FAMILY, budgets=[64, 200])
    check(manager, [[1, 20, 20], [1, 16, 22], [1, 24, 24], [1, 2, 2], [1, 30, 30]])
    assert manager.statistics.replayed == 4
    assert dict(manager.statistics.eager) == {"larger than every token budget": 1}


def test_budgets_when_a_step_schedules_fewer_tokens_than_one_image() -> None:
    base = copy.copy(managers.config(FAMILY))
    base.scheduler_config = copy.copy(base.scheduler_config)
    base.scheduler_config.max_num_batched_tokens = 20
    manager = managers.make_manager(FAMILY, base=base)
    assert list(manager.captured) == [20]
    check(manager, [[1, 4, 10]])
    check(manager, [[1, 8, 12]])
    assert manager.statistics.replayed == 1 and manager.statistics.eager.total() == 1


@pytest.mark.parametrize("off", ["video", "image"])
def test_limit_of_zero_serves_the_other_modality(off: str) -> None:
    limits = {"image": 4, "video": 2} | {off: 0}
    base = managers.towers.make_config(
        FAMILY, compilation_config={"cudagraph_mm_encoder": True}, limit_mm_per_prompt=limits
    )
    model = managers.towers.build_model(FAMILY, config=base)
    manager = managers.make_manager(FAMILY, of=model, base=base)
    other = "image" if off == "video" else "video"
    assert manager.supports_modality(other) and not manager.supports_modality(off)
    grids = [[1, 8, 8], [1, 6, 10]] if other == "image" else [[2, 8, 8], [3, 4, 6]]
    check(manager, grids, other)
    assert manager.statistics.replayed == 2 and not manager.statistics.eager
    if off == "video":
        slots = manager.captured[2048].capacity.sequences
        assert slots == manager.settings.limits.items  # no slots for frames that cannot come


# -- input -------------------------------------------------------------------------------------


@pytest.fixture
def manager() -> EncoderGraphManager:
    return managers.make_manager(FAMILY, budgets=[64, 256])


def refused(manager: EncoderGraphManager, kwargs: dict[str, Any]) -> str:
    """``execute`` says None before anything has run; gives the reason that was counted."""
    with (
        torch.inference_mode(),
        mock.patch.object(manager.model, "vit_forward", side_effect=AssertionError("it ran")),
        mock.patch.object(manager.captured[64], "load", side_effect=AssertionError("it wrote")),
    ):
        assert manager.execute(kwargs) is None
    (reason,) = manager.statistics.eager
    return reason


def test_empty_batch(manager: EncoderGraphManager) -> None:
    kwargs = managers.batch(manager.model, [[1, 2, 2]])
    empty = {
        "pixel_values": kwargs["pixel_values"][:0],
        "image_grid_thw": kwargs["image_grid_thw"][:0],
    }
    assert managers.run(manager, empty) == []
    assert not manager.statistics.replays and not manager.statistics.eager


@pytest.mark.parametrize(
    "grid", [[1, 3, 4], [1, 4, 5], [0, 4, 4], [1, -4, 4], [1, 0, 4]], ids=lambda grid: str(grid)
)
def test_malformed_grid(manager: EncoderGraphManager, grid: list[int]) -> None:
    kwargs = managers.batch(manager.model, [[1, 4, 4]])
    kwargs["image_grid_thw"] = torch.tensor([grid] * 3)
    assert refused(manager, kwargs) == "input does not fit its grids"
    assert manager.statistics.eager.total() == 3


@pytest.mark.parametrize("rows", [-1, 1, 100])
def test_pixel_rows_that_do_not_match(
    manager: EncoderGraphManager, rows: int, vllm_log: list[Any]
) -> None:
    kwargs = managers.batch(manager.model, [[1, 4, 4]])
    pixels = kwargs["pixel_values"]
    kwargs["pixel_values"] = torch.cat([pixels] * 10)[: len(pixels) + rows]
    assert refused(manager, kwargs) == "input does not fit its grids"
    refused(manager, kwargs)
    assert len(warnings(vllm_log)) == 1
    assert f"has {16 + rows} rows, its grids ask for 16" in warnings(vllm_log)[0]
    with pytest.raises(Exception):  # noqa: B017  upstream's own error, whatever it is
        managers.eager(manager.model, kwargs)


def test_grids_of_a_wrong_shape(manager: EncoderGraphManager) -> None:
    kwargs = managers.batch(manager.model, [[1, 4, 4]])
    kwargs["image_grid_thw"] = torch.tensor([1, 4, 4])
    assert refused(manager, kwargs) == "input does not fit its grids"


@pytest.mark.parametrize("grids", [[[1, 4, None]], "144", 7, [[1, 4, 4], 3], {"t": 1}], ids=str)
def test_input_that_cannot_be_read(manager: EncoderGraphManager, grids: Any) -> None:
    kwargs = managers.batch(manager.model, [[1, 4, 4]])
    kwargs["image_grid_thw"] = grids
    assert refused(manager, kwargs) in ("input could not be read", "input does not fit its grids")


def test_precomputed_embeddings(manager: EncoderGraphManager) -> None:
    embeds = torch.randn(4, manager.model.visual.out_hidden_size)
    kwargs = {"image_embeds": embeds, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    assert refused(manager, kwargs) == "precomputed embeddings"
    (out,) = managers.eager(manager.model, kwargs)
    assert torch.equal(out, embeds)


def test_two_modalities_in_one_batch(manager: EncoderGraphManager) -> None:
    kwargs = managers.batch(manager.model, [[1, 4, 4]])
    kwargs |= managers.batch(manager.model, [[2, 4, 4]], "video")
    assert refused(manager, kwargs) == "more than one modality in a batch"
    assert len(managers.eager(manager.model, kwargs)) == 2


def test_float_pixels_where_the_buffer_is_uint8(
    manager: EncoderGraphManager, vllm_log: list[Any]
) -> None:
    """They run eagerly and are never cast into the buffer."""
    kwargs = managers.batch(manager.model, [[1, 8, 8]])
    assert kwargs["pixel_values"].dtype == torch.uint8
    kwargs["pixel_values"] = kwargs["pixel_values"].float() + 0.5
    before = manager.captured[64].buffers["pixel_values"].clone()
    for _ in range(2):
        managers.assert_same(managers.run(manager, kwargs), managers.eager(manager.model, kwargs))
    assert dict(manager.statistics.eager) == {"pixel dtype differs from the buffer": 2}
    assert torch.equal(manager.captured[64].buffers["pixel_values"], before)
    assert (
        len(warnings(vllm_log)) == 1 and "torch.float32, not torch.uint8" in warnings(vllm_log)[0]
    )


def test_a_batch_that_eager_runs_cheaper_does_so(vllm_log: list[Any]) -> None:
    """Not by a test's own costs: small graphs cost less than the launches of an eager run, but
    nothing is gained beside an item that runs eagerly in any case."""
    manager = managers.make_manager(
        FAMILY, budgets=[64], manager_class=EncoderGraphManager, of=managers.model(FAMILY)
    )
    check(manager, [[1, 8, 8]])
    assert dict(manager.statistics.replays) == {64: 1}
    check(manager, [[1, 8, 8], [1, 30, 30]])
    assert dict(manager.statistics.replays) == {64: 1}
    assert dict(manager.statistics.eager) == {
        "cheaper eagerly": 1,
        "larger than every token budget": 1,
    }
    # A plan is no reason to warn; an item above every budget is.
    assert [text for text in warnings(vllm_log) if "eager" in text] == [
        "Encoder batch runs eagerly: larger than every token budget (said once)"
    ]


# -- configuration -----------------------------------------------------------------------------


def nothing_captured(manager: EncoderGraphManager, because: str, log: list[Any]) -> None:
    manager.capture(object())
    assert not manager.is_captured() and manager.get_num_graphs_to_capture() == 0
    with torch.inference_mode():
        assert manager.execute(managers.batch(manager.model, [[1, 8, 8]])) is None
    assert [because in text for text in warnings(log)] == [True]


def test_tower_lora(vllm_log: list[Any]) -> None:
    base = copy.copy(managers.config(FAMILY))
    base.lora_config = mock.Mock(enable_tower_connector_lora=True)
    manager = managers.make_manager(FAMILY, base=base, capture=False)
    nothing_captured(manager, "set enable_tower_connector_lora=false", vllm_log)


def test_text_lora_alone_keeps_graphs() -> None:
    base = copy.copy(managers.config(FAMILY))
    base.lora_config = mock.Mock(enable_tower_connector_lora=False)
    check(managers.make_manager(FAMILY, base=base, budgets=[64]), [[1, 8, 8]])


def test_attention_that_reads_offsets_on_the_host(vllm_log: list[Any]) -> None:
    with managers.backend(managers.model(FAMILY), AttentionBackendEnum.TORCH_SDPA):
        manager = managers.make_manager(FAMILY, capture=False)
        nothing_captured(manager, "TORCH_SDPA reads offsets on the host", vllm_log)
        assert not manager.supports_modality("image")


def test_dynamic_fp8_scales(vllm_log: list[Any]) -> None:
    attention = managers.model(FAMILY).visual.blocks[0].attn.attn
    with mock.patch.object(attention, "_fp8_dynamic_scale", True):
        manager = managers.make_manager(FAMILY, capture=False)
        nothing_captured(manager, "mm_encoder_fp8_scale_path", vllm_log)


def test_one_dynamic_scale_for_all_rows(vllm_log: list[Any]) -> None:
    """Padding rows would enter the scale of real ones. Scales of single tokens are fine."""
    method = managers.model(FAMILY).visual.blocks[0].mlp.down_proj.quant_method
    with mock.patch.object(method, "activation_quant_key", kFp8DynamicTokenSym, create=True):
        assert managers.make_manager(FAMILY, capture=False).refusal is None
    kernel = mock.Mock(spec=["config"], config=SimpleNamespace(key=kFp8DynamicTensorSym))
    with mock.patch.object(method, "fp8_linear", kernel, create=True):
        assert "scales its input" in str(managers.make_manager(FAMILY, capture=False).refusal)
    del managers.model(FAMILY)._vit_refusal_said
    vllm_log.clear()
    with mock.patch.object(method, "activation_quant_key", kFp8DynamicTensorSym, create=True):
        manager = managers.make_manager(FAMILY, capture=False)
        nothing_captured(manager, "use per-token or static activation scales", vllm_log)


def test_compiled_tower_on_the_twin(vllm_log: list[Any]) -> None:
    base = managers.with_settings(managers.config(FAMILY), compile_mm_encoder=True)
    manager = managers.make_manager(FAMILY, base=base, capture=False)
    nothing_captured(manager, "compile_mm_encoder", vllm_log)


def test_a_geometry_that_cannot_be_read(vllm_log: list[Any]) -> None:
    """A fault in a hook, or a model of unforeseen shape, costs the graphs and not the server."""
    model = managers.model(FAMILY)
    with (
        mock.patch.dict(model.__dict__),
        mock.patch.object(type(model), "vit_geometry", side_effect=ValueError("window of 0")),
    ):
        model.__dict__.pop("vit_declared", None)
        manager = managers.make_manager(FAMILY, capture=False)
        nothing_captured(manager, "vit_geometry() failed, ValueError: window of 0", vllm_log)
        # A second manager of the model (the V1 runner makes two) says it no more.
        managers.make_manager(FAMILY, capture=False)
    assert len(warnings(vllm_log)) == 1


@pytest.fixture
def without_lengths() -> Any:
    """A model whose tower takes no single lengths; made before a test listens to the log."""
    return managers.model("qwen2_vl")


def test_pruning_that_vit_finish_does_not_do(without_lengths: Any, vllm_log: list[Any]) -> None:
    """Qwen2-VL has none, and keeps the mixin's own ``vit_prunes``."""
    with mock.patch.object(without_lengths, "is_multimodal_pruning_enabled", True, create=True):
        manager = managers.make_manager("qwen2_vl", capture=False)
        nothing_captured(manager, "video pruning", vllm_log)


def test_flashinfer_where_the_tower_takes_no_lengths(
    without_lengths: Any, vllm_log: list[Any]
) -> None:
    with managers.backend(without_lengths, AttentionBackendEnum.FLASHINFER):
        manager = managers.make_manager("qwen2_vl", capture=False)
        nothing_captured(manager, "FLASHINFER reads single lengths", vllm_log)


def test_a_device_without_graphs(vllm_log: list[Any]) -> None:
    settings = managers.config(FAMILY)
    with set_current_vllm_config(settings):
        manager = EncoderGraphManager(
            settings, torch.device("meta"), torch.float32, managers.model(FAMILY)
        )
    nothing_captured(manager, "meta", vllm_log)


# -- failures ----------------------------------------------------------------------------------


def test_an_exception_in_replay_retires_the_graph(
    manager: EncoderGraphManager, vllm_log: list[Any]
) -> None:
    graph = manager.captured[64].graph
    with mock.patch.object(type(graph), "replay", side_effect=RuntimeError("broken\nsecond line")):
        check(manager, [[1, 8, 8]])
    assert list(manager.captured) == [256]
    check(manager, [[1, 8, 8]])  # the next graph takes over
    assert manager.statistics.replays[256] == 1
    assert dict(manager.statistics.eager) == {"its graph was retired": 1}
    (said,) = warnings(vllm_log)
    assert "is retired" in said and "RuntimeError: broken" in said and "second line" not in said


@pytest.mark.parametrize("where", ["before the replay", "in the replay"])
def test_lack_of_memory_retires_nothing(
    manager: EncoderGraphManager, vllm_log: list[Any], where: str
) -> None:
    full = torch.OutOfMemoryError("none left just now")
    place = (
        mock.patch.object(manager.model, "vit_metadata_parts", side_effect=full)
        if where == "before the replay"
        else mock.patch.object(type(manager.captured[64].graph), "replay", side_effect=full)
    )
    with place:
        check(manager, [[1, 8, 8]])
        check(manager, [[1, 8, 8]])
    assert list(manager.captured) == [64, 256] and len(warnings(vllm_log)) == 1
    check(manager, [[1, 8, 8]])
    assert manager.statistics.replays[64] == 1
    assert dict(manager.statistics.eager) == {"an error before the replay": 2}


def test_an_error_without_a_text(manager: EncoderGraphManager) -> None:
    class Odd(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no text")

    with mock.patch.object(type(manager.captured[64].graph), "replay", side_effect=Odd()):
        check(manager, [[1, 8, 8]])
    assert list(manager.captured) == [256]


WRONG_HOOKS = {
    "vit_project": lambda rows, grids: rows[:1],
    "vit_finish": lambda outputs, mm_kwargs: outputs[:1],
    "vit_forward": lambda pixels, metadata: torch.zeros(3, 64),
}


@pytest.mark.parametrize("hook", WRONG_HOOKS)
def test_rows_that_do_not_match_are_never_split(manager: EncoderGraphManager, hook: str) -> None:
    kwargs = managers.batch(manager.model, [[1, 8, 8], [1, 30, 40]])
    with (
        mock.patch.object(manager.model, hook, WRONG_HOOKS[hook]),
        torch.inference_mode(),
    ):
        assert manager.execute(kwargs) is None
    assert "an error outside the graphs" in manager.statistics.eager


def test_a_tower_of_other_rows_than_declared_is_not_captured(vllm_log: list[Any]) -> None:
    """A merge size that is not the tower's: stock raises in `split`, and so may this eagerly."""
    model = managers.model(FAMILY)
    forward = model.vit_forward
    with mock.patch.object(model, "vit_forward", lambda p, m: forward(p, m).repeat(4, 1)):
        manager = managers.make_manager(FAMILY, budgets=[64])
    assert not manager.captured
    assert "the tower gave 256 rows where vit_geometry() asks for 64" in warnings(vllm_log)[0]


def test_all_graphs_retired_leaves_upstreams_path(manager: EncoderGraphManager) -> None:
    with mock.patch.object(
        type(manager.captured[64].graph), "replay", side_effect=RuntimeError("broken")
    ):
        check(manager, [[1, 8, 8]])
        check(manager, [[1, 8, 8]])
    with torch.inference_mode():
        assert manager.execute(managers.batch(manager.model, [[1, 8, 8]])) is None


def test_a_hook_that_rebinds_a_buffer_is_named(
    manager: EncoderGraphManager, vllm_log: list[Any]
) -> None:
    buffers = manager.captured[64].buffers
    buffers["cu_seqlens"].set_(buffers["cu_seqlens"].clone())
    check(manager, [[1, 8, 8]])
    assert any("buffer cu_seqlens moved since capture" in text for text in warnings(vllm_log))
    assert 64 not in manager.captured


def test_a_lost_context_is_passed_on(manager: EncoderGraphManager) -> None:
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    with (
        mock.patch.object(type(manager.captured[64].graph), "replay", side_effect=lost),
        pytest.raises(RuntimeError, match="illegal memory access") as caught,
        torch.inference_mode(),
    ):
        manager.execute(managers.batch(manager.model, [[1, 8, 8]]))
    assert caught.value is lost


def test_a_failing_eager_run_leaves_the_error_to_upstream(manager: EncoderGraphManager) -> None:
    kwargs = managers.batch(manager.model, [[1, 60, 60]])
    with (
        mock.patch.object(manager.model, "vit_forward", side_effect=RuntimeError("no memory")),
        torch.inference_mode(),
    ):
        assert manager.execute(kwargs) is None
    assert "an error outside the graphs" in manager.statistics.eager


def test_a_graph_that_cannot_be_captured_is_left_out(vllm_log: list[Any]) -> None:
    manager = managers.make_manager(FAMILY, budgets=[32, 64, 256], capture=False)
    capture = manager._capture

    def fails_at_64(budget: int) -> Any:
        if budget == 64:
            raise torch.OutOfMemoryError("out of memory")
        return capture(budget)

    with (
        mock.patch.object(manager, "_capture", fails_at_64),
        set_current_vllm_config(manager.vllm_config),
    ):
        manager.capture(object())
    assert list(manager.captured) == [32, 256]
    assert any("[64] tokens are left out: OutOfMemoryError" in text for text in warnings(vllm_log))
    check(manager, [[1, 12, 12]])
    assert manager.statistics.replays[256] == 1


def test_under_tensor_parallel_weights_a_failure_is_fatal(manager: EncoderGraphManager) -> None:
    module = "vllm.vit_cudagraph.capturing.get_tensor_model_parallel_world_size"
    with (
        mock.patch(module, return_value=2),
        mock.patch.object(
            type(manager.captured[64].graph), "replay", side_effect=ValueError("here only")
        ),
        pytest.raises(RuntimeError, match="set cudagraph_mm_encoder=false") as caught,
        torch.inference_mode(),
    ):
        manager.execute(managers.batch(manager.model, [[1, 8, 8]]))
    assert isinstance(caught.value.__cause__, ValueError)


# -- weights ---------------------------------------------------------------------------------


def reload_tower(model: Any, factor: float) -> None:
    """The tower's patch embedding times a factor, through the model's own ``load_weights``."""
    weight = model.visual.patch_embed.proj.weight
    model.load_weights([("visual.patch_embed.proj.weight", weight.detach().clone() * factor)])


def test_weights_loaded_in_place_are_seen_by_graphs(manager: EncoderGraphManager) -> None:
    try:
        before = managers.run(manager, managers.batch(manager.model, [[1, 8, 8]]))
        reload_tower(manager.model, 2.0)
        check(manager, [[1, 8, 8]])
        after = managers.run(manager, managers.batch(manager.model, [[1, 8, 8]]))
        assert not torch.allclose(before[0], after[0])
        assert manager.statistics.replayed == 3 and not manager.statistics.eager
    finally:
        reload_tower(manager.model, 0.5)


def test_weights_loaded_into_new_memory_end_the_graphs(
    manager: EncoderGraphManager, vllm_log: list[Any]
) -> None:
    parameter = manager.model.visual.patch_embed.proj.weight
    old = parameter.data
    try:
        parameter.data = old.clone()
        reload_tower(manager.model, 2.0)
        check(manager, [[1, 8, 8]])
        assert not manager.captured and not manager.statistics.replays
        assert (
            sum("weights were loaded into new memory" in text for text in warnings(vllm_log)) == 1
        )
    finally:
        parameter.data = old


# -- rounds of capture -------------------------------------------------------------------------


def test_capture_clear_capture(manager: EncoderGraphManager) -> None:
    """As the V2 runner does; buffers of a round end with it."""
    first = manager.captured[64].buffers["pixel_values"]
    check(manager, [[1, 8, 8]])
    manager.clear()
    assert not manager.is_captured() and not manager.captured and manager.graph_pool is None
    with torch.inference_mode():
        assert manager.execute(managers.batch(manager.model, [[1, 8, 8]])) is None
    for _ in range(2):
        pool = object()
        with torch.inference_mode(), set_current_vllm_config(manager.vllm_config):
            manager.capture(pool)
        assert manager.graph_pool is pool and manager.is_captured()
    assert manager.captured[64].buffers["pixel_values"] is not first
    assert not manager.captured[64].buffers["pixel_values"].is_inference()
    check(manager, [[1, 8, 8], [1, 4, 20]])
    assert manager.statistics.replayed == 3


def test_a_second_manager_takes_over(manager: EncoderGraphManager) -> None:
    """As the V1 runner does: one manager measures memory, another serves."""
    manager.clear()
    second = managers.make_manager(FAMILY, budgets=[64, 256])
    check(second, [[1, 8, 8]])
    assert second.statistics.replayed == 1


def test_log_line(vllm_log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_CUDAGRAPH_LOG_INTERVAL", "1")
    manager = managers.make_manager(FAMILY, budgets=[64])
    check(manager, [[1, 8, 8], [1, 30, 30]])
    assert texts(vllm_log)[-1] == (
        "Encoder CUDA graphs: 1 items replayed, 1 items eager (larger than every token budget: 1), "
        "1 replays, 48 padding tokens"
    )
    stats = manager.get_cumulative_stats()
    assert (stats["graph_hits"], stats["graph_misses"], stats["num_budgets"]) == (1, 1, 1)
    assert stats["replays"] == {64: 1} and stats["padding_tokens"] == 48
