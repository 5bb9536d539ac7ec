# SPDX-License-Identifier: Apache-2.0
"""Cosmos3 and Cosmos3-Edge."""

from families import FamilyConformance


class TestCosmos3(FamilyConformance):
    family = "cosmos3"


class TestCosmos3Edge(FamilyConformance):
    family = "cosmos3_edge"
