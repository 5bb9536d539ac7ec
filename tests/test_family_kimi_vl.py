# SPDX-License-Identifier: Apache-2.0
"""Kimi-VL: the conformance suite, its metadata against the tower's own, its checkpoint."""

from typing import Any

import pytest
import torch
from families import FamilyConformance, family_config, family_subject

from vllm.vit_cudagraph.positions import interpolated, resized_rows
from vllm.vit_cudagraph.testing import models

GRIDS = [(1, 8, 6), (1, 2, 2), (1, 4, 10), (1, 20, 4), (1, 2, 120)]
"""The first is the table's own shape."""


class TestKimiVL(FamilyConformance):
    family = "kimi_vl"


def test_metadata_is_the_towers_own() -> None:
    model: Any = family_subject("kimi_vl").model
    ours = model.vit_metadata(GRIDS, torch.device("cpu"))
    theirs = model.vision_tower.prepare_encoder_metadata([grid[1:] for grid in GRIDS])
    table = model.vision_tower.patch_embed.pos_emb.weight
    theirs_positions = theirs.pop("pos_embeds")
    torch.testing.assert_close(interpolated(table.flatten(0, 1), ours), theirs_positions)
    for name, rows in theirs.items():
        assert torch.equal(ours[name], rows) and ours[name].dtype == rows.dtype, name


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("shape", [(8, 6), (1, 1), (3, 40), (31, 2), (1, 6), (64, 64)])
def test_resized_rows_are_torchs_interpolation(mode: str, shape: tuple[int, int]) -> None:
    table = torch.randn(8, 6, 5, generator=torch.Generator().manual_seed(0))
    resized = torch.nn.functional.interpolate(table.permute(2, 0, 1)[None], size=shape, mode=mode)
    expected = resized[0].permute(1, 2, 0).flatten(0, 1)
    rows = resized_rows((2, *shape), table, mode)
    torch.testing.assert_close(interpolated(table.flatten(0, 1), rows), expected.repeat(2, 1))


def test_a_table_smaller_than_the_kernel() -> None:
    table = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0))
    resized = torch.nn.functional.interpolate(
        table.permute(2, 0, 1)[None], size=(6, 4), mode="bicubic"
    )
    rows = resized_rows((1, 6, 4), table, "bicubic")
    expected = resized[0].permute(1, 2, 0).flatten(0, 1)
    torch.testing.assert_close(interpolated(table.flatten(0, 1), rows), expected)


def test_repacked_grids_are_the_models_own() -> None:
    subject = family_subject("kimi_vl")
    model: Any = subject.model
    kwargs = {"pixel_values": torch.zeros(12, 3, 14, 14), "image_grid_hws": torch.tensor([[2, 4]])}
    kwargs["image_grid_hws"] = torch.tensor([[2, 4], [2, 2]])
    chosen = model.vit_repack(kwargs, [1])
    assert chosen["image_grid_hws"] == [(2, 2)] and len(chosen["pixel_values"]) == 4
    assert model.vit_inputs(chosen).grids == [(1, 2, 2)]


def test_weights_of_the_projector_are_watched() -> None:
    """It is inside the graph, which reads them where they lay at capture."""
    model: Any = family_subject("kimi_vl").model
    addresses = model.vit_weight_addresses().values()
    assert model.multi_modal_projector.linear_2.weight.data_ptr() in addresses
    assert model.vision_tower.patch_embed.pos_emb.weight.data_ptr() in addresses


def test_the_checkpoint_has_every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    config = family_config("kimi_vl")
    config = models.with_vision(config, {})

    def fill(model: Any) -> None:
        for weight in model.parameters():
            weight.data.fill_(float("nan"))
        models.load_weights(config)(model)

    model = models.build_model(config, fill=fill)
    missing = [name for name, weight in model.named_parameters() if weight.isnan().any()]
    assert not missing
