# SPDX-License-Identifier: Apache-2.0
"""The conformance suite: what a model on the mixin must hold, whatever it is given.

A test module of a model holds one class::

    from vllm.vit_cudagraph.testing import models
    from vllm.vit_cudagraph.testing.conformance import EncoderGraphConformance
    from vllm.vit_cudagraph.testing.subject import Subject


    class TestMyModel(EncoderGraphConformance):
        @staticmethod
        def make_model() -> Subject:
            config = models.make_config("qwen2_vl")
            return Subject(models.build_model(config), config)

and inherits all properties below, drawn by hypothesis and marked ``fuzz``, the named edges and
defect kinds, the histories (``histories.py``) and the planted faults (``faults.py``), which show
that the properties would notice. It runs on the CPU twin and on a GPU alike (``models.py`` names
the environment variables). How many examples a property gets is the profile's
(``profiles.py``); the ``conftest.py`` beside the module calls ``profiles.load()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.vit_cudagraph.costs import CostLines
from vllm.vit_cudagraph.geometry import Limits
from vllm.vit_cudagraph.testing import faults, histories, strategies
from vllm.vit_cudagraph.testing.defects import DEFECTS, Defect
from vllm.vit_cudagraph.testing.edges import edges as edge_batches
from vllm.vit_cudagraph.testing.edges import named_edges
from vllm.vit_cudagraph.testing.oracles import (
    Mismatch,
    assert_close,
    flash_attention,
    flash_attention_missing,
)
from vllm.vit_cudagraph.testing.profiles import examples
from vllm.vit_cudagraph.testing.strategies import Batch, GraphSettings
from vllm.vit_cudagraph.testing.subject import Subject, WatchedManager, check_batch

_CACHED = "_conformance_cache"


class EncoderGraphConformance:
    """Base class of a model's conformance tests; see the module's docstring.

    Attributes:
        settings: What the shared manager captures. Small budgets run many examples a second;
            batches are drawn up to a bit above the largest.
        history_settings: What is captured again and again in histories.
        variants: Gives a strategy of other configurations of the family, each of which
            :meth:`make_variant` takes; or None.
        share: Of the examples that a property is worth in continuous integration; for models that
            share most of what is tested with another.
    """

    settings: ClassVar[GraphSettings] = GraphSettings((6, 16, 40), items=8)
    history_settings: ClassVar[GraphSettings] = GraphSettings((8, 32), items=8)
    variants: ClassVar[Callable[..., st.SearchStrategy[Any]] | None] = None
    share: ClassVar[float] = 1.0

    @staticmethod
    def make_model() -> Subject:
        """The model under test. Required; called once, when the first test runs."""
        raise NotImplementedError("a conformance class must define make_model()")

    @staticmethod
    def make_variant(options: Any) -> Subject:
        """The model with another configuration, as drawn from :attr:`variants`."""
        raise NotImplementedError("a conformance class with variants must define make_variant()")

    def reference(
        self, subject: Subject, batch: Batch, mm_kwargs: dict[str, Any]
    ) -> list[torch.Tensor] | None:
        """The batch's embeddings by code of others, or None where there is none for ``subject``."""
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        setattr(cls, _CACHED, {})
        for prop in PROPERTIES.values():
            here = prop.name != "variants" or cls.variants is not None
            setattr(cls, f"test_{prop.name}", prop.test_of(cls) if here else None)

    @classmethod
    def share_of(cls, worth: int) -> hypothesis.settings:
        """Hypothesis' settings for this class's :attr:`share` of so many examples."""
        return examples(max(1, round(worth * cls.share)))

    # -- shared by the properties ----------------------------------------------------------------

    @classmethod
    def subject(cls) -> Subject:
        """:meth:`make_model`, once a class."""
        cache = getattr(cls, _CACHED)
        if "subject" not in cache:
            cache["subject"] = cls.make_model()
        return cache["subject"]

    @classmethod
    def variant(cls, options: Any) -> Subject:
        """:meth:`make_variant`; the last one is kept, because drawing a batch for it needs it."""
        cache = getattr(cls, _CACHED)
        if cache.get("variant", (None,))[0] != options:
            cache["variant"] = options, cls.make_variant(options)
        return cache["variant"][1]

    def manager(self) -> WatchedManager:
        """The shared manager, with its buffers disturbed, so that no example depends on those
        before it. A graph that was retired, or left out, is an error of the example that did it:
        the next one gets a new manager."""
        cache = getattr(type(self), _CACHED)
        manager = cache.get("manager")
        if manager is None or set(manager.captured) != set(self.settings.budgets):
            manager = cache["manager"] = self.new_manager(self.settings)
        manager.disturb()
        return manager

    def new_manager(self, graph_settings: GraphSettings) -> WatchedManager:
        """A manager of its own. What could not be captured is a mismatch: settings that are
        accepted are captured."""
        manager = self.subject().manager(graph_settings)
        if list(manager.captured) != sorted(graph_settings.budgets):
            raise Mismatch(
                f"captured are {list(manager.captured)}, not {graph_settings.budgets}; "
                f"refusal: {manager.refusal}, left out: {manager.left_out}"
            )
        return manager

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """While open, nothing is shared with what ran before; the model itself is."""
        cache = {"subject": self.subject()}
        subject = cache["subject"]
        subject.model.__dict__.pop("_vit_builder", None)
        with mock.patch.object(type(self), _CACHED, cache):
            yield
        subject.model.__dict__.pop("_vit_builder", None)

    def check(self, batch: Batch, manager: WatchedManager | None = None) -> list[torch.Tensor]:
        """Hold one batch against everything; see :func:`subject.check_batch`."""
        chosen = self.manager() if manager is None else manager
        return self.check_with(self.subject(), chosen, batch)

    def check_with(
        self, subject: Subject, manager: WatchedManager, batch: Batch
    ) -> list[torch.Tensor]:
        """:meth:`check` for a model and a manager of its own."""
        return check_batch(subject, manager, batch, partial(self.reference, subject))

    # -- tests that draw nothing -----------------------------------------------------------------

    def test_named_edges(self) -> None:
        """One batch of each kind of edge, for each graph."""
        manager = self.manager()
        capacities = [graph.capacity for graph in manager.captured.values()]
        frames = manager.settings.limits.frames
        named = named_edges(self.subject().geometry, capacities, frames=frames)
        assert named
        for name, batch in named.items():
            try:
                self.check(batch)
            except Mismatch as mismatch:
                raise Mismatch(f"{name}: {batch}: {mismatch}") from mismatch

    def test_flash_attn_package(self) -> None:
        """Against the eager tower with the ``flash-attn`` package's own attention, on a GPU."""
        missing = flash_attention_missing()
        if missing is not None:
            pytest.skip(missing)
        subject, manager = self.subject(), self.manager()
        capacities = [graph.capacity for graph in manager.captured.values()]
        for batch in named_edges(subject.geometry, capacities).values():
            mm_kwargs = subject.kwargs(batch)
            with flash_attention(subject.model.vit_tower()):
                expected = subject.eager(mm_kwargs)
            assert_close(subject.execute(manager, mm_kwargs), expected, "flash-attn")

    @pytest.mark.parametrize("defect", DEFECTS.values(), ids=list(DEFECTS))
    def test_defect(self, defect: Defect) -> None:
        """An explicit example of a defect that stock vLLM has shown."""
        if not defect.applies(self.subject().geometry):
            pytest.skip(f"{defect.name}: {defect.needs}")
        defect.check(self)

    @pytest.mark.parametrize("fault", faults.FAULTS.values(), ids=list(faults.FAULTS))
    def test_planted_fault(self, fault: faults.Fault) -> None:
        """With one line of the product sabotaged, a property fails."""
        if not fault.applies(self.subject().geometry):
            pytest.skip(f"{fault.name}: {fault.needs}")
        with fault.planted(self.subject().model) as plant, self.fresh():
            caught = next(filter(None, (failure(self, name) for name in fault.caught_by)), None)
        assert plant.called, "the sabotaged line never ran"
        assert caught is not None, f"survived: {fault.name}"

    @pytest.mark.fuzz
    def test_histories(self) -> None:
        """Any order of batches, repeats, disturbances and recaptures over one manager."""
        some = self.share_of(histories.EXAMPLES)
        histories.run(self.subject(), self.new_manager, self.history_settings, some)


