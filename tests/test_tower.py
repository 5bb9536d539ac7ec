# SPDX-License-Identifier: Apache-2.0
"""MLPs with padded rows: the same values, however weights come and go."""

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import towers
from hypothesis import given
from hypothesis import strategies as st
from managers import CPU

import vllm.model_executor.layers.linear
import vllm.model_executor.parameter
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.models import qwen2_5_vl, qwen3_vl
from vllm.vit_cudagraph import tower
from vllm.vit_cudagraph.gated import silu_and_mul
from vllm.vit_cudagraph.settings import tower_work
from vllm.vit_cudagraph.testing import models
from vllm.vit_cudagraph.tower import PaddedLinear

MISALIGNED = {
    "qwen2_vl": {},  # its widths are multiples of its hidden size: see `all_misaligned`
    "qwen2_5_vl": {"intermediate_size": 135},
    "qwen3_vl": {"intermediate_size": 135},
}
OFF = {"additional_config": {"vit_cudagraph": {"tower": False}}}
GRIDS = [(1, 8, 8), (1, 6, 10), (2, 2, 4)]


@pytest.fixture(autouse=True)
def all_misaligned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For Qwen2-VL no width is aligned, so that it has something to pad."""
    if "family" in request.fixturenames and request.getfixturevalue("family") == "qwen2_vl":
        monkeypatch.setattr(tower, "ROW_BYTES", 4096)
        monkeypatch.setattr(tower, "PADDED_TO", 96)


def build(family: str, *, fill: Any = None, **engine: Any) -> tuple[Any, Any]:
    """A tiny model whose MLP rows are misaligned, and its configuration."""
    config = models.make_config(family, vision=MISALIGNED[family], **engine)
    return models.build_model(config, fill=fill), config


def rows(built: tuple[Any, Any]) -> torch.Tensor:
    model, config = built
    pixels = towers.random_pixels(model, [list(grid) for grid in GRIDS])
    with torch.inference_mode(), set_current_vllm_config(config):
        return model.vit_forward(pixels, model.vit_metadata(GRIDS, CPU))


def padded(model: Any) -> list[Any]:
    layers = [m for m in model.visual.modules() if hasattr(m, "quant_method")]
    return [layer for layer in layers if isinstance(layer.quant_method, PaddedLinear)]


def spoil_padding(model: Any) -> None:
    """What memory may hold after it was given back and taken again."""
    for layer in padded(model):
        weight, bias = layer.weight.data.clone(), layer.bias.data.clone()
        layer.quant_method.weight.fill_(torch.nan)
        layer.quant_method.bias.fill_(torch.nan)
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(bias)


@pytest.mark.parametrize("family", MISALIGNED)
def test_values_and_shapes_are_as_without(family: str) -> None:
    ours, plain = build(family), build(family, **OFF)
    assert len(padded(ours[0])) == 2 * len(ours[0].visual.blocks) and not padded(plain[0])
    torch.testing.assert_close(rows(ours), rows(plain), rtol=1e-5, atol=1e-5)
    up, down = padded(ours[0])[:2]
    width = 128 if family == "qwen2_vl" else 135
    assert down.weight.shape[1] == width
    assert down.quant_method.weight.shape[1] == (192 if family == "qwen2_vl" else 160)
    assert up.weight.shape[0] == (2 * width if family == "qwen2_5_vl" else width)
    assert up.quant_method.weight.shape[0] % tower.PADDED_TO == 0


@pytest.mark.parametrize("family", MISALIGNED)
def test_a_changed_weight_is_seen(family: str) -> None:
    """The control of the test above: its comparison can fail."""
    ours, plain = build(family), build(family, **OFF)
    before = rows(plain)
    padded(ours[0])[1].weight.data[0] += 1
    assert not torch.allclose(rows(ours), before, rtol=1e-3, atol=1e-3)


def test_aligned_widths_are_left_alone() -> None:
    config = models.make_config("qwen2_5_vl")
    assert not padded(models.build_model(config))


@pytest.mark.parametrize("family", MISALIGNED)
def test_padding_is_zero_again_after_weights_are_loaded(family: str) -> None:
    """As after sleep at level 2, which gives the memory of weights back."""
    with unchanged_linears():
        ours = build(family)
    before, state = rows(ours), tower_state(ours[0])
    spoil_padding(ours[0])
    if family != "qwen2_5_vl":  # whose gate reads no padding
        assert not torch.equal(rows(ours), before)
    ours[0].load_weights(state)
    assert torch.equal(rows(ours), before)


def tower_state(model: Any) -> list[tuple[str, torch.Tensor]]:
    """The tower's weights under the names and in the shapes of a checkpoint."""
    found = []
    for name, weight in model.visual.named_parameters():
        for stacked, pieces in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("qkv", ("q", "k", "v") if hasattr(model.visual, "window_size") else ()),
        ):
            if f".{stacked}." in name and pieces:
                parts = weight.detach().clone().chunk(len(pieces))
                found += [
                    (f"visual.{name}".replace(stacked, piece), part)
                    for piece, part in zip(pieces, parts, strict=True)
                ]
                break
        else:
            found.append((f"visual.{name}", weight.detach().clone()))
    return found


