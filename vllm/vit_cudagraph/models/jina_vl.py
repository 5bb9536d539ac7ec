# SPDX-License-Identifier: Apache-2.0
"""Jina VL reranker: Qwen2-VL with a score for an answer."""

from vllm.model_executor.models import jina_vl
from vllm.vit_cudagraph.models.qwen2_vl import Qwen2VLForConditionalGeneration


class JinaVLForSequenceClassification(
    Qwen2VLForConditionalGeneration, jina_vl.JinaVLForSequenceClassification
):
    pass