# -- properties ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Property:
    """What must hold for every case.

    Attributes:
        check: Raises :class:`Mismatch` where it does not.
        cases: Draws cases for a model.
        examples: How many it is worth in continuous integration.
    """

    check: Callable[[EncoderGraphConformance, Any], None]
    cases: Callable[[EncoderGraphConformance], st.SearchStrategy[Any]]
    examples: int = 40

    @property
    def name(self) -> str:
        return self.check.__name__

    def strategy(self, suite: EncoderGraphConformance) -> st.SearchStrategy[Any]:
        """Cases, made when the first one is drawn: the model is not built at collection."""
        return st.deferred(lambda: self.cases(suite))

    def test_of(self, cls: type[EncoderGraphConformance]) -> Callable[..., None]:
        """A test method for one class, with a name of its own for hypothesis."""

        def test(self: EncoderGraphConformance, case: Any) -> None:
            check(self, case)

        check = self.check
        test.__name__ = f"test_{self.name}"
        test.__qualname__ = f"{cls.__qualname__}.{test.__name__}"
        test.__module__ = cls.__module__
        test.__doc__ = self.check.__doc__
        drawn = given(case=self.strategy(cls()))(test)
        return pytest.mark.fuzz(cls.share_of(self.examples)(drawn))


def failure(suite: EncoderGraphConformance, name: str, cases: int = 150) -> Mismatch | None:
    """The first mismatch that a property finds among so many cases, always the same ones."""
    if name == "histories":
        return histories.failure(suite.subject(), suite.new_manager, suite.history_settings)
    prop = PROPERTIES[name]

    @histories.always_the_same(cases)
    @given(case=prop.strategy(suite))
    def run(case: Any) -> None:
        prop.check(suite, case)

    return histories.first_mismatch(run)


