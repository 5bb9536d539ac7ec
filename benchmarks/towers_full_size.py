# SPDX-License-Identifier: Apache-2.0
"""Vision towers at their published sizes, over a text model of one layer, with random weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "window_size": 112,
        "patch_size": 14,
    },
    "qwen2_vl": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "num_heads": 16,
        "mlp_ratio": 4,
        "patch_size": 14,
    },
    "qwen3_vl": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
"""``vision_config`` of Qwen2.5-VL-7B, Qwen2-VL-7B and Qwen3-VL-8B, as published."""

_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "hidden_size": 3584,
        "num_hidden_layers": 1,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [16, 24, 24],
        },
    },
    "qwen3_vl": {
        "hidden_size": 4096,
        # deepstack adds the tower's three levels to as many layers
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
}
_TEXT["qwen2_vl"] = _TEXT["qwen2_5_vl"]

TEXT_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "rope_parameters": _TEXT["qwen2_5_vl"]["rope_parameters"],
}
"""``text_config`` of Qwen2.5-VL-7B, as published."""

_CLASSES = {
    "qwen2_vl": "qwen2_vl:Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "qwen2_5_vl:Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "qwen3_vl:Qwen3VLForConditionalGeneration",
}


def make_folder(
    family: str, folder: Path, *, text: dict[str, Any] | None = None, tiny: bool = False
) -> Path:
    """A checkpoint folder without weights: the tower, and the processor's real pixel limits.

    Args:
        family: A key of :data:`VISION`.
        folder: Where; made if it is not there.
        text: Entries of the text model's configuration, instead of one layer.
        tiny: The tests' small tower instead.
    """
    from vllm.vit_cudagraph.testing.checkpoints import make_checkpoint

    make_checkpoint(family, folder)
    if tiny:
        return folder
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= VISION[family]
    config["text_config"] |= text or _TEXT[family]
    config["text_config"].pop("layer_types", None)  # one entry a layer; derived when absent
    (folder / "config.json").write_text(json.dumps(config))
    _fill_vocabulary(folder / "tokenizer.json", config["text_config"]["vocab_size"])
    cell = cell_pixels(family)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).exists():
            settings = json.loads((folder / name).read_text())
            image = settings.get("image_processor", settings)
            image["size"] = {"shortest_edge": 4 * cell**2, "longest_edge": cell**2 * 4096}
            (folder / name).write_text(json.dumps(settings))
    return folder


def _fill_vocabulary(path: Path, size: int) -> None:
    """A word for each further number, so that whatever random weights answer can be written."""
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = [token["id"] for token in tokenizer["added_tokens"]]
    first = max([*vocabulary.values(), *special]) + 1
    vocabulary |= {f"x{number}": number for number in range(first, size)}
    path.write_text(json.dumps(tokenizer))


def cell_pixels(family: str) -> int:
    """Pixels along a side of one merged token."""
    return 2 * int(VISION[family]["patch_size"])


def upstream_class(family: str) -> Any:
    """vLLM's own class, whatever the plugin has registered in its place."""
    module, name = _CLASSES[family].split(":")
    return getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)


def same_weights(*models: Any, seed: int = 0) -> None:
    """Random weights of a size that keeps activations finite, the same in all models, in place."""
    import torch

    for model in models:
        device = next(model.parameters()).device
        generator = torch.Generator(device=device).manual_seed(seed)
        with torch.no_grad():
            for name, weight in sorted(model.named_parameters()):
                if weight.dim() > 1:
                    weight.copy_(
                        torch.empty(weight.shape, dtype=weight.dtype, device=device).normal_(
                            0.0, 0.02, generator=generator
                        )
                    )
                else:
                    weight.fill_(0.0 if name.endswith("bias") else 1.0)
