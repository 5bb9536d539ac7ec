# SPDX-License-Identifier: Apache-2.0
"""One captured budget: what it refuses before a copy, and what stands in its buffers after one."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.vit_cudagraph.arena import FlatArena, HostArena, fill_host
from vllm.vit_cudagraph.buffers import Buffers, SharedRows
from vllm.vit_cudagraph.captured import BufferMoved, CapturedBudget
from vllm.vit_cudagraph.geometry import Capacity, NotCapturable
from vllm.vit_cudagraph.metadata import AttentionLayout, Exact, fill
from vllm.vit_cudagraph.testing.profiles import examples

CPU = torch.device("cpu")
CAPACITY = Capacity(budget=4, items=3, patches=16, sequences=5, windows=0)
PADS = {
    "cos": "zero",
    "sin": "zero",
    "order": "identity",
    "cu_seqlens": "last",
    "lengths": "zero",
    "learned": "zero",
}
STALE = -99
Values = dict[str, Exact | None]


class NoGraph:
    def replay(self) -> None:
        raise AssertionError("nothing here replays")


def make_captured() -> CapturedBudget:
    """Buffers of every kind, full of an earlier batch's values."""
    host = HostArena(
        {
            "order": ((4,), torch.int64),
            "cu_seqlens": ((6,), torch.int32),
            "lengths": ((5,), torch.int32),
        },
        CPU,
    )
    table = (16, 2), torch.bfloat16
    flat = FlatArena({"cos": table, "sin": table}, CPU)
    pixels = SharedRows(torch.zeros(20, 6))
    named = {
        "pixel_values": pixels.rows[:16],
        "max_seqlen": torch.tensor(16, dtype=torch.int32),
        "learned": torch.zeros(16, 3),
        **host.buffers,
        **flat.buffers,
    }
    for name, buffer in named.items():
        if name != "max_seqlen":
            buffer.fill_(STALE)
    for staged in host.staged.values():
        staged.fill(STALE)
    pixels.dirty = len(pixels.rows)
    memory = Buffers(named, pixels, PADS, host, [flat])
    return CapturedBudget(CAPACITY, NoGraph(), memory, output=torch.zeros(4, 8))


def values(tokens: int = 2, sequences: int = 2) -> Values:
    """Exact values of a step that fits, each as it is made: integers on the host, positions and
    pixels in pieces."""
    patches = 4 * tokens
    ends = np.linspace(0, patches, sequences + 1).astype(np.int32)
    pieces = [4, patches - 4] if tokens > 1 else [4]
    return {
        "pixel_values": torch.rand(patches, 6).split(pieces),
        "cos": torch.rand(patches, 2).to(torch.bfloat16).split(pieces),
        "sin": torch.rand(patches, 2).to(torch.bfloat16).split(pieces),
        "learned": [torch.rand(patches, 3)],
        "order": np.arange(tokens)[::-1].copy(),
        "cu_seqlens": ends,
        "lengths": np.diff(ends),
        "max_seqlen": np.array(patches, dtype=np.int32),
    }


