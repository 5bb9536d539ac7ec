# SPDX-License-Identifier: Apache-2.0
"""Kimi-VL: MoonViT and a text model of DeepSeek's kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _kimi, _kimi_vl_processing
from vllm.vit_cudagraph.testing.strategies import Batch
from vllm.vit_cudagraph.testing.subject import make_kwargs as usual_kwargs

PROCESSOR = (
    "Kimi-VL's processor is code in its checkpoints that no package ships; a small one of ours, "
    "which lies in the test checkpoint in the same way, stands in for it."
)
WEIGHTS = True
ENGINE = {"trust_remote_code": True}
"""The processor is code in the checkpoint, as in the published ones."""
ENVIRONMENT = {"VLLM_MLA_DISABLE": "1"}
"""vLLM's MLA on a CPU needs certain widths and a certain processor; without it the text model has
usual attention."""
SERVE = ("--trust-remote-code",)

_PROCESSING = "processing_kimi_vl"


def make(path: Path, seed: int) -> None:
    tokenizer = _kimi.make_tokenizer()
    text = _kimi.deepseek_config(tokenizer)
    _kimi.write_config(
        path,
        {
            "architectures": ["KimiVLForConditionalGeneration"],
            "model_type": "kimi_vl",
            "media_placeholder_token_id": tokenizer.convert_tokens_to_ids(_kimi.MEDIA_PAD),
            "pad_token_id": tokenizer.pad_token_id,
            "text_config": {"model_type": "deepseek_v2", **text},
            "torch_dtype": "float32",
            "vision_config": {
                "model_type": "moonvit",
                "patch_size": _kimi.PATCH_SIZE,
                "init_pos_emb_height": _kimi.TABLE_SIDES[0],
                "init_pos_emb_width": _kimi.TABLE_SIDES[1],
                "num_attention_heads": checkpoints.VISION_HEADS,
                "num_hidden_layers": _kimi.LAYERS,
                "hidden_size": _kimi.HIDDEN,
                "intermediate_size": _kimi.INTERMEDIATE,
                "merge_kernel_size": [checkpoints.MERGE_SIZE] * 2,
            },
        },
    )
    tokenizer.save_pretrained(path)
    _write_processor(path)
    _write_weights(path, text, tokenizer, seed)


def make_kwargs(model: Any, batch: Batch) -> dict[str, Any]:
    """Grids without frames, under the model's name."""
    usual = usual_kwargs(model, batch)
    return {
        "pixel_values": usual["pixel_values"],
        "image_grid_hws": usual["image_grid_thw"][:, 1:],
    }


def _write_processor(path: Path) -> None:
    shutil.copy(_kimi_vl_processing.__file__, path / f"{_PROCESSING}.py")
    auto_map = {
        "AutoProcessor": f"{_PROCESSING}.KimiVLProcessor",
        "AutoImageProcessor": f"{_PROCESSING}.KimiVLImageProcessor",
    }
    sizes = {
        "patch_size": _kimi.PATCH_SIZE,
        "merge_kernel_size": [checkpoints.MERGE_SIZE] * 2,
        "in_token_limit": checkpoints.MAX_IMAGE_TOKENS * checkpoints.MERGE_SIZE**2,
    }
    named = {"processor_class": "KimiVLProcessor", "auto_map": auto_map}
    image = {"image_processor_type": "KimiVLImageProcessor", **named, **sizes}
    (path / "preprocessor_config.json").write_text(json.dumps(image, indent=2))
    (path / "processor_config.json").write_text(json.dumps(named, indent=2))


def _write_weights(path: Path, text: dict[str, Any], tokenizer: Any, seed: int) -> None:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    language_model = DeepseekV2ForCausalLM(DeepseekV2Config(**text))
    projector = dict(zip(("linear_1", "linear_2"), _kimi.projector_layers(), strict=True))
    _kimi.save_weights(path, seed, tokenizer, language_model, multi_modal_projector=projector)
