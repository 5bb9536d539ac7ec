# SPDX-License-Identifier: Apache-2.0
"""A processor for tiny Kimi-VL checkpoints, which take this file along.

It stands in for the one that Kimi-VL's own checkpoints bring as code of theirs, and no package
ships. It does what vLLM's model expects of that: a picture is shrunk where it has too many patches,
padded at its right and lower side to whole merged tokens, and cut into patches row by row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import BaseImageProcessor, BatchFeature, ProcessorMixin


class KimiVLImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values", "image_grid_hws"]

    def __init__(
        self,
        patch_size: int = 14,
        merge_kernel_size: Sequence[int] = (2, 2),
        in_token_limit: int = 4096,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.merge_kernel_size = list(merge_kernel_size)
        self.in_token_limit = in_token_limit

    def preprocess(self, images: Any, return_tensors: Any = None, **_: Any) -> BatchFeature:
        images = images if isinstance(images, list) else [images]
        patches, grids = zip(*map(self._patches, images), strict=True)
        pixels = torch.from_numpy(np.concatenate(patches))
        made = {"pixel_values": pixels, "image_grid_hws": torch.tensor(grids)}
        return BatchFeature(made, tensor_type=return_tensors)

    def _patches(self, image: Any) -> tuple[np.ndarray, tuple[int, int]]:
        image = image.convert("RGB")
        side, (width, height) = self.patch_size, image.size
        count = (width // side) * (height // side)
        if count > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / count)
            width, height = int(width * scale), int(height * scale)
            image = image.resize((width, height))
        down, across = (side * merge for merge in self.merge_kernel_size)
        values = np.asarray(image, dtype=np.float32) / 127.5 - 1
        values = np.pad(values, ((0, -height % down), (0, -width % across), (0, 0)))
        rows, columns = values.shape[0] // side, values.shape[1] // side
        squares = values.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
        return squares.reshape(-1, 3, side, side), (rows, columns)


class KimiVLProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"
    image_token = "<|media_pad|>"

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(
        self, images: Any = None, text: Any = None, return_tensors: Any = None, **_: Any
    ) -> BatchFeature:
        made: dict[str, Any] = {}
        if images is not None:
            made = dict(self.image_processor.preprocess(images, return_tensors=return_tensors))
        if text is not None:
            texts = [text] if isinstance(text, str) else list(text)
            made |= self.tokenizer(self._filled(texts, made), return_tensors=return_tensors)
        return BatchFeature(made, tensor_type=return_tensors)

    def _filled(self, texts: list[str], made: Mapping[str, Any]) -> list[str]:
        """Each placeholder as often as its image has merged tokens."""
        merged = math.prod(self.image_processor.merge_kernel_size)
        counts = iter(int(h * w) // merged for h, w in made.get("image_grid_hws", ()))
        return ["".join(self._parts(text, counts)) for text in texts]

    def _parts(self, text: str, counts: Iterator[int]) -> Iterator[str]:
        first, *others = text.split(self.image_token)
        yield first
        for part in others:
            yield self.image_token * next(counts, 1) + part
