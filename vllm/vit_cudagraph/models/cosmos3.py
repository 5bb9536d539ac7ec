# SPDX-License-Identifier: Apache-2.0
"""Cosmos3: the tower of Qwen3-VL."""

from vllm.model_executor.models import cosmos3
from vllm.vit_cudagraph.models._qwen import Qwen3VLTower


class Cosmos3ForConditionalGeneration(Qwen3VLTower, cosmos3.Cosmos3ForConditionalGeneration):
    pass
