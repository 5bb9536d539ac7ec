# SPDX-License-Identifier: Apache-2.0
"""InternS2 Mobius: the tower of Qwen3-VL."""

from vllm.model_executor.models import interns2_mobius
from vllm.vit_cudagraph.models._qwen import Qwen3VLTower


class InternS2MobiusForConditionalGeneration(
    Qwen3VLTower, interns2_mobius.InternS2MobiusForConditionalGeneration
):
    pass
