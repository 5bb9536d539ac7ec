# SPDX-License-Identifier: Apache-2.0
"""Ovis2.5: SigLIP2 with windows and learned positions, a small visual vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, SiglipImageProcessor

from vllm.model_executor.models.ovis2_5 import INDICATOR_IDS
from vllm.transformers_utils.processors.ovis2_5 import Ovis2_5Processor
from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _remote
from vllm.vit_cudagraph.testing.strategies import Batch

PROCESSOR = "real"
WEIGHTS = False
ENGINE = _remote.ENGINE

VISUAL_WORDS = 96


def make(path: Path, seed: int) -> None:
    write(path, "Ovis2_5")


def write(path: Path, architecture: str) -> None:
    tokenizer = _long_tokenizer()
    vision = {
        "model_type": "siglip2_navit",
        "hidden_size": checkpoints.VISION_HIDDEN,
        "intermediate_size": 2 * checkpoints.VISION_HIDDEN,
        "num_hidden_layers": 3,
        "num_attention_heads": checkpoints.VISION_HEADS,
        "num_channels": 3,
        "num_patches": -1,
        "image_size": 112,
        "patch_size": 16,
        "hidden_stride": 2,
        "temporal_patch_size": 1,
        "window_size": 96,
        "fullatt_block_indexes": "1",
        "preserve_original_pe": True,
        "use_rope": True,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0.0,
    }
    # Its vocabulary is the tokenizer's small part: no test of the tower asks for more.
    text = _remote.text(checkpoints.VOCAB_SIZE)
    text |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    config = {
        "architectures": [architecture],
        "hidden_size": text["hidden_size"],
        "visual_vocab_size": VISUAL_WORDS,
        "vit_config": vision,
        "text_config": text,
    }
    _remote.write(path, tokenizer, config, None)
    Ovis2_5Processor(SiglipImageProcessor(), tokenizer).save_pretrained(path)


def _long_tokenizer() -> Any:
    """The tokenizer of the other checkpoints, with so many words that the tokens which Ovis adds
    get the numbers that vLLM's class knows them by."""
    short = checkpoints.make_tokenizer()
    described = json.loads(short.backend_tokenizer.to_str())
    words = described["model"]["vocab"]
    before = ("<image>", "<video>", "<ovis_visual_atom>")
    for number in range(len(words), INDICATOR_IDS[0] - len(before)):
        words[f"<word {number}>"] = number
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)),
        eos_token=short.eos_token,
        pad_token=short.pad_token,
        additional_special_tokens=list(checkpoints.SPECIAL_TOKENS[1:]),
        model_max_length=short.model_max_length,
    )


def make_kwargs(model: Any, batch: Batch) -> dict[str, Any]:
    """One tensor an item, stacked where all have one size, as vLLM batches them."""
    geometry, tower = model.vit_declared, model.vit_tower()
    generator = torch.Generator().manual_seed(batch.seed)
    prefix = "" if batch.modality == "image" else "video_"

    def pixels(grid: tuple[int, int, int]) -> torch.Tensor:
        shape = (geometry.patches(grid), *geometry.pixel_row)
        return torch.randn(shape, generator=generator).to(tower.device, tower.dtype)

    def marks(grid: tuple[int, int, int]) -> torch.Tensor:
        # vLLM's class cuts three for an item of one token, where the processor makes two; the
        # processor never makes such an item.
        count = 3 if geometry.output_tokens(grid) == 1 else 2
        return VISUAL_WORDS - 4 + torch.arange(count, device=tower.device)

    return {
        f"{prefix}pixel_values": _batched([pixels(grid) for grid in batch.grids]),
        f"{prefix}grids": torch.tensor([[list(grid)] for grid in batch.grids], device=tower.device),
        f"{prefix}indicator_tokens": _batched([marks(grid) for grid in batch.grids]),
    }


def _batched(parts: Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    same = len({part.shape for part in parts}) == 1
    return torch.stack(list(parts)) if same else list(parts)
