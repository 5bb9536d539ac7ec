# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni: a window layer and a full one, two audio layers, no talker."""

from pathlib import Path
from typing import Any

from vllm.vit_cudagraph.testing.checkpoints import make_tokenizer

PROCESSOR = "real"
WEIGHTS = False

TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 66,  # misaligned rows, as the published 3420
    "num_heads": 4,
    "out_hidden_size": 64,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}
AUDIO = {
    "num_mel_bins": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "d_model": 64,
    "max_source_positions": 100,
    "n_window": 50,
    "output_dim": 64,
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "mrope_section": [4, 6, 6],
    },
}


def make(path: Path, seed: int) -> None:
    from transformers import Qwen2_5OmniConfig
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor

    tokenizer = make_tokenizer(**TOKENS)
    token_id = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    thinker: dict[str, Any] = {
        "vision_config": VISION,
        "audio_config": AUDIO,
        "text_config": TEXT | {"vocab_size": len(tokenizer)},
        "audio_token_index": token_id["audio_token"],
        "image_token_index": token_id["image_token"],
        "video_token_index": token_id["video_token"],
        "audio_start_token_id": token_id["audio_bos_token"],
        "audio_end_token_id": token_id["audio_eos_token"],
    }
    config = Qwen2_5OmniConfig(
        thinker_config=thinker,
        enable_audio_output=False,
        architectures=["Qwen2_5OmniForConditionalGeneration"],
    )
    config.save_pretrained(path)
    Qwen2_5OmniProcessor(*media_processors(AUDIO["num_mel_bins"]), tokenizer).save_pretrained(path)


def media_processors(mel_bins: int, patch_size: int = 14) -> tuple[Any, Any, Any]:
    """For images, videos and audio, as the omni families' processors have them."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor, WhisperFeatureExtractor

    token_pixels = (2 * patch_size) ** 2
    sizes: dict[str, Any] = {
        "patch_size": patch_size,
        "size": {"shortest_edge": token_pixels, "longest_edge": 640 * token_pixels},
    }
    return (
        Qwen2VLImageProcessor(**sizes),
        Qwen2VLVideoProcessor(**sizes),
        WhisperFeatureExtractor(feature_size=mel_bins, chunk_length=1),
    )
