"""A traced program as a pure function, by torch's own functionalisation, which traces it twice more.

Ops that only make views (`flatten`, `mT`, `chunk`) are decomposed during the first trace.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from attngraph.capture.instead import replaced
from attngraph.capture.lines import refused
from attngraph.ir.graph import may_alias, source_of
from attngraph.meaning.algebra.sizes import example_number

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_WRITTEN_OUT = frozenset(
    {
        "absolute", "negative", "multiply", "subtract", "divide", "true_divide", "greater", "greater_equal",
        "less", "less_equal", "not_equal", "clip", "float_power", "concatenate", "hstack", "vstack",
        "row_stack", "dstack", "column_stack", "atleast_1d", "atleast_2d", "atleast_3d", "fliplr", "flipud",
        "meshgrid", "broadcast_tensors", "take_along_dim", "ger", "linalg_matmul", "linalg_multi_dot",
        "chain_matmul", "linalg_vecdot", "cosine_similarity", "special_softmax", "special_log_softmax",
        "special_logsumexp", "special_expit", "special_exp2", "special_erf", "special_erfc",
        "special_expm1", "special_log1p", "special_round", "fix", "relu6", "selu", "isfinite", "isclose",
        "isreal", "diag",
    }
)  # fmt: skip
"""Ops that are aliases or plain compositions of other ops, in eager mode too."""
_UNSAID = (
    "type_as", "broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d", "sum_to_size",
)  # fmt: skip
"""Composite ops whose results may be views of operands, which their schemas do not state."""
_OWN_OPS = ("aten", "attngraph")
"""Libraries whose composite ops have element rules or kernels of their own."""
RECURRENT = [aten.gru.input, aten.lstm.input, aten.rnn_tanh.input, aten.rnn_relu.input]
"""Operations that are loops over tokens."""


@contextlib.contextmanager
def views_taken_apart() -> Iterator[None]:
    """Let torch.export decompose composite views, and composite ops of other libraries, while it traces."""
    # Of torchao, say, whose integers with scales are then torch's operations, which have element rules.
    others = {op: op.decompose for op in _composites(of_torch=False)}
    traced = functools.partial(make_fx, decomposition_table=_composite_views() | others)
    with replaced("torch.export._trace", "make_fx", traced):
        yield


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program as a pure function of its inputs; composite ops without side effects are not decomposed.

    Raises:
        CaptureError: a write through strides to a part of a tensor.
    """
    found: ExportedProgram = program.run_decompositions(written_out())
    # What torch writes there has a wrong derivative.
    for node in found.graph.find_nodes(op="call_function", target=aten.as_strided_scatter.default):
        whole, written, *given = node.args
        named = {**dict(zip(_STRIDES, given, strict=False)), **node.kwargs}
        if not is_dense(whole.meta["val"]):
            raise refused("forward() writes through as_strided to a part of a tensor", source_of(node))
        node.target = torch.ops.attngraph.strided_scatter.default
        node.args = (whole, written, *map(named.get, _STRIDES[:2]), named.get(_STRIDES[2]) or 0)
        node.kwargs = {}
    return found


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill its memory, in whatever order."""
    sizes = [s if isinstance(s, int) else s.node.hint for s in tensor.shape]
    strides = [s if isinstance(s, int) else s.node.hint for s in tensor.stride()]
    expected = 1
    for stride, size in sorted((t, s) for t, s in zip(strides, sizes, strict=True) if s != 1):
        if stride != expected:
            return False
        expected *= size
    return True


_STRIDES = "size", "stride", "storage_offset"


def _fill_diagonal(x: Tensor, value: Any, wrap: bool = False) -> Any:
    """A write to the diagonal of a matrix, which need not be one through strides."""
    if x.ndim != 2 or wrap:
        return NotImplemented
    x.diagonal().fill_(value)
    return x


def _unrolled(unroll: Callable[..., Any], x: Any, *args: Any) -> Any:
    """A recurrent network as operations on each token, in a trace for one number of tokens alone; one
    operation in other traces, and where it also runs backwards."""
    number, is_backwards = example_number(), args[6]
    return unroll(x, *args) if number and number in x.shape[:2] and not is_backwards else NotImplemented


def _composites(of_torch: bool) -> Iterator[Any]:
    """The composite ops of torch, or of other libraries, that write to no operand."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        space, _, overload = name.partition("::")
        packet, _, which = overload.partition(".")
        wanted = space == "aten" if of_torch else space not in _OWN_OPS
        if wanted and hasattr(getattr(torch.ops, space), packet):
            op = getattr(getattr(getattr(torch.ops, space), packet), which or "default")
            if not op._schema.is_mutable:
                yield op


@functools.cache
def written_out() -> dict[Any, Callable[..., Any]]:
    """Decompositions of the ops that are aliases or compositions of ops with element rules."""
    known = torch.export.default_decompositions()
    return {op: known[op] for op in known if op.namespace == "aten" and op._opname in _WRITTEN_OUT}


@functools.cache
def _composite_views() -> dict[Any, Callable[..., Any]]:
    """Decompositions of the composite ops that may return a view of an operand."""
    ops = _composites(of_torch=True)
    found = {op: op.decompose for op in ops if may_alias(op) and _COMPOSITE not in op.py_kernels}
    found |= {op: op.decompose for op in written_out()}
    found |= {op: op.decompose for name in _UNSAID for op in [getattr(aten, name).default]}
    found[aten.einsum.default] = lambda equation, operands, **order: (
        aten.einsum.default.decompose(equation, operands, **order) if len(operands) == 1 else NotImplemented
    )
    found[aten.fill_diagonal_.default] = _fill_diagonal
    found[aten.dropout.default] = lambda x, p, train: NotImplemented if train and p != 0 else x
    found |= {
        op: functools.partial(_unrolled, unroll) for op, unroll in get_decompositions(RECURRENT).items()
    }
    return found
