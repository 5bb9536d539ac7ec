# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of families whose configuration and processor are code on a model hub.

No installed package has them, so the folder names stand-ins from here, by the same mechanism.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from vllm.vit_cudagraph.testing import checkpoints

ENGINE = {"trust_remote_code": True}

_CODE = "remote"


class NestedConfig(PreTrainedConfig):
    """Entries as they are; parts such as ``vision_config`` are configurations themselves, of
    transformers' own class where it knows their ``model_type``."""

    def __init__(self, **entries: Any) -> None:
        for name, entry in entries.items():
            if name.endswith("_config") and isinstance(entry, dict):
                entries[name] = _part(dict(entry))
        super().__init__(**entries)


def _part(entries: dict[str, Any]) -> PreTrainedConfig:
    model_type = entries.get("model_type")
    if model_type in CONFIG_MAPPING:
        return AutoConfig.for_model(entries.pop("model_type"), **entries)
    part = PreTrainedConfig(**entries)
    part.model_type = model_type or ""
    return part


def write(path: Path, tokenizer: Any, config: dict[str, Any], processor: type | None) -> None:
    """The folder of a checkpoint without weights.

    Args:
        path: Of the folder.
        tokenizer: Is saved.
        config: Entries of the configuration, ``architectures`` among them.
        processor: Class of the processor, whose module can be imported; it is made by its own
            ``from_pretrained``. None where an installed one is saved beside.
    """
    tokenizer.save_pretrained(path)
    kinds = {"AutoConfig": NestedConfig} | ({"AutoProcessor": processor} if processor else {})
    code = {auto: f"{_CODE}.{kind.__name__}" for auto, kind in kinds.items()}
    lines = [f"from {kind.__module__} import {kind.__name__}\n" for kind in kinds.values()]
    (path / f"{_CODE}.py").write_text("".join(lines))
    common = {
        "auto_map": code,
        "dtype": "float32",
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    (path / "config.json").write_text(json.dumps(common | config, indent=2))
    if processor:
        named = {"auto_map": code, "processor_class": processor.__name__}
        (path / "processor_config.json").write_text(json.dumps(named, indent=2))


def text(vocab_size: int) -> dict[str, Any]:
    """Sizes of a text model that vLLM builds on a CPU, with positions in three dimensions."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": checkpoints.TEXT_HIDDEN,
        "intermediate_size": 2 * checkpoints.TEXT_HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": checkpoints.TEXT_HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "rope_theta": 1e6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [6, 5, 5],
        },
    }


def token_ids(tokenizer: Any) -> dict[str, int]:
    """Entries of the configuration that name special tokens."""
    names = {"image": "image_pad", "video": "video_pad"} | {
        f"vision_{end}": f"vision_{end}" for end in ("start", "end")
    }
    ids = tokenizer.convert_tokens_to_ids
    return {f"{entry}_token_id": ids(f"<|{token}|>") for entry, token in names.items()}
