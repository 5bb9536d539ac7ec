# SPDX-License-Identifier: Apache-2.0
"""Token budgets and limits out of vLLM's settings: the user's as they stand, the rest inferred."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from vllm.vit_cudagraph.geometry import Limits
from vllm.vit_cudagraph.ladder import token_ladder
from vllm.vit_cudagraph.planning import MIN_TOKEN_BUDGET


@dataclass(frozen=True)
class Settings:
    """What to capture.

    Attributes:
        token_budgets: Ascending, each once. ``encoder_cudagraph_token_budgets`` as given, or a
            ladder from the smallest usual image to the most tokens of a step, of which only those
            are captured that can win.
        given: Whether the user gave them.
        limits: ``encoder_cudagraph_max_vision_items_per_batch`` and
            ``encoder_cudagraph_max_frames_per_batch`` where given. Without the first, as many
            items as smallest images fit the largest budget.
    """

    token_budgets: tuple[int, ...]
    limits: Limits
    given: bool = field(default=True, compare=False)

    @classmethod
    def of(cls, vllm_config: Any, model: Any) -> Settings:
        given = vllm_config.compilation_config
        smallest, largest = model.get_encoder_cudagraph_budget_range(vllm_config)
        budgets = sorted(set(given.encoder_cudagraph_token_budgets))
        is_given = bool(budgets)
        budgets = budgets or token_ladder(smallest, largest)
        items = given.encoder_cudagraph_max_vision_items_per_batch or max(
            1, budgets[-1] // MIN_TOKEN_BUDGET
        )
        frames = given.encoder_cudagraph_max_frames_per_batch
        if vllm_config.model_config.multimodal_config.get_limit_per_prompt("video") == 0:
            frames = 0
        return cls(tuple(budgets), Limits(items=items, frames=frames), is_given)

    @property
    def frames_text(self) -> str:
        frames = self.limits.frames
        if frames is None:
            return f"one frame for {self.limits.tokens_per_sequence} tokens"
        return f"at most {frames} video frames"

    def acceptable_upstream(self, vllm_config: Any) -> Any:
        """``vllm_config`` with these settings spelt out, within what upstream's manager accepts.

        Upstream refuses an item limit above the smallest budget, because it builds dummy grids of
        ``budget // items`` tokens. Nothing here is sized that way, so the limit stands; upstream's
        ``__init__`` is shown a smaller one.
        """
        shown = copy.copy(vllm_config)
        shown.compilation_config = copy.copy(vllm_config.compilation_config)
        shown.compilation_config.encoder_cudagraph_token_budgets = list(self.token_budgets)
        shown.compilation_config.encoder_cudagraph_max_vision_items_per_batch = min(
            self.limits.items, self.token_budgets[0]
        )
        return shown
