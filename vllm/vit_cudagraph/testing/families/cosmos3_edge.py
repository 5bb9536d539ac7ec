# SPDX-License-Identifier: Apache-2.0
"""Cosmos3-Edge: a SigLIP2 tower, whose patches are of one frame each."""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _qwen

PROCESSOR = "real"  # vLLM's own, from 0.33 on transformers'
WEIGHTS = False


def make(path: Path, seed: int) -> None:
    try:
        from vllm.transformers_utils.processors import cosmos3_edge as processors
    except ImportError:
        import transformers as processors

    tokenizer = checkpoints.make_tokenizer()
    vision = {
        "hidden_size": checkpoints.VISION_HIDDEN,
        "intermediate_size": 2 * checkpoints.VISION_HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": checkpoints.VISION_HEADS,
        "patch_size": 16,
        "num_patches": 36,
    }
    projector = {
        "input_hidden_size": checkpoints.VISION_HIDDEN,
        "spatial_merge_size": checkpoints.MERGE_SIZE,
        "merger_intermediate_size": 2 * checkpoints.VISION_HIDDEN,
        "out_hidden_size": checkpoints.TEXT_HIDDEN,
    }
    text = _qwen.text(tokenizer)
    _qwen.write_config(
        path,
        "cosmos3_edge",
        tokenizer,
        vision_config=vision,
        projector_config=projector,
        text_config=text,
        architectures=["Cosmos3EdgeForConditionalGeneration"],
    )
    size = {"shortest_edge": 32**2, "longest_edge": checkpoints.MAX_IMAGE_TOKENS * 32**2}
    parts = {"size": size, "patch_size": 16, "merge_size": checkpoints.MERGE_SIZE}
    image = processors.Cosmos3EdgeImageProcessor(**parts)
    video = processors.Cosmos3EdgeVideoProcessor(**parts, temporal_patch_size=1)
    template = checkpoints.make_processor("qwen3_vl", tokenizer).chat_template
    processor = processors.Cosmos3EdgeProcessor(image, tokenizer, video, template)
    processor.save_pretrained(path)
    image.save_pretrained(path)
    video.save_pretrained(path)
