# SPDX-License-Identifier: Apache-2.0
"""One GPU, the real engine, a full-size tower: do graphs give what the eager tower gives?

Starts vLLM's offline engine with encoder graphs on, over Qwen2.5-VL-7B's vision tower at full size
with random weights (and a text model of one layer), sends real photographs and a video, and holds
the embeddings of every batch that went through the manager against the model's own eager
``embed_multimodal`` on the same input. Weights are random, so a text says nothing; embeddings do.

    python benchmarks/engine_check.py --runner v2
    python benchmarks/engine_check.py --runner v1
    python benchmarks/engine_check.py --pruning 0.5   # video pruning, graphs on
    python benchmarks/engine_check.py --processes     # as a user runs it: engine in its own process

With pruning on, which rows of a video stay is a choice by similarity that a rounding may turn. So
the rows are compared before anything is done to them, and what `execute` gives is held, bit for
bit, against what upstream's `embed_multimodal` makes of those very rows.

It also prints the costs that were measured at start-up, and the milliseconds of each batch through
`execute` and through `embed_multimodal`, runs of both in turn, medians.

Ends non-zero where an embedding differs by more than bf16's tolerance, where no graph ran, or where
something ran eagerly that should not have. Needs the ``test`` extra's scikit-image.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import encoder_clock
from towers_full_size import make_folder, same_weights

TOLERANCE = 3e-2
"""Relative error, norm of the difference over norm of the eager embeddings. bf16 keeps 8 bits, so
one rounding is 4e-3, and matrix kernels for another number of rows round elsewhere, in 32 layers.
The column `eager itself` shows how much the eager tower differs from itself for that reason: the
same items, run twice over in one batch."""

SIZES = [(224, 224), (640, 427), (451, 300), (1000, 872), (1411, 1411), (1600, 160), (336, 56)]
NAMES = ["astronaut", "rocket", "chelsea", "hubble", "retina", "motorcycle", "coffee"]


def fill_weights(worker: Any) -> None:
    """Random weights, in place: graphs read them there."""
    same_weights(worker.model_runner.get_model())


def manager_of(worker: Any) -> Any:
    """The encoder manager of either model runner."""
    return encoder_clock.manager_of(worker.model_runner)


@dataclass
class Recorded:
    """One batch of the runner: its input, the tower's rows of each item, what `execute` gave."""

    mm_kwargs: dict[str, Any]
    rows: list[Any]
    outputs: list[Any]


def record_batches(manager: Any) -> list[Recorded]:
    """Keep every batch that the runner hands to this manager, with what it gave back."""
    batches: list[Recorded] = []
    execute, execute_ranks = manager.execute, manager._execute_ranks
    rows: list[Any] = []

    def before_finishing(*inputs: Any) -> Any:
        outputs = execute_ranks(*inputs)
        rows[:] = [output.clone() for output in outputs]
        return outputs

    def recording(mm_kwargs: dict[str, Any]) -> Any:
        outputs = execute(mm_kwargs)
        if outputs is not None:
            batches.append(Recorded(mm_kwargs, list(rows), outputs))
        return outputs

    manager._execute_ranks, manager.execute = before_finishing, recording
    return batches


@contextmanager
def tower_rows(model: Any, mm_kwargs: dict[str, Any], given: list[Any]) -> Iterator[None]:
    """Give upstream's post-processing these rows in place of its tower's."""
    name = f"_process_{model.get_input_modality(mm_kwargs)}_input"
    setattr(model, name, lambda inputs: tuple(row.clone() for row in given))
    try:
        yield
    finally:
        delattr(model, name)


def finished_by_upstream(model: Any, mm_kwargs: dict[str, Any], given: list[Any]) -> list[Any]:
    """What upstream's eager path makes of given rows."""
    import torch

    with torch.inference_mode(), tower_rows(model, mm_kwargs, given):
        return list(model.embed_multimodal(**mm_kwargs))


def eager_rows(model: Any, mm_kwargs: dict[str, Any]) -> list[Any]:
    """The rows of each item from upstream's tower, before pruning."""
    import torch

    parsed = model._parse_and_validate_multimodal_inputs(**mm_kwargs)
    ((modality, inputs),) = parsed.items()
    with torch.inference_mode():
        return list(getattr(model, f"_process_{modality}_input")(inputs))


