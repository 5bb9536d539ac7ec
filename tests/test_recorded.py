# SPDX-License-Identifier: Apache-2.0
"""The CPU twin keeps a CUDA graph's rules, and refuses what a CUDA graph cannot do."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import towers

from vllm.config import CompilationConfig, VllmConfig
from vllm.vit_cudagraph.graphs import GraphCaptureError, backend_for, cuda, no_collection
from vllm.vit_cudagraph.graphs.recorded import (
    RecordedBackend,
    RecordedGraph,
    _OperatorRecorder,
)
from vllm.vit_cudagraph.testing import reference_attention

CPU = torch.device("cpu")
Forward = Callable[[torch.Tensor], torch.Tensor]


def record(forward: Callable[[], torch.Tensor]) -> tuple[RecordedGraph, torch.Tensor]:
    return RecordedBackend().capture(forward)


def eager(forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return forward().clone()


def poison(graph: RecordedGraph) -> None:
    """Fill the graph's pool with what must never be read before it is written."""
    with torch.inference_mode():
        for tensor in graph.pool_tensors():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 77)


def data(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- what a replay computes ------------------------------------------------------------------------


def into_slices(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(8, 6)
    out[:4] = x
    out[4:] = 1.5
    return out


def out_variant(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(4, 6)
    torch.mul(x, 3, out=out)
    return out


def in_place_chain(x: torch.Tensor) -> torch.Tensor:
    return x.clone().mul_(2).add_(x).clamp_(min=0)


def several_outputs(x: torch.Tensor) -> torch.Tensor:
    values, indices = x.sort(dim=1)
    first, second = values.split(3, dim=1)
    return torch.cat([first + second, indices.float()], dim=1)


def views_written_through(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.view(2, 12).t()[3:6].neg_()
    return y.reshape(24)


def sizes_changed_in_place(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).unsqueeze_(0).transpose_(1, 2)
    return y @ x


def integer_indices(x: torch.Tensor) -> torch.Tensor:
    order = torch.argsort(x[:, 0])
    y = x[order]
    y[order, 1] = x[:, 2]
    return y


def mask_without_a_shape(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, -1).masked_fill(x > 1, 5).masked_scatter(x < -1, x * 2)


def composites(x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, torch.ones(6, 6), torch.ones(6)).flatten().reshape(6, 4).contiguous()
    return torch.einsum("ij,jk->ik", y, x).to(torch.float64)


def attention_without_dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.scaled_dot_product_attention(x[None], x[None], x[None]), 0.5, training=False)


def sizes_given(x: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(x, torch.full((4,), 2), dim=0, output_size=8)


def moved_to_its_own_device(x: torch.Tensor) -> torch.Tensor:
    # Towers write this with their `device` attribute.
    return x.to(device=torch.device("cpu")).to(torch.device("cpu"), torch.bfloat16) * 2


def number_made_inside(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(3.0)


def compiled_function(x: torch.Tensor) -> torch.Tensor:
    return torch.compile(lambda y: F.silu(y) * 2, backend="aot_eager")(x) + 1


REPLAYABLE: list[Forward] = [
    into_slices,
    out_variant,
    in_place_chain,
    several_outputs,
    views_written_through,
    sizes_changed_in_place,
    integer_indices,
    mask_without_a_shape,
    composites,
    attention_without_dropout,
    sizes_given,
    moved_to_its_own_device,
    number_made_inside,
    compiled_function,
]


@pytest.mark.parametrize("forward", REPLAYABLE, ids=lambda f: f.__name__)
def test_replay_equals_eager_on_new_data_whatever_the_pool_held(forward: Forward) -> None:
    buffer = data(0, 4, 6)
    graph, output = record(lambda: forward(buffer))
    assert len(graph) > 0
    for seed in (1, 2):
        buffer.copy_(data(seed, 4, 6))
        poison(graph)
        graph.replay()
        expected = eager(lambda: forward(buffer))
        assert torch.equal(output, expected)
        assert not torch.equal(output, eager(lambda: forward(data(0, 4, 6))))


def test_a_read_of_unwritten_memory_shows_in_a_poisoned_pool() -> None:
    """The control of the test above: a forward that reads rows it never wrote."""
    buffer = data(0, 4, 6)

    def forward() -> torch.Tensor:
        out = torch.empty(5, 6)
        out[:4] = buffer
        return out + 1

    graph, output = record(forward)
    poison(graph)
    graph.replay()
    assert output[4].isnan().all()
    assert not output[:4].isnan().any()


def test_two_replays_give_the_same_bits() -> None:
    buffer, weight = data(0, 16, 32), data(1, 32, 32)
    graph, output = record(lambda: F.gelu(F.layer_norm(buffer @ weight, (32,))).softmax(-1))
    first = output.clone()
    for _ in range(3):
        graph.replay()
        assert torch.equal(output, first)


def test_accumulating_into_a_buffer_goes_on_at_every_replay() -> None:
    total = torch.zeros(3)
    graph, _ = record(lambda: total.add_(1))
    before = total.clone()
    graph.replay()
    graph.replay()
    assert torch.equal(total, before + 2)


# -- what is fixed at capture ----------------------------------------------------------------------


def test_python_numbers_are_baked() -> None:
    number = {"factor": 2.0, "rows": 3}
    buffer = data(0, 4, 6)
    graph, output = record(lambda: buffer[: number["rows"]] * number["factor"])
    number.update(factor=5.0, rows=1)
    graph.replay()
    assert torch.equal(output, buffer[:3] * 2.0)


@pytest.mark.parametrize(
    "use",
    [lambda x, n: x * n, lambda x, n: x * n.view(1), lambda x, n: x + n.to(torch.float32) * 2],
    ids=["itself", "a_view_of_it", "converted"],
)
def test_0_dim_tensors_from_outside_are_baked(
    use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    buffer, max_seqlen = data(0, 4), torch.tensor(3, dtype=torch.int32)
    graph, output = record(lambda: use(buffer, max_seqlen))
    max_seqlen.fill_(50)
    graph.replay()
    assert torch.equal(output, use(buffer, torch.tensor(3, dtype=torch.int32)))


def test_an_element_of_a_buffer_is_not_baked() -> None:
    buffer = data(0, 4)
    graph, output = record(lambda: buffer * buffer[0])
    buffer.copy_(data(1, 4))
    graph.replay()
    assert torch.equal(output, buffer * buffer[0])


def test_addresses_are_kept() -> None:
    buffer = data(0, 4)
    graph, output = record(lambda: buffer * 2)
    before = [output.data_ptr(), *(t.data_ptr() for t in graph.pool_tensors())]
    buffer.copy_(data(1, 4))
    graph.replay()
    assert [output.data_ptr(), *(t.data_ptr() for t in graph.pool_tensors())] == before
    assert torch.equal(output, buffer * 2)


def test_new_inputs_are_seen_only_through_the_buffers_of_capture() -> None:
    holder = {"x": data(0, 4)}
    captured, old = holder["x"], holder["x"].clone()
    memory = captured.detach()
    graph, output = record(lambda: holder["x"] * 2)

    holder["x"] = data(1, 4)  # another tensor under the same name
    graph.replay()
    assert torch.equal(output, old * 2)

    captured.data = data(2, 4)  # the same tensor, moved elsewhere
    graph.replay()
    assert torch.equal(output, old * 2)

    memory.copy_(data(3, 4))  # the address that capture read
    graph.replay()
    assert torch.equal(output, data(3, 4) * 2)


def test_the_pool_holds_what_was_made_inside_and_no_buffer() -> None:
    buffer = data(0, 4)
    graph, output = record(lambda: (buffer * 2).view(2, 2) + 1)
    pool = [t.data_ptr() for t in graph.pool_tensors()]
    assert len(pool) == len(set(pool)) == 2
    assert output.data_ptr() in pool
    assert buffer.data_ptr() not in pool


# -- what is refused -------------------------------------------------------------------------------

torch.library.define("vit_cudagraph_tests::peek", "(Tensor x) -> Tensor")
torch.library.impl("vit_cudagraph_tests::peek", "cpu", lambda x: x * x.max().item())

HOST_READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "bool": lambda x: bool(x[0, 0]),
    "int": lambda x: int(x[0, 0]),
    "float": lambda x: float(x[0, 0]),
    "index": lambda x: [1, 2, 3][x[0, 0].long().clamp(0, 2)],
    "size": lambda x: torch.zeros(x[0, 0].long().abs()),
    "select": lambda x: x[x[0, 0].long().clamp(0, 1)],
    "slice": lambda x: x[: x[0, 0].long()],
    "if_any": lambda x: x if (x > 0).any() else -x,
    "contains": lambda x: 1.0 in x,
    "max_of_list": lambda x: max(x[0]),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
}
CPU_TENSOR_READS: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "array": lambda x: x.__array__(),
    "from_dlpack": lambda x: np.from_dlpack(x),
    "cpu": lambda x: x.cpu(),
    "to_cpu": lambda x: x.to("cpu"),
    "to_cpu_by_keyword": lambda x: x.to(device="cpu", dtype=torch.float64),
    "type_name": lambda x: x.type("torch.FloatTensor"),
    "repr": lambda x: repr(x),
    "print": lambda x: print(x),
    "format": lambda x: f"{x}",
}
DATA_SHAPES: dict[str, Callable[[torch.Tensor], object]] = {
    "nonzero": lambda x: x.nonzero(),
    "nonzero_as_tuple": lambda x: x.nonzero(as_tuple=True),
    "argwhere": lambda x: torch.argwhere(x),
    "where_with_one_argument": lambda x: torch.where(x > 0),
    "boolean_mask": lambda x: x[x > 0],
    "uint8_mask": lambda x: torch.ops.aten.index.Tensor(x, [(x > 0).to(torch.uint8)]),
    "write_through_boolean_mask": lambda x: x.clone().__setitem__(x > 0, x[0, 0]),
    "index_put": lambda x: x.clone().index_put_((x > 0,), x[0, 0]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "unique_dim": lambda x: x.unique(dim=0),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "repeat_interleave": lambda x: x.repeat_interleave(x[:, 0].long().abs(), dim=0),
    "repeats_alone": lambda x: torch.repeat_interleave(x[:, 0].long().abs()),
    "bincount": lambda x: x[0].long().abs().bincount(),
    "one_hot": lambda x: F.one_hot(x[0].long().abs()),
    "inside_a_composite": lambda x: torch.combinations(x[0], 2),
    "split_at_tensor": lambda x: torch.tensor_split(x, torch.full((1,), 2)),
}
NOT_ON_THE_DEVICE: dict[str, Callable[[torch.Tensor], object]] = {
    "list_to_tensor": lambda x: x + torch.tensor([1.0, 2, 3, 4, 5, 6]),
    "number_to_device": lambda x: x + torch.tensor(1.0, device=x.device),
    "new_tensor": lambda x: x + x.new_tensor(1.0),
    "from_numpy": lambda x: x + torch.from_numpy(np.ones(6, np.float32)),
    "random": lambda x: x + torch.rand(6),
    "dropout_in_training": lambda x: F.dropout(x, 0.5, training=True),
    "attention_dropout": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
    "resize": lambda x: (x * 2).resize_(2, 2),
    "resizing_out": lambda x: torch.add(x, x, out=torch.empty(0)),
    "set": lambda x: torch.empty(4, 6).set_(x),
    "custom_operator": lambda x: torch.ops.vit_cudagraph_tests.peek(x),
}
REFUSED = HOST_READS | CPU_TENSOR_READS | DATA_SHAPES | NOT_ON_THE_DEVICE

# What the message must name, where it is not the word in the table.
NAMED = {
    "bool": "aten.is_nonzero",
    "int": "aten.item",
    "float": "aten.item",
    "index": "aten.item",
    "size": "aten.item",
    "select": "aten.item",
    "slice": "aten.item",
    "if_any": "aten.is_nonzero",
    "contains": "aten.item",
    "max_of_list": "aten.is_nonzero",
    "asarray": "Tensor.__array__",
    "array": "Tensor.__array__",
    "from_dlpack": "Tensor.__dlpack__",
    "to_cpu": "Tensor.to",
    "to_cpu_by_keyword": "Tensor.to",
    "type_name": "Tensor.type",
    "print": "Tensor.__",
    "format": "Tensor.__format__",
    "nonzero_as_tuple": "nonzero",
    "where_with_one_argument": "aten.where",
    "boolean_mask": "aten.index.Tensor",
    "uint8_mask": "aten.index.Tensor",
    "write_through_boolean_mask": "aten.index_put_",
    "index_put": "aten.index_put_",
    "repeats_alone": "repeat_interleave",
    "inside_a_composite": "aten.masked_select",
    "split_at_tensor": "aten.tensor_split",
    "list_to_tensor": "aten.lift_fresh",
    "number_to_device": "tensor",
    "from_numpy": "aten.lift_fresh",
    "random": "aten.rand",
    "dropout_in_training": "aten.",
    "attention_dropout": "aten.",
    "resizing_out": "aten.add.out",
    "set": "aten.set_",
    "custom_operator": "vit_cudagraph_tests.peek",
}


def refusing(read: Callable[[torch.Tensor], object], x: torch.Tensor) -> torch.Tensor:
    read(x)
    return x + 1


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_and_nothing_stays_active(name: str) -> None:
    buffer = data(0, 4, 6)
    with pytest.raises(GraphCaptureError) as caught:
        record(partial(refusing, REFUSED[name], buffer))
    assert NAMED.get(name, name) in str(caught.value)
    assert_no_mode_is_active()
    graph, output = record(lambda: buffer * 2)
    buffer.copy_(data(1, 4, 6))
    graph.replay()
    assert torch.equal(output, buffer * 2)


def assert_no_mode_is_active() -> None:
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert not torch.is_inference_mode_enabled()
    assert torch.ones(2).sum().item() == 2.0
    assert torch.ones(2).numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", HOST_READS)
def test_host_reads_are_refused_outside_inference_mode_too(name: str) -> None:
    buffer = data(0, 4, 6)

    @torch.inference_mode(False)
    def forward() -> torch.Tensor:
        assert not torch.is_inference_mode_enabled()
        return refusing(HOST_READS[name], buffer)

    with pytest.raises(GraphCaptureError, match="host"):
        record(forward)


def test_a_refusal_that_forward_swallows_still_ends_the_capture() -> None:
    buffer = data(0, 4)

    def forward() -> torch.Tensor:
        try:
            return buffer * buffer.max().item()
        except GraphCaptureError:
            return buffer * 2

    with pytest.raises(GraphCaptureError, match=r"aten\.item"):
        record(forward)


def test_a_refusal_that_forward_translates_is_raised_itself() -> None:
    buffer = data(0, 4)

    def forward() -> torch.Tensor:
        try:
            return buffer * buffer.max().item()
        except GraphCaptureError as exc:
            raise KeyError("lost") from exc

    with pytest.raises(GraphCaptureError, match=r"aten\.item"):
        record(forward)


def test_an_error_of_forward_is_passed_on_and_nothing_stays_active() -> None:
    calls = []

    def forward() -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("while recording")
        return torch.zeros(1)

    with pytest.raises(KeyError, match="while recording"):
        record(forward)
    assert_no_mode_is_active()
    assert gc.isenabled()


def test_writing_to_a_0_dim_tensor_from_outside_is_refused() -> None:
    counter = torch.tensor(0)
    with pytest.raises(GraphCaptureError, match=r"aten\.add_.*one element"):
        record(lambda: counter.add_(1))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x: (x * 2, x * 3), "one tensor, not tuple"),
        (lambda x: None, "one tensor, not NoneType"),
        (lambda x: x, "No recorded operator"),
    ],
    ids=["tuple", "nothing", "untouched"],
)
def test_forward_must_compute_one_tensor(forward: Forward, message: str) -> None:
    buffer = data(0, 4)
    with pytest.raises(GraphCaptureError, match=message):
        record(lambda: forward(buffer))


def test_operators_are_seen_where_something_has_switched_dispatch_modes_off() -> None:
    """As a whole, and only as long as the recording lasts."""
    buffer, python = data(0, 4), torch._C.DispatchKey.Python
    with torch._C._DisableTorchDispatch():
        graph, output = record(lambda: buffer * 2)
        assert torch._C._dispatch_tls_is_dispatch_key_excluded(python)
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(python)
    buffer.fill_(3)
    graph.replay()
    assert torch.equal(output, torch.full((4,), 6.0))


def test_vllms_own_cpu_attention_is_refused() -> None:
    """It reads offsets on the host, inside a custom operator: the reason for our own."""
    x, offsets = data(0, 1, 4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(GraphCaptureError, match=r"vllm\.torch_sdpa_wrapper.*ALLOWED_CUSTOM"):
        record(lambda: torch.ops.vllm.torch_sdpa_wrapper(x, x, x, 1.0, offsets))


def test_an_allow_listed_custom_operator_is_one_step() -> None:
    assert reference_attention.UNWRITTEN != reference_attention.UNWRITTEN  # NaN
    q, offsets, longest = data(0, 6, 2, 8), torch.tensor([0, 2, 6]).int(), torch.tensor(6).int()

    def forward() -> torch.Tensor:
        return torch.ops.vit_cudagraph.varlen_attention(q, q, q, offsets, longest, 0.3)

    graph, output = record(forward)
    assert len(graph) == 1
    offsets.copy_(torch.tensor([0, 5, 6]))
    longest.fill_(0)  # baked: would raise if it were read again
    graph.replay()
    longest.fill_(6)
    assert torch.equal(output, eager(forward))


def test_no_capture_while_a_compiler_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(GraphCaptureError, match=r"torch\.compile"):
        record(lambda: torch.zeros(1))


@pytest.mark.parametrize("compiled", [False, True])
def test_compile_mm_encoder_is_refused(compiled: bool) -> None:
    config = VllmConfig(compilation_config=CompilationConfig(compile_mm_encoder=compiled))
    assert config.compilation_config.compile_mm_encoder is compiled
    reason = backend_for(CPU).refusal(config)
    if compiled:
        assert reason is not None
        assert '"compile_mm_encoder": false in --compilation-config' in reason
    else:
        assert reason is None


def test_finalisers_of_other_tensors_are_no_part_of_a_recording() -> None:
    class ReadsAtTheEnd:
        def __init__(self) -> None:
            self.tensor = torch.ones(1)
            self.cycle = self  # only the collector can free it

        def __del__(self) -> None:
            self.tensor.item()

    def forward() -> torch.Tensor:
        others.clear()
        kept = [[i] for i in range(100_000)]  # enough for the collector to start, were it on
        return torch.zeros(2) + len(kept)

    gc.collect()
    others: list[ReadsAtTheEnd] = []
    forward()
    others.extend(ReadsAtTheEnd() for _ in range(50))
    recorder = _OperatorRecorder()
    with no_collection(), recorder:
        forward()
    assert recorder.refused is None
    assert len(recorder.graph) == 2
    assert gc.isenabled()


# -- backends --------------------------------------------------------------------------------------


def test_backend_for_each_device_without_touching_it() -> None:
    assert backend_for(CPU).name == "recorded"
    assert backend_for(torch.device("cuda")).name == "cuda"
    assert not torch.cuda.is_initialized()
    with pytest.raises(ValueError, match='"cudagraph_mm_encoder": false'):
        backend_for(torch.device("meta"))


def test_cuda_capture_reports_the_error_of_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending a broken capture raises as well; the first error is the one to read."""

    @contextmanager
    def broken_graph(*args: object, **kwargs: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("capture invalidated")

    monkeypatch.setattr(torch.cuda, "graph", broken_graph)

    def forward() -> torch.Tensor:
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        cuda._capture_into(None, forward, None, None)
    with pytest.raises(RuntimeError, match="capture invalidated"):
        cuda._capture_into(None, lambda: torch.zeros(1), None, None)


# -- real towers -----------------------------------------------------------------------------------

GRIDS = [[1, 8, 12], [1, 4, 4], [2, 6, 8], [1, 2, 10]]


@pytest.fixture(scope="module", params=towers.FAMILIES)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return towers.build_model(request.param)


def test_a_tower_replays_exactly_on_other_pixels(model: torch.nn.Module) -> None:
    tower = model.visual
    with torch.inference_mode():
        metadata = tower.prepare_encoder_metadata(GRIDS)
    pixels = towers.random_pixels(model, GRIDS, seed=0)
    forward = partial(tower, pixels, None, encoder_metadata=metadata)
    graph, output = record(forward)
    first = output.clone()
    assert len(graph) > 50
    for seed in (1, 2):
        pixels.copy_(towers.random_pixels(model, GRIDS, seed=seed))
        poison(graph)
        graph.replay()
        assert torch.equal(output, eager(forward))
        assert output.isfinite().all()
        assert (output - first).abs().max() > 1e-2


def test_a_tower_follows_its_offsets(model: torch.nn.Module) -> None:
    """Offsets are a buffer: other items of the same total size go through the same graph."""
    tower = model.visual
    other = [[1, 8, 12], [1, 4, 4], [1, 2, 10], [2, 6, 8]]
    with torch.inference_mode():
        metadata = tower.prepare_encoder_metadata(GRIDS)
        changed = tower.prepare_encoder_metadata(other)
    pixels = towers.random_pixels(model, GRIDS, seed=3)
    forward = partial(tower, pixels, None, encoder_metadata=metadata)
    graph, output = record(forward)
    before = output.clone()
    with torch.inference_mode():
        for name, buffer in metadata.items():
            if buffer is not None and buffer.dim() > 0:
                buffer.copy_(changed[name])
    poison(graph)
    graph.replay()
    expected = eager(partial(tower, pixels, None, encoder_metadata=changed))
    assert torch.equal(output, expected)
    assert (output - before).abs().max() > 1e-2


def test_a_tower_that_makes_its_own_metadata_is_refused(model: torch.nn.Module) -> None:
    pixels = towers.random_pixels(model, GRIDS)
    with pytest.raises(GraphCaptureError, match="cannot be part of a graph"):
        record(partial(model.visual, pixels, torch.tensor(GRIDS)))
