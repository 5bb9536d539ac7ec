# SPDX-License-Identifier: Apache-2.0
"""ColQwen3 and its like, for retrieval: the tower of Qwen3-VL."""

from vllm.model_executor.models import colqwen3
from vllm.vit_cudagraph.models._qwen import Qwen3VLTower


class ColQwen3Model(Qwen3VLTower, colqwen3.ColQwen3Model):
    pass
