# SPDX-License-Identifier: Apache-2.0
"""LLaVA-OneVision-2: two vision layers."""

import json
from pathlib import Path
from typing import Any

import torch

from vllm.vit_cudagraph.testing.checkpoints import make_tokenizer
from vllm.vit_cudagraph.testing.strategies import Batch

PROCESSOR = (
    "a small one of ours around Qwen2-VL's image processor, since the published one is remote code"
)
WEIGHTS = False
ENGINE = {"trust_remote_code": True}

CODE = {
    "configuration_llava_onevision2": "LlavaOnevision2Config",
    "processing_llava_onevision2": "LlavaOnevision2Processor",
    "video_processing_llava_onevision2": "LlavaOnevision2VideoProcessor",
}
"""Modules that vLLM and transformers ask a checkpoint for, and the class in each."""

VISION = {
    "patch_size": 14,
    "spatial_merge_size": 2,
    "hidden_size": 64,
    "intermediate_size": 66,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "frame_windows_size": 4,
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def make(path: Path, seed: int) -> None:
    from transformers import Qwen2VLImageProcessor

    tokenizer, ours = make_tokenizer(), f"{__package__}._llava_onevision2"
    for module, name in CODE.items():
        (path / f"{module}.py").write_text(f"from {ours} import {name} as {name}\n")
    config = {
        "architectures": ["LlavaOnevision2ForConditionalGeneration"],
        "model_type": "llava_onevision2",
        "auto_map": {"AutoConfig": "configuration_llava_onevision2.LlavaOnevision2Config"},
        "vision_config": VISION,
        "text_config": TEXT | {"vocab_size": len(tokenizer)},
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    }
    (path / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(path)
    Qwen2VLImageProcessor(
        temporal_patch_size=1, size={"shortest_edge": 28**2, "longest_edge": 640 * 28**2}
    ).save_pretrained(path)


def make_kwargs(model: Any, batch: Batch) -> dict[str, Any]:
    """Random pixels and positions; a video has a grid for each frame."""
    tower, grids = model.vit_tower(), batch.grids
    patches = sum(t * h * w for t, h, w in grids)
    columns = tower.embeddings.in_channels * tower.embeddings.patch_size**2
    generator = torch.Generator().manual_seed(batch.seed)
    pixels = torch.randn((patches, columns), generator=generator).to(tower.device, tower.dtype)
    positions = torch.randint(0, 100_000, (patches, 3), generator=generator).to(tower.device)
    if batch.modality == "image":
        grid_thw = torch.tensor([list(grid) for grid in grids])
        return {"pixel_values": pixels, "patch_positions": positions, "image_grid_thw": grid_thw}
    return {
        "pixel_values_videos": pixels,
        "patch_positions_videos": positions,
        "video_grid_thw": torch.tensor([[1, h, w] for t, h, w in grids for _ in range(t)]),
        "video_num_frames": torch.tensor([t for t, _, _ in grids]),
    }
