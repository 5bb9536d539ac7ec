# SPDX-License-Identifier: Apache-2.0
"""PaddleOCR-VL: SigLIP with stretched positions, images alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.paddleocr_vl.image_processing_paddleocr_vl import (
    PaddleOCRVLImageProcessor,
)
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _remote, _siglip_rows
from vllm.vit_cudagraph.testing.strategies import Batch

PROCESSOR = "real"
WEIGHTS = False


def make(path: Path, seed: int) -> None:
    usual = checkpoints.make_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=usual.backend_tokenizer,
        eos_token=usual.eos_token,
        pad_token=usual.pad_token,
        extra_special_tokens={"image_token": "<|image_pad|>"},
    )
    config = AutoConfig.for_model(
        "paddleocr_vl",
        architectures=["PaddleOCRVLForConditionalGeneration"],
        vision_config=_siglip_rows.vision(),
        text_config=_remote.text(len(tokenizer)),
        dtype="float32",
        tie_word_embeddings=False,
        **_remote.token_ids(tokenizer),
    )
    config.save_pretrained(path)
    edges = {"shortest_edge": 28 * 28, "longest_edge": checkpoints.MAX_IMAGE_TOKENS * 28 * 28}
    PaddleOCRVLProcessor(PaddleOCRVLImageProcessor(size=edges), tokenizer).save_pretrained(path)


def make_kwargs(model: Any, batch: Batch) -> dict[str, Any]:
    """In one tensor (vLLM 0.33) or one an image, stacked where all have one size (0.32)."""
    made = _siglip_rows.make_kwargs(model, batch)
    if not ONE_TENSOR:
        sizes = [model.vit_declared.patches(grid) for grid in batch.grids]
        parts = made["pixel_values"].split(sizes)
        made["pixel_values"] = torch.stack(parts) if len(set(sizes)) == 1 else list(parts)
    return made


def _one_tensor() -> bool:
    from vllm.model_executor.models.paddleocr_vl import PaddleOCRVLMultiModalProcessor

    return "_postprocess_hf_mm_data" not in vars(PaddleOCRVLMultiModalProcessor)


ONE_TENSOR = _one_tensor()
