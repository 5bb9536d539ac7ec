# SPDX-License-Identifier: Apache-2.0
"""HyperCLOVAX SEED Think: a window layer and a full one, and a projector to a wider text model."""

from pathlib import Path
from typing import Any

from vllm.vit_cudagraph.testing.checkpoints import SPECIAL_TOKENS, make_tokenizer

PROCESSOR = "real"
WEIGHTS = False

PADS = {"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"}
BRACKETS = ("<|image_start|>", "<|image_end|>", "<|video_start|>", "<|video_end|>")
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 66,  # misaligned rows, as the published 3420
    "num_heads": 4,
    "out_hidden_size": 48,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}
TEXT = {
    "model_type": "hyperclovax",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
}


def make(path: Path, seed: int) -> None:
    from transformers import (
        HyperCLOVAXVisionV2Config,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )
    from transformers.models.hyperclovax_vision_v2.processing_hyperclovax_vision_v2 import (
        HyperCLOVAXVisionV2Processor,
    )

    tokenizer = make_tokenizer((*SPECIAL_TOKENS, *BRACKETS), **PADS)
    config = HyperCLOVAXVisionV2Config(
        vision_config=dict(VISION),
        text_config=TEXT | {"vocab_size": len(tokenizer)},
        image_token_id=tokenizer.convert_tokens_to_ids(PADS["image_token"]),
        video_token_id=tokenizer.convert_tokens_to_ids(PADS["video_token"]),
        architectures=["HCXVisionV2ForCausalLM"],
    )
    config.save_pretrained(path)
    size: dict[str, Any] = {"size": {"shortest_edge": 28**2, "longest_edge": 640 * 28**2}}
    HyperCLOVAXVisionV2Processor(
        Qwen2VLImageProcessor(**size), tokenizer, Qwen2VLVideoProcessor(**size)
    ).save_pretrained(path)
