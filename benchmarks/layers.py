# SPDX-License-Identifier: Apache-2.0
"""One layer of Qwen2.5-VL-7B's tower, piece by piece: upstream's kernels and ours, on a GPU.

    python benchmarks/layers.py

Microseconds of one call: the median of CUDA events around replays of a graph of four calls, on
random data. What two ways compute is compared before they are timed. Needs vLLM for GPUs with
FlashAttention 3, and takes about half a minute; versions 2 and 4 are measured where vLLM has them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

HEADS, SIZE, WINDOW = 16, 80, 64
ROWS = (1024, 8464)
RUNS = 15

Call = Callable[[], Any]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").mul_(0.5).to(torch.bfloat16)


def microseconds(call: Call) -> float:
    call()  # kernels are built and chosen
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            call()
    times = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 4 * 1e3)
    return statistics.median(times)


def show(what: str, rows: int, call: Call) -> None:
    print(f"{rows:>6} rows  {what:<60} {microseconds(call):8.1f} us", flush=True)


def linear(rows: int, inputs: int, outputs: int) -> Call:
    x, weight, bias = random(rows, inputs), random(outputs, inputs), random(outputs)
    return lambda: F.linear(x, weight, bias)


def strided(rows: int, inputs: int, stride: int, outputs: int) -> Call:
    """Rows of ``stride``, of which only ``inputs`` columns are multiplied."""
    x, weight = random(rows, stride)[:, :inputs], random(outputs, stride)[:, :inputs]
    bias = random(outputs)
    return lambda: F.linear(x, weight, bias)


def projections(rows: int) -> None:
    for inputs in (3420, 3424, 3456, 1710, 1728, 855, 864):
        show(f"down projection, {inputs} to 1280", rows, linear(rows, inputs, 1280))
    show("down projection, 3420 in rows of 3456", rows, strided(rows, 3420, 3456, 1280))
    for outputs in (6840, 6848, 3420, 3424):
        show(f"gate and up projection, 1280 to {outputs}", rows, linear(rows, 1280, outputs))


def gates(rows: int) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.vit_cudagraph.gated import silu_and_mul

    x = random(rows, 6848)
    tight, out = x[:, :6840].contiguous(), random(rows, 3420)
    torch.testing.assert_close(
        silu_and_mul(x, 3420, 3424)[:, :3420],
        SiluAndMul.forward_native(tight),
        rtol=2e-2,
        atol=2e-3,
    )
    show("silu and mul, vLLM's", rows, lambda: torch.ops._C.silu_and_mul(out, tight))
    show("silu and mul, padded rows", rows, lambda: silu_and_mul(x, 3420, 3424))


def attention(rows: int) -> None:
    from vllm.vit_cudagraph.window_kernels import rotated, window_attention
    from vllm.vllm_flash_attn import flash_attn_varlen_func
    from vllm.vllm_flash_attn.layers.rotary import apply_rotary_emb

    qkv = random(rows, 3 * HEADS * SIZE)
    cos, sin = (torch.rand(rows, SIZE // 2, device="cuda").to(torch.bfloat16) for _ in range(2))
    offsets = torch.arange(0, rows + WINDOW - 1, WINDOW, device="cuda", dtype=torch.int32)
    offsets = offsets.clamp(max=rows)
    slots = torch.cat([offsets, offsets.new_full((3 * len(offsets),), rows)])
    parts = qkv.view(1, rows, 3, HEADS, SIZE)

    def copy() -> torch.Tensor:
        together = parts[:, :, :2].permute(2, 0, 1, 3, 4)
        return together.reshape(2, rows, HEADS, SIZE).contiguous()

    def upstream() -> torch.Tensor:
        q, k = apply_rotary_emb(copy(), cos, sin, False).unbind(0)
        return flash(q, k, offsets)

    def flash(q: torch.Tensor, k: torch.Tensor, at: torch.Tensor, version: int = 3) -> torch.Tensor:
        attended = flash_attn_varlen_func(
            q,
            k,
            parts[0, :, 2],
            cu_seqlens_q=at,
            cu_seqlens_k=at,
            max_seqlen_q=WINDOW,
            max_seqlen_k=WINDOW,
            dropout_p=0.0,
            causal=False,
            softmax_scale=SIZE**-0.5,
            fa_version=version,
        )
        return attended.reshape(rows, HEADS * SIZE)

    out = torch.zeros(rows, HEADS * SIZE, device="cuda", dtype=torch.bfloat16)

    def ours(at: torch.Tensor) -> None:
        window_attention(qkv, cos, sin, at, out, HEADS, SIZE, SIZE**-0.5)

    qk = copy()
    assert torch.equal(rotated(qkv, cos, sin, HEADS, SIZE), apply_rotary_emb(qk, cos, sin, False))
    ours(offsets)
    expected = upstream()
    apart = ((out - expected).float().norm() / expected.float().norm()).item()
    assert apart < 1e-3, apart
    q, k = apply_rotary_emb(qk, cos, sin, False).unbind(0)
    show("copy of Q and K", rows, copy)
    show("rotary positions, vLLM's", rows, lambda: apply_rotary_emb(qk, cos, sin, False))
    show("both in one pass", rows, lambda: rotated(qkv, cos, sin, HEADS, SIZE))
    show("windows, FlashAttention 3", rows, lambda: flash(q, k, offsets))
    for version in (2, 4):
        other_version(version, rows, partial(flash, q, k, offsets, version), expected)
    show("windows, copy and rotary positions and FlashAttention 3", rows, upstream)
    show(f"windows, one kernel (apart by {apart:.0e})", rows, lambda: ours(offsets))
    show("windows, one kernel, four times the slots", rows, lambda: ours(slots))


def other_version(version: int, rows: int, call: Call, expected: torch.Tensor) -> None:
    """FlashAttention of a version that need not be there, or why it is not measured."""
    from vllm.vllm_flash_attn.flash_attn_interface import (
        fa_version_unsupported_reason,
        is_fa_version_supported,
    )

    name = f"windows, FlashAttention {version}"
    if not is_fa_version_supported(version):
        print(f"{rows:>6} rows  {name}: {fa_version_unsupported_reason(version)}")
        return
    try:
        apart = ((call() - expected).float().norm() / expected.float().norm()).item()
        assert apart < 1e-2, apart
        show(f"{name} (apart by {apart:.0e})", rows, call)
    except Exception as error:  # whatever a version lacks for this head size or card
        print(f"{rows:>6} rows  {name} failed: {error!r:.200}")


def main() -> int:
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    print(torch.cuda.get_device_name())
    for rows in ROWS:
        projections(rows)
        gates(rows)
        attention(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
