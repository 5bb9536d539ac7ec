# SPDX-License-Identifier: Apache-2.0
"""Kimi-K2.5: MoonViT with pooled frames, a text model of DeepSeek's kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _kimi
from vllm.vit_cudagraph.testing.families.kimi_vl import ENVIRONMENT as ENVIRONMENT
from vllm.vit_cudagraph.testing.strategies import Batch
from vllm.vit_cudagraph.testing.subject import make_kwargs as usual_kwargs

PROCESSOR = "real"
WEIGHTS = True
SERVE = ()
FRAMES = 4
"""Most frames of a chunk."""


def make(path: Path, seed: int) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    tokenizer = _kimi.make_tokenizer("<|kimi_k25_video_placeholder|>")
    text = _kimi.deepseek_config(tokenizer)
    _kimi.write_config(
        path,
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "image_token_id": tokenizer.convert_tokens_to_ids(_kimi.MEDIA_PAD),
            "use_unified_vision_chunk": True,
            "video_placeholder": "<|kimi_k25_video_placeholder|>",
            "tie_word_embeddings": False,
            "text_config": {"model_type": "deepseek_v3", **text},
            "dtype": "float32",
            "vision_config": {
                "model_type": "kimi_k25_vision",
                "patch_size": _kimi.PATCH_SIZE,
                "pos_emb_height": _kimi.TABLE_SIDES[0],
                "pos_emb_width": _kimi.TABLE_SIDES[1],
                "pos_emb_time": FRAMES,
                "num_attention_heads": checkpoints.VISION_HEADS,
                "num_hidden_layers": _kimi.LAYERS,
                "hidden_size": _kimi.HIDDEN,
                "intermediate_size": _kimi.INTERMEDIATE,
                "merge_kernel_size": [checkpoints.MERGE_SIZE] * 2,
            },
        },
    )
    tokenizer.save_pretrained(path)
    save_processor(path)
    language_model = DeepseekV3ForCausalLM(DeepseekV3Config(**text))
    projector = nn.ModuleDict(dict(zip("02", _kimi.projector_layers(), strict=True)))
    parts = {"proj": projector}
    _kimi.save_weights(path, seed, tokenizer, language_model, mm_projector=parts)


def save_processor(path: Path) -> None:
    """What vLLM's own image processor reads."""
    settings = {
        "patch_size": _kimi.PATCH_SIZE,
        "merge_kernel_size": checkpoints.MERGE_SIZE,
        "temporal_merge_kernel_size": FRAMES,
        "in_patch_limit": checkpoints.MAX_IMAGE_TOKENS * checkpoints.MERGE_SIZE**2,
        "in_patch_limit_each_frame": checkpoints.MAX_FRAME_TOKENS * checkpoints.MERGE_SIZE**2,
        "in_patch_limit_video": None,
        "patch_limit_on_one_side": 512,
        "fixed_output_tokens": None,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "sample_fps": 2.0,
    }
    config = {"image_processor_type": "KimiK25VisionProcessor", "media_proc_cfg": settings}
    (path / "preprocessor_config.json").write_text(json.dumps(config, indent=2))


def make_kwargs(model: Any, batch: Batch) -> dict[str, Any]:
    """Under the names that the model has for images and chunks alike."""
    pixels, grids = usual_kwargs(model, batch).values()
    return {"pixel_values": pixels, "grid_thws": grids}
