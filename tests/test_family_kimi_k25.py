# SPDX-License-Identifier: Apache-2.0
"""Kimi-K2.5: the conformance suite over images, and chunks of videos beside them."""

from typing import Any
from unittest import mock

import pytest
import torch
from families import FamilyConformance, family_config, family_subject

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.metadata import AttentionLayout
from vllm.vit_cudagraph.positions import interpolated
from vllm.vit_cudagraph.testing import models
from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings
from vllm.vit_cudagraph.testing.subject import check_batch

IMAGES = [(1, 8, 6), (1, 2, 2), (1, 4, 10), (1, 20, 4), (1, 2, 120)]
CHUNKS = [(1, 8, 6), (4, 4, 6), (1, 4, 4), (2, 8, 6), (3, 2, 2)]


class TestKimiK25(FamilyConformance):
    family = "kimi_k25"


@pytest.mark.parametrize("grids", [CHUNKS, CHUNKS[1:2], CHUNKS[::-1]])
def test_chunks_run_eagerly_and_images_beside_them_do_not(grids: list[Any]) -> None:
    subject = family_subject("kimi_k25")
    manager = subject.manager(GraphSettings((16, 64)))
    check_batch(subject, manager, Batch("vision_chunk", grids))  # counts replays and eager items
    assert manager.statistics.replayed == sum(grid[0] == 1 for grid in grids)


def test_the_plain_eager_path_pools_frames() -> None:
    """What upstream's manager would call, were it to run the whole batch."""
    subject = family_subject("kimi_k25")
    mm_kwargs = subject.kwargs(Batch("vision_chunk", CHUNKS))
    with torch.inference_mode():
        rows = subject.model.encoder_eager_forward(mm_kwargs)
    torch.testing.assert_close(rows, torch.cat(subject.eager(mm_kwargs)))


def test_metadata_is_the_towers_own() -> None:
    model: Any = family_subject("kimi_k25").model
    tower, device = model.vision_tower, torch.device("cpu")
    ours = model.vit_metadata(IMAGES, device)
    theirs = tower.prepare_encoder_cudagraph_metadata(IMAGES, max_batch_size=None, device=device)
    table = tower.patch_embed.pos_emb.weight
    theirs_positions = theirs.pop("pos_embeds")
    torch.testing.assert_close(interpolated(table.flatten(0, 1), ours), theirs_positions)
    theirs["merge_gather_idx"] = theirs["merge_gather_idx"].flatten()
    for name, rows in theirs.items():
        if rows is None:  # sequence lengths, which FlashInfer alone reads
            assert ours[name] is None
        else:
            assert torch.equal(ours[name], rows) and ours[name].dtype == rows.dtype, name


def test_pixels_are_normalised_by_the_patch_embedding() -> None:
    model: Any = family_subject("kimi_k25").model
    buffer = model.vit_pixel_buffer(4, torch.device("cpu"), torch.float32)
    assert buffer.dtype == torch.uint8 and buffer.shape == (4, 3, 14, 14)


def test_offsets_for_flashinfer_count_in_the_attentions_width() -> None:
    tower: Any = family_subject("kimi_k25").model.vision_tower
    with mock.patch.object(tower, "attn_backend", AttentionBackendEnum.FLASHINFER):
        layout = AttentionLayout.of_tower(tower)
    layer = tower.encoder.blocks[0].attn
    assert layout.hidden_size // layout.tp_size == layer.num_heads * layer.head_size == 64


def test_the_checkpoint_has_every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    config = models.with_vision(family_config("kimi_k25"), {})

    def fill(model: Any) -> None:
        for weight in model.parameters():
            weight.data.fill_(float("nan"))
        models.load_weights(config)(model)

    model = models.build_model(config, fill=fill)
    missing = [name for name, weight in model.named_parameters() if weight.isnan().any()]
    assert not missing
