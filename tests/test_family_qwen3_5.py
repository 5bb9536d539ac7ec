# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 and Qwen3.6, dense and with experts."""

from families import FamilyConformance


class TestQwen3_5(FamilyConformance):
    family = "qwen3_5"


class TestQwen3_5Moe(FamilyConformance):
    family = "qwen3_5_moe"
