# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3: images through Kimi-K2.5's tower."""

from vllm.models import kimi_k3
from vllm.vit_cudagraph.models._moonvit import MoonViT3dMixin


class KimiK3ForConditionalGeneration(MoonViT3dMixin, kimi_k3.KimiK3ForConditionalGeneration):
    pass
