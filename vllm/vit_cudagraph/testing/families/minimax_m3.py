# SPDX-License-Identifier: Apache-2.0
"""A tiny MiniMax-M3: tower, projector and merger; a text model of one dense layer, which vLLM
builds on a CPU and cannot run there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vllm.vit_cudagraph.testing import checkpoints

PROCESSOR = "real"
WEIGHTS = False
NOTE = "on the twin plain torch stands for the tower's two Triton kernels"

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "]<]image[>[",
    "]<]video[>[",
    "]<]start of image[>[",
    "]<]end of image[>[",
)

VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "num_channels": 3,
    "patch_size": 14,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
    # Longer clips are several attention sequences.
    "vision_segment_max_frames": 3,
}
TEXT: dict[str, Any] = {
    "model_type": "minimax_m3_text",
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 32,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rotary_dim": 16,
    "max_position_embeddings": 32768,
    "num_local_experts": 4,
    "moe_layer_freq": [0],
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 32,
        "sparse_num_index_heads": 1,
        "sparse_topk_blocks": 2,
        "sparse_block_size": 16,
        "sparse_attention_freq": [0],
    },
}


def make(path: Path, seed: int) -> None:
    """Write configuration, tokenizer and the settings of vLLM's own processors."""
    tokenizer = checkpoints.make_tokenizer(SPECIAL_TOKENS)
    tokenizer.chat_template = checkpoints.chat_template("]<]image[>[", "]<]video[>[")
    tokenizer.save_pretrained(path)
    token_id = tokenizer.convert_tokens_to_ids
    config = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "dtype": "float32",
        "vision_config": VISION,
        "text_config": TEXT | {"vocab_size": len(tokenizer), "dtype": "float32"},
        "projector_hidden_size": 80,
        "image_token_index": token_id("]<]image[>["),
        "video_token_index": token_id("]<]video[>["),
    }
    images = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    files = {
        "config.json": config,
        "preprocessor_config.json": images | {"max_pixels": checkpoints.MAX_IMAGE_TOKENS * 28**2},
        "video_preprocessor_config.json": images
        | {"max_pixels": checkpoints.MAX_FRAME_TOKENS * 28**2},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n")


# -- the tower's two Triton kernels, where there is no Triton --------------------------------------


def use_plain_kernels() -> None:
    """Let the tower compute its positions, and turn Q and K by them, in plain torch.

    vLLM has both as Triton kernels alone, which no CPU runs. 0.32 calls a function for the first,
    0.33 a layer.
    """
    from vllm.models.minimax_m3.common import vision_tower

    tower: Any = vision_tower
    tower.triton_mrope = turn_in_place
    if hasattr(tower, "VitMropeSetup"):
        tower.VitMropeSetup.forward = lambda layer, *arguments: planes(*arguments)
    else:
        tower.vit_mrope_setup = planes


def planes(
    inv_freq_t: torch.Tensor,
    inv_freq_h: torch.Tensor,
    inv_freq_w: torch.Tensor,
    grids: list[list[int]],
    merge: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[3, N, sections]``: each axis has its own section of columns, and the
    rest of its plane is never read. Here it is NaN, so that a read of it shows."""
    places = torch.cat([_places(grid, merge) for grid in grids]).float()
    angles, first = torch.full((3, len(places), 3 * len(inv_freq_t)), torch.nan), 0
    for axis, frequencies in enumerate((inv_freq_t, inv_freq_h, inv_freq_w)):
        section = slice(first, first + len(frequencies))
        angles[axis, :, section] = places[:, axis, None] * frequencies.cpu()
        first = section.stop
    return angles.cos(), angles.sin()


def _places(thw: list[int], merge: int) -> torch.Tensor:
    """Frame, row and column of each patch ``[N, 3]``, in the order of merged tokens."""
    (frames, rows, columns), axes = thw, [torch.arange(n) for n in thw]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    blocks = grid.view(frames, rows // merge, merge, columns // merge, merge, 3)
    return blocks.transpose(2, 3).reshape(-1, 3)


def turn_in_place(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sections: list[int],
    head_size: int,
    rotary_dim: int,
    mrope_interleaved: bool,
    is_neox_style: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn the first ``rotary_dim`` numbers of each head of ``[N, heads * head_size]``."""
    assert is_neox_style and not mrope_interleaved
    ends = [sum(sections[:n]) for n in range(4)]
    cos, sin = (
        torch.cat([plane[axis, :, ends[axis] : ends[axis + 1]] for axis in range(3)], dim=-1)
        for plane in (cos, sin)
    )
    for rows in (q, k):
        heads = rows.unflatten(-1, (-1, head_size))[..., :rotary_dim]
        a, b = (half.float() for half in heads.chunk(2, dim=-1))
        turned = (a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None])
        heads.copy_(torch.cat(turned, dim=-1))
    return q, k
