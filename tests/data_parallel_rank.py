# SPDX-License-Identifier: Apache-2.0
"""Several real processes that share a batch's items over gloo (encoder data parallelism); see
``test_data_parallel_processes.py``, which starts them.

    python data_parallel_rank.py WORLD FOLDER

Each of WORLD processes captures, runs all of :func:`cases` for each family, and writes what it did
and what it was given into FOLDER. A case that takes too long ends its process, and the log tells
where that waited. Graphs are those of the CPU twin, or CUDA's where VIT_CUDAGRAPH_TEST_DEVICE says
so; ranks that are more than GPUs share them (``rank_groups.py``).
"""

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import managers
import torch
from managers import BACKEND, GRAPH, ON_GPU
from safetensors.torch import load_file

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    get_tp_group,
)
from vllm.model_executor.models import registry
from vllm.v1.worker import encoder_cudagraph
from vllm.vit_cudagraph.failures import RankFailure, brief
from vllm.vit_cudagraph.mixin import ViTInputs
from vllm.vit_cudagraph.testing import models
from vllm.vit_cudagraph.testing.rank_groups import join, take_gpu
from vllm.vit_cudagraph.testing.subject import new_pool

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
START_LIMIT_S, CASE_LIMIT_S = 200, 60
BUDGETS = [16, 40, 100]
GRIDS = {
    "image": [[1, 8, 8], [1, 4, 20], [1, 10, 6], [1, 2, 2], [1, 6, 6]],
    "video": [[2, 4, 6], [4, 6, 8], [1, 8, 8], [2, 2, 2], [3, 2, 10]],
}
LARGE = [1, 22, 20]  # above every budget
FPS = (2.0, 0.5, 1.0, 24.0, 0.7)


class Case(NamedTuple):
    """One batch.

    Attributes:
        kind: Which test looks at it.
        holders: Ranks with items: the k-th of upstream's shares goes to the k-th of them. Empty:
            as upstream has it, which fills the lowest ranks first.
        fault: One of :data:`FAULTS`, or "".
        at: The rank that has the fault or the large item.
        prunes: Whether video pruning is on.
    """

    kind: str
    modality: str
    grids: list[list[int]]
    holders: tuple[int, ...] = ()
    fault: str = ""
    at: int = -1
    prunes: bool = False

    def empty(self, world: int) -> set[int]:
        """Ranks that must have no item."""
        holders = self.holders or range(min(world, len(self.grids)))
        return set(range(world)) - set(holders)


def cases(world: int) -> list[Case]:
    """All batches of one start, in order. The place of one in it is the seed of its pixels."""
    return [*_placements(world), *_upstreams_own(world), *_pruned(world), *_one_runs_eagerly(world)]


def _placements(world: int) -> Iterator[Case]:
    """Every set of ranks that have items, largest share on the lowest rank or on the highest."""
    for size in range(1, world + 1):
        for ranks in combinations(range(world), size):
            yield Case("placement", "image", GRIDS["image"], ranks)
            yield Case("placement", "video", GRIDS["video"], ranks[::-1])


def _upstreams_own(world: int) -> Iterator[Case]:
    """A single item, fewer items than ranks, as many, more."""
    for items in range(1, len(GRIDS["image"]) + 1):
        for modality, grids in GRIDS.items():
            yield Case("upstream", modality, grids[:items])


def _pruned(world: int) -> Iterator[Case]:
    for ranks in ((world - 1,), tuple(range(world - 1)), tuple(range(world))):
        yield Case("pruning", "video", GRIDS["video"], ranks, prunes=True)


def _one_runs_eagerly(world: int) -> Iterator[Case]:
    """Each rank in turn; with more than two ranks another one has no items."""
    for at in range(world):
        others = tuple(rank for rank in range(world) if rank != at)
        holders = (at, *others)[: max(2, world - 1)]
        yield Case("large", "image", [*GRIDS["image"], LARGE], holders, at=at)
        for fault in FAULTS:
            modality = "video" if at % 2 else "image"
            yield Case("fault", modality, GRIDS[modality], holders, fault, at)
        yield Case("fault", "image", GRIDS["image"], others, "captures fail", at)


# -- what goes wrong on one rank -------------------------------------------------------------------

