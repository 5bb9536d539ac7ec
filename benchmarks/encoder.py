# SPDX-License-Identifier: Apache-2.0
"""A vision tower six ways, in one process, batch by batch: is ours ever slower than eager?

    python benchmarks/encoder.py                          # one H200: Qwen2.5-VL-7B's tower
    python benchmarks/encoder.py --model qwen3_vl --trace single
    python benchmarks/encoder.py --trace FILE             # one batch a line: t,h,w t,h,w ...
    python benchmarks/encoder.py --tiny --device cpu      # small, on the CPU twin: no figures

Each batch of a trace runs as

    eager   vLLM's own class, eagerly (``embed_multimodal``)
    stock   vLLM's own class under vLLM's own encoder CUDA graphs, with its defaults
    tower   our class, eagerly: the same, with the tower's layers made faster (``tower.py``)
    ours    our class under our manager (``execute``), no graph's metadata known from before
    same    the same, the metadata of this batch's last step in each graph still there
    exact   one graph captured for this very batch, replayed: no padding, no planning, nothing
            around it. No scheme of graphs can be faster over the same tower.

Weights are random, the same for both classes. What each way gives is held against `eager` before
anything is timed. Then ways take turns; a figure is the median of its runs, wall clock, the device
idle at the start and waited for at the end. `eager` is timed twice in each turn, as `eager` and
`again`: how far these two differ is what a difference between ways must exceed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import towers_full_size
from encoder_report import plot, print_report
from engine_check import TOLERANCE, relative, worst
from traces import TRACES, Trace, read_trace


@dataclass
class Timed:
    """One batch.

    Attributes:
        grids: Its items.
        tokens: Output tokens, all items.
        ms: Median milliseconds of each way.
        low, high: Of each way, the quartiles.
        host_ms: Of `ours` and `same`: wall clock of a run less what its own replays took; empty
            where a part ran eagerly.
        steps: Of `ours`: token budgets in order, None for an eager run.
        error: Largest relative error of an item against `eager`, of each way.
    """

    grids: list[list[int]]
    tokens: int
    ms: dict[str, float] = field(default_factory=dict)
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    host_ms: dict[str, float] = field(default_factory=dict)
    steps: list[int | None] = field(default_factory=list)
    error: dict[str, float] = field(default_factory=dict)


@dataclass
class Captured:
    """What capturing cost a manager: seconds of a first and of a second round, and MiB kept."""

    first_s: float
    second_s: float
    mib: float
    graphs: int


class Bench:
    """Both models, both managers, and the ways to run a batch.

    Args:
        options: The command line's.
        folder: The checkpoint's.
        settings: Further arguments of the engine.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, **settings: Any) -> None:
        import torch

        from vllm.vit_cudagraph.manager import EncoderGraphManager
        from vllm.vit_cudagraph.stock_safety import EncoderCudaGraphManager
        from vllm.vit_cudagraph.testing import models

        self.torch = torch
        self.device = models.place().torch_device
        self.dtype = getattr(torch, models.place().dtype)
        engine = {
            "max_model_len": options.model_len,
            "max_num_batched_tokens": options.model_len,
            "limit_mm_per_prompt": limits(options),
        } | settings
        self.config = self._make_config(folder, engine)
        self.ours = models.build_model(self.config)
        stock_class = towers_full_size.upstream_class(options.model)
        self.stock_config = self._make_config(folder, engine)
        self.stock = models.build_model(self.stock_config, model_class=stock_class)
        towers_full_size.same_weights(self.ours, self.stock)
        self.pool = self._new_pool()
        self.captures: dict[str, Captured] = {}
        self.manager = self._captured("ours", EncoderGraphManager, self.config, self.ours)
        self.stock_manager = (
            self._captured("stock", EncoderCudaGraphManager, self.stock_config, self.stock)
            if self.device.type == "cuda"
            else None
        )

    def _make_config(self, folder: Path, engine: dict[str, Any]) -> Any:
        from vllm.vit_cudagraph.testing import models

        return models.make_config(folder, **engine)

    def _new_pool(self) -> Any:
        return self.torch.cuda.graph_pool_handle() if self.device.type == "cuda" else object()

    def _captured(self, name: str, kind: Any, config: Any, model: Any) -> Any:
        """A manager with its graphs, captured twice over, as vLLM's runners do."""
        with self._within(config):
            manager = kind(config, self.device, self.dtype, model)
            free = self._free_bytes()
            first = self._capture(manager)
            manager.clear()
            gc.collect()
            second = self._capture(manager)
        mib = (free - self._free_bytes()) / 2**20
        graphs = manager.get_num_graphs_to_capture()
        self.captures[name] = Captured(first, second, mib, graphs)
        return manager

    def _within(self, config: Any) -> ExitStack:
        """What a runner holds around a capture: its configuration, and vLLM's capture stream."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import graph_capture

        held = ExitStack()
        held.enter_context(set_current_vllm_config(config))
        if self.device.type == "cuda":
            held.enter_context(graph_capture(self.device))
        return held

    def _capture(self, manager: Any) -> float:
        self._wait()
        start = time.perf_counter()
        manager.capture(self._new_pool())
        self._wait()
        return time.perf_counter() - start

    def _free_bytes(self) -> int:
        if self.device.type != "cuda":
            return 0
        self.torch.cuda.empty_cache()
        return int(self.torch.cuda.mem_get_info(self.device)[0])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def _prepare(self, name: str, ways: dict[str, Callable[[], Any]]) -> None:
        """Each run that is timed comes after one of its own way, so that caches are as warm and the
        device as hot for all: one that is kept busy runs a few per cent slower. ``ours`` and
        ``same`` differ in whether the graphs' metadata is taken for what that run left."""
        ways[name]()
        if name == "ours":
            for captured in self.manager.captured.values():
                captured.holds = None

    def _wait_for_all(self) -> None:
        """Before a run that is timed."""
        self._wait()

    # -- one batch -----------------------------------------------------------------------------

    def run(self, modality: str, grids: list[list[int]], seed: int, repeats: int) -> Timed:
        """Check every way on a batch, then time them in turns."""
        mm_kwargs = self._kwargs(modality, grids, seed)
        declared = self.ours.vit_declared
        tokens = sum(declared.output_tokens(tuple(grid)) for grid in grids)
        timed = Timed(grids, tokens)
        ways = self._ways(mm_kwargs)
        with self.torch.inference_mode():
            expected = [row.clone() for row in ways["eager"]()]
            timed.error = errors(ways, expected)
            samples = self._in_turns(ways, repeats)
            inputs = self.ours.vit_checked_inputs(mm_kwargs)
            timed.steps = [step.budget for step in self.manager._plan(inputs).steps]
            if None not in timed.steps:
                timed.host_ms = {name: self._host_ms(name, ways) for name in ("ours", "same")}
        for name, of in samples.items():
            timed.ms[name] = statistics.median(of)
            quartiles = statistics.quantiles(of, n=4) if len(of) > 1 else [of[0]] * 3
            timed.low[name], timed.high[name] = quartiles[0], quartiles[2]
        return timed

    def _kwargs(self, modality: str, grids: list[list[int]], seed: int) -> dict[str, Any]:
        """A batch as a runner hands it over, its pixels drawn."""
        from vllm.vit_cudagraph.testing.strategies import Batch
        from vllm.vit_cudagraph.testing.subject import make_kwargs

        batch = Batch(modality, tuple(tuple(grid) for grid in grids), seed)
        return make_kwargs(self.ours, batch)

    def _ways(self, mm_kwargs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
        ways = {
            "eager": lambda: self.stock.embed_multimodal(**mm_kwargs),
            "again": lambda: self.stock.embed_multimodal(**mm_kwargs),
            "tower": lambda: self.ours.embed_multimodal(**mm_kwargs),
            "ours": lambda: self.manager.execute(mm_kwargs),
            "same": lambda: self.manager.execute(mm_kwargs),
        }
        if self.stock_manager is not None:
            ways["stock"] = lambda: self.stock_manager.execute(mm_kwargs)
            ways["exact"] = self._exact(mm_kwargs)
        return ways

    def _exact(self, mm_kwargs: dict[str, Any]) -> Callable[[], Any]:
        """A graph of this batch alone."""
        torch, model = self.torch, self.ours
        inputs = model.vit_checked_inputs(mm_kwargs)
        with torch.inference_mode(), self._within(self.config):
            metadata = model.vit_metadata(inputs.grids, self.device)
            model.vit_forward(inputs.pixels, metadata)  # kernels are built outside of the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                rows = model.vit_forward(inputs.pixels, metadata)
        sizes = [model.vit_declared.output_tokens(grid) for grid in inputs.grids]

        def replay() -> Any:
            graph.replay()
            return rows.split(sizes)

        return replay

    def _in_turns(self, ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {name: [] for name in ways}
        order = list(ways)
        for turn in range(repeats + 1):
            random.Random(turn).shuffle(order)
            for name in order:
                self._prepare(name, ways)
                self._wait_for_all()
                start = time.perf_counter()
                ways[name]()
                self._wait()
                if turn:  # the first is a warm-up
                    samples[name].append((time.perf_counter() - start) * 1e3)
        return samples

    def _host_ms(self, name: str, ways: dict[str, Callable[[], Any]]) -> float:
        samples = []
        for _ in range(9):
            self._prepare(name, ways)
            self._wait_for_all()
            with self._replays_timed() as watches:
                start = time.perf_counter()
                ways[name]()
                self._wait()
                wall_ms = (time.perf_counter() - start) * 1e3
            samples.append(wall_ms - sum(watch.milliseconds() for watch in watches))
        return statistics.median(samples)

    @contextmanager
    def _replays_timed(self) -> Iterator[list[Any]]:
        """The watches of all replays while open."""
        watches: list[Any] = []
        graphs = {budget: captured.graph for budget, captured in self.manager.captured.items()}
        for budget, captured in self.manager.captured.items():
            captured.graph = WatchedGraph(graphs[budget], self.manager.backend, watches)
        try:
            yield watches
        finally:
            for budget, captured in self.manager.captured.items():
                captured.graph = graphs[budget]


@dataclass
class WatchedGraph:
    """A graph whose replays leave their watches behind."""

    graph: Any
    backend: Any
    watches: list[Any]

    def replay(self) -> None:
        watch = self.backend.stopwatch()
        watch.start()
        self.graph.replay()
        watch.stop()
        self.watches.append(watch)


def errors(ways: dict[str, Callable[[], Any]], expected: Sequence[Any]) -> dict[str, float]:
    """Largest relative error of an item, of each way."""
    return {
        name: worst(relative(a, b) for a, b in zip(way(), expected, strict=True))
        for name, way in ways.items()
    }


def limits(options: argparse.Namespace) -> dict[str, int]:
    limit = {"image": 32}
    if options.videos is not None:
        limit["video"] = options.videos
    return limit


def command_line(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(towers_full_size.VISION), default="qwen2_5_vl")
    parser.add_argument(
        "--trace", default="synthetic", help=f"{', '.join(TRACES)}, or a file of grids"
    )
    parser.add_argument("--batches", type=int, default=40, help="of a trace that is drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each way and batch")
    parser.add_argument("--videos", type=int, default=0, help="limit_mm_per_prompt of videos")
    parser.add_argument("--model-len", type=int, default=8192)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the tests' small towers")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    parser.add_argument("--plot", type=Path, default=None, help="draw tokens against milliseconds")
    return parser.parse_args(arguments)


def chosen_trace(options: argparse.Namespace) -> Trace:
    """Raises ``SystemExit`` with what would work, where there is no such trace."""
    cell = towers_full_size.cell_pixels(options.model)
    if options.trace in TRACES:
        return TRACES[options.trace](cell, options.batches, options.seed)
    path = Path(options.trace)
    if not path.is_file():
        raise SystemExit(f"--trace {options.trace}: give one of {', '.join(TRACES)}, or a file")
    return read_trace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line(arguments)
    trace = chosen_trace(options)
    if trace.modality == "video" and not options.videos:
        raise SystemExit(f"--trace {options.trace} is of videos: give --videos 1 as well")
    os.environ |= {"VIT_CUDAGRAPH_TEST_DEVICE": options.device, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = towers_full_size.make_folder(options.model, Path(scratch), tiny=options.tiny)
        bench = Bench(options, folder)
        rows = [
            bench.run(trace.modality, grids, seed, options.repeats)
            for seed, grids in enumerate(trace.batches)
        ]
    figures = {
        "model": options.model,
        "trace": options.trace,
        "videos": options.videos,
        "device": device_name(options.device),
        "captured": {name: asdict(of) for name, of in bench.captures.items()},
        "budgets": sorted(bench.manager.captured),
        "costs": bench.manager.costs.as_dict(),
        "rows": [asdict(row) for row in rows],
    }
    print_report(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(rounded(figures)) + "\n")
    if options.plot is not None:
        plot(figures, options.plot)
    wrong = [row for row in rows if not worst(row.error.values()) <= TOLERANCE]
    return 1 if wrong else 0


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "CPU twin"


def rounded(figures: Any) -> Any:
    """Four decimals are plenty, and keep the file small."""
    if isinstance(figures, dict):
        return {key: rounded(value) for key, value in figures.items()}
    if isinstance(figures, list):
        return [rounded(value) for value in figures]
    return round(figures, 4) if isinstance(figures, float) else figures


if __name__ == "__main__":
    sys.exit(main())
