# SPDX-License-Identifier: Apache-2.0
"""How long does it take to plan a batch? Host time, no GPU.

    python benchmarks/planning.py
    python benchmarks/planning.py --json planning.json --batches 2000

Packs batches of Qwen2.5-VL-sized items into the graphs that would be captured for its tower (the
token ladder from 64 tokens up, costs as modelled from an H200), and prints microseconds for each
number of items and each kind of batch:

* ``pack``: a batch that was not seen before. Each is another one.
* ``hit``: a batch that was, through the cache of plans, keyed by its grids. Its time is that of
  hashing and comparing the key, which is another object each time, as when a request comes in.

Run it on a quiet machine: the figures are wall time, and whatever else runs is in them, most of all
in the 99th percentiles. The load average is printed and kept for that reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm.vit_cudagraph.costs import CostLines
from vllm.vit_cudagraph.geometry import Grid, Limits, ViTGeometry, offset_rows, window_rows
from vllm.vit_cudagraph.ladder import token_ladder
from vllm.vit_cudagraph.packing import EXACT_ITEMS, Packer, PlanCache

COUNTS = (1, 2, 4, 8, 9, 10, 11, 16, 32, 64, 128, 512)
LARGEST_BUDGET = 1650
MOST_ITEMS = 64
LIMITS_US = {8: 200.0, 512: 5000.0}
"""What is promised of `pack` by number of items: the median, on a quiet machine."""
HIT_LIMIT_US = 5.0
"""And of a hit, up to 64 items; beyond, a key takes longer to hash."""

QWEN2_5_VL = ViTGeometry(
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    window_side=4,
    rows=window_rows("order", "inverse")
    | offset_rows("sequences", "full", "longest")
    | offset_rows("windows", "windows", "longest_window"),
)


def equal_small(generator: random.Random, count: int) -> tuple[Grid, ...]:
    """One thumbnail's size, another for each batch: 16 to 100 tokens."""
    return ((1, 2 * generator.randint(4, 10), 2 * generator.randint(4, 10)),) * count


def mixed(generator: random.Random, count: int) -> tuple[Grid, ...]:
    """From 224 x 224 to beyond the largest graph."""

    def side() -> int:
        return min(160, 2 * max(4, round(generator.lognormvariate(2.6, 0.5))))

    return tuple((1, side(), side()) for _ in range(count))


def videos(generator: random.Random, count: int) -> tuple[Grid, ...]:
    """Clips of 2 to 16 (halved) frames of 4 x 4 to 14 x 14 merged tokens."""

    def side() -> int:
        return 2 * generator.randint(4, 14)

    return tuple((generator.choice([2, 4, 8, 16]), side(), side()) for _ in range(count))


KINDS: dict[str, Callable[[random.Random, int], tuple[Grid, ...]]] = {
    "equal small images": equal_small,
    "mixed sizes": mixed,
    "videos": videos,
}


def microseconds(call: Callable[[Any], object], arguments: Sequence[Any]) -> list[float]:
    """Wall time of ``call`` on each argument, the garbage collector held back."""
    clock = time.perf_counter_ns
    times = []
    gc.collect()
    gc.disable()
    try:
        for argument in arguments:
            start = clock()
            call(argument)
            times.append((clock() - start) / 1e3)
    finally:
        gc.enable()
    return sorted(times)


def measure(packer: Packer, kind: str, count: int, batches: int) -> dict[str, Any]:
    """Figures of one kind of batch and one number of items."""
    generator = random.Random(f"{kind} {count}")
    # Few kinds of equal images exist, so keep what was drawn even where it comes twice.
    grids = [KINDS[kind](generator, count) for _ in range(batches)]
    usages = [[QWEN2_5_VL.usage(grid) for grid in batch] for batch in grids]
    for batch in usages[:5]:
        packer.pack(batch)
    packed = microseconds(packer.pack, usages)
    seen = PlanCache(lambda batch: packer.pack([QWEN2_5_VL.usage(grid) for grid in batch]))
    recent = grids[-500:]
    for batch in recent:
        seen(batch)
    hits = microseconds(seen, [tuple((t, h, w) for t, h, w in batch) for batch in recent])
    plans = [packer.pack(batch) for batch in usages[:200]]
    return {
        "kind": kind,
        "items": count,
        "pack_median_us": statistics.median(packed),
        "pack_p99_us": packed[len(packed) * 99 // 100],
        "hit_median_us": statistics.median(hits),
        "hit_p99_us": hits[len(hits) * 99 // 100],
        "steps_mean": statistics.mean(len(plan.steps) for plan in plans),
        "cost_of_eager": sum(p.cost_ms for p in plans) / sum(p.eager_ms for p in plans),
    }


def machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "niceness": os.nice(0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--batches", type=int, default=1000, help="batches a row (default 1000)")
    options = parser.parse_args()

    budgets = token_ladder(64, LARGEST_BUDGET)
    packer = Packer(
        [QWEN2_5_VL.capacity(budget, Limits(items=MOST_ITEMS)) for budget in budgets],
        CostLines.modelled(budgets),
    )
    about = machine() | {"budgets": len(budgets), "exact_items": EXACT_ITEMS}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'kind':20} {'items':>5} {'pack':>9} {'p99':>9} {'hit':>7} {'p99':>7}   (us)", end="")
    print(f" {'steps':>6} {'cost/eager':>10}")
    rows = []
    for kind in KINDS:
        for count in COUNTS:
            # Long lists take milliseconds each: fewer of them say as much.
            row = measure(packer, kind, count, max(50, options.batches * 8 // max(8, count)))
            rows.append(row)
            print(
                f"{kind:20} {count:5} {row['pack_median_us']:9.1f} {row['pack_p99_us']:9.1f} "
                f"{row['hit_median_us']:7.2f} {row['hit_p99_us']:7.2f}        "
                f"{row['steps_mean']:6.1f} {row['cost_of_eager']:10.2f}",
                flush=True,
            )
    for count, limit in LIMITS_US.items():
        worst = max(row["pack_median_us"] for row in rows if row["items"] == count)
        print(f"pack of {count} items: largest median {worst:.0f} us, limit {limit:.0f}")
    worst = max(row["hit_median_us"] for row in rows if row["items"] <= 64)
    print(f"hit of up to 64 items: largest median {worst:.2f} us, limit {HIT_LIMIT_US:.2f}")
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
