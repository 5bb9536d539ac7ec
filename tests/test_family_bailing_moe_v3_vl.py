# SPDX-License-Identifier: Apache-2.0
"""Ling-VL (Bailing)."""

from families import FamilyConformance


class TestBailingMoeV3VL(FamilyConformance):
    family = "bailing_moe_v3_vl"

    def test_projector(self) -> None:
        """Runs inside the graphs, so its weights and its width count."""
        subject, config = self.subject(), self.manager().config
        assert config.modalities == ["image"]
        assert config.out_hidden_size == subject.config.model_config.get_inputs_embeds_size()
        projector = subject.model.linear_proj.linear_fc1.weight
        assert projector.data_ptr() in subject.model.vit_weight_addresses().values()
