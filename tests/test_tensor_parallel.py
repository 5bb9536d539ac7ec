# SPDX-License-Identifier: Apache-2.0
"""A tower split over real processes (tensor-parallel weights, vLLM's default): the same graphs and
plans on each, values of one process, and an end with a message where only one rank fails."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.vit_cudagraph.testing.checkpoints import make_checkpoint
from vllm.vit_cudagraph.testing.models import place
from vllm.vit_cudagraph.testing.oracles import assert_close

RANK = Path(__file__).parent / "tensor_parallel_rank.py"
LIMIT_S = 240
LACKS_ROOM = 40


def ranks(family: str, case: str, world: int, folder: Path) -> list[tuple[int, str]]:
    """Exit status and output of each rank; all that still run are ended where one has failed."""
    if not (folder / "model").exists():
        make_checkpoint(family, folder / "model")
    (folder / "rendezvous").unlink(missing_ok=True)
    logs = [folder / f"log-{rank}" for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, RANK, family, case, rank, world, folder]
        with log.open("w") as out:
            processes.append(
                subprocess.Popen(
                    [str(part) for part in command],
                    stdout=out,
                    stderr=out,
                    env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
                )
            )
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(code, log.read_text()) for code, log in zip(codes, logs, strict=True)]


def results(folder: Path, world: int) -> list[dict[str, Any]]:
    device = place().torch_device
    return [torch.load(folder / f"rank-{rank}.pt", map_location=device) for rank in range(world)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What one process gives, and the folder with its checkpoint."""
    folder = tmp_path_factory.mktemp("ranks")
    ((code, log),) = ranks("qwen2_5_vl", "nothing", 1, folder)
    assert code == 0, log[-3000:]
    return folder, results(folder, 1)[0]


def assert_like(together: dict[str, Any], alone: dict[str, Any]) -> None:
    for ours, theirs in zip(together["outputs"], alone["outputs"], strict=True):
        assert_close(ours, theirs, "one process")


@pytest.mark.parametrize("case", ["nothing", "slow", "allocation"])
def test_ranks_agree_and_give_the_values_of_one_process(
    alone: tuple[Path, dict[str, Any]], case: str
) -> None:
    folder, one = alone
    for code, log in ranks("qwen2_5_vl", case, 2, folder):
        assert code == 0, log[-3000:]
    first, second = results(folder, 2)
    assert first["shard"] == second["shard"] != one["shard"]  # the tower is split
    for name in ("captured", "plans", "replays", "costs"):
        assert first[name] == second[name], name
    assert first["replays"] and first["costs"]["eager_ms"] == [[1, 1e6]]  # the first rank's
    assert (LACKS_ROOM in first["captured"]) == (case != "allocation")
    if case == "allocation":
        assert "another rank" in str(first["left_out"])
        assert "OutOfMemoryError: planted" in str(second["left_out"])
    else:
        assert first["plans"] == one["plans"]
    for together in (first, second):
        assert_like(together, one)


@pytest.mark.parametrize("case", ["capture", "replay"])
def test_a_failure_of_one_rank_in_a_forward_is_the_end_of_all(
    alone: tuple[Path, dict[str, Any]], case: str
) -> None:
    folder, _ = alone
    (waits, waiting), (fails, failed) = ranks("qwen2_5_vl", case, 2, folder)
    assert fails != 0 and "RankFailure" in failed and "cudagraph_mm_encoder=false" in failed
    assert waits != 0, waiting[-3000:]  # its collective ends with the other's connection
