# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni: three vision layers with two levels of deepstack, one audio layer, no talker."""

from pathlib import Path
from typing import Any

from vllm.vit_cudagraph.testing.checkpoints import make_tokenizer
from vllm.vit_cudagraph.testing.families.qwen2_5_omni import TOKENS, media_processors

PROCESSOR = "real"
WEIGHTS = False

VISION = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 66,  # misaligned rows, which the published towers may have when sharded
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
    # Of published checkpoints; transformers has no field for these two, vLLM reads them.
    "image_size": 128,
    "apply_vit_abs_pos_embed": True,
}
AUDIO = {
    "num_mel_bins": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "d_model": 64,
    "max_source_positions": 100,
    "output_dim": 64,
    "downsample_hidden_size": 8,
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}


def make(path: Path, seed: int) -> None:
    from transformers import Qwen3OmniMoeConfig
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

    tokenizer = make_tokenizer(**TOKENS)
    token_id = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    thinker: dict[str, Any] = {
        "vision_config": VISION,
        "audio_config": AUDIO,
        "text_config": TEXT | {"vocab_size": len(tokenizer)},
        "audio_token_id": token_id["audio_token"],
        "image_token_id": token_id["image_token"],
        "video_token_id": token_id["video_token"],
        "audio_start_token_id": token_id["audio_bos_token"],
        "vision_start_token_id": token_id["vision_bos_token"],
    }
    config = Qwen3OmniMoeConfig(
        thinker_config=thinker,
        enable_audio_output=False,
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
    )
    config.save_pretrained(path)
    processors = media_processors(AUDIO["num_mel_bins"], patch_size=16)
    Qwen3OmniMoeProcessor(*processors, tokenizer).save_pretrained(path)
