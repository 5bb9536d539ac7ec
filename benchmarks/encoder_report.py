# SPDX-License-Identifier: Apache-2.0
"""The table and the plot of ``encoder.py``'s figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_check import worst

SHOWN = ("eager", "stock", "tower", "ours", "same", "exact")


def present(figures: dict[str, Any]) -> list[str]:
    return [name for name in SHOWN if name in figures["rows"][0]["ms"]]


def spread(row: dict[str, Any]) -> float:
    """How far eager differs from itself, as a share: medians of two sets of runs, or the wider
    of their quartiles."""
    eager, again = row["ms"]["eager"], row["ms"]["again"]
    apart = abs(eager - again) / min(eager, again)
    quartiles = max(row["high"][n] - row["low"][n] for n in ("eager", "again")) / 2
    return float(max(apart, quartiles / min(eager, again)))


def against_eager(row: dict[str, Any]) -> float:
    """By which share ours is slower than the faster eager line; negative where it is faster."""
    eager = min(row["ms"][name] for name in ("eager", "again", "tower"))
    return float(row["ms"]["ours"] / eager - 1)


def totals(figures: dict[str, Any]) -> dict[str, float]:
    rows = figures["rows"]
    return {name: sum(row["ms"][name] for row in rows) for name in present(figures)}


def print_report(figures: dict[str, Any]) -> None:
    names = present(figures)
    print(f"\n{figures['model']}, trace {figures['trace']}, {figures['device']}")
    print(f"video limit {figures['videos']}; budgets of ours: {figures['budgets']}")
    for name, of in figures["captured"].items():
        print(
            f"captured, {name}: {of['graphs']} graphs, first round {of['first_s']:.1f} s, "
            f"second {of['second_s']:.1f} s, {of['mib']:.0f} MiB"
        )
    columns = " ".join(f"{name:>8}" for name in names)
    print(f"{'items':>5} {'tokens':>6} {columns} {'slower':>7} {'spread':>7} {'host':>9}  steps")
    for row in figures["rows"]:
        times = " ".join(f"{row['ms'][name]:8.2f}" for name in names)
        host = "/".join(f"{ms:.2f}" for ms in row["host_ms"].values()) or "-"
        steps = " ".join("eager" if step is None else str(step) for step in row["steps"])
        print(
            f"{len(row['grids']):>5} {row['tokens']:>6} {times} {against_eager(row):>7.1%} "
            f"{spread(row):>7.1%} {host:>9}  {steps}"
        )
    total = totals(figures)
    print(f"{'total':>12} " + " ".join(f"{total[name]:8.1f}" for name in names))
    slowest = max(figures["rows"], key=lambda row: against_eager(row) - spread(row))
    print(
        f"worst batch against the faster eager: {against_eager(slowest):+.1%} "
        f"(its spread {spread(slowest):.1%}); largest error "
        f"{worst(worst(row['error'].values()) for row in figures['rows']):.1e}"
    )
    for other in ("exact", "stock", "eager", "tower"):
        if other in total:
            print(f"total of ours / {other}: {total['ours'] / total[other]:.3f}")


def plot(figures: dict[str, Any], path: Path) -> None:
    """Tokens against milliseconds, one line a way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(figures["rows"], key=lambda row: row["tokens"])
    axes = pyplot.figure(figsize=(8, 5)).gca()
    for name in present(figures):
        points = [(row["tokens"], row["ms"][name]) for row in rows]
        axes.plot(*zip(*points, strict=True), marker=".", linewidth=1, label=name)
    axes.set(xscale="log", yscale="log", xlabel="output tokens of the batch", ylabel="milliseconds")
    axes.set_title(f"{figures['model']}, trace {figures['trace']}, {figures['device']}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    axes.figure.savefig(path)