def whole(value: Exact | None) -> torch.Tensor:
    """The same as one tensor."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    assert value is not None
    return value if isinstance(value, torch.Tensor) else torch.cat(list(value))


def contents(captured: CapturedBudget) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in captured.buffers.items()}


def assert_same_contents(captured: CapturedBudget, before: dict[str, torch.Tensor]) -> None:
    for name, buffer in captured.buffers.items():
        assert torch.equal(buffer, before[name]), name


# -- check -----------------------------------------------------------------------------------------


def change(name: str, value: Any) -> Callable[[Values], None]:
    return lambda them: them.__setitem__(name, value)


TWICE = torch.zeros(2, 2, dtype=torch.bfloat16)

REFUSED = {
    "pixels of another dtype": (
        change("pixel_values", torch.zeros(8, 6, dtype=torch.uint8)),
        "pixel dtype differs from the buffer",
    ),
    "pixels of a narrower dtype": (
        change("pixel_values", torch.zeros(8, 6, dtype=torch.bfloat16)),
        "pixel dtype differs from the buffer",
    ),
    "wider pixels": (
        change("pixel_values", torch.zeros(8, 7)),
        "pixel_values rows differ in shape from the buffer's",
    ),
    "pixels of width one, which a copy would broadcast": (
        change("pixel_values", torch.zeros(8, 1)),
        "pixel_values rows differ in shape from the buffer's",
    ),
    "flat pixels": (
        change("pixel_values", torch.zeros(6)),
        "pixel_values rows differ in shape from the buffer's",
    ),
    "pixels with one more dimension": (
        change("pixel_values", torch.zeros(8, 6, 1)),
        "pixel_values rows differ in shape from the buffer's",
    ),
    "one pixel row too many": (
        change("pixel_values", torch.zeros(17, 6)),
        "pixel_values has more rows than its buffer",
    ),
    "one offset too many": (
        change("cu_seqlens", torch.zeros(7, dtype=torch.int32)),
        "cu_seqlens has more rows than its buffer",
    ),
    "one token too many": (
        change("order", np.arange(5)),
        "order has more rows than its buffer",
    ),
    "long offsets": (
        change("cu_seqlens", np.zeros(3, dtype=np.int64)),
        "cu_seqlens dtype differs from the buffer",
    ),
    "metadata of the wrong dtype": (
        change("cos", torch.zeros(8, 2)),
        "cos dtype differs from the buffer",
    ),
    "one piece of another dtype": (
        change("cos", [torch.zeros(4, 2).to(torch.bfloat16), torch.zeros(4, 2)]),
        "cos dtype differs from the buffer",
    ),
    "pieces that are too many together": (
        change("pixel_values", [torch.zeros(9, 6), torch.zeros(8, 6)]),
        "pixel_values has more rows than its buffer",
    ),
    "one piece too often": (
        change("cos", [torch.zeros(6, 2, dtype=torch.bfloat16)] * 3),
        "cos has more rows than its buffer",
    ),
    "one piece twice, and another of a wrong shape": (
        change("cos", [TWICE, TWICE, torch.zeros(2, 3, dtype=torch.bfloat16)]),
        "cos rows differ in shape from the buffer's",
    ),
    "metadata that is not there": (
        change("cos", None),
        "a tensor is missing from the metadata",
    ),
    "a name that is not there": (
        lambda them: them.pop("lengths"),
        "a tensor is missing from the metadata",
    ),
    "a number where rows belong": (
        change("lengths", np.array(3, dtype=np.int32)),
        "lengths rows differ in shape from the buffer's",
    ),
    "rows where a number belongs": (
        change("max_seqlen", torch.zeros(1, dtype=torch.int32)),
        "max_seqlen rows differ in shape from the buffer's",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(case: str) -> None:
    spoil, reason = REFUSED[case]
    captured, them = make_captured(), values()
    captured.check(them)
    spoil(them)
    before = contents(captured)
    with pytest.raises(NotCapturable) as refused:
        captured.check(them)
    assert refused.value.reason == reason
    assert_same_contents(captured, before)


def test_a_reason_holds_no_values_of_the_input() -> None:
    """Reasons are counted, so two inputs with one fault must give one reason."""
    reasons = set()
    for rows in (17, 18, 4000):
        with pytest.raises(NotCapturable) as refused:
            make_captured().check(values() | {"pixel_values": torch.zeros(rows, 6)})
        reasons.add(refused.value.reason)
        assert str(rows) in str(refused.value)
    assert len(reasons) == 1


@pytest.mark.parametrize("longest", [1, 8, 16])
def test_a_longest_length_that_the_graph_covers_passes(longest: int) -> None:
    """Whatever integer type it has: it is a host number and is never copied."""
    for dtype in (torch.int32, torch.int64):
        make_captured().check(values() | {"max_seqlen": torch.tensor(longest, dtype=dtype)})


def test_a_longest_length_above_the_baked_one_is_refused() -> None:
    """Attention drops the rows past a bound that is too small, without an error."""
    with pytest.raises(NotCapturable):
        make_captured().check(values() | {"max_seqlen": torch.tensor(17, dtype=torch.int32)})


def test_what_the_graph_does_not_read_is_not_looked_at() -> None:
    captured = make_captured()
    captured.check(values() | {"other": torch.zeros(999, 999), "none": None})


def test_values_that_fill_every_buffer_pass() -> None:
    captured, them = make_captured(), values(tokens=4, sequences=5)
    captured.check(them)
    captured.load(them)
    for name, value in them.items():
        assert torch.equal(captured.buffers[name], whole(value)), name


@pytest.mark.parametrize("how", [whole, lambda value: [whole(value)]], ids=["tensor", "piece"])
def test_tensors_of_a_hook_are_loaded_as_well(how: Callable[[Any], Any]) -> None:
    """A model's own ``vit_metadata`` gives tensors for everything."""
    captured, them = make_captured(), values()
    same = {name: how(value) if whole(value).ndim else whole(value) for name, value in them.items()}
    captured.check(same)
    captured.load(same)
    expected = make_captured()
    expected.load(them)
    for name, buffer in captured.buffers.items():
        assert torch.equal(buffer, expected.buffers[name]), name


