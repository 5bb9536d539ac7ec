# SPDX-License-Identifier: Apache-2.0
"""OpenPangu-VL: windows, a merger for each of two layers, images normalised on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _remote
from vllm.vit_cudagraph.testing.strategies import Batch

PROCESSOR = (
    "Qwen2.5-VL's processor, whose images keep their numbers and one frame, "
    "since the family's own is code on the hub"
)
WEIGHTS = False
ENGINE = {**_remote.ENGINE, "dtype": "bfloat16"}
"""vLLM's class rounds an image's pixels to bfloat16 whatever the model's dtype."""


class RawImageProcessor(Qwen2VLImageProcessor):
    """Patches of one frame, as the picture has them; the model normalises them."""

    def preprocess(self, images: Any, **kwargs: Any) -> Any:
        made = super().preprocess(images, **kwargs | {"do_rescale": False, "do_normalize": False})
        shape = (3, self.temporal_patch_size, self.patch_size**2)
        made["pixel_values"] = made["pixel_values"].unflatten(1, shape)[:, :, 0].flatten(1)
        return made


class OpenPanguVLProcessor(Qwen2_5_VLProcessor):
    vision_start_token, vision_end_token = "<|vision_start|>", "<|vision_end|>"

    @classmethod
    def from_pretrained(cls, path: str, **kwargs: Any) -> OpenPanguVLProcessor:
        usual = checkpoints.make_processor("qwen2_5_vl", AutoTokenizer.from_pretrained(path))
        entries = usual.image_processor
        patches = {n: getattr(entries, n) for n in ("patch_size", "merge_size", "size")}
        raw = RawImageProcessor(temporal_patch_size=entries.temporal_patch_size, **patches)
        return cls(raw, usual.tokenizer, usual.video_processor)


def make(path: Path, seed: int) -> None:
    tokenizer = checkpoints.make_tokenizer()
    vision = {
        "depth": 4,
        "hidden_size": checkpoints.VISION_HIDDEN,
        "intermediate_size": 2 * checkpoints.VISION_HIDDEN,
        "num_heads": checkpoints.VISION_HEADS,
        "hidden_act": "gelu",
        "in_channels": 3,
        "out_hidden_size": 48,
        "patch_size": 14,
        "spatial_merge_size": checkpoints.MERGE_SIZE,
        "temporal_patch_size": checkpoints.TEMPORAL_PATCH_SIZE,
        "window_size": 112,
        "fullatt_block_indexes": [1, 3],
        "mm_unit_vision_select_layer": [-1, -3],
        "rms_norm_eps": 1e-6,
    }
    config = {
        "architectures": ["OpenPanguVLForConditionalGeneration"],
        "vision_config": vision,
        **_remote.text(len(tokenizer)),
        **_remote.token_ids(tokenizer),
    }
    _remote.write(path, tokenizer, config, OpenPanguVLProcessor)


def make_kwargs(model: Any, batch: Batch) -> dict[str, Any]:
    """Images of numbers from 0 to 255 and one frame; videos normalised."""
    geometry, tower = model.vit_declared, model.vit_tower()
    patches = sum(geometry.patches(grid) for grid in batch.grids)
    generator = torch.Generator().manual_seed(batch.seed)
    if batch.modality == "image":
        name, shape = "pixel_values", (patches, geometry.in_channels * geometry.patch_size**2)
        pixels = torch.randint(0, 256, shape, generator=generator)
    else:
        name, shape = "pixel_values_videos", (patches, *geometry.pixel_row)
        pixels = torch.randn(shape, generator=generator)
    return {
        name: pixels.to(tower.device, tower.dtype),
        f"{batch.modality}_grid_thw": torch.tensor([list(grid) for grid in batch.grids]),
    }
