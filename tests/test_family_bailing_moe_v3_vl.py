# SPDX-License-Identifier: Apache-2.0
"""Ling-VL (Bailing)."""

from families import FamilyConformance


class TestBailingMoeV3VL(FamilyConformance):
    family = "bailing_moe_v3_vl"
