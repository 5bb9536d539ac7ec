# SPDX-License-Identifier: Apache-2.0
"""EXAONE-4.5."""

from families import FamilyConformance


class TestExaone4_5(FamilyConformance):
    family = "exaone4_5"
