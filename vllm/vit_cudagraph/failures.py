# SPDX-License-Identifier: Apache-2.0
"""Which failures a process can survive."""

from __future__ import annotations

import torch

POISONING_CODES = frozenset({214, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})
"""CUDA runtime errors that leave the context unusable: uncorrectable ECC, illegal address, launch
timeout, destroyed context, device assertion, hardware stack, illegal instruction, misaligned
address, invalid address space, invalid program counter, launch failure (CUDA runtime API,
``cudaError_t``)."""

_POISONING_TEXTS = (
    "illegal memory access",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "illegal instruction",
    "uncorrectable ECC",
    "peer GPU memory over nvlink or a hardware error",
    "launch timed out",
    "context is destroyed",
    "global/shared address space",
    "tensor memory not completely freed",
    "hardware stack error",
    "invalid program counter",
)


class RankFailure(RuntimeError):
    """One rank failed where the others may wait for it: only the end of the engine is safe."""


class AgreedFailure(RuntimeError):
    """A failure that all ranks know of before anything collective has begun: they go on alike."""


def text_of(error: BaseException) -> str:
    """The error's text; its class alone where even that cannot be had."""
    try:
        return str(error)
    except Exception:
        return f"(no text) {type(error).__name__}"


def brief(error: BaseException) -> str:
    """One line of an error: its class and the first line of its text."""
    lines = text_of(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def poisons_the_process(error: BaseException) -> bool:
    """Whether the CUDA context is lost: such an error is passed on unchanged, so that vLLM's own
    restart sees it. Running out of memory is not one of them."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    accelerator_error = getattr(torch, "AcceleratorError", ())
    if isinstance(error, accelerator_error):
        code = getattr(error, "error_code", None)
        if code is not None:
            return code in POISONING_CODES
    return isinstance(error, RuntimeError) and any(
        text in text_of(error) for text in _POISONING_TEXTS
    )