# -- metadata that stays ---------------------------------------------------------------------------


def test_pixels_alone_leave_the_metadata_as_it_is() -> None:
    captured, them = make_captured(), values(tokens=3)
    captured.check(them)
    captured.load(them, key="a step")
    assert captured.holds == "a step"
    before = contents(captured)
    pixels: Values = {"pixel_values": [torch.rand(12, 6)]}
    captured.check(pixels, kept=True)
    captured.load(pixels, key="a step")
    assert captured.holds == "a step"
    assert torch.equal(captured.buffers["pixel_values"][:12], whole(pixels["pixel_values"]))
    before["pixel_values"] = captured.buffers["pixel_values"]
    assert_same_contents(captured, before)


@pytest.mark.parametrize("case", [case for case in REFUSED if "pixel" in case])
def test_pixels_alone_are_held_against_their_buffer(case: str) -> None:
    spoil, reason = REFUSED[case]
    captured, them = make_captured(), values()
    spoil(them)
    with pytest.raises(NotCapturable) as refused:
        captured.check({"pixel_values": them["pixel_values"]}, kept=True)
    assert refused.value.reason == reason


def test_pixels_alone_are_not_enough_where_nothing_is_kept() -> None:
    with pytest.raises(NotCapturable, match="missing"):
        make_captured().check({"pixel_values": values()["pixel_values"]})


def test_what_was_written_half_is_not_held() -> None:
    captured, them = make_captured(), values()
    captured.load(them, key="a step")
    full = torch.OutOfMemoryError("no room")
    with (
        mock.patch.object(FlatArena, "load", side_effect=full),
        pytest.raises(torch.OutOfMemoryError),
    ):
        captured.load(values(tokens=1), key="another")
    assert captured.holds is None


def test_metadata_without_a_key_is_not_held() -> None:
    captured = make_captured()
    captured.load(values(), key="a step")
    captured.load(values())
    assert captured.holds is None


# -- buffers that moved ----------------------------------------------------------------------------


def rebind(captured: CapturedBudget) -> None:
    captured.buffers["cos"] = captured.buffers["cos"].clone()


def resize(captured: CapturedBudget) -> None:
    buffer = captured.buffers["cos"]
    rows = len(buffer)
    buffer.resize_(10_000, 2).resize_(rows, 2)  # back to its size, but it has moved


def set_storage(captured: CapturedBudget) -> None:
    captured.buffers["cos"].set_(torch.zeros(16, 2, dtype=torch.bfloat16))


def shift(captured: CapturedBudget) -> None:
    """A view of the same storage, one row further on."""
    captured.buffers["pixel_values"] = captured.buffers["pixel_values"][1:]


