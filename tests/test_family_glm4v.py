# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V and GLM-4.5V: the conformance suite."""

import copy

import pytest
import torch
from families import FamilyConformance

from vllm.vit_cudagraph.positions import bicubic_rows, interpolated


class TestGlm4v(FamilyConformance):
    family = "glm4v"


class TestGlm4vMoe(FamilyConformance):
    family = "glm4v_moe"
    share = 0.05  # the same tower


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bicubic_positions_are_the_towers_own(dtype: torch.dtype) -> None:
    """Table entries and weights give what upstream's sampling gives, also past the table's size."""
    model = TestGlm4v.subject().model
    tower = copy.deepcopy(model.visual).to(dtype)
    table = tower.embeddings.position_embedding.weight
    for grid in ((1, 2, 2), (1, 4, 6), (2, 8, 8), (1, 2, 40), (3, 26, 14)):
        rows = bicubic_rows(grid, 8, tower.spatial_merge_size, table)
        theirs = tower.pos_embeds_interpolate([list(grid)]).float()
        difference = interpolated(table, rows).float() - theirs
        # A weight rounds to 8 bits in bfloat16, and so does the sum, on both sides.
        allowed = 1e-5 if dtype is torch.float32 else 0.01
        assert difference.abs().max() <= allowed * theirs.abs().max()
