# SPDX-License-Identifier: Apache-2.0
"""What tensor-parallel ranks tell each other at start-up, over the CPU group.

Under tensor-parallel weights a captured forward holds all-reduces, so a graph that one rank has and
another one has not is a hang. Nothing here is called in service.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm.distributed import get_tp_group


def agreed(mine: bool) -> bool:
    """Whether every rank says yes. All of them must call it, in the same order."""
    vote = torch.tensor([int(mine)], dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(
        vote, op=torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group
    )
    return bool(vote.item())


def of_first_rank(mine: Any) -> Any:
    """The first rank's value, on all of them. All must call it, in the same order."""
    group, values = get_tp_group(), [mine]
    torch.distributed.broadcast_object_list(values, src=group.ranks[0], group=group.cpu_group)
    return values[0]
