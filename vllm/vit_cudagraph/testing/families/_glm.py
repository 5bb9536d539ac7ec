# SPDX-License-Identifier: Apache-2.0
"""What the tiny checkpoints of the GLM-4.1V line share: tokens, sizes, the stock processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.vit_cudagraph.testing import checkpoints

IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
VIDEO = "<|begin_of_video|><|video|><|end_of_video|>"

TOKENS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
"""Special tokens, by their names in the configuration."""

PATCH_SIZE = 14
TABLE_SIDE = 8
"""Entries along each side of the table of positions."""


def make_tokenizer() -> Any:
    return checkpoints.make_tokenizer((*checkpoints.CHAT_TOKENS, *TOKENS.values()))


def make_config(model_type: str, tokenizer: Any, **text: Any) -> Any:
    """The configuration of one model of the line; ``text`` are more entries of its text model."""
    from transformers import AutoConfig

    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    vision_config = {
        "depth": 3,
        "hidden_size": checkpoints.VISION_HIDDEN,
        "num_heads": checkpoints.VISION_HEADS,
        "intermediate_size": 2 * checkpoints.VISION_HIDDEN,
        "out_hidden_size": checkpoints.TEXT_HIDDEN,
        "patch_size": PATCH_SIZE,
        "image_size": TABLE_SIDE * PATCH_SIZE,
        "spatial_merge_size": checkpoints.MERGE_SIZE,
        "temporal_patch_size": checkpoints.TEMPORAL_PATCH_SIZE,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": checkpoints.TEXT_HIDDEN,
        "intermediate_size": 2 * checkpoints.TEXT_HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "rope_parameters": rope | {"mrope_section": [2, 3, 3]},
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return AutoConfig.for_model(
        model_type, vision_config=vision_config, text_config=text_config | text, **ids
    )


def save_processor(path: Path, tokenizer: Any, processor: str = "Glm4v") -> None:
    """The line's own processor, for small pictures."""
    import transformers

    token_pixels = checkpoints.TEMPORAL_PATCH_SIZE * (PATCH_SIZE * checkpoints.MERGE_SIZE) ** 2
    most = checkpoints.MAX_IMAGE_TOKENS * token_pixels
    size = {"shortest_edge": token_pixels, "longest_edge": most}
    made = getattr(transformers, f"{processor}Processor")(
        getattr(transformers, f"{processor}ImageProcessor")(size=size),
        tokenizer,
        getattr(transformers, f"{processor}VideoProcessor")(size=size),
        checkpoints.chat_template(IMAGE, VIDEO),
    )
    made.save_pretrained(path)


def make_without_weights(
    model_type: str, path: Path, *, processor: str = "Glm4v", **text: Any
) -> None:
    """Everything but weights; ``processor`` is the beginning of its classes' names."""
    tokenizer = make_tokenizer()
    config = make_config(model_type, tokenizer, **text)
    config.architectures = [type(config).__name__.replace("Config", "ForConditionalGeneration")]
    config.save_pretrained(path)
    save_processor(path, tokenizer, processor)


def make_with_weights(model_type: str, path: Path, seed: int) -> None:
    """A whole checkpoint, with random weights."""
    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = make_tokenizer()
    config = make_config(model_type, tokenizer)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    checkpoints.fill_weights(model, tokenizer, seed)
    with checkpoints.no_progress_bar():
        model.save_pretrained(path)
    save_processor(path, tokenizer)
