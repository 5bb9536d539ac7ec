# SPDX-License-Identifier: Apache-2.0
"""A tiny Ernie4.5-VL: tower, resampler that merges pairs of frames, text experts and vision
experts."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _ernie45_vl_code as code

PROCESSOR = (
    "one of ours, since no installed package ships the one that vLLM asks for (code in the folder "
    "on the hub); vLLM's own half, which normalises pixels, is real"
)
WEIGHTS = True
ENGINE = {"trust_remote_code": True}
SERVE = ("--trust-remote-code",)

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|IMAGE_START|>",
    "<|IMAGE_END|>",
    "<|VIDEO_START|>",
    "<|VIDEO_END|>",
    "<|image@placeholder|>",
    "<|video@placeholder|>",
    "<|IMAGE_PLACEHOLDER|>",
)

VISION = {
    "depth": 3,
    "embed_dim": 64,
    "hidden_size": 64,
    "num_heads": 4,
    "mlp_ratio": 2,
    "patch_size": 14,
    "in_channels": 3,
    "spatial_merge_size": 2,
}
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "freq_allocation": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "use_bias": False,
    # The first layer is dense, as in the published sizes.
    "moe_layer_start_index": [1, 1],
    "moe_layer_end_index": [1, 1],
    "moe_num_experts": [4, 4],
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": [32, 16],
    "moe_k": 2,
    "pixel_hidden_size": 64,
    "spatial_conv_size": 2,
    "temporal_conv_size": 2,
    "use_temporal_conv": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500000.0,
        "mrope_section": [6, 6, 4],
    },
    "tie_word_embeddings": False,
    # As published; tests run the model in another one.
    "dtype": "bfloat16",
}


def make(path: Path, seed: int) -> None:
    """Write configuration, weights, tokenizer and the code beside them."""
    tokenizer = checkpoints.make_tokenizer(SPECIAL_TOKENS)
    tokenizer.chat_template = checkpoints.chat_template(
        "<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
        "<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>",
    )
    tokenizer.save_pretrained(path)
    shutil.copy(code.__file__, path / "ernie45_vl_code.py")
    token_id = tokenizer.convert_tokens_to_ids
    code.TinyErnieConfig(
        architectures=["Ernie4_5_VLMoeForConditionalGeneration"],
        auto_map={
            "AutoConfig": "ernie45_vl_code.TinyErnieConfig",
            "AutoProcessor": "ernie45_vl_code.TinyErnieProcessor",
        },
        vision_config=VISION,
        vocab_size=len(tokenizer),
        im_patch_id=token_id("<|IMAGE_PLACEHOLDER|>"),
        image_start_token_id=token_id("<|IMAGE_START|>"),
        image_end_token_id=token_id("<|IMAGE_END|>"),
        video_start_token_id=token_id("<|VIDEO_START|>"),
        video_end_token_id=token_id("<|VIDEO_END|>"),
        bos_token_id=token_id("<|endoftext|>"),
        eos_token_id=token_id("<|im_end|>"),
        pad_token_id=token_id("<|endoftext|>"),
        **TEXT,
    ).save_pretrained(path)
    weights = {name: torch.empty(shape) for name, shape in _shapes(len(tokenizer)).items()}
    model = SimpleNamespace(
        named_parameters=weights.items,
        get_output_embeddings=lambda: SimpleNamespace(weight=weights["lm_head.weight"]),
    )
    checkpoints.fill_weights(model, tokenizer, seed)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes as published; linear layers are (out, in)."""
    width = TEXT["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocabulary, width),
        "model.embed_tokens.weight": (vocabulary, width),
        "model.norm.weight": (width,),
    }
    for layer in range(TEXT["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": s for name, s in _text_layer(layer).items()}
    shapes |= {f"vision_model.{name}": shape for name, shape in _tower().items()}
    shapes |= {f"model.resampler_model.{name}": shape for name, shape in _resampler().items()}
    return shapes


def _text_layer(layer: int) -> dict[str, tuple[int, ...]]:
    width, size = TEXT["hidden_size"], TEXT["head_dim"]
    query, key = TEXT["num_attention_heads"] * size, TEXT["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (query, width),
        "self_attn.k_proj.weight": (key, width),
        "self_attn.v_proj.weight": (key, width),
        "self_attn.o_proj.weight": (width, query),
    }
    if layer < TEXT["moe_layer_start_index"][0]:
        return shapes | _mlp("mlp", TEXT["intermediate_size"])
    (experts, _), (text, vision) = TEXT["moe_num_experts"], TEXT["moe_intermediate_size"]
    shapes |= {
        "mlp.gate.weight": (width, experts),
        "mlp.gate.weight_1": (width, experts),
        "mlp.moe_statics.e_score_correction_bias": (2, experts),
    }
    for expert in range(2 * experts):
        shapes |= _mlp(f"mlp.experts.{expert}", text if expert < experts else vision)
    return shapes | _mlp("mlp.shared_experts", text)


def _mlp(name: str, inner: int) -> dict[str, tuple[int, ...]]:
    width = TEXT["hidden_size"]
    return {
        f"{name}.gate_proj.weight": (inner, width),
        f"{name}.up_proj.weight": (inner, width),
        f"{name}.down_proj.weight": (width, inner),
    }


def _tower() -> dict[str, tuple[int, ...]]:
    width, inner = VISION["embed_dim"], VISION["embed_dim"] * VISION["mlp_ratio"]
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, VISION["in_channels"] * VISION["patch_size"] ** 2)
    }
    shapes |= _norm("ln", width)
    for block in range(VISION["depth"]):
        here = f"blocks.{block}"
        shapes |= _norm(f"{here}.norm1", width) | _norm(f"{here}.norm2", width)
        shapes |= _linear(f"{here}.attn.qkv", width, 3 * width)
        shapes |= _linear(f"{here}.attn.proj", width, width)
        shapes |= _linear(f"{here}.mlp.fc1", width, inner) | _linear(
            f"{here}.mlp.fc2", inner, width
        )
    return shapes


def _resampler() -> dict[str, tuple[int, ...]]:
    token = TEXT["pixel_hidden_size"] * TEXT["spatial_conv_size"] ** 2
    shapes = _linear("mlp", token, TEXT["hidden_size"])
    shapes["after_norm.weight"] = (TEXT["hidden_size"],)
    for name, wide in (("spatial", token), ("temporal", token * TEXT["temporal_conv_size"])):
        shapes |= _linear(f"{name}_linear.0", wide, token)
        shapes |= _linear(f"{name}_linear.2", token, token)
        shapes |= _norm(f"{name}_linear.3", token)
    return shapes


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