FAULTS: dict[str, tuple[type, str, Exception]] = {
    "replays fail": (GRAPH, "replay", RuntimeError("planted")),
    "replays lack memory": (GRAPH, "replay", torch.OutOfMemoryError("planted")),
    "captures fail": (BACKEND, "capture", RuntimeError("planted")),
}


@contextmanager
def planted(fault: str, manager: managers.EncoderGraphManager) -> Iterator[None]:
    """While open this rank has the fault; its graphs are captured anew afterwards."""
    owner, method, error = FAULTS[fault]
    with mock.patch.object(owner, method, side_effect=error):
        if method == "capture":
            manager.capture(new_pool())
        yield
    manager.capture(new_pool())


def placed(holders: Sequence[int]) -> Any:
    """While open, upstream's shares go to these ranks. All ranks must do this alike."""
    balance = encoder_cudagraph.get_load_balance_assignment

    def assign(sizes: list[int], world: int) -> tuple[list[int], list[int], list[int]]:
        order, counts, _ = balance(sizes, len(holders))
        ends = [0, *accumulate(counts)]
        shares = {rank: order[ends[k] : ends[k + 1]] for k, rank in enumerate(holders)}
        of_rank = [shares.get(rank, []) for rank in range(world)]
        return (
            [item for share in of_rank for item in share],
            [len(share) for share in of_rank],
            [sum(sizes[item] for item in share) for share in of_rank],
        )

    return mock.patch.object(encoder_cudagraph, "get_load_balance_assignment", assign)


# -- models and batches, for the one process too that all is compared with -------------------------


def make_config(folder: Path, **engine: Any) -> VllmConfig:
    """Of the checkpoint in ``folder``, with text heads that four ranks can share."""
    text: dict[str, Any] = {"num_attention_heads": 4}
    if folder.name == "qwen2_5_vl":  # its heads are as wide as their number allows
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
        text["rope_parameters"] = rope
    # vLLM imports itself in a process of its own to inspect a class, which is loaded here already.
    with mock.patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()):
        return models.make_config(
            folder,
            hf_overrides={"text_config": text},
            video_pruning_rate=0.5,
            # vLLM refuses more ranks than GPUs unless somebody else is to place them.
            distributed_executor_backend="external_launcher" if ON_GPU else None,
            **engine,
        )


def build_model(config: VllmConfig) -> Any:
    """With the checkpoint's tower, and its text embeddings, which pruned videos need."""
    weights = load_file(Path(config.model_config.model) / "model.safetensors")
    wanted = {n: w for n, w in weights.items() if "visual" in n or "embed_tokens" in n}
    return models.build_model(config, fill=lambda model: model.load_weights(wanted.items()))


def batch(model: Any, case: Case, seed: int) -> dict[str, Any]:
    """The case's kwargs as the runner hands them over; time stamps where videos are pruned."""
    kwargs = managers.batch(model, case.grids, case.modality, seed)
    if not case.prunes:
        return kwargs
    if model.config.model_type == "qwen2_5_vl":
        return kwargs | {"second_per_grid_ts": torch.tensor([2 / fps for fps in FPS])}
    videos = zip(case.grids, FPS, strict=True)
    return kwargs | {"timestamps": [[2 * t / fps for t in range(grid[0])] for grid, fps in videos]}


def pruning(model: Any, case: Case) -> Any:
    """While open, the model prunes videos if the case does."""
    return mock.patch.object(model, "is_multimodal_pruning_enabled", case.prunes)


# -- one process -----------------------------------------------------------------------------------


class Reports(managers.DearEager):
    """Notes what this rank did for one batch."""

    def note_anew(self) -> None:
        self.mine: list[list[int]] = []
        self.gathers = self.runs = 0
        self.rows: list[torch.Tensor] = []
        self.before = self.statistics.replayed, self.statistics.eager.copy()

    def _execute_steps(self, mm_kwargs: dict[str, Any], inputs: ViTInputs) -> list[torch.Tensor]:
        self.mine += [list(grid) for grid in inputs.grids]
        return super()._execute_steps(mm_kwargs, inputs)

    def _run(self, captured: Any) -> None:
        super()._run(captured)
        self.runs += 1

    def _dp_gather(self, *args: Any) -> list[torch.Tensor]:
        self.gathers += 1
        return super()._dp_gather(*args)

    def _execute_ranks(self, *args: Any) -> list[torch.Tensor]:
        outputs = super()._execute_ranks(*args)
        self.rows = [output.clone() for output in outputs]  # before they are finished
        return outputs

    def noted(self) -> dict[str, Any]:
        replayed, eager = self.before
        return {
            "mine": self.mine,
            "gathers": self.gathers,
            "runs": self.runs,
            "replayed": self.statistics.replayed - replayed,
            "eager": dict(self.statistics.eager - eager),
            "rows": self.rows,
        }


