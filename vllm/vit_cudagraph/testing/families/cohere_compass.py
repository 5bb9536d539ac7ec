# SPDX-License-Identifier: Apache-2.0
"""Cohere Compass: images alone, learned positions, deepstack."""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing import checkpoints

PROCESSOR = "real"
WEIGHTS = False

IMAGE = "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>"
VIDEO = "<|VISION_START|><|VIDEO_PAD|><|VISION_END|>"

PATCH_SIZE = 16

TOKENS = {
    "image_token_id": "<|IMAGE_PAD|>",
    "video_token_id": "<|VIDEO_PAD|>",
    "vision_start_token_id": "<|VISION_START|>",
    "vision_end_token_id": "<|VISION_END|>",
}
"""Special tokens, by their names in the configuration."""


def make(path: Path, seed: int) -> None:
    from transformers import CohereCompassConfig

    tokenizer = checkpoints.make_tokenizer((*checkpoints.CHAT_TOKENS, *TOKENS.values()))
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    vision_config = {
        "depth": 3,
        "hidden_size": checkpoints.VISION_HIDDEN,
        "num_heads": checkpoints.VISION_HEADS,
        "intermediate_size": 2 * checkpoints.VISION_HIDDEN,
        "out_hidden_size": checkpoints.TEXT_HIDDEN,
        "patch_size": PATCH_SIZE,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 2],
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": checkpoints.TEXT_HIDDEN,
        "intermediate_size": 2 * checkpoints.TEXT_HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "rope_parameters": {"full_attention": rope},
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = CohereCompassConfig(
        vision_config=vision_config, text_config=text_config, tie_word_embeddings=True, **ids
    )
    config.architectures = ["CohereCompassForConditionalGeneration"]
    config.save_pretrained(path)
    _save_processor(path, tokenizer)


def _save_processor(path: Path, tokenizer: object) -> None:
    from transformers import (
        CohereCompassImageProcessor,
        CohereCompassProcessor,
        CohereCompassVideoProcessor,
    )

    token_pixels = (PATCH_SIZE * checkpoints.MERGE_SIZE) ** 2
    most = checkpoints.MAX_IMAGE_TOKENS * token_pixels
    size = {"shortest_edge": token_pixels, "longest_edge": most}
    processor = CohereCompassProcessor(
        CohereCompassImageProcessor(size=size, patch_size=PATCH_SIZE),
        tokenizer,
        CohereCompassVideoProcessor(patch_size=PATCH_SIZE),
        checkpoints.chat_template(IMAGE, VIDEO),
    )
    processor.save_pretrained(path)
