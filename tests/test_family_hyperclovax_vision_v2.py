# SPDX-License-Identifier: Apache-2.0
"""HyperCLOVAX SEED Think: Qwen2.5-VL's tower with a projector behind it, inside the graphs."""

import torch
from families import FamilyConformance


class TestHyperCLOVAX(FamilyConformance):
    family = "hyperclovax_vision_v2"

    def test_the_projector_belongs_to_the_graphs(self) -> None:
        """Rows have its width, and its weights are watched as the tower's are."""
        model, manager = self.subject().model, self.manager()
        assert manager.config.out_hidden_size == 64 != model.visual.out_hidden_size
        addresses = model.vit_weight_addresses()
        weight = model.mm_projector.weight
        assert addresses.pop("1.weight") == weight.data_ptr()
        kept, weight.data = weight.data, torch.clone(weight.data)
        assert model.vit_weight_addresses()["1.weight"] != kept.data_ptr()
        weight.data = kept