def make_manager(family: str, config: VllmConfig, model: Any) -> Reports:
    manager = managers.make_manager(
        family, budgets=BUDGETS, items=8, of=model, base=config, manager_class=Reports
    )
    assert isinstance(manager, Reports)
    return manager


def run_case(manager: Reports, case: Case, seed: int, rank: int) -> dict[str, Any]:
    """What this rank did and was given."""
    faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    print(case, flush=True)  # the last one in the log is where it ended
    with ExitStack() as stack:
        stack.enter_context(pruning(manager.model, case))
        if case.holders:
            stack.enter_context(placed(case.holders))
        if case.fault and rank == case.at:
            stack.enter_context(planted(case.fault, manager))
        manager.note_anew()
        outputs = managers.run(manager, batch(manager.model, case, seed))
        noted = {"outputs": [output.clone() for output in outputs], **manager.noted()}
        return noted if case.prunes else noted | {"rows": []}


def last_batch(manager: Reports, rank: int, world: int) -> tuple[str, str]:
    """The last rank can run its share in no way: how ``execute`` ends on this rank, and why."""
    case = Case("end", "image", GRIDS["image"], tuple(range(world)))
    fails = mock.Mock(side_effect=RuntimeError("planted"))
    with ExitStack() as stack:
        if rank == world - 1:
            stack.enter_context(mock.patch.object(GRAPH, "replay", fails))
            stack.enter_context(mock.patch.object(manager.model, "encoder_eager_forward", fails))
        try:
            run_case(manager, case, 0, rank)
        except RankFailure as error:
            return str(error), brief(error.__cause__ or error)
    return "no failure", ""


def communicator_waits(communicator: Any) -> bool:
    """Whether it is the CPU's over shared memory, in which a rank waits for one that has gone."""
    return getattr(communicator, "dist_module", torch.distributed) is not torch.distributed


def run_family(family: str, config: VllmConfig, rank: int, world: int) -> dict[str, Any]:
    """Reports of all cases."""
    manager = make_manager(family, config, build_model(config))
    group = get_tp_group()
    return {
        "ranks": group.world_size,
        "over": torch.distributed.get_backend(group.device_group),
        "waits_for_ever": communicator_waits(group.device_communicator),
        "tower": sum(weight.numel() for weight in manager.model.visual.parameters()),
        "cases": [run_case(manager, case, seed, rank) for seed, case in enumerate(cases(world))],
        "manager": manager,
    }


def main(rank: int, world: int, folder: Path) -> None:
    reports: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        faulthandler.dump_traceback_later(START_LIMIT_S, exit=True)
        take_gpu(rank)
        config = make_config(
            folder.parent / family, tensor_parallel_size=world, mm_encoder_tp_mode="data"
        )
        config.parallel_config.rank = rank
        with set_current_vllm_config(config):
            if not reports:
                join(rank, world, folder, timedelta(seconds=START_LIMIT_S))
            reports[family] = run_family(family, config, rank, world)
    manager = [report.pop("manager") for report in reports.values()][-1]
    torch.save(reports, folder / f"rank-{rank}.pt")
    with set_current_vllm_config(config):
        torch.save(last_batch(manager, rank, world), folder / f"end-{rank}.pt")


def fork(rank: int, world: int, folder: Path) -> int:
    """Start one rank and return its pid. Forked, because imports are nearly all that a start costs;
    no thread runs yet, and no group exists."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        main(rank, world, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # destroying process groups waits for ranks that have gone


def start(world: int, folder: Path) -> list[int]:
    """Run all ranks to their ends; exit status of each."""
    assert threading.active_count() == 1
    pids = [fork(rank, world, folder) for rank in range(world)]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    codes = start(int(sys.argv[1]), Path(sys.argv[2]))
    sys.exit(f"ranks ended with {codes}" if any(codes) else 0)