def remove(captured: CapturedBudget) -> None:
    """The graph goes on reading what was there."""
    del captured.buffers["cos"]


@pytest.mark.parametrize("move", [rebind, resize, set_storage, shift, remove])
def test_a_buffer_that_moved_is_an_error_that_says_so(
    move: Callable[[CapturedBudget], None],
) -> None:
    captured = make_captured()
    captured.check(values())
    move(captured)
    before = contents(captured)
    with pytest.raises(BufferMoved, match=r"(cos|pixel_values) moved since capture.*never rebind"):
        captured.check(values())
    assert_same_contents(captured, before)


def test_loading_moves_nothing() -> None:
    captured = make_captured()
    addresses = {name: buffer.data_ptr() for name, buffer in captured.buffers.items()}
    for tokens, sequences in [(4, 5), (1, 1), (2, 2), (4, 1)]:
        them = values(tokens, sequences)
        captured.check(them)
        captured.load(them)
    assert {name: buffer.data_ptr() for name, buffer in captured.buffers.items()} == addresses
    assert {name: len(buffer) for name, buffer in captured.buffers.items() if buffer.ndim} == {
        "pixel_values": 16,
        "cos": 16,
        "sin": 16,
        "learned": 16,
        "order": 4,
        "cu_seqlens": 6,
        "lengths": 5,
    }


# -- load ------------------------------------------------------------------------------------------


@given(steps=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4))
@pytest.mark.fuzz
@examples(60)
@example(steps=[(4, 5), (1, 1)])
def test_heads_are_exact_and_tails_are_padded_whatever_came_before(
    steps: list[tuple[int, int]],
) -> None:
    captured = make_captured()
    for tokens, sequences in steps:
        them = values(tokens, min(sequences, 4 * tokens))
        captured.check(them)
        captured.load(them)
        buffers = captured.buffers
        for name, value in them.items():
            exact = whole(value)
            if exact.ndim:
                assert torch.equal(buffers[name][: len(exact)], exact), name
        offsets = whole(them["cu_seqlens"])
        assert (buffers["cu_seqlens"][len(offsets) :] == offsets[-1]).all()
        assert (buffers["cu_seqlens"].diff() >= 0).all()
        assert (buffers["lengths"][len(offsets) - 1 :] == 0).all()
        assert torch.equal(buffers["lengths"], buffers["cu_seqlens"].diff())
        for name in ("cos", "sin", "learned"):
            assert (buffers[name][4 * tokens :] == 0).all(), name
        assert buffers["order"][tokens:].tolist() == list(range(tokens, 4))
        assert sorted(buffers["order"].tolist()) == [0, 1, 2, 3]
        assert buffers["max_seqlen"] == 16, "a baked number is never written"
        assert (buffers["pixel_values"][4 * tokens :] == 0).all(), "nothing of another batch"


def test_values_of_any_stride_are_loaded() -> None:
    captured, them = make_captured(), values()
    pixels = torch.rand(6, 8).t()
    captured.check(them | {"pixel_values": pixels})
    captured.load(them | {"pixel_values": pixels})
    assert torch.equal(captured.buffers["pixel_values"][:8], pixels)


@pytest.mark.parametrize("pad", ["zero", "last", "identity"])
def test_a_full_buffer_has_no_tail(pad: str) -> None:
    buffer, staged = torch.full((3,), STALE), np.full(3, STALE)
    fill(buffer, torch.tensor([2, 0, 1]), pad)
    fill_host(staged, np.array([2, 0, 1]), pad)
    assert buffer.tolist() == staged.tolist() == [2, 0, 1]


@pytest.mark.parametrize("pad", ["zero", "last", "identity", "sections"])
def test_host_and_device_are_padded_alike(pad: str) -> None:
    buffer, staged = torch.full((10,), STALE), np.full(10, STALE)
    exact = np.array([0, 4, 0, 12])
    fill(buffer, torch.from_numpy(exact), pad)
    fill_host(staged, exact, pad)
    assert buffer.tolist() == staged.tolist()