def images(suite: EncoderGraphConformance, batch: Batch) -> None:
    """Images of any sizes: graph output equals eager output, and what fits went through a graph."""
    suite.check(batch)


def videos(suite: EncoderGraphConformance, batch: Batch) -> None:
    """Videos of any sizes and numbers of frames, as :func:`images`."""
    suite.check(batch)


def edges(suite: EncoderGraphConformance, batch: Batch) -> None:
    """Batches that just fit a graph in one respect, and batches that just do not."""
    suite.check(batch)


def partitions(suite: EncoderGraphConformance, pair: tuple[Batch, Batch]) -> None:
    """Two batches with one total of tokens, one after the other, through the same graphs."""
    manager = suite.manager()
    for batch in (*pair, pair[0]):
        check_batch(suite.subject(), manager, batch)


def turns(suite: EncoderGraphConformance, batches: list[Batch]) -> None:
    """Graphs that share buffers take turns, with nothing in between: what one leaves behind there
    is gone when the next one needs it."""
    manager = suite.manager()
    for batch in batches:
        check_batch(suite.subject(), manager, batch)


def order(suite: EncoderGraphConformance, case: tuple[Batch, tuple[int, ...]]) -> None:
    """The same items in another order, as the scheduler may send them."""
    batch, permutation = case
    subject, manager = suite.subject(), suite.manager()
    turned = subject.reordered(subject.kwargs(batch), permutation)
    outputs = subject.execute(manager, turned)
    assert_close(outputs, subject.eager(turned), "the eager path, in another order")


def graph_settings(
    suite: EncoderGraphConformance, case: tuple[GraphSettings, tuple[Batch, ...]]
) -> None:
    """Any budgets and limits that a user may set, each with a manager of its own."""
    chosen, batches = case
    manager = suite.new_manager(chosen)
    for batch in batches:
        manager.disturb()
        check_batch(suite.subject(), manager, batch)


