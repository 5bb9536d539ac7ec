# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5V: the tower of GLM-4.1V with experts in the text model."""

from __future__ import annotations

from pathlib import Path

from vllm.vit_cudagraph.testing.checkpoints import TEXT_HEAD_DIM
from vllm.vit_cudagraph.testing.families import _glm

PROCESSOR = "real"
WEIGHTS = False


def make(path: Path, seed: int) -> None:
    _glm.make_without_weights(
        "glm4v_moe",
        path,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        # Published configurations have these two; transformers knows no default for them.
        head_dim=TEXT_HEAD_DIM,
        use_qk_norm=False,
    )
