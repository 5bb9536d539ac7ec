# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels under Triton's interpreter, on a CPU, held against plain torch.

Started by ``test_window_kernels.py`` in a process of its own: on a CPU vLLM puts a stand-in in
Triton's place, and the interpreter must be chosen before a kernel is defined.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm.triton_utils

vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl

from vllm.vit_cudagraph import gated, window_kernels  # noqa: E402

# bfloat16 is read as integers by the interpreter of Triton 3.9; the kernels do not ask which it is.
DTYPES = {torch.float32: 1e-5, torch.float16: 4e-3}

fuzz = settings(max_examples=int(os.environ["EXAMPLES"]), deadline=None, derandomize=True)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``[N, heads, size]`` with rotary positions, in 32 bits, rounded once."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def drawn(rows: int, heads: int, size: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(rows, size // 2, generator=generator) * 6
    qkv = torch.randn(rows, 3 * heads * size, generator=generator)
    return [qkv.to(dtype), angle.cos().to(dtype), angle.sin().to(dtype)]


sizes = st.sampled_from([(1, 16), (2, 8), (3, 20), (2, 80)])
dtypes = st.sampled_from(list(DTYPES))


@fuzz
@given(
    lengths=st.lists(st.integers(0, 64), max_size=5),
    shape=sizes,
    dtype=dtypes,
    behind=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def windows(
    lengths: list[int], shape: tuple[int, int], dtype: torch.dtype, behind: int, seed: int
) -> None:
    (heads, size), rows = shape, sum(lengths) + behind
    qkv, cos, sin = drawn(rows, heads, size, dtype, seed)
    if behind:  # nothing of what lies behind may be read
        qkv[-behind:], cos[-behind:] = torch.nan, torch.nan
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    out = torch.full((rows, heads * size), 7.0, dtype=dtype)
    window_kernels.window_attention(qkv, cos, sin, offsets, out, heads, size, size**-0.5)
    q, k, v = qkv.view(rows, 3, heads, size).unbind(1)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    expected = torch.full((rows, heads, size), 7.0)
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        parts = (x[start:end].transpose(0, 1).float() for x in (q, k, v))
        if end > start:
            attended = torch.nn.functional.scaled_dot_product_attention(*parts)
            expected[start:end] = attended.transpose(0, 1)
    close(out.view(rows, heads, size), expected, dtype)


@fuzz
@given(rows=st.integers(0, 5), shape=sizes, dtype=dtypes, seed=st.integers(0, 99))
def rotary(rows: int, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    heads, size = shape
    qkv, cos, sin = drawn(rows, heads, size, dtype, seed)
    out = window_kernels.rotated(qkv, cos, sin, heads, size)
    q, k, _ = qkv.view(rows, 3, heads, size).unbind(1)
    expected = torch.stack([turned(q, cos, sin), turned(k, cos, sin)])
    assert out.is_contiguous() and out.shape == (2, rows, heads, size)
    close(out, expected.float(), dtype)


@fuzz
@given(
    rows=st.integers(1, 3),
    width=st.sampled_from([1, 7, 8, 1500]),
    more=st.integers(0, 40),
    behind=st.integers(0, 9),
    dtype=dtypes,
)
def gate(rows: int, width: int, more: int, behind: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 2 * width + behind).to(dtype)
    x[:, 2 * width :] = torch.nan
    out = torch.full((rows, width + more), 7.0, dtype=dtype)
    gated.launch(x, out, width)
    assert not out[:, width:].any()
    up = x[:, width : 2 * width].float()
    expected = torch.nn.functional.silu(x[:, :width].float()).to(dtype).float() * up
    close(out[:, :width], expected, dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = DTYPES[dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    for check in (windows, rotary, gate):
        check()
        print(check.__name__, "holds")
