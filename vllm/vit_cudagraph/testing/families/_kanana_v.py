# SPDX-License-Identifier: Apache-2.0
"""Configuration and processor that stand in for Kanana-V's, whose own are code on the hub.

They have the fields that vLLM's model reads, and Qwen2-VL's image processor does the work.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoProcessor,
    BatchFeature,
    LlamaConfig,
    PreTrainedConfig,
    ProcessorMixin,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

# vLLM looks for `smart_resize` in the module of the image processor's class.
from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
    Qwen2VLImageProcessor,
    smart_resize,
)

__all__ = ["KananaVConfig", "KananaVImageProcessor", "KananaVProcessor", "register", "smart_resize"]


class KananaVProjectorConfig(PreTrainedConfig):
    model_type = "kanana_v_projector"


class KananaVConfig(PreTrainedConfig):
    model_type = "kanana_v"
    sub_configs = {
        "text_config": LlamaConfig,
        "vision_config": Qwen2VLVisionConfig,
        "projector_config": KananaVProjectorConfig,
    }

    def __init__(self, **entries: Any) -> None:
        for name, kind in self.sub_configs.items():
            value = entries.pop(name, None)
            setattr(self, name, kind(**value) if isinstance(value, dict) else value or kind())
        super().__init__(**entries)


class KananaVImageProcessor(Qwen2VLImageProcessor):
    """One image at a time; sizes come apart from the pixels."""

    @property
    def min_pixels(self) -> int:
        return int(self.size["shortest_edge"])

    @property
    def max_pixels(self) -> int:
        return int(self.size["longest_edge"])

    def __call__(self, image: Any, **options: Any) -> BatchFeature:
        made = super().__call__(image, return_tensors="pt", **options)
        ((t, h, w),) = made["image_grid_thw"].tolist()
        sizes = {
            "vision_grid_thw": (t, h, w),
            "image_token_thw": (t, h // self.merge_size, w // self.merge_size),
        }
        return BatchFeature({"pixel_values": made["pixel_values"], "image_meta": sizes})


class KananaVProcessor(ProcessorMixin):
    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **options: Any) -> None:
        super().__init__(image_processor, tokenizer, **options)


def register() -> None:
    """Make the three known to transformers in this process."""
    AutoConfig.register(KananaVConfig.model_type, KananaVConfig, exist_ok=True)
    AutoImageProcessor.register(
        KananaVConfig, fast_image_processor_class=KananaVImageProcessor, exist_ok=True
    )
    AutoProcessor.register(KananaVConfig, KananaVProcessor, exist_ok=True)
