# SPDX-License-Identifier: Apache-2.0
"""Cosmos3."""

from families import FamilyConformance


class TestCosmos3(FamilyConformance):
    family = "cosmos3"
