# SPDX-License-Identifier: Apache-2.0
"""One of several real processes that share a tower's weights over gloo; see
``test_tensor_parallel.py``, which starts it.

    python tensor_parallel_rank.py FAMILY CASE RANK WORLD FOLDER

It captures, runs batches and writes what they gave into FOLDER: on the CPU twin over gloo, or with
a GPU each over NCCL where VIT_CUDAGRAPH_TEST_DEVICE says so. Its all-reduces are vLLM's own custom
operator, as on a GPU, so they are part of the recording.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import managers
import torch
from managers import BACKEND, GRAPH, ON_GPU

from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import graph_capture
from vllm.vit_cudagraph.manager import EncoderGraphManager
from vllm.vit_cudagraph.testing import models
from vllm.vit_cudagraph.testing.rank_groups import join
from vllm.vit_cudagraph.testing.subject import new_pool

BUDGETS = [16, 40, 100]
LACKS_ROOM = 40
BATCHES: list[tuple[str, list[list[int]]]] = [
    ("image", [[1, 8, 8]]),
    ("image", [[1, 4, 4], [1, 10, 6], [1, 4, 4]]),
    ("image", [[1, 40, 2], [1, 6, 6], [1, 22, 20], [1, 2, 2]]),  # one above every budget
    ("video", [[4, 6, 8], [2, 4, 6]]),
]


class LeavesCosts(EncoderGraphManager):
    """Costs by which eager is dear, through the same exchange as the real ones."""

    def _known_costs(self) -> Any:
        tells = {1: 1e6} if get_tp_group().rank_in_group == 0 else {1: 1e-3}
        of = mock.patch(
            "vllm.vit_cudagraph.capturing.CostLines.modelled",
            lambda budgets: managers.CostLines.of(dict.fromkeys(budgets, 1.0), tells),
        )
        with of:
            return super()._known_costs()


# -- what goes wrong on one rank -------------------------------------------------------------------


def allocation_fails(manager: EncoderGraphManager) -> None:
    own = manager.model.vit_buffers

    def fails(capacity: Any, pixels: Any) -> Any:
        if capacity.budget == LACKS_ROOM:
            raise torch.OutOfMemoryError("planted")
        return own(capacity, pixels)

    manager.model.vit_buffers = fails


def capture_fails(manager: EncoderGraphManager) -> None:
    own = BACKEND.capture

    def fails(backend: Any, forward: Callable[[], torch.Tensor], pool: Any) -> Any:
        if len(manager.captured) == 1:
            raise RuntimeError("planted")
        return own(backend, forward, pool)

    mock.patch.object(BACKEND, "capture", fails).start()


def slow(manager: EncoderGraphManager) -> None:
    own = GRAPH.replay

    def sleeps(graph: Any) -> None:
        time.sleep(0.05)
        own(graph)

    mock.patch.object(GRAPH, "replay", sleeps).start()


def replay_fails(manager: EncoderGraphManager) -> None:
    def fails(graph: Any) -> None:
        raise RuntimeError("planted")

    mock.patch.object(GRAPH, "replay", fails).start()


CASES: dict[str, Callable[[EncoderGraphManager], None]] = {
    "nothing": lambda manager: None,
    "slow": slow,
    "allocation": allocation_fails,
    "capture": capture_fails,
    "replay": replay_fails,
}


def main(family: str, case: str, rank: int, world: int, folder: Path) -> None:
    if ON_GPU:
        if torch.cuda.device_count() < world:
            sys.exit(f"{world} ranks need a GPU each: a captured all-reduce is NCCL's")
        torch.cuda.set_device(rank)
    config = models.make_config(folder / "model", tensor_parallel_size=world)
    with set_current_vllm_config(config):
        join(rank, world, folder)
        get_tp_group().use_custom_op_call = True  # as on a GPU
    model = models.build_model(config, fill=models.load_weights(config))
    manager = managers.make_manager(
        family,
        budgets=BUDGETS,
        items=8,
        of=model,
        base=config,
        capture=False,
        manager_class=LeavesCosts,
    )
    if rank == world - 1:
        CASES[case](manager)
    with set_current_vllm_config(config):
        with graph_capture(manager.device) if ON_GPU else nullcontext():
            manager.capture(new_pool())
        outputs, plans = [], []
        for modality, grids in BATCHES:
            kwargs = managers.batch(model, grids, modality)
            plans.append(
                [(s.items, s.budget) for s in manager._plan(model.vit_inputs(kwargs)).steps]
            )
            outputs.append(managers.run(manager, kwargs))
    torch.save(
        {
            "outputs": outputs,
            "plans": plans,
            "captured": list(manager.captured),
            "left_out": manager.left_out,
            "costs": manager.costs.as_dict(),
            "replays": dict(manager.statistics.replays),
            "shard": model.visual.blocks[0].mlp.down_proj.input_size_per_partition,
        },
        folder / f"rank-{rank}.pt",
    )


if __name__ == "__main__":
    name, what, number, of, where = sys.argv[1:]
    main(name, what, int(number), int(of), Path(where))
    sys.stdout.flush()
    os._exit(0)  # destroying process groups waits for ranks that have gone
