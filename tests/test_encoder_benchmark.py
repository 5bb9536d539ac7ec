# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/encoder.py`` runs, checks what it times, and reads traces. Its figures mean nothing
on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import encoder_report  # noqa: E402
import traces  # noqa: E402


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "encoder.py"), "--device", "cpu", "--tiny", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
        cwd=tmp_path,
        timeout=300,
    )


def test_a_trace_from_a_file_on_the_twin(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("# two batches\n1,8,8 1,6,10\n\n1,16,16\n")
    ran = run(
        tmp_path, "--trace", "trace", "--repeats", "2", "--model-len", "128", "--json", "out.json"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures = json.loads((tmp_path / "out.json").read_text())
    assert [row["grids"] for row in figures["rows"]] == [[[1, 8, 8], [1, 6, 10]], [[1, 16, 16]]]
    assert [row["tokens"] for row in figures["rows"]] == [31, 64]
    for row in figures["rows"]:
        assert set(row["ms"]) == {"eager", "again", "tower", "ours", "same"}
        assert max(row["error"].values()) < 1e-4 and min(row["ms"].values()) > 0
        assert set(row["host_ms"]) == {"ours", "same"}
        assert all(0 < ms < 1000 for ms in row["host_ms"].values())
    assert [row["steps"] for row in figures["rows"]] == [[64], [64]]
    assert "total of ours / eager" in ran.stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1,8\n", "t,h,w"),
        ("1,7,8\n", "h and w even"),
        ("1,8,8\nvideo: 2,8,8\n", "all of videos"),
        ("", "all lines"),
        ("audio: 1,8,8\n", "all lines"),
    ],
)
def test_a_bad_trace_is_named_with_what_works(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(SystemExit, match=says):
        traces.read_trace(tmp_path / "trace")


@pytest.mark.parametrize("name", traces.TRACES)
def test_traces_are_the_same_for_a_seed_and_within_bounds(name: str) -> None:
    trace = traces.TRACES[name](28, 12, 3)
    assert trace == traces.TRACES[name](28, 12, 3) and len(trace.batches) == 12
    for t, h, w in (grid for batch in trace.batches for grid in batch):
        assert h % 2 == 0 and w % 2 == 0 and h * w // 4 <= traces.MOST_TOKENS
        assert (t > 1) == (trace.modality == "video")


def row(**ms: float) -> dict[str, Any]:
    return {"ms": ms, "low": ms, "high": {name: value + 0.4 for name, value in ms.items()}}


def test_slower_is_against_the_faster_eager_and_spread_is_of_eager_itself() -> None:
    one = row(eager=10.0, again=11.0, tower=8.0, ours=9.0)
    assert encoder_report.against_eager(one) == pytest.approx(9 / 8 - 1)
    assert encoder_report.spread(one) == pytest.approx(0.1)
    assert encoder_report.spread(row(eager=10.0, again=10.0)) == pytest.approx(0.02)
