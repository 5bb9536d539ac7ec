# SPDX-License-Identifier: Apache-2.0
"""The reference attention keeps FlashAttention's rules, and vLLM's own numbers where both apply."""

import importlib

import pytest
import torch
import towers
from hypothesis import given
from hypothesis import strategies as st

from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.v1.attention.ops.vit_attn_wrappers import vit_torch_sdpa_wrapper
from vllm.vit_cudagraph.testing import reference_attention

HEADS, HEAD_SIZE, SCALE = 3, 16, 0.25


def heads_of(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, HEADS, HEAD_SIZE, generator=generator).to(dtype)


def qkv(rows: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [heads_of(rows, seed, dtype) for seed in (0, 1, 2)]


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def attend(
    tensors: list[torch.Tensor], offsets: torch.Tensor, longest: int | None = None
) -> torch.Tensor:
    bound = None if longest is None else torch.tensor(longest, dtype=torch.int32)
    return torch.ops.vit_cudagraph.varlen_attention(*tensors, offsets, bound, SCALE)


def softmax_attention(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One sequence by the formula, in float64."""
    q, k, v = (x.double() for x in tensors)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any))
def test_equals_vllms_sdpa_bit_for_bit(dtype: torch.dtype, lengths: list[int]) -> None:
    offsets = offsets_of(lengths)
    tensors = qkv(int(offsets[-1]), dtype)
    expected = vit_torch_sdpa_wrapper(*(x[None] for x in tensors), SCALE, offsets)[0]
    assert torch.equal(attend(tensors, offsets), expected)
    assert torch.equal(attend(tensors, offsets, max(lengths)), expected)


def test_equals_the_formula_within_each_sequence() -> None:
    tensors = qkv(12)
    out = attend(tensors, offsets_of([5, 7]))
    for rows in (slice(0, 5), slice(5, 12)):
        expected = softmax_attention([x[rows] for x in tensors])
        torch.testing.assert_close(out[rows].double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_past_the_last_offset_are_not_written_and_not_read() -> None:
    tensors = qkv(10)
    out = attend(tensors, offsets_of([4, 3]))
    assert out[7:].isnan().all()
    for x in tensors:
        x[7:] = torch.nan
    assert torch.equal(attend(tensors, offsets_of([4, 3]))[:7], out[:7])
    assert out[:7].isfinite().all()


def test_unwritten_rows_hold_what_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_attention, "UNWRITTEN", 7.0)
    assert (attend(qkv(5), offsets_of([3]))[3:] == 7.0).all()


def test_query_rows_past_max_seqlen_are_dropped_and_keys_are_not() -> None:
    tensors = qkv(9)
    whole = attend(tensors, offsets_of([6, 3]))
    out = attend(tensors, offsets_of([6, 3]), longest=4)
    assert torch.equal(out[:4], whole[:4])
    assert out[4:6].isnan().all()
    assert torch.equal(out[6:], whole[6:])


def test_a_bound_above_the_longest_sequence_changes_nothing() -> None:
    tensors = qkv(9)
    assert torch.equal(
        attend(tensors, offsets_of([6, 3]), longest=4096), attend(tensors, offsets_of([6, 3]))
    )


def test_empty_slots_change_nothing() -> None:
    tensors = qkv(9)
    padded = torch.tensor([0, 0, 6, 6, 9, 9, 9], dtype=torch.int32)
    assert torch.equal(attend(tensors, padded), attend(tensors, offsets_of([6, 3])))
    assert attend(tensors, torch.zeros(4, dtype=torch.int32), longest=0).isnan().all()


def test_fewer_key_heads_are_shared() -> None:
    q, k, v = heads_of(5, 0)[:, :2], heads_of(5, 1)[:, :1], heads_of(5, 2)[:, :1]
    out = attend([q, k, v], offsets_of([5]))
    repeated = attend([q, k.repeat(1, 2, 1), v.repeat(1, 2, 1)], offsets_of([5]))
    torch.testing.assert_close(out, repeated)


@pytest.mark.parametrize(
    ("offsets", "longest", "message"),
    [
        (torch.tensor([0, 6, 0], dtype=torch.int32), 6, "decreases from 6 to 0 at position 2"),
        (torch.tensor([0, 10], dtype=torch.int32), 10, "ends at 10, but there are only 9 rows"),
        (torch.tensor([2, 9], dtype=torch.int32), 9, "must start at 0"),
        (torch.tensor([], dtype=torch.int32), 9, "must start at 0"),
        (torch.tensor([0, 9]), 9, "must be int32"),
        (torch.tensor([[0, 9]], dtype=torch.int32), 9, "one dimension"),
        (torch.tensor([0, 9], dtype=torch.int32), 0, "max_seqlen is 0"),
    ],
    ids=["decreasing", "too_far", "late_start", "no_offsets", "int64", "two_dimensions", "zero"],
)
def test_nonsense_is_an_error(offsets: torch.Tensor, longest: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(qkv(9), offsets, longest)


def test_the_operator_survives_a_second_import() -> None:
    tensors = qkv(4)
    before = attend(tensors, offsets_of([4]))
    # A copy under another name, so that this process keeps the module that others imported.
    spec = importlib.util.find_spec(reference_attention.__name__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert torch.equal(attend(tensors, offsets_of([4])), before)


def test_the_operator_has_a_shape_without_data() -> None:
    with torch.device("meta"):
        q, v = torch.empty(6, 2, 8), torch.empty(6, 2, 4)
        offsets = torch.empty(3, dtype=torch.int32)
    out = torch.ops.vit_cudagraph.varlen_attention(q, q, v, offsets, None, SCALE)
    assert out.shape == (6, 2, 4)
    assert out.device.type == "meta"


# -- the layer -------------------------------------------------------------------------------------


def test_register_may_run_twice_and_vllm_builds_ours() -> None:
    with towers.attention_layer(reference=False):
        reference_attention.register()
        reference_attention.register()
        assert op_registry_oot["MMEncoderAttention"] is reference_attention.ReferenceAttention
    assert op_registry_oot.get("MMEncoderAttention") is not reference_attention.ReferenceAttention


def test_register_names_the_class_that_is_in_its_place() -> None:
    class Other(MMEncoderAttention):
        pass

    with towers.attention_layer(reference=False):
        MMEncoderAttention.register_oot(Other)
        with pytest.raises(RuntimeError, match="Other is registered"):
            reference_attention.register()


@pytest.fixture(scope="module", params=towers.FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, torch.nn.Module]:
    """One model with the reference attention, one with vLLM's own, same weights."""
    return towers.build_model(request.param), towers.build_model(request.param, flash=False)


def test_towers_agree_with_vllms_own_attention(
    pair: tuple[torch.nn.Module, torch.nn.Module],
) -> None:
    ours, theirs = pair
    layers = [type(m) for m in ours.visual.modules() if isinstance(m, MMEncoderAttention)]
    assert layers
    assert set(layers) == {reference_attention.ReferenceAttention}
    assert {type(m) for m in theirs.visual.modules() if isinstance(m, MMEncoderAttention)} == {
        MMEncoderAttention
    }
    grids = [[1, 8, 12], [1, 4, 4], [2, 6, 8]]
    pixels = towers.random_pixels(ours, grids)
    with torch.inference_mode():
        out, expected = (
            model.visual(
                pixels, None, encoder_metadata=model.visual.prepare_encoder_metadata(grids)
            )
            for model in pair
        )
    assert out.std() > 0.1
    assert torch.equal(out, expected)


@pytest.mark.parametrize("flat", [False, True], ids=["by_head", "flat"])
def test_the_layer_takes_vllms_shapes(
    flat: bool, pair: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    ours, theirs = (
        next(m for m in model.visual.modules() if isinstance(m, MMEncoderAttention))
        for model in pair
    )
    heads, size = ours.num_heads, ours.head_size
    q, k, v = (torch.randn(2, 5, heads, size) for _ in range(3))
    if flat:
        q, k, v = (x.flatten(2) for x in (q, k, v))
    out = ours.forward_native(q, k, v)
    assert out.shape == q.shape
    torch.testing.assert_close(out, theirs.forward_native(q, k, v))
    assert torch.equal(out, ours.forward_cpu(q, k, v))