# -- FlashInfer's two sections ---------------------------------------------------------------------


def flashinfer(hidden: int, tp: int, padded: int | None) -> AttentionLayout:
    return AttentionLayout(AttentionBackendEnum.FLASHINFER, hidden, tp, padded)


lengths_of_sequences = st.lists(st.integers(1, 300), min_size=1, max_size=90)


@given(
    lengths=lengths_of_sequences,
    unused=st.integers(0, 70),
    layout=st.sampled_from(
        [flashinfer(1280, 1, None), flashinfer(1280, 4, None), flashinfer(1152, 2, 1280)]
    ),
)
@pytest.mark.fuzz
@examples(120)
@example(lengths=[4] * 8, unused=0, layout=flashinfer(1280, 1, None))
@example(lengths=[4] * 8, unused=1, layout=flashinfer(1280, 1, None))
@example(lengths=[4], unused=69, layout=flashinfer(1280, 1, None))
def test_sections_padded_to_capacity_are_upstreams_own(
    lengths: list[int], unused: int, layout: AttentionLayout
) -> None:
    """Padding section by section gives what upstream lays out for offsets whose last is repeated
    up to the capacity, so a graph of that capacity reads what upstream would have given it."""
    assert layout.sectioned
    exact = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    slots = len(lengths) + unused
    repeated = np.concatenate([exact, np.full(unused, exact[-1], np.int32)])
    expected = layout.offsets(repeated)
    buffer = np.full_like(layout.offsets(np.zeros(slots + 1, np.int32)), STALE)
    assert buffer.shape == expected.shape
    fill_host(buffer, layout.offsets(exact), "sections")
    assert buffer.tolist() == expected.tolist()
    for section in np.split(buffer, 2):
        assert (np.diff(section) >= 0).all()
    # Single lengths, which FlashInfer reads as well: unused slots are empty sequences.
    singles, lone = layout.lengths(np.zeros(slots + 1, np.int32)), layout.lengths(exact)
    padded = layout.lengths(repeated)
    assert singles is not None and lone is not None and padded is not None
    singles.fill(STALE)
    fill_host(singles, lone, "zero")
    assert singles.tolist() == padded.tolist()


def test_padding_sections_as_one_would_be_wrong() -> None:
    """Why sections are padded each on its own: the check above can fail."""
    layout = flashinfer(8, 1, None)
    exact, repeated = np.array([0, 4], np.int32), np.array([0] + [4] * 9, np.int32)
    expected = layout.offsets(repeated)
    buffer = np.zeros_like(expected)
    fill_host(buffer, layout.offsets(exact), "last")
    assert buffer.tolist() != expected.tolist()


@given(lengths=lengths_of_sequences, slack=st.integers(0, 4000))
@pytest.mark.fuzz
@examples(60)
def test_a_bound_in_flashinfers_buckets_covers_every_longest(
    lengths: list[int], slack: int
) -> None:
    layout = flashinfer(1280, 1, None)
    exact = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    bound = layout.longest(np.array([0, max(lengths) + slack], np.int32))
    assert bound >= layout.longest(exact) >= max(lengths)
    assert bound.ndim == 0


# -- pixel rows that graphs share ------------------------------------------------------------------


def shared_after(*loads: tuple[int, int]) -> SharedRows:
    """Rows after loads of so many rows each, into graphs of so many rows."""
    shared = SharedRows(torch.zeros(16, 3))
    for used, capacity in loads:
        exact = torch.full((used, 3), float(used))
        shared.load(exact.tensor_split(min(2, used)), capacity)
        assert torch.equal(shared.rows[:used], exact)
        assert not shared.rows[used:capacity].any()
        assert not shared.rows[shared.dirty :].any()
    return shared


@pytest.mark.parametrize(
    "loads",
    [
        [(3, 4), (2, 4), (1, 4)],
        [(16, 16), (1, 4), (3, 4), (1, 8), (2, 16)],
        [(4, 4), (10, 16), (2, 4), (5, 16)],
        [(12, 16), (8, 8), (1, 16)],
    ],
)
def test_graphs_find_zeros_behind_their_rows_whoever_came_before(
    loads: list[tuple[int, int]],
) -> None:
    shared_after(*loads)


