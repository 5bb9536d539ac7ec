# SPDX-License-Identifier: Apache-2.0
"""The figures of ``serving.py``: runs pooled over the rounds, and their table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WAYS = ("eager", "stock", "ours")


@dataclass
class Run:
    """One load on one way in one round. Lists have an entry a request.

    Attributes:
        seconds: From the first request to the last answer.
        ttft_ms: Time to the first token.
        tpot_ms: Time per output token after the first; none for an answer of one token.
        input_tokens, output_tokens: All requests together.
        encoder_ms, encoder_batches: By the clock in the worker.
    """

    round: int
    load: str
    way: str
    seconds: float
    ttft_ms: list[float] = field(repr=False)
    tpot_ms: list[float] = field(repr=False)
    input_tokens: int
    output_tokens: int
    encoder_ms: float
    encoder_batches: int

    def summary(self) -> dict[str, Any]:
        """What is written of a single run: no lists."""
        return {
            "round": self.round,
            "load": self.load,
            "way": self.way,
            "requests": len(self.ttft_ms),
            "seconds": self.seconds,
            "ttft_mean_ms": mean(self.ttft_ms),
            "tpot_mean_ms": mean(self.tpot_ms),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "encoder_ms": self.encoder_ms,
            "encoder_batches": self.encoder_batches,
        }


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def pooled(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, Any]]]:
    """Load -> way -> figures over all rounds; loads in the order in which they first ran."""
    of: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        of.setdefault(run.load, {}).setdefault(run.way, []).append(run)
    return {load: {way: _pool(rounds) for way, rounds in ways.items()} for load, ways in of.items()}


def _pool(runs: Sequence[Run]) -> dict[str, Any]:
    ttft = [value for run in runs for value in run.ttft_ms]
    seconds = sum(run.seconds for run in runs)
    return {
        "requests": len(ttft),
        "ttft_mean_ms": mean(ttft),
        "ttft_median_ms": float(np.median(ttft)),
        "ttft_p99_ms": float(np.percentile(ttft, 99)),
        "tpot_mean_ms": mean([value for run in runs for value in run.tpot_ms]),
        "requests_per_s": len(ttft) / seconds,
        "output_tokens_per_s": sum(run.output_tokens for run in runs) / seconds,
        "encoder_ms_per_run": mean([run.encoder_ms for run in runs]),
        "encoder_batches_per_run": mean([run.encoder_batches for run in runs]),
        "ttft_ms": ttft,
    }


def against_better(ways: dict[str, dict[str, Any]], key: str) -> float | None:
    """`key` of ours as a share of the lower of eager and stock; None where a side is missing."""
    others = [ways[name][key] for name in ("eager", "stock") if name in ways]
    if "ours" not in ways or not others or not min(others):
        return None
    return float(ways["ours"][key] / min(others))


_COLUMNS = {
    "ttft_mean_ms": "mean ttft",
    "ttft_median_ms": "median",
    "ttft_p99_ms": "p99",
    "tpot_mean_ms": "tpot",
    "requests_per_s": "req/s",
    "output_tokens_per_s": "tok/s",
    "encoder_ms_per_run": "encoder ms",
    "encoder_batches_per_run": "batches",
}


def report(figures: dict[str, Any]) -> str:
    """The table of `figures`, as ``serving.py`` writes them with ``--json``."""
    return "\n".join(_lines(figures))


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    yield f"vLLM {figures['vllm']}, {figures['device']}; milliseconds, encoder's per run"
    for way, seconds in figures["ready_s"].items():
        yield f"{way}: ready after {seconds:.0f} s"
    heads = " ".join(f"{head:>10}" for head in _COLUMNS.values())
    yield f"{'load':<8} {'way':<6} {'requests':>8} {heads}"
    for load, ways in figures["pooled"].items():
        for way, of in ways.items():
            cells = " ".join(f"{of[key]:10.2f}" for key in _COLUMNS)
            yield f"{load:<8} {way:<6} {of['requests']:>8} {cells}"
    for load, ways in figures["pooled"].items():
        average, tail = (against_better(ways, f"ttft_{key}_ms") for key in ("mean", "p99"))
        if average is not None and tail is not None:
            others = " and ".join(name for name in ("eager", "stock") if name in ways)
            better = f"better of {others}" if "and" in others else others
            yield f"{load}: ttft of ours / {better}: mean {average:.3f}, P99 {tail:.3f}"
    if "ours" in figures["graphs"]:
        ours = figures["graphs"]["ours"]
        yield (
            f"ours: {ours['replayed']} of {ours['sent']} items sent were replayed, "
            f"{ours['eager']} ran eagerly (warm-up included)"
        )
