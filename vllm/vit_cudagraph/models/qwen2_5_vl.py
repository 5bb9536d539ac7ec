# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL: most layers attend within windows, some within each frame."""

from vllm.model_executor.models import qwen2_5_vl
from vllm.vit_cudagraph.models._qwen import Qwen2_5VLTower


class Qwen2_5_VLForConditionalGeneration(
    Qwen2_5VLTower, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
):
    pass