def test_reloading_as_the_engine_does_it() -> None:
    """``reload_weights`` builds each layer anew, and copies it into the memory that graphs read."""
    config = models.make_config("qwen2_5_vl", vision=MISALIGNED["qwen2_5_vl"])
    with unchanged_linears(), set_current_vllm_config(config):
        recorded = mock.patch.object(models, "_fill_weights", recording(models._fill_weights))
        with recorded:
            model = models.build_model(config)
        before = rows((model, config))
        doubled = [
            (name, weight * 2 if "down_proj.weight" in name else weight)
            for name, weight in tower_state(model)
        ]
        addresses = [layer.weight.data_ptr() for layer in padded(model)]
        spoil_padding(model)
        reload_weights(config, model, iter(doubled), None, True)
    assert [layer.weight.data_ptr() for layer in padded(model)] == addresses
    assert all(not layer.quant_method.weight.isnan().any() for layer in padded(model))
    after = rows((model, config))
    assert after.isfinite().all() and not torch.allclose(after, before, rtol=1e-3)
    for layer in padded(model)[1::2]:
        layer.weight.data.mul_(0.5)
    assert torch.equal(rows((model, config)), before)


def unchanged_linears() -> Any:
    """The CPU's linear layers give their weights away when they are packed; a GPU's do not."""
    return mock.patch.object(UnquantizedLinearMethod, "process_weights_after_loading", unpacked)


def unpacked(method: Any, layer: Any) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def recording(fill: Any) -> Any:
    def recorded(model: Any, seed: int) -> None:
        record_metadata_for_reloading(model)
        fill(model, seed)

    return recorded


