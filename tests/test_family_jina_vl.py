# SPDX-License-Identifier: Apache-2.0
"""Jina VL reranker."""

from families import FamilyConformance


class TestJinaVL(FamilyConformance):
    family = "jina_vl"
