# SPDX-License-Identifier: Apache-2.0
"""Encoder data parallelism in real processes over gloo: two and four of them, with every set of
ranks left without items, give on each rank what one process gives eagerly.

``data_parallel_rank.py`` has the batches and is the ranks. All batches of one number of ranks run
in one start. A hang is a failure: a rank ends itself when a batch takes too long, and all of them
are killed when the time of the start is up.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import data_parallel_rank as rank_script
import managers
import pytest
import torch
from data_parallel_rank import FAMILIES, Case
from test_pruning import hold

from vllm.vit_cudagraph.testing.checkpoints import make_checkpoint
from vllm.vit_cudagraph.testing.models import place
from vllm.vit_cudagraph.testing.oracles import assert_close
from vllm.vit_cudagraph.testing.rank_groups import backend

LIMIT_S = 300.0
KINDS = ("placement", "upstream", "pruning", "large", "fault")
EAGER = {
    "": "larger than every token budget",
    "replays fail": "its graph was retired",
    "replays lack memory": "an error before the replay",
    "captures fail": "no graph is captured",
}
"""The reason that is counted on the rank with the fault."""

each_family = pytest.mark.parametrize("family", FAMILIES)
Model = Callable[[str], Any]


class Started(NamedTuple):
    """What the processes of one start left: a report and an end for each rank."""

    world: int
    reports: list[dict[str, Any]]
    ends: list[tuple[str, str]]

    def batches(self, family: str, kind: str) -> Iterator[tuple[int, Case, list[dict[str, Any]]]]:
        """Seed, case, and what each rank did."""
        of_ranks = zip(*(report[family]["cases"] for report in self.reports), strict=True)
        pairs = zip(rank_script.cases(self.world), of_ranks, strict=True)
        for seed, (case, did) in enumerate(pairs):
            if case.kind == kind:
                yield seed, case, list(did)


# -- processes ---------------------------------------------------------------------------------


def run_group(command: Sequence[str], out: int, limit_s: float) -> int | None:
    """Exit status of a command, or None where its time was up. No process of it is left."""
    process = subprocess.Popen(
        command,
        stdout=out,
        stderr=out,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_ranks(world: int, folder: Path) -> None:
    """Start all ranks, and fail with their logs unless each ends well in time."""
    with (folder / "log").open("wb") as out:
        command = [sys.executable, rank_script.__file__, str(world), str(folder)]
        code = run_group(command, out.fileno(), LIMIT_S)
    if code != 0:
        tails = [f"{log.name}: {log.read_text()[-3000:]}" for log in sorted(folder.glob("log*"))]
        pytest.fail("\n".join([f"exit status {code}", *tails]), pytrace=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all families."""
    folder = tmp_path_factory.mktemp("data_parallel")
    for family in FAMILIES:
        make_checkpoint(family, folder / family)
    return folder


@pytest.fixture(scope="module", params=(2, 4), ids="{} ranks".format)
def started(request: pytest.FixtureRequest, folder: Path) -> Started:
    world = request.param
    of_ranks = folder / f"ranks-{world}"
    of_ranks.mkdir()
    run_ranks(world, of_ranks)
    reports, ends = (
        [
            torch.load(of_ranks / f"{name}-{rank}.pt", map_location=place().torch_device)
            for rank in range(world)
        ]
        for name in ("rank", "end")
    )
    return Started(world, reports, ends)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Model:
    """The same model in this process, by family."""
    return cache(lambda family: rank_script.build_model(rank_script.make_config(folder / family)))


# -- one batch ---------------------------------------------------------------------------------


def check_shares(case: Case, did: list[dict[str, Any]]) -> None:
    """The ranks that must be empty are, and no other; every item is some rank's."""
    empty = {rank for rank, report in enumerate(did) if not report["mine"]}
    assert empty == case.empty(len(did)), case
    assert sorted(grid for report in did for grid in report["mine"]) == sorted(case.grids), case
    if case.holders:  # the largest share is where the case wants it
        largest = max(case.grids, key=lambda grid: grid[0] * grid[1] * grid[2])
        assert largest in did[case.holders[0]]["mine"], case


