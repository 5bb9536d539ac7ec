# SPDX-License-Identifier: Apache-2.0
"""The CPU twin of a CUDA graph: records operators, replays them into the same storages.

While ``forward`` runs, a dispatch mode sees each operator with its tensors. What it keeps is what a
CUDA graph would keep: the operator, the addresses of its tensors, and the numbers as they were.

* An operator that makes a new tensor is run again at replay, and its result copied to the address
  that the first result had.
* An operator that writes to a tensor is run again on the recorded tensors.
* A view is not run again: it is an address, and addresses do not change.
* ``torch.empty`` is not run again either: as in a CUDA graph's pool, whatever was there stays.

A 0-dim tensor that was made outside the recording stands for a number of the host (``max_seqlen``
is one). A kernel launch takes its value, so the recording keeps a copy and later writes to it
change nothing. On the CPU such a number cannot be told from a 0-dim tensor of the device; reading
that as a constant is the same unless somebody writes to it, which recording refuses.

What the modes cannot see: Python code inside a custom operator (refused unless allow-listed),
what a tower does that vLLM has compiled as a whole (``refusal``), and a host read that a Python
function *of torch* makes inside itself through one of ``refusals._host_functions``. A single
function under ``torch.compile``, as vLLM has for some activations, runs op by op under a dispatch
mode, by torch's own rule, and is recorded like any other code.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.vit_cudagraph.graphs import GraphCaptureError, no_collection
from vllm.vit_cudagraph.graphs.refusals import (
    function_name,
    function_refusal,
    made_of_others,
    operator_refusal,
    random_refusal,
    tensors_in,
    written_tensors,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)


@dataclass(frozen=True)
class _Step:
    """One operator call to repeat. Tensors in it are aliases: same storage, sizes as recorded."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # Position among the tensors of the result -> where that tensor was when it was recorded.
    fresh: dict[int, torch.Tensor]

    def run(self) -> None:
        results = tensors_in(self.func(*self.args, **self.kwargs))
        for position, recorded in self.fresh.items():
            recorded.copy_(results[position])


@dataclass
class RecordedGraph:
    """A recorded forward. ``len(graph)`` is the number of operators that a replay runs."""

    _steps: list[_Step] = field(default_factory=list)
    _pool: list[torch.Tensor] = field(default_factory=list)

    def replay(self) -> None:
        """Run the operators again, in order, into the storages that they had when recorded."""
        with torch.inference_mode():
            for step in self._steps:
                step.run()

    def __len__(self) -> int:
        return len(self._steps)

    def pool_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that were made while recording: what a CUDA graph has in its memory pool.

        One tensor for each storage. A correct forward gives the same output whatever they hold
        before a replay. Numbers that were baked are not among them.
        """
        yield from self._pool


class HostWatch:
    """The host's clock: a recording has run when ``replay`` returns."""

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self) -> None:
        self._stop = time.perf_counter()

    def milliseconds(self) -> float | None:
        """See :class:`vllm.vit_cudagraph.statistics.Stopwatch`."""
        return (self._stop - self._start) * 1e3


class RecordedBackend:
    """Captures by recording operators on the CPU."""

    name = "recorded"

    # A recording keeps every tensor in between, where CUDA graphs share one pool of memory.
    most_graphs: int | None = 8

    def refusal(self, vllm_config: "VllmConfig") -> str | None:
        """A compiled tower runs code that shows no operators: its recording would be wrong."""
        if vllm_config.compilation_config.compile_mm_encoder:
            return (
                "compile_mm_encoder is true, and the CPU twin cannot record a compiled encoder: "
                'set "compile_mm_encoder": false in --compilation-config'
            )
        return None

    def milliseconds(self, run: Callable[[], object]) -> float | None:
        """None: how long operators take on this CPU says nothing about a GPU."""
        return None

    def stopwatch(self) -> "HostWatch":
        """See :class:`vllm.vit_cudagraph.graphs.GraphBackend`."""
        return HostWatch()

    def new_pool(self) -> Any:
        return object()

    def give_back(self) -> None:
        """Nothing to do: tensors of dropped recordings are freed with them."""

    def capture(
        self, forward: Callable[[], torch.Tensor], pool: Any = None
    ) -> tuple[RecordedGraph, torch.Tensor]:
        """See :class:`vllm.vit_cudagraph.graphs.GraphBackend`. ``pool`` is not used.

        Raises:
            GraphCaptureError: ``forward`` does what a CUDA graph cannot, even if it catches the
                error itself: a capture that has been broken stays broken.
        """
        if torch.compiler.is_compiling():
            raise GraphCaptureError(
                "A forward cannot be recorded while torch.compile traces it: call capture outside."
            )
        recorder = _OperatorRecorder()
        with torch.inference_mode():
            forward()
            try:
                with no_collection(), _modes_are_seen(), recorder, _FunctionGuard(recorder):
                    output = forward()
            except Exception as exc:
                if recorder.refused is None or recorder.refused is exc:
                    raise
                raise recorder.refused from exc
        if recorder.refused is not None:
            raise recorder.refused
        recorder.check_output(output)
        return recorder.graph, output


