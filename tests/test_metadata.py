# SPDX-License-Identifier: Apache-2.0
"""Metadata from the geometry equals upstream's, bit for bit; so does the tower's eager output.

Qwen3-VL's learned positions are summed inside the forward here, in another order of additions than
upstream's, so there the last bits may differ.
"""

from unittest import mock

import managers
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from vllm.model_executor.models.qwen3_vl import pos_embed_interpolate_native
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.geometry import ViTGeometry, position_rows
from vllm.vit_cudagraph.metadata import MetadataBuilder, RowCache
from vllm.vit_cudagraph.positions import (
    TABLE_ROWS,
    TABLE_WEIGHTS,
    bilinear_rows,
    interpolated,
)
from vllm.vit_cudagraph.testing.profiles import examples

BACKENDS = [AttentionBackendEnum.TORCH_SDPA, AttentionBackendEnum.FLASH_ATTN]
SIZES = [(224, 224), (427, 640), (300, 451), (56, 1120), (1120, 56), (768, 1024), (30, 30)]


def real_grids(family: str) -> list[list[int]]:
    """Grids that the image processor makes of real image sizes (height, width)."""
    patch = managers.model(family).vit_declared.patch_size
    shapes = [smart_resize(*size, patch * 2, max_pixels=2**19) for size in SIZES]
    return [[1, h // patch, w // patch] for h, w in shapes]


def assert_metadata_equal(family: str, grids: managers.Grids) -> None:
    model = managers.model(family)
    with torch.inference_mode():
        theirs = model.visual.prepare_encoder_metadata([list(grid) for grid in grids])
        ours = model.vit_metadata([tuple(grid) for grid in grids], managers.CPU)
        if "pos_embeds" in theirs:
            table = model.visual.pos_embed.weight
            learned = interpolated(table, {n: ours.pop(n) for n in (TABLE_ROWS, TABLE_WEIGHTS)})
            torch.testing.assert_close(learned, theirs.pop("pos_embeds"))
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        actual = ours[name]
        if expected is None and name == "max_seqlen":
            # Qwen2-VL says None, the other towers 0, where the backend reads no bound.
            assert actual is not None and int(actual) == 0
        elif expected is None:
            assert actual is None, name
        else:
            assert actual is not None, name
            assert actual.dtype == expected.dtype, name
            assert torch.equal(actual, expected), name


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("family", managers.FAMILIES)
def test_equals_upstream_on_real_grids(family: str, backend: AttentionBackendEnum) -> None:
    grids = real_grids(family)
    videos = [[4, *grids[0][1:]], [3, *grids[2][1:]]]
    with managers.backend(managers.model(family), backend):
        for batch in (*([grid] for grid in grids), grids, grids[::-1], videos, videos + grids):
            assert_metadata_equal(family, batch)


@pytest.mark.parametrize("family", managers.FAMILIES)
@given(batch=st.lists(managers.grids_of(frames=3), min_size=1, max_size=5))
@pytest.mark.fuzz
@examples(25)
def test_equals_upstream_on_any_grids(family: str, batch: list[list[int]]) -> None:
    assert_metadata_equal(family, batch)


@pytest.mark.parametrize("modality", ["image", "video"])
@pytest.mark.parametrize("family", managers.FAMILIES)
def test_eager_output_equals_embed_multimodal(family: str, modality: str) -> None:
    model = managers.model(family)
    grids = real_grids(family)[:5] if modality == "image" else [[3, 8, 12], [1, 4, 4], [5, 6, 10]]
    kwargs = managers.batch(model, grids, modality)
    outputs: dict[int, torch.Tensor] = {}
    tokens = [model.vit_declared.output_tokens(tuple(grid)) for grid in grids]
    with torch.inference_mode():
        rows = model.encoder_eager_forward(kwargs)
        model.postprocess_encoder_output(
            {"default": rows}, list(range(len(grids))), tokens, outputs, batch_mm_kwargs=kwargs
        )
    for i, expected in enumerate(managers.eager(model, kwargs)):
        if hasattr(model.visual, "pos_embed"):
            torch.testing.assert_close(outputs[i], expected, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(outputs[i], expected)


def test_learned_positions_follow_the_weights() -> None:
    """In graphs that were captured before, and with the grid in the cache."""
    manager = managers.make_manager("qwen3_vl", budgets=[64])
    model, weight = manager.model, manager.model.visual.pos_embed.weight
    kwargs = managers.batch(model, [[1, 8, 8]])
    (before,) = managers.run(manager, kwargs)
    kept = weight.data.clone()
    try:
        weight.data.mul_(2.0)  # as vLLM's weight loaders write: no version counter moves
        (after,), expected = managers.run(manager, kwargs), managers.eager(model, kwargs)
    finally:
        weight.data.copy_(kept)
    assert manager.statistics.replayed == 2
    assert (after - before).abs().max() > 0.01
    managers.assert_same([after], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("merge", [1, 2])
@given(
    grid=st.tuples(st.integers(1, 3), st.integers(1, 30), st.integers(1, 30)),
    side=st.integers(1, 12),
)
@pytest.mark.fuzz
@examples(60)
@example(grid=(1, 12, 12), side=12)
@example(grid=(2, 1, 1), side=48)
def test_interpolated_positions_are_upstreams(
    dtype: torch.dtype, merge: int, grid: tuple[int, int, int], side: int
) -> None:
    """A table larger and smaller than the frame, frames of one patch, any number of frames."""
    frames, height, width = grid[0], grid[1] * merge, grid[2] * merge
    table = torch.randn(side**2, 5, generator=torch.Generator().manual_seed(side)).to(dtype)
    expected = pos_embed_interpolate_native(
        table.float(), frames, height, width, side, merge, torch.float32
    )
    rows = bilinear_rows((frames, height, width), side, merge, table)
    assert rows[TABLE_ROWS].dtype == torch.int32 and rows[TABLE_WEIGHTS].dtype == dtype
    tight = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.03}
    torch.testing.assert_close(interpolated(table, rows).float(), expected, **tight)


def test_cache_is_bounded_and_drops_the_least_recently_used() -> None:
    cache = RowCache(max_bytes=3 * 40)
    made: list[tuple[int, int, int]] = []

    def make(grid: tuple[int, int, int]) -> dict[str, torch.Tensor]:
        made.append(grid)
        return {"rows": torch.zeros(10, dtype=torch.float32) + grid[1]}

    first, second, third, fourth = ((1, 2 * n, 2) for n in range(1, 5))
    for grid in (first, second, third, first, fourth):
        assert cache.get(grid, make)["rows"][0] == grid[1]
    assert cache.bytes <= 120
    cache.get(first, make)
    assert made == [first, second, third, fourth]  # first was used again before fourth came
    cache.get(second, make)
    assert made[-1] == second
    huge = cache.get((1, 2, 200), lambda grid: {"rows": torch.zeros(1000)})
    assert len(huge["rows"]) == 1000 and cache.bytes <= 120


def test_a_key_is_told_by_order_by_layout_and_since_when() -> None:
    """All of what :meth:`MetadataBuilder.parts` depends on."""
    model = managers.model("qwen2_5_vl")
    builder, grids = model._vit_builder, [(1, 4, 4), (1, 4, 8)]
    key = builder.key(grids)
    assert key is not None and key == builder.key(list(grids))
    others = [builder.key(grids[::-1]), builder.key(grids[:1])]
    with managers.backend(model, AttentionBackendEnum.TORCH_SDPA):
        others.append(builder.key(grids))
    with mock.patch.object(model.visual, "hidden_size", model.visual.hidden_size + 1):
        others.append(builder.key(grids))
    assert builder.key(grids) == key
    builder.forget()
    others.append(builder.key(grids))
    assert key not in others and len(set(others)) == len(others)


def test_position_rows_that_a_hook_made_on_the_host_go_to_the_tower() -> None:
    builder = MetadataBuilder(
        ViTGeometry(14, 2, position_rows("positions")),
        torch.nn.Linear(1, 1, device="meta"),
        position_rows=lambda grid: {"positions": torch.zeros(4, 3)},
        learned_rows=lambda grids: {},
    )
    (rows,) = builder.parts([(1, 2, 2)])["positions"]
    assert rows.device.type == "meta"
