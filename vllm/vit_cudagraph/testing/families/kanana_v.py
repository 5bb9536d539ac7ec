# SPDX-License-Identifier: Apache-2.0
"""Kanana-V: Qwen2-VL's tower without its merger, then convolutions over each image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.vit_cudagraph.testing import checkpoints, subject
from vllm.vit_cudagraph.testing.families import _kanana_v
from vllm.vit_cudagraph.testing.strategies import Batch

PROCESSOR = (
    "Kanana-V's own is code on the hub; a small one of ours around Qwen2-VL's image processor "
    "stands in for it."
)
WEIGHTS = False


def make(path: Path, seed: int) -> None:
    _kanana_v.register()
    # vLLM takes the token after the end of a message for that of an image.
    tokenizer = checkpoints.make_tokenizer((*checkpoints.CHAT_TOKENS, "<|image_pad|>", "<image>"))
    config = _kanana_v.KananaVConfig(
        vision_config={
            "depth": 3,
            "embed_dim": checkpoints.VISION_HIDDEN,
            "hidden_size": checkpoints.TEXT_HIDDEN,
            "num_heads": checkpoints.VISION_HEADS,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": checkpoints.MERGE_SIZE,
            "temporal_patch_size": checkpoints.TEMPORAL_PATCH_SIZE,
        },
        projector_config={
            "depth": 1,
            "mlp_depth": 2,
            "encoder_hidden_size": checkpoints.VISION_HIDDEN,
            "hidden_size": 32,
            "output_hidden_size": checkpoints.TEXT_HIDDEN,
            "merge_size": checkpoints.MERGE_SIZE,
            "pos_emb": True,
            "pos_emb_size": 64,
            "feature_layer_index": -1,
        },
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": checkpoints.TEXT_HIDDEN,
            "intermediate_size": 2 * checkpoints.TEXT_HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32768,
            "eos_token_id": tokenizer.eos_token_id,
        },
        architectures=["KananaVForConditionalGeneration"],
    )
    config.save_pretrained(path)
    token_pixels = (14 * checkpoints.MERGE_SIZE) ** 2
    size = {
        "shortest_edge": token_pixels,
        "longest_edge": checkpoints.MAX_IMAGE_TOKENS * token_pixels,
    }
    template = checkpoints.chat_template("<image>")
    processor = _kanana_v.KananaVProcessor(
        _kanana_v.KananaVImageProcessor(size=size), tokenizer, chat_template=template
    )
    processor.save_pretrained(path)


def make_kwargs(model: Any, batch: Batch) -> dict[str, Any]:
    kwargs = subject.make_kwargs(model, batch)
    kwargs["vision_grid_thw"] = kwargs.pop("image_grid_thw")
    return kwargs
