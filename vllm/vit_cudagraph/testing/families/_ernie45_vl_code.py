# SPDX-License-Identifier: Apache-2.0
"""Stands in for the code that Ernie4.5-VL's folders on a hub bring along: the configuration, and a
processor. ``make`` of ``ernie45_vl.py`` puts this file into the folder, where transformers finds
it through ``auto_map``; so it imports nothing of this package.

The processor gives what vLLM takes from the original: patches of 8-bit values that are not yet
normalised under ``images``, images first, and all grids under ``grid_thw``. It draws no time stamps
into frames.
"""

import math
from typing import Any

import numpy as np
from PIL import Image
from transformers import BatchFeature, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin


class TinyErnieVisionConfig(PreTrainedConfig):
    model_type = "tiny_ernie_vision"


class TinyErnieConfig(PreTrainedConfig):
    """Text at the top, the tower under ``vision_config``."""

    model_type = "ernie4_5_moe_vl"
    sub_configs = {"vision_config": TinyErnieVisionConfig}

    def __init__(self, vision_config: Any = None, **text: Any) -> None:
        if not isinstance(vision_config, PreTrainedConfig):
            vision_config = TinyErnieVisionConfig(**(vision_config or {}))
        self.vision_config = vision_config
        super().__init__(**text)


class TinyErnieImageProcessor(BaseImageProcessor):
    """Pictures and frames to patches, in the order of merged tokens."""

    image_mean = [0.48145466, 0.4578275, 0.40821073]
    image_std = [0.26862954, 0.26130258, 0.27577711]
    rescale_factor = 1 / 255
    size = {"min_pixels": 28 * 28, "max_pixels": 640 * 28 * 28}
    patch_size, merge_size = 14, 2

    def patches(self, frames: Any, most_pixels: int) -> tuple[np.ndarray, list[int]]:
        """Frames of one size to patches ``[frames * rows * columns, 3 * patch ** 2]``, and the
        grid."""
        pictures = [Image.fromarray(np.asarray(frame)).convert("RGB") for frame in frames]
        size = self._size(*pictures[0].size, most_pixels)
        pixels = np.stack([np.asarray(p.resize(size, Image.Resampling.BICUBIC)) for p in pictures])
        side, merge = self.patch_size, self.merge_size
        t, rows, cols = len(pixels), size[1] // side, size[0] // side
        shape = (t, rows // merge, merge, side, cols // merge, merge, side, 3)
        blocks = pixels.reshape(shape).transpose(0, 1, 4, 2, 5, 7, 3, 6)
        return blocks.reshape(t * rows * cols, -1), [t, rows, cols]

    def _size(self, width: int, height: int, most_pixels: int) -> tuple[int, int]:
        """Multiples of a merged token, within the limits on pixels."""
        token = self.patch_size * self.merge_size
        scale = min(1.0, math.sqrt(most_pixels / (width * height)))
        across, down = (max(1, math.floor(side * scale / token)) for side in (width, height))
        return across * token, down * token


class TinyErnieProcessor(ProcessorMixin):
    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"
    spatial_conv_size = temporal_conv_size = 2
    frame_pixels = 64 * 28 * 28

    def __init__(self, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(tokenizer, chat_template=chat_template)
        self.image_processor = TinyErnieImageProcessor()

    @classmethod
    def from_pretrained(cls, path: Any, tokenizer: Any = None, **_: Any) -> "TinyErnieProcessor":
        tokenizer = tokenizer or PreTrainedTokenizerFast.from_pretrained(path)
        return cls(tokenizer, chat_template=tokenizer.chat_template)

    def __call__(
        self,
        text: Any = None,
        images: Any = (),
        videos: Any = (),
        return_tensors: str | None = None,
        **_: Any,
    ) -> BatchFeature:
        """Tokens of the text as it stands, patches and grids."""
        limit = self.image_processor.size["max_pixels"]
        made = [self.image_processor.patches([image], limit) for image in images or ()]
        for clip in videos or ():
            frames = list(np.asarray(clip))
            frames += frames[-1:] * (len(frames) % self.temporal_conv_size)
            made.append(self.image_processor.patches(frames, self.frame_pixels))
        data = dict(self.tokenizer(text))
        if made:
            data["images"] = np.concatenate([patches for patches, _ in made])
            data["grid_thw"] = np.array([grid for _, grid in made])
        return BatchFeature(data, tensor_type=return_tensors)
