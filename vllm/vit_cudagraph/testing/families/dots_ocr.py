# SPDX-License-Identifier: Apache-2.0
"""dots.ocr: two vision layers. vLLM itself reads its images with Qwen2-VL's processor."""

import json
from pathlib import Path
from typing import Any

from vllm.vit_cudagraph.testing.checkpoints import SPECIAL_TOKENS, make_tokenizer

PROCESSOR = "real"
WEIGHTS = False
# vLLM ships the configuration's class and does not register it, so a published checkpoint brings
# its own code; this one's is vLLM's.
ENGINE = {"trust_remote_code": True}
CONFIGURATION = (
    "from vllm.transformers_utils.configs.dotsocr import DotsOCRConfig as DotsOCRConfig\n"
)

TOKENS = ("<|img|>", "<|imgpad|>", "<|endofimg|>")
VISION = {
    "embed_dim": 64,
    "hidden_size": 64,
    "intermediate_size": 66,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def make(path: Path, seed: int) -> None:
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    tokenizer = make_tokenizer((*SPECIAL_TOKENS, *TOKENS))
    config: dict[str, Any] = TEXT | {
        "architectures": ["DotsOCRForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_dots.DotsOCRConfig"},
        "model_type": "dots_ocr",
        "vision_config": VISION,
        "vocab_size": len(tokenizer),
        "image_token_id": tokenizer.convert_tokens_to_ids("<|imgpad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    }
    (path / "configuration_dots.py").write_text(CONFIGURATION)
    (path / "config.json").write_text(json.dumps(config))
    sizes: dict[str, Any] = {
        "temporal_patch_size": 1,
        "size": {"shortest_edge": 28**2, "longest_edge": 640 * 28**2},
    }
    Qwen2VLProcessor(
        Qwen2VLImageProcessor(**sizes), tokenizer, Qwen2VLVideoProcessor(**sizes)
    ).save_pretrained(path)