def test_only_what_is_dirty_is_zeroed() -> None:
    shared = shared_after((12, 16), (2, 4))
    assert shared.dirty == 12  # rows 4 to 11 are beyond the small graph
    shared.rows[12:] = STALE  # as nothing but a load may do: a load does not go there
    shared.load([torch.ones(1, 3)], 16)
    assert shared.dirty == 1
    assert (shared.rows[12:] == STALE).all() and not shared.rows[1:12].any()


def test_a_load_that_fails_leaves_its_rows_dirty() -> None:
    shared = shared_after((2, 4))
    with pytest.raises(RuntimeError):
        shared.load([torch.ones(6, 4)], 16)
    assert shared.dirty == 6


def test_a_budget_that_comes_twice_in_a_batch_has_another_staging_area() -> None:
    """Its first copy may still wait behind work on the device when the second is written."""
    arena = HostArena({"a": ((4,), torch.int32)}, torch.device("cpu"))
    areas = []
    for value in (1, 2, 3):
        arena.wait()
        areas.append(arena.staged["a"])
        fill_host(arena.staged["a"], np.array([value], dtype=np.int32), "last")
        arena.send()
        assert arena.buffers["a"].tolist() == [value] * 4
    assert areas[0] is areas[2] and not np.shares_memory(areas[0], areas[1])
    assert areas[1].tolist() == [2] * 4  # the third has not touched it


def test_position_buffers_of_one_arena_do_not_touch_and_are_aligned() -> None:
    flat = FlatArena(
        {name: ((rows, 3), torch.bfloat16) for name, rows in (("a", 7), ("b", 50), ("c", 1))},
        torch.device("cpu"),
    )
    starts = [view.storage_offset() * 2 for view in flat.buffers.values()]
    assert all(start % 256 == 0 for start in starts)
    rows = {name: torch.full((5, 3), i + 1.0) for i, name in enumerate("abc")}
    pieces = {name: [value.bfloat16()[: len(flat.buffers[name])]] for name, value in rows.items()}
    flat.load(pieces)
    for number, (name, view) in enumerate(flat.buffers.items(), start=1):
        used = len(pieces[name][0])
        assert (view[:used] == number).all() and not view[used:].any()


@given(
    rows=st.lists(st.lists(st.integers(0, 9), max_size=2).map(tuple), min_size=1, max_size=2),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    data=st.data(),
)
@examples(40)
def test_an_arena_of_any_rows_is_aligned_and_holds_what_it_is_given(
    rows: list[tuple[int, ...]], dtype: torch.dtype, lengths: list[int], data: st.DataObject
) -> None:
    """Rows of one shape, and of two in turn."""
    shapes = {str(i): ((n, *rows[i % len(rows)]), dtype) for i, n in enumerate(lengths)}
    flat = FlatArena(shapes, CPU)
    for _ in range(2):  # what the first leaves, the second covers
        given = {}
        for name, ((length, *row), _) in shapes.items():
            ends = sorted(data.draw(st.lists(st.integers(0, length), min_size=1, max_size=4)))
            exact = torch.randint(1, 200, (ends[-1], *row)).to(dtype)
            given[name] = exact.tensor_split(ends[:-1])
        flat.load(given)
        for name, view in flat.buffers.items():
            assert view.storage_offset() * dtype.itemsize % 256 == 0
            assert view.is_contiguous() and view.shape == shapes[name][0]
            exact = torch.cat(given[name])
            assert torch.equal(view[: len(exact)], exact) and not view[len(exact) :].any()


def test_buffers_of_two_dtypes_do_not_share_an_arena() -> None:
    with pytest.raises(ValueError):
        FlatArena({"a": ((4, 3), torch.float32), "b": ((4, 3), torch.float64)}, CPU)
