# SPDX-License-Identifier: Apache-2.0
"""What the checkpoints of PaddleOCR-VL and Keye have in common: patches that come row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.feature_extraction_utils import BatchFeature
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.processing_utils import ProcessorMixin

from vllm.vit_cudagraph.geometry import ViTGeometry
from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _remote
from vllm.vit_cudagraph.testing.strategies import Batch

PATCH, MERGE = 14, 2


def vision() -> dict[str, Any]:
    """Sizes of a SigLIP tower of three layers whose table of positions has 5 x 5 entries."""
    return {
        "hidden_size": checkpoints.VISION_HIDDEN,
        "intermediate_size": 2 * checkpoints.VISION_HIDDEN,
        "num_hidden_layers": 3,
        "num_attention_heads": checkpoints.VISION_HEADS,
        "num_channels": 3,
        "image_size": 5 * PATCH,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0.0,
    }


def make_kwargs(model: Any, batch: Batch) -> dict[str, Any]:
    """Pixels ``[N, 3, patch, patch]`` of all items, and grids."""
    geometry, tower = model.vit_declared, model.vit_tower()
    rows = (sum(geometry.patches(grid) for grid in batch.grids), *geometry.pixel_row)
    generator = torch.Generator().manual_seed(batch.seed)
    pixels = torch.randn(rows, generator=generator).to(tower.device, tower.dtype)
    grids = torch.tensor([list(grid) for grid in batch.grids])
    suffix = "" if batch.modality == "image" else "_videos"
    return {f"pixel_values{suffix}": pixels, f"{batch.modality}_grid_thw": grids}


class RowImageProcessor(Qwen2VLImageProcessor):
    """Patches ``[N, 3, patch, patch]``, row by row."""

    def preprocess(self, images: Any, **kwargs: Any) -> Any:
        made = super().preprocess(images, **kwargs)
        merged = made["pixel_values"].unflatten(1, (3, self.patch_size, self.patch_size))
        geometry = ViTGeometry(self.patch_size, self.merge_size, {})
        rows, first = torch.empty_like(merged), 0
        for grid in made["image_grid_thw"].tolist():
            order = torch.from_numpy(geometry.merge_order(tuple(grid))) + first
            rows[order] = merged[first : first + len(order)]
            first += len(order)
        made["pixel_values"] = rows
        return made


class KeyeProcessor(ProcessorMixin):
    """Stands in for the processors of Keye and Keye 1.5, which are code on the hub."""

    attributes = ["image_processor", "tokenizer"]
    image_token, video_token = "<|image_pad|>", "<|video_pad|>"

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **_: Any) -> None:
        super().__init__(image_processor, tokenizer)

    @classmethod
    def from_pretrained(cls, path: str, **_: Any) -> KeyeProcessor:
        square = (PATCH * MERGE) ** 2
        edges = {
            "shortest_edge": square,
            "longest_edge": checkpoints.MAX_IMAGE_TOKENS * square,
        }
        patches = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 1}
        images = RowImageProcessor(size=edges, **patches)
        return cls(images, AutoTokenizer.from_pretrained(path))

    def __call__(
        self, text: Any = None, images: Any = None, videos: Any = None, **_: Any
    ) -> BatchFeature:
        text = [text] if isinstance(text, str) else text
        made: dict[str, Any] = dict(self.tokenizer(text)) if text else {}
        if images:
            made |= dict(self.image_processor.preprocess(images))
        if videos:
            made |= self._videos(videos)
        return BatchFeature(made, tensor_type="pt")

    def _videos(self, videos: Any) -> dict[str, Any]:
        frames = [self.image_processor.preprocess(list(np.asarray(clip))) for clip in videos]
        grids = [clip["image_grid_thw"] for clip in frames]
        return {
            "pixel_values_videos": torch.cat([clip["pixel_values"] for clip in frames]),
            "video_grid_thw": self.video_grids(grids),
        }

    def video_grids(self, grids: list[torch.Tensor]) -> torch.Tensor:
        """One grid a video, of all its frames."""
        return torch.stack([torch.tensor([len(clip), *clip[0, 1:].tolist()]) for clip in grids])


class Keye1_5Processor(KeyeProcessor):
    """One grid a frame, and how many frames each video has."""

    frame_token, fast_start, fast_end = "frame ", "", ""

    def _videos(self, videos: Any) -> dict[str, Any]:
        counts = torch.tensor([len(clip) for clip in videos])
        return {**super()._videos(videos), "num_frames": counts}

    def video_grids(self, grids: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(grids)


def write_keye(path: Path, architecture: str, processor: type) -> None:
    tokenizer = checkpoints.make_tokenizer()
    config = {
        "architectures": [architecture],
        "vision_config": vision(),
        **_remote.text(len(tokenizer)),
        **_remote.token_ids(tokenizer),
    }
    _remote.write(path, tokenizer, config, processor)
