# SPDX-License-Identifier: Apache-2.0
"""Keye-VL: full attention within each image and each whole video."""

from vllm.model_executor.models import keye
from vllm.vit_cudagraph.models._siglip_rows import KeyeMixin


class KeyeForConditionalGeneration(KeyeMixin, keye.KeyeForConditionalGeneration):
    pass