@contextmanager
def _modes_are_seen() -> Iterator[None]:
    """While open, this thread's operators reach dispatch modes, even if something that ran before
    has left them switched off (``torch._C._DisableTorchDispatch`` does so while it lives)."""
    keys = [torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot]
    off = [key for key in keys if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in off:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key in off:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


class _OperatorRecorder(TorchDispatchMode):
    """Records into ``graph`` every operator that runs while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = RecordedGraph()
        self.refused: GraphCaptureError | None = None
        self._pool_addresses: set[int] = set()
        self._seen_addresses: set[int] = set()
        # 0-dim tensors by id, each kept alive so that its id stays its own: those made inside, and
        # for those from outside the copy that took their place.
        self._made_inside: dict[int, torch.Tensor] = {}
        self._baked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._baked_addresses: set[int] = set()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if reason := operator_refusal(func, args, kwargs):
            raise self.refuse(str(func), reason)
        if made_of_others(func):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if reason := random_refusal(func, args, kwargs):
            raise self.refuse(str(func), reason)
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._bake, (args, kwargs))
        return self._record(func, args, kwargs)

    def refuse(self, name: str, reason: str) -> GraphCaptureError:
        """The error to raise. The first one is remembered: ``forward`` may swallow it."""
        error = GraphCaptureError(f"{name} cannot be part of a graph: it {reason}.")
        self.refused = self.refused or error
        return error

    def check_output(self, output: Any) -> None:
        """Raise unless ``output`` is one tensor that some recorded operator has touched."""
        if not isinstance(output, torch.Tensor):
            raise GraphCaptureError(
                f"forward must return one tensor, not {type(output).__name__}: a graph has one "
                "output buffer. Concatenate the parts inside forward."
            )
        if output.numel() and _address(output) not in self._seen_addresses:
            raise GraphCaptureError(
                "No recorded operator made or read the output of forward: it was computed where "
                "recording cannot look (compiled code, numpy), so replays would never refresh it."
            )

    def _bake(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() > 0 or id(tensor) in self._made_inside:
            return tensor
        if id(tensor) not in self._baked:
            # An inference tensor only where the original is one: the views that torch makes of it
            # are prepared for what the original was.
            with torch.inference_mode(tensor.is_inference()):
                copy = tensor.detach().clone()
            self._baked[id(tensor)] = (tensor, copy)
            self._baked_addresses.add(_address(copy))
            self._made_inside[id(copy)] = copy
        return self._baked[id(tensor)][1]

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_in((args, kwargs))
        addresses = {_address(tensor) for tensor in inputs}
        written = written_tensors(func, args, kwargs)
        storages = [(_address(tensor), tensor.untyped_storage().nbytes()) for tensor in written]
        if any(address in self._baked_addresses for address, _ in storages):
            raise self.refuse(
                str(func),
                "writes to a 0-dim tensor from outside the graph, which may be a number of the "
                "host: make it a buffer of one element, shape (1,)",
            )
        # Before the call, because some operators change the sizes of their argument in place.
        recorded_args, recorded_kwargs = pytree.tree_map_only(torch.Tensor, _alias, (args, kwargs))

        result = func(*args, **kwargs)

        if storages != [(_address(t), t.untyped_storage().nbytes()) for t in written]:
            raise self.refuse(
                str(func),
                "resizes the tensor that it writes to, and a graph's addresses are fixed: give it "
                "an output of the right size",
            )
        outputs = tensors_in(result)
        fresh = {i: _alias(t) for i, t in enumerate(outputs) if _address(t) not in addresses}
        self._own(fresh.values())
        self._seen_addresses |= addresses
        self._made_inside.update((id(tensor), tensor) for tensor in outputs if tensor.dim() == 0)
        if self._must_run(func, bool(written), bool(outputs), bool(fresh)):
            self.graph._steps.append(_Step(func, recorded_args, recorded_kwargs, fresh))
        return result

    def _own(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if _address(tensor) not in self._pool_addresses:
                self._pool_addresses.add(_address(tensor))
                self.graph._pool.append(tensor)
        self._seen_addresses |= self._pool_addresses

    @staticmethod
    def _must_run(func: OpOverload, writes: bool, has_outputs: bool, makes_tensors: bool) -> bool:
        if torch.Tag.inplace_view in func.tags:
            return False
        if func._schema.name.partition("::")[2] in _UNINITIALISED:
            return False
        # Views have outputs and make none; an assertion has no outputs but does something. Only
        # torch's own operators are trusted to be views when they look like it.
        return writes or makes_tensors or not has_outputs or func.namespace != "aten"


class _FunctionGuard(TorchFunctionMode):
    """Refuses the host reads that a dispatch mode does not recognise on the CPU."""

    def __init__(self, recorder: _OperatorRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if reason := function_refusal(func, args, kwargs):
            raise self._recorder.refuse(function_name(func), reason)
        return func(*args, **kwargs)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage with the sizes of now: ``tensor.data = other`` later does not reach it."""
    return tensor.detach()
