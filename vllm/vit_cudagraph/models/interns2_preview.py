# SPDX-License-Identifier: Apache-2.0
"""InternS2, preview: the tower of Qwen3-VL."""

from vllm.model_executor.models import interns2_preview
from vllm.vit_cudagraph.models._qwen import Qwen3VLTower


class InternS2PreviewForConditionalGeneration(
    Qwen3VLTower, interns2_preview.InternS2PreviewForConditionalGeneration
):
    pass
