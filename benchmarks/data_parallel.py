# SPDX-License-Identifier: Apache-2.0
"""Encoder data parallelism (``mm_encoder_tp_mode=data``): a batch's items shared over ranks, timed.

    python benchmarks/data_parallel.py                     # two GPUs: one rank, then two over NCCL
    python benchmarks/data_parallel.py --ranks 1 2 4 --traces twenty
    python benchmarks/data_parallel.py --ranks 2 --shared  # on one GPU if there is no other: gloo
    python benchmarks/data_parallel.py --tiny --device cpu # the CPU twin, over gloo: no figures

For each number of ranks that many processes start, each with a whole tower. Each batch runs as

    eager   vLLM's own class, eagerly: ``embed_multimodal`` shards and gathers
    stock   vLLM's own class under vLLM's own encoder CUDA graphs
    tower   our class, eagerly, sharded as above
    ours    our class under our manager

What each rank is given in each way is held against the same class run whole and eagerly in that
rank alone, item by item. Then ways take turns; a run starts when all ranks are ready, and takes as
long as on the slowest of them; a figure is the median. The balance is that of upstream's
assignment: patches of the fullest rank over the mean.

A batch that takes longer than ``--limit`` seconds ends its process, and so all. Ranks that share a
GPU show that values are right and that nothing hangs; their times say nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import encoder
import towers_full_size
from encoder import errors
from engine_check import TOLERANCE, worst
from traces import TRACES

START_LIMIT_S = 300
SHOWN = ("eager", "stock", "tower", "ours")


def command_line(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(towers_full_size.VISION), default="qwen2_5_vl")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes of a start")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=["synthetic", "twenty"])
    parser.add_argument("--batches", type=int, default=20, help="of each trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each way and batch")
    parser.add_argument("--videos", type=int, default=2, help="limit_mm_per_prompt of videos")
    parser.add_argument("--model-len", type=int, default=8192)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shared", action="store_true", help="ranks may share a GPU")
    parser.add_argument("--tiny", action="store_true", help="the tests' small towers")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a batch may take")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# -- one rank --------------------------------------------------------------------------------------


class ShardedBench(encoder.Bench):
    """The ways of ``encoder.py`` on one of several ranks."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.folder, (self.world,) = options.rank, options.folder, options.ranks
        settings: dict[str, Any] = {}
        if self.world > 1:
            settings = {"tensor_parallel_size": self.world, "mm_encoder_tp_mode": "data"}
        if options.shared:
            # vLLM refuses more ranks than GPUs unless it leaves their places to somebody else.
            settings["distributed_executor_backend"] = "external_launcher"
        super().__init__(options, options.folder.parent / "model", **settings)

    def _make_config(self, folder: Path, engine: dict[str, Any]) -> Any:
        """This rank's; ranks join each other at the first."""
        from vllm.config import set_current_vllm_config
        from vllm.vit_cudagraph.testing.rank_groups import join

        config = super()._make_config(folder, engine)
        config.parallel_config.rank = self.rank
        if not self.torch.distributed.is_initialized():
            with set_current_vllm_config(config):
                join(self.rank, self.world, self.folder, timedelta(seconds=START_LIMIT_S))
        return config

    def over(self) -> str:
        """What ranks talk over."""
        from vllm.distributed import get_tp_group

        return str(self.torch.distributed.get_backend(get_tp_group().device_group))

    def _ways(self, mm_kwargs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
        ways = super()._ways(mm_kwargs)
        for of_one_rank in ("exact", "same"):
            ways.pop(of_one_rank, None)
        return ways

    def _wait_for_all(self) -> None:
        from vllm.distributed import get_tp_group

        self._wait()
        if self.world > 1:
            get_tp_group().barrier()

    def run_batch(self, modality: str, grids: list[list[int]], seed: int, repeats: int) -> Any:
        """Errors of this rank, and samples of its runs, by way."""
        mm_kwargs = self._kwargs(modality, grids, seed)
        ways = self._ways(mm_kwargs)
        with self.torch.inference_mode():
            with whole(self.stock):
                expected = [row.clone() for row in self.stock.embed_multimodal(**mm_kwargs)]
            return errors(ways, expected), self._in_turns(ways, repeats)


@contextmanager
def whole(model: Any) -> Iterator[None]:
    """While open, the model runs all items itself."""
    shards, model.use_data_parallel = model.use_data_parallel, False
    try:
        yield
    finally:
        model.use_data_parallel = shards


def run_rank(options: argparse.Namespace) -> None:
    """Run all traces as one of the ranks; the first writes what all of them found."""
    faulthandler.dump_traceback_later(START_LIMIT_S, exit=True)
    from vllm.vit_cudagraph.testing.rank_groups import take_gpu

    take_gpu(options.rank)
    bench = ShardedBench(options)
    captured = {name: asdict(of) for name, of in bench.captures.items()}
    figures: dict[str, Any] = {"ranks": bench.world, "over": bench.over(), "captured": captured}
    figures["traces"] = {}
    cell = towers_full_size.cell_pixels(options.model)
    for name in options.traces:
        trace = TRACES[name](cell, options.batches, options.seed)
        rows = []
        for seed, grids in enumerate(trace.batches):
            faulthandler.dump_traceback_later(options.limit, exit=True)
            found = bench.run_batch(trace.modality, grids, seed, options.repeats)
            rows.append(of_all(bench, grids, gathered(found, bench.world)))
        figures["traces"][name] = rows
    if options.rank == 0:
        (options.folder / "figures.json").write_text(json.dumps(figures))


def gathered(found: Any, world: int) -> list[Any]:
    """What each rank found."""
    import torch

    from vllm.distributed import get_tp_group

    of_ranks: list[Any] = [None] * world
    torch.distributed.all_gather_object(of_ranks, found, group=get_tp_group().cpu_group)
    return of_ranks


def of_all(bench: ShardedBench, grids: list[list[int]], found: list[Any]) -> dict[str, Any]:
    """One batch: the worst error and the slowest rank of each way, and how even the shares are."""
    from vllm.v1.worker.encoder_cudagraph import get_load_balance_assignment

    wrong, samples = zip(*found, strict=True)
    patches = [bench.ours.vit_declared.patches(tuple(grid)) for grid in grids]
    *_, shares = get_load_balance_assignment(patches, bench.world)
    return {
        "grids": grids,
        "tokens": sum(bench.ours.vit_declared.output_tokens(tuple(grid)) for grid in grids),
        "error": {name: worst(of[name] for of in wrong) for name in wrong[0]},
        "ms": {
            name: statistics.median(map(max, zip(*(of[name] for of in samples), strict=True)))
            for name in samples[0]
        },
        "balance": max(shares) * len(shares) / sum(shares),
    }


# -- all ranks -------------------------------------------------------------------------------------


def start(options: argparse.Namespace, arguments: list[str], world: int, folder: Path) -> Any:
    """Figures of one number of ranks.

    Raises:
        SystemExit: A rank failed; its log's end is shown.
    """
    folder.mkdir()
    command = [sys.executable, str(Path(__file__)), *arguments, "--folder", str(folder)]
    command += ["--ranks", str(world)]
    environment = os.environ | {"VIT_CUDAGRAPH_TEST_DEVICE": options.device, "HF_HUB_OFFLINE": "1"}
    logs = [folder / f"log-{rank}" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("wb") as out:
            ranks.append(
                subprocess.Popen(
                    [*command, "--rank", str(rank)],
                    stdout=out,
                    stderr=out,
                    env=environment,
                    start_new_session=True,
                )
            )
    try:
        while any(process.poll() is None for process in ranks):
            if any(process.poll() for process in ranks):
                time.sleep(3)  # for the others to fail of the same cause
                break
            time.sleep(0.1)
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failed:
            tails = (f"rank {n} of {world} failed:\n{logs[n].read_text()[-4000:]}" for n in failed)
            raise SystemExit("\n".join(tails))
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return json.loads((folder / "figures.json").read_text())


def print_report(figures: dict[str, Any]) -> None:
    """Totals of each trace, and how many times as fast as the first number of ranks each way is."""
    first = figures["starts"][0]
    print(f"\n{figures['model']}, {figures['device']}")
    for name in first["traces"]:
        ways = [way for way in SHOWN if way in first["traces"][name][0]["ms"]]
        columns = " ".join(f"{way:>9} {'':>6}" for way in ways)
        print(f"\n{name}: milliseconds in total, and times as fast as {first['ranks']} rank(s)")
        print(f"{'ranks':>5} {columns} {'balance':>7} {'largest error':>13}")
        base = {way: sum(row["ms"][way] for row in first["traces"][name]) for way in ways}
        for of in figures["starts"]:
            rows = of["traces"][name]
            total = {way: sum(row["ms"][way] for row in rows) for way in ways}
            cells = " ".join(f"{total[way]:9.1f} {base[way] / total[way]:6.2f}" for way in ways)
            balance = statistics.mean(row["balance"] for row in rows)
            error = worst(worst(row["error"].values()) for row in rows)
            print(f"{of['ranks']:>5} {cells} {balance:>7.2f} {error:>13.1e}  {of['over']}")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = command_line(given)
    if options.rank is not None:
        run_rank(options)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        towers_full_size.make_folder(options.model, folder / "model", tiny=options.tiny)
        starts = [start(options, given, n, folder / f"ranks-{n}") for n in options.ranks]
    figures = {
        "model": options.model,
        "device": encoder.device_name(options.device),
        "starts": starts,
    }
    print_report(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(encoder.rounded(figures)) + "\n")
    rows = [row for of in starts for trace in of["traces"].values() for row in trace]
    return 0 if all(worst(row["error"].values()) <= TOLERANCE for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
