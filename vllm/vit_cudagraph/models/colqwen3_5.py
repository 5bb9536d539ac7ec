# SPDX-License-Identifier: Apache-2.0
"""ColQwen3.5, for retrieval: the tower of Qwen3-VL."""

from vllm.model_executor.models import colqwen3_5
from vllm.vit_cudagraph.models._qwen import Qwen3VLTower


class ColQwen3_5Model(Qwen3VLTower, colqwen3_5.ColQwen3_5Model):
    pass
