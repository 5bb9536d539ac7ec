# SPDX-License-Identifier: Apache-2.0
"""InternS1-Pro: the tower of Qwen3-VL, a text model with experts and Fourier positions.

Its configuration is code on the model hub; that of Qwen3-VL has all that vLLM reads.
"""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing import checkpoints
from vllm.vit_cudagraph.testing.families import _qwen

PROCESSOR = "Qwen3-VL's, since InternS1-Pro's is code on the model hub"
WEIGHTS = False


def make(path: Path, seed: int) -> None:
    tokenizer = checkpoints.make_tokenizer()
    fourier = {"fope_init_factor": 0.5, "fope_sep_head": True, "num_inv_freq": None}
    rope = {"rope_type": "default", "rope_theta": 1000000.0, **fourier}
    text = _qwen.text(tokenizer, rope_parameters=rope, decoder_sparse_step=1, num_hidden_layers=3)
    _qwen.write_config(
        path,
        "qwen3_vl_moe",
        tokenizer,
        vision_config=_qwen.qwen3_vision(),
        text_config=text | _qwen.experts(),
    )
    _qwen.rename(path, "InternS1ProForConditionalGeneration")
    checkpoints.make_processor("qwen3_vl", tokenizer).save_pretrained(path)
