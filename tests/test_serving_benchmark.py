# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/serving.py`` runs, every request is answered, and its report says what was measured.
Its figures mean nothing on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import serving  # noqa: E402
import serving_report  # noqa: E402


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "serving.py"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        timeout=300,
    )


@pytest.mark.serve
def test_two_servers_on_the_twin_answer_every_request(tmp_path: Path) -> None:
    short = ["--rounds", "1", "--requests", "2", "--output-tokens", "4"]
    ran = run(tmp_path, "--tiny", *short, "--json", "out.json", "--logs", "logs")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures = json.loads((tmp_path / "out.json").read_text())
    requests = {"twenty": 2, "four": 2, "one": 4}
    assert set(figures["pooled"]) == set(requests)
    for load, ways in figures["pooled"].items():
        assert set(ways) == {"eager", "ours"}
        for of in ways.values():
            assert of["requests"] == len(of["ttft_ms"]) == requests[load]
            assert min(of["ttft_ms"]) > 0 and of["tpot_mean_ms"] > 0
            assert of["encoder_ms_per_run"] > 0 and of["encoder_batches_per_run"] >= 1
    assert {run["output_tokens"] for run in figures["runs"]} == {8, 16}
    ours = figures["graphs"]["ours"]
    sent = 2 * (2 * 20 + 2 * 4) + 4 + 4  # the warm-up, and the round
    assert ours["sent"] == sent == ours["replayed"] + ours["eager"] and ours["replayed"] > 0
    assert min(figures["ready_s"].values()) > 0
    assert "twenty: ttft of ours / eager: mean" in ran.stdout
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "eager.log",
        "ours.log",
        "client.log",
    }


def one_run(way: str, number: int, ttft_ms: list[float], load: str = "four") -> serving_report.Run:
    return serving_report.Run(
        round=number,
        load=load,
        way=way,
        seconds=2.0,
        ttft_ms=ttft_ms,
        tpot_ms=[10.0] * len(ttft_ms),
        input_tokens=100,
        output_tokens=32 * len(ttft_ms),
        encoder_ms=50.0 * number,
        encoder_batches=number,
    )


def some_figures(runs: list[serving_report.Run]) -> dict[str, Any]:
    return {
        "vllm": "0.33",
        "device": "some GPU",
        "ready_s": {"eager": 41.0, "ours": 52.0},
        "graphs": {"ours": {"sent": 9, "replayed": 8, "eager": 1, "graphs": 5}},
        "pooled": serving_report.pooled(runs),
    }


def test_runs_are_pooled_by_request_and_ours_is_held_against_the_better() -> None:
    runs = [
        one_run("eager", 1, [100.0, 300.0]),
        one_run("stock", 1, [400.0, 400.0]),
        one_run("ours", 1, [80.0, 100.0]),
        one_run("eager", 2, [200.0, 200.0]),
        one_run("stock", 2, [100.0, 100.0]),
        one_run("ours", 2, [120.0, 100.0]),
    ]
    figures = some_figures(runs)
    eager = figures["pooled"]["four"]["eager"]
    assert eager["requests"] == 4 and eager["ttft_mean_ms"] == eager["ttft_median_ms"] == 200.0
    assert eager["ttft_p99_ms"] == pytest.approx(297.0)
    assert eager["requests_per_s"] == 1.0 and eager["output_tokens_per_s"] == 32.0
    assert eager["encoder_ms_per_run"] == 75.0 and eager["encoder_batches_per_run"] == 1.5
    text = serving_report.report(figures)
    # 100 against 200 on average; the tail of stock is 400, that of eager 297
    assert "four: ttft of ours / better of eager and stock: mean 0.500, P99 0.402" in text
    assert "ours: 8 of 9 items sent were replayed, 1 ran eagerly" in text
    assert "ours: ready after 52 s" in text


def test_a_ratio_needs_both_sides() -> None:
    pooled = serving_report.pooled([one_run("ours", 1, [1.0])])
    assert serving_report.against_better(pooled["four"], "ttft_mean_ms") is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tiny", "--ways", "stock"), "--ways eager ours"),
        (("--rounds", "0"), "such as 1"),
        (("--tiny", "--json", "nowhere/out.json"), "--json serving.json"),
        (("--gpu-memory-utilization", "3"), "give 0.28"),
    ],
)
def test_a_bad_option_is_named_with_what_works(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        serving.command_line(arguments)
    assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"completed": 1, "errors": ["", "Bad Request"]}, "a request failed: Bad Request"),
        ({"completed": 1}, "1 of 2 requests were answered"),
        ({"output_lens": [4, 3]}, "an answer has 3 tokens, not 4"),
    ],
)
def test_a_request_without_its_answer_is_an_error(change: dict[str, Any], says: str) -> None:
    good = {"completed": 2, "errors": ["", ""], "ttfts": [0.1, 0.2], "output_lens": [4, 4]}
    serving.check_answers(good, 2, 4, "round 1")
    with pytest.raises(serving.RequestsFailed, match=f"round 1: {says}"):
        serving.check_answers(good | change, 2, 4, "round 1")
