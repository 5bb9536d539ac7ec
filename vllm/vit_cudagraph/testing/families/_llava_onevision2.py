# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of LLaVA-OneVision-2 brings as its own code: small stand-ins of ours."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchFeature, PreTrainedConfig, Qwen3Config


class LlavaOnevision2Config(PreTrainedConfig):
    model_type = "llava_onevision2"

    def __init__(
        self,
        vision_config: dict[str, Any] | None = None,
        text_config: dict[str, Any] | None = None,
        image_token_id: int = 0,
        video_token_id: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vision_config = PreTrainedConfig(**(vision_config or {}))
        self.text_config = Qwen3Config(**(text_config or {}))
        self.image_token_id, self.video_token_id = image_token_id, video_token_id


class LlavaOnevision2VideoProcessor:
    """vLLM makes one, and gives frames to the image processor."""

    def __init__(self, **kwargs: Any) -> None:
        self.image_processor = kwargs["image_processor"]


class LlavaOnevision2Processor:
    """Text with one ``<|image_pad|>`` a merged token; pixels, grids, and a position for each patch.

    The frame number of a picture is its place in the call.
    """

    def __init__(
        self, image_processor: Any, tokenizer: Any, video_processor: Any, **_: Any
    ) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.video_processor = video_processor

    def __call__(
        self, text: str, images: Sequence[Any] | None = None, **kwargs: Any
    ) -> BatchFeature:
        made: dict[str, Any] = {}
        if images:
            made = dict(self.image_processor(images=list(images), return_tensors="pt"))
            merge = self.image_processor.merge_size
            grids = made["image_grid_thw"].tolist()
            made["patch_positions"] = torch.cat(
                [patch_positions(n, grid, merge) for n, grid in enumerate(grids)]
            )
            first, *rest = text.split("<|image_pad|>")
            counts = [t * h * w // merge**2 for t, h, w in grids]
            text = first + "".join(
                "<|image_pad|>" * n + part for n, part in zip(counts, rest, strict=True)
            )
        return BatchFeature(made | dict(self.tokenizer([text], return_tensors="pt")))


def patch_positions(frame: int, grid: Sequence[int], merge: int) -> torch.Tensor:
    """(frame, row, column) of each patch, patches of a merged token next to each other."""
    _, height, width = grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    table = torch.stack([torch.full_like(rows, frame), rows, columns], dim=-1)
    blocks = table.unflatten(1, (-1, merge)).unflatten(0, (-1, merge)).transpose(1, 2)
    return blocks.flatten(0, 3)