def check_hits(case: Case, did: list[dict[str, Any]]) -> None:
    """Graphs ran on every rank with items but for what must run eagerly, and that is counted by its
    reason; every rank gathered once."""
    for rank, report in enumerate(did):
        items = len(report["mine"])
        eager = 0 if rank != case.at else items if case.fault else 1
        assert report["eager"] == ({EAGER[case.fault]: eager} if eager else {}), (rank, case)
        assert report["replayed"] == items - eager, (rank, case)
        assert (report["runs"] > 0) == (items > eager), (rank, case)
        assert report["gathers"] == 1, (rank, case)
    assert sum(report["runs"] for report in did) > 0, case


def check_values(model: Any, seed: int, case: Case, did: list[dict[str, Any]]) -> None:
    """On every rank, what this process gives eagerly."""
    kwargs = rank_script.batch(model, case, seed)
    with rank_script.pruning(model, case):
        expected = managers.eager(model, kwargs)
        for report in did:
            if case.prunes:  # a rounding may change which rows stay, so in two parts
                hold(model, kwargs, report["rows"], report["outputs"])
            else:
                assert_close(report["outputs"], expected, "one process")


@pytest.mark.parametrize("kind", KINDS)
@each_family
def test_every_rank_has_what_one_process_gives(
    started: Started, alone: Model, family: str, kind: str
) -> None:
    batches = list(started.batches(family, kind))
    assert batches
    for seed, case, did in batches:
        print(case)  # shown if it fails
        check_shares(case, did)
        check_hits(case, did)
        check_values(alone(family), seed, case, did)


# -- a whole start -----------------------------------------------------------------------------


@each_family
def test_ranks_are_processes_with_a_whole_tower_each(
    started: Started, alone: Model, family: str
) -> None:
    tower = sum(weight.numel() for weight in alone(family).visual.parameters())
    for report in started.reports:
        assert report[family]["ranks"] == started.world
        assert report[family]["over"] == backend(started.world)
        assert not report[family]["waits_for_ever"]
        assert report[family]["tower"] == tower


@pytest.mark.parametrize("modality", ["image", "video"])
@each_family
def test_every_set_of_ranks_was_empty(started: Started, family: str, modality: str) -> None:
    """By what the ranks report; all but the set of all of them."""
    seen = {
        frozenset(rank for rank, report in enumerate(did) if not report["mine"])
        for _, case, did in started.batches(family, "placement")
        if case.modality == modality
    }
    ranks = range(started.world)
    assert seen == {frozenset(c) for n in ranks for c in combinations(ranks, n)}


@each_family
def test_each_rank_was_the_one_that_ran_eagerly(started: Started, family: str) -> None:
    """With a large item and with each fault; and each had failed captures and no items."""
    large = {case.at for _, case, _ in started.batches(family, "large")}
    faults = {
        (case.fault, case.at, not did[case.at]["mine"])
        for _, case, did in started.batches(family, "fault")
    }
    ranks = range(started.world)
    wanted = {(fault, at, False) for fault in rank_script.FAULTS for at in ranks}
    assert large == set(ranks)
    assert faults == wanted | {("captures fail", at, True) for at in ranks}


def test_a_rank_that_cannot_run_its_share_is_the_end_of_all(started: Started) -> None:
    """The others wait for it in the gather, and end with its connection."""
    for text, _ in started.ends:
        assert "cudagraph_mm_encoder=false" in text
    *others, failed = [cause for _, cause in started.ends]
    assert failed == "RuntimeError: planted"
    assert not any("planted" in cause for cause in others)


def test_no_process_outlives_its_time() -> None:
    """Nor one whose starter has failed: all of them have let go of the pipe."""
    hangs = "import os, time; pid = os.fork(); {}; time.sleep(600)"
    for parent, status in (("time.sleep(600)", None), ("assert not pid", 1)):
        reads, writes = os.pipe()
        assert run_group([sys.executable, "-c", hangs.format(parent)], writes, 2.0) == status
        os.close(writes)
        with os.fdopen(reads) as pipe:
            assert ("AssertionError" in pipe.read()) == (status is not None)
