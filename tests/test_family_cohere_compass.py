# SPDX-License-Identifier: Apache-2.0
"""Cohere Compass: the conformance suite."""

from families import FamilyConformance


class TestCohereCompass(FamilyConformance):
    family = "cohere_compass"