def costs(suite: EncoderGraphConformance, case: tuple[CostLines, Batch]) -> None:
    """Whatever replays and eager runs cost, and so whichever is taken for an item: the same
    embeddings, and each item runs once."""
    lines, batch = case
    subject, manager = suite.subject(), suite.manager()
    mm_kwargs, counts = subject.kwargs(batch), manager.statistics
    before = counts.replayed + counts.eager.total()
    with manager.priced(lines):
        outputs = subject.execute(manager, mm_kwargs)
    assert_close(outputs, subject.eager(mm_kwargs), "the eager path")
    ran = counts.replayed + counts.eager.total() - before
    if ran != len(batch.grids):
        raise Mismatch(f"{ran} items were counted, of {len(batch.grids)}")


def hooks(suite: EncoderGraphConformance, batch: Batch) -> None:
    """``vit_finish`` is called once a batch with all items in order and the runner's kwargs, and
    what it gives is what is handed out."""
    subject, manager = suite.subject(), suite.manager()
    model, mm_kwargs = subject.model, subject.kwargs(batch)
    expected = subject.eager(mm_kwargs)
    finish, calls = model.vit_finish, []

    def marked(outputs: list[torch.Tensor], given_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        calls.append(given_kwargs is mm_kwargs)
        return [torch.cat([out, out[:1] + 1]) for out in finish(outputs, given_kwargs)]

    with mock.patch.object(model, "vit_finish", marked):
        outputs = subject.execute(manager, mm_kwargs)
    if calls != [True]:
        raise Mismatch(f"vit_finish was called {len(calls)} times, or with other kwargs: {calls}")
    assert_close(
        outputs, [torch.cat([out, out[:1] + 1]) for out in expected], "the finished eager output"
    )


def own_eager_path(suite: EncoderGraphConformance, batch: Batch) -> None:
    """The hooks without a graph give what ``embed_multimodal`` gives: metadata is exact."""
    subject = suite.subject()
    model, mm_kwargs = subject.model, subject.kwargs(batch)
    tokens = [model.vit_declared.output_tokens(grid) for grid in batch.grids]
    items: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        rows = model.encoder_eager_forward(mm_kwargs)
        model.postprocess_encoder_output(
            {"default": rows}, list(range(len(tokens))), tokens, items, batch_mm_kwargs=mm_kwargs
        )
        outputs = model.vit_finish([items[i] for i in range(len(tokens))], mm_kwargs)
    assert_close(outputs, subject.eager(mm_kwargs), "embed_multimodal")


def variants(suite: EncoderGraphConformance, case: tuple[Any, GraphSettings, Batch]) -> None:
    """The family's model with other depths, windows, merge sizes, ..., as drawn."""
    options, chosen, batch = case
    subject = suite.variant(options)
    manager = subject.manager(chosen)
    if list(manager.captured) != sorted(chosen.budgets):
        raise Mismatch(f"captured are {list(manager.captured)}; refusal: {manager.refusal}")
    manager.disturb()
    suite.check_with(subject, manager, batch)


def _batches(suite: EncoderGraphConformance) -> st.SearchStrategy[Batch]:
    largest = max(suite.settings.budgets)
    return strategies.batches(
        suite.subject().geometry,
        most_items=6,
        most_tokens=largest * 5 // 4,
        most_video_tokens=largest * 5 // 4,
    )


def _images(suite: EncoderGraphConformance) -> st.SearchStrategy[Batch]:
    geometry, largest = suite.subject().geometry, max(suite.settings.budgets)
    if "image" not in geometry.modalities:
        return _batches(suite)
    return strategies.images(geometry, most_items=6, most_tokens=largest * 5 // 4)


def _videos(suite: EncoderGraphConformance) -> st.SearchStrategy[Batch]:
    geometry, largest = suite.subject().geometry, max(suite.settings.budgets)
    if "video" not in geometry.modalities:
        return _batches(suite)
    return strategies.videos(geometry, most_tokens=largest * 5 // 4, frames=12)


def _edges(suite: EncoderGraphConformance) -> st.SearchStrategy[Batch]:
    manager = suite.manager()
    capacities = [graph.capacity for graph in manager.captured.values()]
    frames = manager.settings.limits.frames
    return edge_batches(suite.subject().geometry, capacities, frames=frames)


def _pairs(suite: EncoderGraphConformance) -> st.SearchStrategy[tuple[Batch, Batch]]:
    return strategies.same_totals(
        suite.subject().geometry, most_tokens=max(2, suite.settings.budgets[-1] * 2 // 3)
    )


def _turns(suite: EncoderGraphConformance) -> st.SearchStrategy[list[Batch]]:
    """Batches of one item, each of which fills another graph more or less."""
    geometry, merge = suite.subject().geometry, suite.subject().geometry.merge_size
    modality = "image" if "image" in geometry.modalities else geometry.modalities[0]
    tokens = st.one_of([st.integers(1, budget) for budget in suite.settings.budgets])
    batch = st.builds(
        lambda n, seed: Batch(modality, ((1, merge, n * merge),), seed), tokens, st.integers(0, 9)
    )
    return st.lists(batch, min_size=2, max_size=5)


def _permuted(suite: EncoderGraphConformance) -> st.SearchStrategy[Any]:
    def with_order(batch: Batch) -> st.SearchStrategy[Any]:
        indices = list(range(len(batch.grids)))
        return st.tuples(st.just(batch), st.permutations(indices).map(tuple))

    return _batches(suite).flatmap(with_order)


def _settings_and_batches(suite: EncoderGraphConformance) -> st.SearchStrategy[Any]:
    geometry = suite.subject().geometry

    def with_batches(chosen: GraphSettings) -> st.SearchStrategy[Any]:
        largest = max(chosen.budgets)
        small, above = max(1, largest // 6), largest * 5 // 4 + 1
        limits = Limits(items=chosen.items or 1, frames=chosen.frames)
        capacities = [geometry.capacity(budget, limits) for budget in chosen.budgets]
        batches = st.one_of(
            strategies.batches(
                geometry, most_items=12, most_tokens=small, most_videos=6, most_video_tokens=small
            ),
            strategies.batches(geometry, most_tokens=above, most_video_tokens=above),
            edge_batches(geometry, capacities, frames=chosen.frames),
        )
        return st.tuples(st.just(chosen), st.lists(batches, min_size=1, max_size=2).map(tuple))

    return strategies.graph_settings(most_budget=max(suite.settings.budgets)).flatmap(with_batches)


def _priced(suite: EncoderGraphConformance) -> st.SearchStrategy[Any]:
    return st.tuples(strategies.cost_lines(sorted(suite.settings.budgets)), _batches(suite))


def _variants(suite: EncoderGraphConformance) -> st.SearchStrategy[Any]:
    assert suite.variants is not None

    def with_batch(options: Any) -> st.SearchStrategy[Any]:
        geometry = suite.variant(options).geometry
        return st.tuples(
            st.just(options),
            strategies.graph_settings(most_budget=48),
            strategies.batches(geometry, most_tokens=48, most_video_tokens=48, frames=4),
        )

    strategy: st.SearchStrategy[Any] = type(suite).variants()  # type: ignore[misc]
    return strategy.flatmap(with_batch)


PROPERTIES: Mapping[str, Property] = {
    prop.name: prop
    for prop in (
        Property(images, _images, 60),
        Property(videos, _videos, 60),
        Property(edges, _edges, 40),
        Property(partitions, _pairs, 25),
        Property(turns, _turns, 25),
        Property(order, _permuted, 25),
        Property(graph_settings, _settings_and_batches, 30),
        Property(costs, _priced, 25),
        Property(hooks, _batches, 25),
        Property(own_eager_path, _batches, 25),
        Property(variants, _variants, 25),
    )
}
