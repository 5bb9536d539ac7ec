# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL."""

from vllm.model_executor.models import qwen2_5_vl
from vllm.vit_cudagraph.models._qwen2_5_tower import Qwen2_5TowerMixin
from vllm.vit_cudagraph.pruning import VideoPruningMixin


class Qwen2_5_VLForConditionalGeneration(
    Qwen2_5TowerMixin, VideoPruningMixin, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
):
    pass
