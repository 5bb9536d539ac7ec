# SPDX-License-Identifier: Apache-2.0
"""Histories of one manager: what a server's day does to its graphs, in any order.

A state machine of hypothesis. Whatever has happened before, a batch gives what eager gives; what
was handed out stays as it is, bit for bit; and the same batch again gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vllm.vit_cudagraph.testing import strategies
from vllm.vit_cudagraph.testing.oracles import Mismatch, assert_close
from vllm.vit_cudagraph.testing.profiles import examples
from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings
from vllm.vit_cudagraph.testing.subject import Subject, WatchedManager, check_batch, new_pool

NewManager = Callable[[GraphSettings], WatchedManager]

MOST_KEPT = 6
STEPS = 8
EXAMPLES = 12
"""How many histories a model is worth in continuous integration."""


@dataclass(frozen=True)
class _Kept:
    """A batch that was run, what was handed out for it, and copies of that."""

    batch: Batch
    mm_kwargs: dict[str, Any]
    outputs: list[torch.Tensor]
    bits: list[torch.Tensor]


class History(RuleBasedStateMachine):
    """One manager, and what happens to it."""

    def __init__(
        self,
        subject: Subject,
        new_manager: NewManager,
        graph_settings: GraphSettings,
    ) -> None:
        super().__init__()
        self.subject = subject
        self.make_manager = lambda: new_manager(graph_settings)
        self.budgets = graph_settings.budgets
        self.manager = self.make_manager()
        self.kept: list[_Kept] = []

    def batches(self, most_tokens: int, most_items: int) -> st.SearchStrategy[Batch]:
        return strategies.batches(
            self.subject.geometry,
            most_items=most_items,
            most_tokens=most_tokens,
            most_video_tokens=most_tokens,
        )

    def run(self, batch: Batch) -> None:
        mm_kwargs = self.subject.kwargs(batch)
        outputs = check_batch(self.subject, self.manager, batch, mm_kwargs=mm_kwargs)
        kept = _Kept(batch, mm_kwargs, outputs, [out.clone() for out in outputs])
        self.kept = [*self.kept[1 - MOST_KEPT :], kept]

    @rule(batch=st.runner().flatmap(lambda self: self.batches(self.budgets[0], 2)))
    def small_batch(self, batch: Batch) -> None:
        """The smallest graph."""
        self.run(batch)

    @rule(batch=st.runner().flatmap(lambda self: self.batches(self.budgets[-1] * 5 // 4, 5)))
    def any_batch(self, batch: Batch) -> None:
        """Any graph, several of them, or an eager run."""
        self.run(batch)

    @precondition(lambda self: self.kept)
    @rule(back=st.integers(1, MOST_KEPT))
    def repeat(self, back: int) -> None:
        """An earlier batch once more: the same bits."""
        kept = self.kept[-min(back, len(self.kept))]
        again = self.subject.execute(self.manager, kept.mm_kwargs)
        if not all(torch.equal(*pair) for pair in zip(again, kept.bits, strict=True)):
            raise Mismatch(f"{kept.batch} gave other bits when it was repeated")

    @precondition(lambda self: self.kept)
    @rule(back=st.integers(1, MOST_KEPT))
    def other_pixels(self, back: int) -> None:
        """The grids of an earlier batch once more, with other pixels."""
        batch = self.kept[-min(back, len(self.kept))].batch
        self.run(replace(batch, seed=batch.seed + 1))

    @precondition(lambda self: self.kept)
    @rule(back=st.integers(1, MOST_KEPT))
    def reverse(self, back: int) -> None:
        """The items of an earlier batch in reverse order."""
        kept = self.kept[-min(back, len(self.kept))]
        turned = self.subject.reordered(kept.mm_kwargs, range(len(kept.outputs))[::-1])
        again = self.subject.execute(self.manager, turned)
        assert_close(again, self.subject.eager(turned), "the eager path, in another order")

    @rule(how=st.sampled_from(("disturb", "disturb", "same manager", "another manager")))
    def upheaval(self, how: str) -> None:
        """NaN and huge values in buffers, outputs and pool; or graphs captured anew, as both
        runners do: V2 with its one manager, V1 with another one."""
        if how == "disturb":
            self.manager.disturb()
            return
        self.manager.clear()
        if self.manager.is_captured() or self.manager.captured:
            raise Mismatch("graphs are left after clear()")
        if how == "another manager":
            self.manager = self.make_manager()
        else:
            self.manager.capture(new_pool())
        if self.manager.left_out:
            raise Mismatch(f"not captured again: {self.manager.left_out}")

    @invariant()
    def handed_out_stays(self) -> None:
        for kept in self.kept:
            if not all(torch.equal(*pair) for pair in zip(kept.outputs, kept.bits, strict=True)):
                raise Mismatch(f"the embeddings of {kept.batch} changed after they were handed out")


def run(
    subject: Subject,
    new_manager: NewManager,
    graph_settings: GraphSettings,
    chosen: settings | None = None,
) -> None:
    """Draw histories and run them.

    Args:
        subject: The model.
        new_manager: Makes a captured manager; what it cannot capture is a :class:`Mismatch`.
        graph_settings: What each manager captures.
        chosen: Settings of hypothesis; by default the profile's, at :data:`EXAMPLES` in ``ci``.
    """
    run_state_machine_as_test(
        # A factory serves as well as a class.
        lambda: History(subject, new_manager, graph_settings),  # type: ignore[arg-type]
        settings=settings(chosen or examples(EXAMPLES), stateful_step_count=STEPS),
    )


def failure(
    subject: Subject, new_manager: NewManager, graph_settings: GraphSettings, cases: int = 40
) -> Mismatch | None:
    """The first mismatch among so many histories, always the same ones."""
    chosen = always_the_same(cases)
    return first_mismatch(lambda: run(subject, new_manager, graph_settings, chosen=chosen))


def always_the_same(cases: int) -> settings:
    """Settings for so many cases, the same in every run, that stop at the first failure."""
    return settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=settings().suppress_health_check,
    )


def first_mismatch(run_cases: Callable[[], None]) -> Mismatch | None:
    """The mismatch that cases end in, or None. Any other exception passes: a sabotaged line that
    ends in a ``TypeError`` has not been noticed by the suite."""
    try:
        run_cases()
    except Mismatch as mismatch:
        return mismatch
    except FlakyFailure as flaky:
        # A sabotage that remembers earlier batches need not fail twice on the same one.
        found = [error for error in flaky.exceptions if isinstance(error, Mismatch)]
        if not found:
            raise
        return found[0]
    return None