def test_a_weight_that_was_moved_is_right() -> None:
    """As CPU offloading and tools that replace ``parameter.data`` leave it."""
    ours = build("qwen2_5_vl")
    before = rows(ours)
    for layer in padded(ours[0]):
        layer.weight.data, layer.bias.data = layer.weight.data.clone(), layer.bias.data.clone()
        layer.quant_method.weight.fill_(torch.nan)
        layer.quant_method.bias.fill_(torch.nan)
    assert torch.equal(rows(ours), before)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_each_rank_pads_its_own_slice(family: str, ranks: int) -> None:
    """Each rank's down projection is a part of a sum; widths of the ranks are 3420 / ranks."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 64, generator=generator)
    whole = mlp_of_rank(family, 0, 1)
    full = {}
    for name, weight in whole.named_parameters():
        weight.data.normal_(0, 0.1, generator=generator)
        full[name] = weight.data.clone()
    with torch.no_grad():
        # Written out, so that what is padded is not held against itself.
        expected = by_hand(family, full, x)
        torch.testing.assert_close(whole(x), expected, rtol=1e-4, atol=1e-4)
        total = torch.zeros_like(expected)
        for rank in range(ranks):
            part = mlp_of_rank(family, rank, ranks)
            load_slices(part, full)
            down = part.get_submodule(DOWN[family])
            assert down.weight.shape[1] == 3420 // ranks  # 1710 and 855: misaligned
            assert isinstance(down.quant_method, PaddedLinear)
            total += part(x)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


DOWN = {"qwen2_5_vl": "down_proj", "qwen3_vl": "linear_fc2"}
UP = {"qwen2_5_vl": "gate_up_proj", "qwen3_vl": "linear_fc1"}


def by_hand(family: str, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    up, down = UP[family], DOWN[family]
    rows = x @ weights[f"{up}.weight"].T + weights[f"{up}.bias"]
    if family == "qwen2_5_vl":
        rows = torch.nn.functional.silu(rows[:, :3420]) * rows[:, 3420:]
    else:
        rows = torch.nn.functional.silu(rows)
    return rows @ weights[f"{down}.weight"].T + weights[f"{down}.bias"]


def mlp_of_rank(family: str, rank: int, ranks: int) -> Any:
    """A vision MLP as one of several ranks builds it; its sum over ranks is left to the caller."""
    of_ranks = {
        "get_tensor_model_parallel_world_size": lambda: ranks,
        "get_tensor_model_parallel_rank": lambda: rank,
        "tensor_model_parallel_all_reduce": lambda part: part,
    }
    config = models.make_config(family)
    with ExitStack() as patches:
        patches.enter_context(set_current_vllm_config(config))
        for module in (vllm.model_executor.layers.linear, vllm.model_executor.parameter):
            for name in of_ranks.keys() & vars(module).keys():
                patches.enter_context(mock.patch.object(module, name, of_ranks[name]))
        if family == "qwen2_5_vl":
            act = SiluAndMul()
            mlp = qwen2_5_vl.Qwen2_5_VisionMLP(64, 3420, bias=True, act_fn=act)
        else:
            mlp = qwen3_vl.Qwen3_VisionMLP(64, 3420, bias=True)
        with mock.patch.object(tower, "ROW_BYTES", 32):  # 3420 in 32 bits is a multiple of 16 bytes
            assert tower.install(mlp, config) == 1
        if ranks > 1:
            mock_reduce = mock.patch.object(
                vllm.model_executor.layers.linear,
                "tensor_model_parallel_all_reduce",
                of_ranks["tensor_model_parallel_all_reduce"],
            )
            mlp.forward = within(mock_reduce, mlp.forward)
    return mlp


def within(patch: Any, call: Any) -> Any:
    def called(x: torch.Tensor) -> Any:
        with patch:
            return call(x)

    return called


def load_slices(mlp: Any, full: dict[str, torch.Tensor]) -> None:
    """By vLLM's own weight loaders, which cut a rank's share out of the whole."""
    for name, parameter in mlp.named_parameters():
        if "gate_up" in name:
            for shard, piece in enumerate(full[name].chunk(2)):
                parameter.weight_loader(parameter, piece, shard)
        else:
            parameter.weight_loader(parameter, full[name])


@pytest.mark.parametrize(
    "engine",
    [
        {"compilation_config": {"cudagraph_mm_encoder": False}},
        {"enable_lora": True, "enable_tower_connector_lora": True},
        {"load_format": "sharded_state"},
        OFF,
    ],
    ids=["graphs are off", "tower LoRA", "loaded flat", "switched off"],
)
def test_where_it_is_not_wanted_nothing_changes(engine: Any) -> None:
    config = models.make_config("qwen2_5_vl", vision=MISALIGNED["qwen2_5_vl"], **engine)
    model = models.build_model(config)
    assert not padded(model)
    assert all(isinstance(block.mlp.act_fn, SiluAndMul) for block in model.visual.blocks)


def test_batch_invariant_mode_keeps_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert not padded(build("qwen3_vl")[0])


def test_without_a_tower_nothing_is_done() -> None:
    """As where a process has none."""
    config = models.make_config("qwen2_5_vl")
    assert tower.install(None, config) == 0
    tower.clear_padding(None)


class OtherMethod(UnquantizedLinearMethod):
    """Stands for quantised layers."""


def test_layers_of_another_kind_are_left_alone() -> None:
    with unchanged_linears():
        model, config = build("qwen3_vl", **OFF)
    mlp = model.visual.blocks[0].mlp
    mlp.linear_fc1.quant_method = OtherMethod.__new__(OtherMethod)
    config.additional_config = {}
    assert tower.install(mlp, config) == 0
    del mlp.linear_fc1.weight  # as quantised layers are, which have packed ones
    assert tower.install(mlp, config) == 0


def test_weights_that_were_offloaded_stay_where_they_are() -> None:
    with unchanged_linears():
        model, config = build("qwen3_vl", **OFF)
    mlp = model.visual.blocks[0].mlp
    config.additional_config = {}
    mlp.linear_fc2.weight._vllm_is_uva_offloaded = True
    assert tower.install(mlp, config) == 0
    del mlp.linear_fc2.weight._vllm_is_uva_offloaded
    assert tower.install(mlp, config) == 1


def test_a_failure_costs_the_faster_layers_alone(vllm_log: list[Any]) -> None:
    broken = mock.patch.object(tower, "_align", side_effect=RuntimeError("planted"))
    with broken:
        model, _ = build("qwen3_vl")
    assert not padded(model)
    assert [r.message for r in vllm_log if r.levelname == "WARNING" and "planted" in r.message] == [
        "Vision tower: upstream's layers stay as they are: RuntimeError: planted"
    ]


@pytest.mark.parametrize("act", [lambda x: x.softmax(-1), torch.cos, lambda x: x[..., :1]])
def test_an_activation_that_does_not_keep_zeros_is_left_alone(act: Any) -> None:
    with unchanged_linears():
        model, config = build("qwen3_vl", **OFF)
    mlp = model.visual.blocks[0].mlp
    del mlp.act_fn
    mlp.act_fn = act
    config.additional_config = {}
    assert tower.install(mlp, config) == 0
    del mlp.act_fn
    mlp.act_fn = torch.nn.GELU()
    assert tower.install(mlp, config) == 1


@pytest.mark.parametrize(
    "given",
    [{"vit_cudagraph": 1}, {"vit_cudagraph": {"towr": True}}, {"vit_cudagraph": {"tower": "no"}}],
)
def test_a_bad_setting_is_named_with_one_that_works(given: Any) -> None:
    with pytest.raises(ValueError, match=r"vit_cudagraph.*(false|true or false)"):
        tower_work(SimpleNamespace(additional_config=given))


def test_settings_of_others_do_not_matter() -> None:
    assert tower_work(SimpleNamespace(additional_config={"other": 1}))
    assert tower_work(SimpleNamespace(additional_config=None))


@given(
    rows=st.integers(0, 5),
    width=st.sampled_from([1, 3, 8, 27, 40]),
    more=st.integers(0, 9),
    behind=st.integers(0, 9),
)
def test_the_gate_reads_no_padding_and_writes_zeros(
    rows: int, width: int, more: int, behind: int
) -> None:
    gpu = os.environ.get("VIT_CUDAGRAPH_TEST_DEVICE") == "cuda"
    device = torch.device("cuda" if gpu else "cpu")
    x = torch.randn(rows, 1, 2 * width + behind, dtype=torch.bfloat16, device=device)
    x[..., 2 * width :] = torch.nan
    out = silu_and_mul(x, width, width + more)
    assert out.shape == (rows, 1, width + more) and not out[..., width:].any()
    expected = SiluAndMul.forward_native(x[..., : 2 * width])
    torch.testing.assert_close(out[..., :width], expected, rtol=1e-2, atol=1e-3)
