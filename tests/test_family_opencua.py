# SPDX-License-Identifier: Apache-2.0
"""OpenCUA."""

from families import FamilyConformance


class TestOpenCUA(FamilyConformance):
    family = "opencua"

    def test_images_alone(self) -> None:
        assert self.manager().config.modalities == ["image"]
