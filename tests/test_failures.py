# SPDX-License-Identifier: Apache-2.0
"""Which failures end the process, and which become an eager run."""

import pytest
import torch

from vllm.vit_cudagraph.failures import POISONING_CODES, poisons_the_process
from vllm.vit_cudagraph.geometry import NotCapturable
from vllm.vit_cudagraph.graphs import GraphCaptureError

POISONING = {
    214: "uncorrectable ECC error encountered",
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "tensor memory not completely freed",
}
"""``cudaError_t`` after which, as CUDA's header says, further work returns the same error until the
process is started again; and its text (``cudaGetErrorString``)."""

HARMLESS = {
    1: "invalid argument",
    2: "out of memory",
    400: "invalid resource handle",
    701: "too many resources requested for launch",
    720: "too many blocks in cooperative launch",
    900: "operation not permitted when stream is capturing",
    901: "operation failed due to a previous error during capture",
}


def accelerator_error(code: int | None, text: str) -> torch.AcceleratorError:
    """As torch raises it from C++, where the code is an attribute."""
    error = torch.AcceleratorError(f"CUDA error: {text}")
    if code is not None:
        error.error_code = code
    return error


@pytest.mark.parametrize("code", POISONING)
def test_a_lost_context_is_known_by_its_code(code: int) -> None:
    assert poisons_the_process(accelerator_error(code, "a text that says nothing"))
    assert code in POISONING_CODES


@pytest.mark.parametrize("text", POISONING.values())
@pytest.mark.parametrize(
    "shape", ["CUDA error: {}", "Triton Error [CUDA]: {}", "CUDA driver error: {}\nmore lines"]
)
def test_a_lost_context_is_known_by_its_text(text: str, shape: str) -> None:
    """Triton and libraries of kernels raise plain errors."""
    assert poisons_the_process(RuntimeError(shape.format(text)))


def test_a_lost_context_is_known_by_its_text_where_no_code_is_told() -> None:
    assert poisons_the_process(accelerator_error(None, POISONING[700]))


@pytest.mark.parametrize("code", HARMLESS)
def test_other_cuda_errors_are_survived(code: int) -> None:
    assert not poisons_the_process(accelerator_error(code, HARMLESS[code]))
    assert not poisons_the_process(RuntimeError(f"CUDA error: {HARMLESS[code]}"))
    assert code not in POISONING_CODES


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        # A report of memory may quote an earlier error; running out of it is survived all the same.
        torch.OutOfMemoryError("out of memory after: an illegal memory access was encountered"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        RuntimeError(""),
        GraphCaptureError("aten.nonzero cannot be captured"),
        NotCapturable("input does not fit its grids"),
        AssertionError(),
        MemoryError(),
        KeyError("an illegal memory access was encountered"),
        ValueError("misaligned address"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_program_are_survived(error: BaseException) -> None:
    """Only errors that CUDA's callers raise are read for a text."""
    assert not poisons_the_process(error)
