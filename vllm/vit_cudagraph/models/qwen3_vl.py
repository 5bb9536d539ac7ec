# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL, dense and MoE: full attention within each frame, learned positions, deepstack."""

from vllm.model_executor.models import qwen3_vl, qwen3_vl_moe
from vllm.vit_cudagraph.models._qwen import Qwen3VLTower


class Qwen3VLForConditionalGeneration(Qwen3VLTower, qwen3_vl.Qwen3VLForConditionalGeneration):
    pass


class Qwen3VLMoeForConditionalGeneration(
    Qwen3VLTower, qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration
):
    pass
