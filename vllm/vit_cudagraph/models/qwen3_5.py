# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 and Qwen3.6, dense and MoE: the tower of Qwen3-VL."""

from vllm.model_executor.models import qwen3_5
from vllm.vit_cudagraph.models._qwen import Qwen3VLTower


class Qwen3_5ForConditionalGeneration(Qwen3VLTower, qwen3_5.Qwen3_5ForConditionalGeneration):
    pass


class Qwen3_5MoeForConditionalGeneration(Qwen3VLTower, qwen3_5.Qwen3_5MoeForConditionalGeneration):
    pass
