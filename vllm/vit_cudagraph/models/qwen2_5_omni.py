# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's thinker: Qwen2.5-VL's tower. Audio has a tower of its own and runs eagerly."""

from vllm.model_executor.models import qwen2_5_omni_thinker
from vllm.vit_cudagraph.models._qwen import Qwen2_5TowerMixin


class Qwen2_5OmniThinkerForConditionalGeneration(
    Qwen2_5TowerMixin, qwen2_5_omni_thinker.Qwen2_5OmniThinkerForConditionalGeneration
):
    pass
