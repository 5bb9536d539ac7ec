# SPDX-License-Identifier: Apache-2.0
"""What a CUDA graph cannot do, as rules about operators and functions.

On a GPU the driver refuses such work while it captures, or computes something wrong at replay. On
the CPU everything succeeds, so the twin asks here before it runs an operator. Each rule returns
the reason why the call cannot be part of a graph, or None.

Two kinds of calls are looked at, because neither level sees everything: operators (what a dispatch
mode sees) and Python functions of torch (what a function mode sees). ``t.numpy()`` of a CPU tensor
for instance dispatches no operator that tells it from a view.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

# Custom operators that may stand in a recording. A dispatch mode cannot look inside them, so each
# is here because someone has: it reads nothing on the host that may change between two replays,
# and its output shape depends on shapes alone.
ALLOWED_CUSTOM_OPERATORS = frozenset(
    {
        # Ours: attention with FlashAttention's rules. It reads offsets, as a kernel would.
        "vit_cudagraph::varlen_attention",
        # vLLM's linear layers on the CPU: a matrix product with weights packed at load time, which
        # a handle names; and the form for small bfloat16 weights on machines with AMX.
        "_C::onednn_mm",
        "_C::weight_packed_linear",
        # vLLM's norms (Qwen2.5-VL), which pick a kernel by shapes and types alone.
        "vllm_ir::rms_norm",
        "vllm_ir::fused_add_rms_norm",
        # Tensor-parallel weights: all ranks replay, so each replay communicates anew.
        "vllm::all_reduce",
    }
)

_TORCH_NAMESPACES = frozenset({"aten", "prims", "prim"})

_HOST_READS = frozenset(
    {
        # Inside inference mode a read arrives as the first two, outside it as the third.
        "item",
        "is_nonzero",
        "_local_scalar_dense",
        # One answer for the host out of whole tensors.
        "equal",
        "allclose",
        # Checks the status of a solver on the host.
        "_linalg_check_errors",
        # Finds its range on the host when none is given.
        "histc",
    }
)

_SHAPE_DEPENDS_ON_DATA = frozenset(
    {
        "argwhere",
        "bincount",
        "masked_select",
        "nonzero",
        "nonzero_numpy",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
        "_unique",
        "_unique2",
    }
)

# May index with a mask, whose true elements decide the shape; with integers they are static.
_INDEXING = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
)

_MOVES_STORAGE = frozenset({"resize", "resize_", "resize_as", "resize_as_", "set", "set_"})

_ON_THE_HOST = "reads a device value on the host, which takes no part in a replay: compute it"
_ADVICE_HOST = f"{_ON_THE_HOST} before the graph and hand it in through the metadata"
_ADVICE_SHAPE = "has an output shape that depends on data, and a graph's shapes are fixed"


def operator_refusal(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Why this operator call cannot be part of a CUDA graph, or None."""
    if func.namespace not in _TORCH_NAMESPACES:
        if func._schema.name in ALLOWED_CUSTOM_OPERATORS:
            return None
        return (
            "is a custom operator that the twin cannot look into: if it reads no device value on "
            "the host, add it to ALLOWED_CUSTOM_OPERATORS in vllm/vit_cudagraph/graphs/refusals.py"
        )
    name = func._schema.name.partition("::")[2]
    if name in _HOST_READS or torch.Tag.data_dependent_output in func.tags:
        return _ADVICE_HOST
    if name in _MOVES_STORAGE:
        return "moves or resizes a storage, and a graph's addresses are fixed"
    if name == "lift_fresh" and args[0].dim() > 0:
        return (
            "brings numbers of the host into a tensor, which on a GPU is a copy that waits for the "
            "device: make the tensor before the graph and hand it in through the metadata"
        )
    if name == "tensor_split" and func._overloadname == "tensor_indices_or_sections":
        return "splits where a tensor says, which must lie on the host: split at Python numbers"
    if name == "pin_memory":
        return "allocates host memory, which a capture forbids"
    return _shape_refusal(name, func, args, kwargs)


