# SPDX-License-Identifier: Apache-2.0
"""EXAONE-4.5: the tower of Qwen2.5-VL with fewer heads for keys and values."""

from vllm.model_executor.models import exaone4_5
from vllm.vit_cudagraph.models._qwen import Qwen2_5VLTower


class Exaone4_5_ForConditionalGeneration(
    Qwen2_5VLTower, exaone4_5.Exaone4_5_ForConditionalGeneration
):
    pass
