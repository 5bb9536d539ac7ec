# SPDX-License-Identifier: Apache-2.0
"""InternS1-Pro: the tower of Qwen3-VL."""

from vllm.model_executor.models import interns1_pro
from vllm.vit_cudagraph.models._qwen import Qwen3VLTower


class InternS1ProForConditionalGeneration(
    Qwen3VLTower, interns1_pro.InternS1ProForConditionalGeneration
):
    pass