def _shape_refusal(
    name: str, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    if name in _INDEXING:
        if any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in args[1]
        ):
            return f"indexes with a mask: it {_ADVICE_SHAPE}. Use torch.where or integer indices"
        return None
    if name == "repeat_interleave":
        if _argument(func, args, kwargs, "output_size") is None and _has_tensor_repeats(func):
            return f"{_ADVICE_SHAPE}. Give output_size"
        return None
    if name == "where" and func._overloadname == "default":
        return f"with one argument {_ADVICE_SHAPE}. Use the form with three"
    if name in _SHAPE_DEPENDS_ON_DATA or torch.Tag.dynamic_output_shape in func.tags:
        return _ADVICE_SHAPE
    return None


def _has_tensor_repeats(func: OpOverload) -> bool:
    return any(
        argument.name == "repeats" and isinstance(argument.type, torch.TensorType)
        for argument in func._schema.arguments
    )


def random_refusal(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a random operator cannot be part of a graph; None if it is not, or draws nothing.

    Asked only of operators that are made of no others: ``dropout`` of a model in evaluation mode
    is none of these, and attention with a dropout of 0 draws nothing.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    if _argument(func, args, kwargs, "dropout_p") == 0:
        return None
    return (
        "draws random numbers: a CUDA graph needs a generator registered with it, and would then "
        "draw others than eager does. Call .eval() on the tower"
    )


def function_refusal(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Why this Python call of torch cannot be part of a CUDA graph, or None.

    Only for what operators do not show: the ways in which a CPU tensor is already on the host.
    """
    if func in _host_functions():
        return _ADVICE_HOST
    if func is torch.Tensor.to:
        # A string names the host. A torch.device object does not: towers write
        # `x.to(device=self.device)`, a no-op where x lives on the device already, and the twin's
        # device is the CPU, so that object is the only thing that it can be compared with.
        targets = [*args[1:2], kwargs.get("device")]
        if any(isinstance(target, str) and target.startswith("cpu") for target in targets):
            return _ADVICE_HOST
    if func is torch.Tensor.type and any(isinstance(a, str) for a in [*args[1:], *kwargs.values()]):
        return _ADVICE_HOST
    if _copies_from_the_host(func, args, kwargs):
        return (
            "copies numbers of the host to the device and waits for it: use torch.full, or make "
            "the tensor before the graph and hand it in through the metadata"
        )
    return None


def _copies_from_the_host(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    if func is torch.Tensor.new_tensor:
        return True
    if func not in (torch.tensor, torch.as_tensor, torch.asarray) or kwargs.get("device") is None:
        return False
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    return not isinstance(data, torch.Tensor)


@cache
def _host_functions() -> frozenset[Callable[..., Any]]:
    tensor = torch.Tensor
    return frozenset(
        {
            tensor.tolist,
            tensor.numpy,
            tensor.cpu,
            tensor.__array__,
            tensor.__dlpack__,
            tensor.__repr__,
            tensor.__format__,
        }
    )


def function_name(func: Callable[..., Any]) -> str:
    """A readable name: ``Tensor.cpu`` for a method descriptor, else what Python calls it."""
    return getattr(func, "__qualname__", repr(func)).replace("TensorBase", "Tensor")


@cache
def made_of_others(func: OpOverload) -> bool:
    """Whether ``func`` is only a composition of other operators (``linear``, ``reshape``, ...).

    Those are opened while recording, so that a host read inside one is seen. One that has a kernel
    of its own for the CPU is not: it would compute something else than eager does.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(
        func.name(), "CPU"
    )


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in the arguments or the result of an operator, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def written_tensors(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The arguments whose values ``func`` writes, as its schema declares them."""
    if torch.Tag.inplace_view in func.tags:
        return []  # new sizes for the same values
    written: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written.extend(tensors_in(value))
    return written


def _argument(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """The value that an operator call gives to the argument ``name``, or its default, or None."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if argument.name in kwargs:
                return kwargs[argument.name]
            return args[position] if position < len(args) else argument.default_value
    return None
