# SPDX-License-Identifier: Apache-2.0
"""Qwen4Exp (vLLM 0.33): the tower of Qwen3-VL."""

from vllm.models import qwen4_exp  # type: ignore[attr-defined, unused-ignore]
from vllm.vit_cudagraph.models._qwen import Qwen3VLTower


class Qwen4ExpForConditionalGeneration(Qwen3VLTower, qwen4_exp.Qwen4ExpForConditionalGeneration):
    pass
