# SPDX-License-Identifier: Apache-2.0
"""InternS2, preview: Qwen3.5 with experts.

Its configuration is code on the model hub; that of Qwen3.5 has all that vLLM reads.
"""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing.families import _qwen, qwen3_5

PROCESSOR = "Qwen3-VL's, since InternS2's is code on the model hub"
WEIGHTS = True


def make(path: Path, seed: int) -> None:
    qwen3_5.write(path, seed, "qwen3_5_moe", **_qwen.experts())
    _qwen.rename(path, "InternS2PreviewForConditionalGeneration")
