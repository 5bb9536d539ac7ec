# SPDX-License-Identifier: Apache-2.0
"""ColQwen3 and ColQwen3.5: models for retrieval."""

from families import FamilyConformance


class TestColQwen3(FamilyConformance):
    family = "colqwen3"


class TestColQwen3_5(FamilyConformance):
    family = "colqwen3_5"
