# SPDX-License-Identifier: Apache-2.0
"""Encoder CUDA graphs for vLLM, derived from the geometry of the vision tower."""

from vllm.vit_cudagraph import _install_check

_install_check.check()

__version__ = "0.1.0"
