# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/data_parallel.py`` runs over real processes and checks what it times. Its figures
mean nothing on a CPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import data_parallel  # noqa: E402


def test_two_ranks_on_the_twin(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "data_parallel.py"), "--device", "cpu", "--tiny"]
    command += ["--ranks", "2", "--traces", "twenty", "--batches", "1", "--repeats", "1"]
    command += ["--model-len", "512", "--videos", "0", "--json", "out.json"]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (start,) = json.loads((tmp_path / "out.json").read_text())["starts"]
    assert start["ranks"] == 2
    (row,) = start["traces"]["twenty"]
    assert len(row["grids"]) == 20
    assert set(row["ms"]) == {"eager", "again", "tower", "ours"} == set(row["error"])
    assert max(row["error"].values()) < 1e-4 and min(row["ms"].values()) > 0
    assert 1 <= row["balance"] < 1.2
    assert "times as fast" in ran.stdout


def test_a_rank_that_fails_is_named_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the first one waits for it."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import sys, time\nif '1' == sys.argv[-1]: sys.exit('the cause')\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(data_parallel, "__file__", str(script))
    options = data_parallel.command_line(["--device", "cpu"])
    with pytest.raises(SystemExit, match="^rank 1 of 2 failed:\nthe cause\n$"):
        data_parallel.start(options, [], 2, tmp_path / "folder")


def test_nan_is_the_worst_error_wherever_it_stands() -> None:
    for errors in ([math.nan, 1.0], [1.0, math.nan, 2.0], [1.0, math.nan]):
        assert math.isnan(data_parallel.worst(errors))
    assert data_parallel.worst([1.0, 3.0, 2.0]) == 3.0