def milliseconds(manager: Any, mm_kwargs: dict[str, Any], runs: int = 9) -> list[float]:
    """Medians of ``execute``, of the host's share of it, and of ``embed_multimodal``."""
    import torch

    times: list[list[float]] = [[], [], []]
    for run in range(runs + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        type(manager).execute(manager, mm_kwargs)
        host = time.perf_counter()
        torch.cuda.synchronize()
        ours = time.perf_counter()
        with torch.inference_mode():
            manager.model.embed_multimodal(**mm_kwargs)
        torch.cuda.synchronize()
        eager = time.perf_counter()
        if run > 1:
            for kept, ms in zip(times, (ours - start, host - start, eager - ours), strict=True):
                kept.append(ms * 1e3)
    return [statistics.median(kept) for kept in times]


def requests() -> list[dict[str, Any]]:
    """Single photographs, several together, and one video. No picture comes twice: vLLM keeps
    embeddings of those it has seen, and would not encode them again."""
    from PIL import ImageOps

    from vllm.vit_cudagraph.testing.photos import panning_frames, photo, video_metadata

    image = "<|vision_start|><|image_pad|><|vision_end|>"
    photos = [photo(name, size) for name, size in zip(NAMES, SIZES, strict=True)]
    prompts: list[dict[str, Any]] = [
        {"prompt": f"{image} What is it?", "multi_modal_data": {"image": one}} for one in photos
    ]
    mirrored = [ImageOps.mirror(one) for one in photos]
    upside_down = [ImageOps.flip(one) for one in photos]
    for some in (mirrored[:3], mirrored[3:], upside_down, [ImageOps.invert(p) for p in photos] * 2):
        prompts.append(
            {"prompt": image * len(some) + " Compare.", "multi_modal_data": {"image": some}}
        )
    frames = panning_frames("motorcycle", 12, (336, 252))
    video = image.replace("image", "video")
    clip = (frames, video_metadata(len(frames)))
    prompts.append({"prompt": f"{video} Tell.", "multi_modal_data": {"video": [clip]}})
    return prompts


def error_on_buffers(manager: Any, mm_kwargs: dict[str, Any]) -> float | None:
    """Relative error of the batch's last replay against an eager run over the buffers it read; None
    where all of it ran eagerly.

    Shapes are the same there, so it tells faults of capture from the rounding of other shapes.
    """
    import torch

    from vllm.vit_cudagraph.testing.oracles import as_while_capturing

    inputs = manager.model.vit_checked_inputs(mm_kwargs)
    type(manager).execute(manager, mm_kwargs)
    # Graphs share a pool: only what the last replay wrote is still there.
    replays = [step.budget for step in manager._plan(inputs).steps if step.budget is not None]
    if not replays:
        return None
    graph = manager.captured[replays[-1]]
    used = int(graph.buffers["cu_seqlens"][-1]) // manager.model.vit_declared.merge_unit
    with torch.inference_mode(), as_while_capturing(manager.device):
        eager = manager.model.encoder_cudagraph_forward(dict(graph.buffers))
    return relative(graph.output[:used], eager[:used])


def compare(manager: Any, batches: list[Recorded]) -> list[dict[str, Any]]:
    """Relative error of each item, and of a wrong item as a control."""
    import torch

    rows, model = [], manager.model
    for batch in batches:
        mm_kwargs, outputs = batch.mm_kwargs, batch.rows
        eager = eager_rows(model, mm_kwargs)
        twice = eager_rows(model, twice_over(mm_kwargs))
        finished = finished_by_upstream(model, mm_kwargs, outputs)
        errors = [relative(a, b) for a, b in zip(outputs, eager, strict=True)]
        itself = [relative(a, b) for a, b in zip(twice, eager, strict=False)]
        control = relative(eager[0].roll(1, 0), eager[0]) if len(eager[0]) > 1 else None
        finite = all(bool(torch.isfinite(out).all()) for out in outputs)
        rows.append(
            {
                "tokens": [len(out) for out in outputs],
                "worst": worst(errors),
                "itself": worst(itself),
                "on_buffers": error_on_buffers(manager, mm_kwargs),
                "control": control,
                "finite": finite,
                "finished": all(
                    torch.equal(a, b) for a, b in zip(batch.outputs, finished, strict=True)
                ),
                "given": [len(out) for out in batch.outputs],
                "ms": milliseconds(manager, mm_kwargs),
            }
        )
    return rows


def twice_over(mm_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same items, each twice, in one batch."""
    import torch

    return {
        key: torch.cat([value, value]) if isinstance(value, torch.Tensor) else value
        for key, value in mm_kwargs.items()
    }


def relative(actual: Any, expected: Any) -> float:
    difference = (actual.float() - expected.float()).norm()
    return float(difference / expected.float().norm())


def worst(errors: Iterable[float]) -> float:
    """The largest, or NaN where one is NaN; ``max`` drops those that do not come first."""
    known = list(errors)
    return max(known, key=lambda error: math.inf if math.isnan(error) else error)


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runner", choices=["v1", "v2"], default="v2")
    parser.add_argument("--attention", default=None, help="--mm-encoder-attn-backend of vLLM")
    parser.add_argument("--pruning", type=float, default=None, help="--video-pruning-rate of vLLM")
    parser.add_argument(
        "--processes",
        action="store_true",
        help="engine in a process of its own; only its log is shown, embeddings are out of reach",
    )
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    return parser.parse_args()


def engine(folder: Path, attention: str | None, pruning: float | None) -> Any:
    """vLLM's offline engine with encoder graphs on."""
    from vllm import LLM

    return LLM(
        model=str(make_folder("qwen2_5_vl", folder)),
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=32768,
        max_num_batched_tokens=16384,
        max_num_seqs=8,
        gpu_memory_utilization=0.5,
        limit_mm_per_prompt={"image": 20, "video": 1},
        mm_processor_cache_gb=0,
        mm_encoder_attn_backend=attention,
        video_pruning_rate=pruning,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_mm_encoder": True,
        },
    )


def main() -> int:
    options = command_line()
    os.environ |= {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if options.runner == "v2" else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if options.processes else "0",
        "VIT_CUDAGRAPH_LOG_INTERVAL": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    from vllm import SamplingParams
    from vllm.vit_cudagraph.planning import ABOVE_ALL, CHEAPER_EAGERLY

    # Not on "vllm" itself: vLLM configures that one anew when it makes a configuration.
    logging.getLogger("vllm.vit_cudagraph").addHandler(handler)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        llm = engine(Path(scratch), options.attention, options.pruning)
        started = time.perf_counter() - start
        prompts = requests()
        sampling = SamplingParams(temperature=0.0, max_tokens=2)
        if options.processes:
            llm.generate(prompts, sampling, use_tqdm=False)
            return 0
        llm.collective_rpc(fill_weights)
        manager = llm.collective_rpc(manager_of)[0]
        batches = record_batches(manager)
        for prompt in prompts:
            llm.generate([prompt], sampling, use_tqdm=False)
    hits, stats = manager.graph_hits, manager.get_cumulative_stats()
    rows = compare(manager, batches)
    report(options, manager, rows, lines, started)
    if options.json is not None:
        figures = {
            "runner": options.runner,
            "rows": rows,
            "stats": stats,
            "log": lines,
            "costs": asdict(manager.costs),
        }
        options.json.write_text(json.dumps(figures, indent=1))
    ok = all(
        row["finished"]
        and row["worst"] <= TOLERANCE
        and (row["on_buffers"] is None or row["on_buffers"] <= TOLERANCE / 10)
        and row["finite"]
        and (row["control"] is None or row["control"] > TOLERANCE)
        for row in rows
    )
    as_planned = set(stats["eager_items"]) <= {CHEAPER_EAGERLY, ABOVE_ALL}
    return 0 if ok and hits and as_planned and len(rows) >= len(prompts) else 1


def report(
    options: argparse.Namespace,
    manager: Any,
    rows: list[dict[str, Any]],
    lines: list[str],
    started: float,
) -> None:
    import torch

    print(f"\n{torch.cuda.get_device_name()}, runner {options.runner}, {type(manager).__name__}")
    print(f"tower attention {manager.model.visual.attn_backend.name}, engine up in {started:.0f} s")
    for line in lines:
        print("log:", line)
    print("start-up, milliseconds of graphs:", pairs(manager.costs.replay_ms))
    print("start-up, milliseconds of eager runs:", pairs(manager.costs.eager_ms))
    print(
        f"{'items':>6} {'tokens':>7} {'given':>6} {'worst error':>12} {'eager itself':>13} "
        f"{'same buffers':>13} {'control':>8} finite finished {'execute ms':>11} {'host':>6} "
        f"{'eager ms':>9}"
    )
    for row in rows:
        control = "-" if row["control"] is None else f"{row['control']:.3f}"
        same = "-" if row["on_buffers"] is None else f"{row['on_buffers']:.2e}"
        execute, host, eager = row["ms"]
        tokens = row["tokens"]
        print(
            f"{len(tokens):>6} {sum(tokens):>7} {sum(row['given']):>6} {row['worst']:>12.2e} "
            f"{row['itself']:>13.2e} {same:>13} {control:>8} {row['finite']!s:>6} "
            f"{row['finished']!s:>8} {execute:>11.2f} {host:>6.2f} {eager:>9.2f}"
        )


def pairs(points: Any) -> str:
    return ", ".join(f"{tokens}: {ms:.2f}" for tokens, ms in points)


if __name__ == "__main__":
    sys.exit(main())
