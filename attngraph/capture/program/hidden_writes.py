"""Writes in place that gradients pass by: under `torch.no_grad()`, or to what `detach()` or `.data` gives.

In eager mode such a write changes the values of a tensor, while gradients flow through the tensor as if
nothing had been written. A graph in which a write gives a new value cannot say that: the new value has no
gradient, or that of the operation. So a graph for training is refused where a write is hidden from gradients
that flow.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from attngraph.errors import CaptureError
from attngraph.ir.graph.program_graph import may_alias
from attngraph.ir.graph.source import source_of

aten = torch.ops.aten

_UNDIFFERENTIATED = frozenset(
    getattr(aten, f"logical_{name}_").default for name in ("not", "and", "or", "xor")
)
"""Writes in place that gradients pass by, although they are enabled."""


@contextlib.contextmanager
def data_of_tensors() -> Iterator[None]:
    """Let a trace follow `tensor.data`, which torch.export takes for a constant: it is `tensor.detach()`."""
    own = torch._C.TensorBase.data
    read = property(Tensor.detach, own.__set__)  # type: ignore[attr-defined]
    with mock.patch.object(Tensor, "data", read, create=True):
        yield


def hidden_write(program: ExportedProgram, arguments: Sequence[Tensor]) -> CaptureError | None:
    """The refusal of a trace for gradients in which a write is hidden from them; None if there is none.

    Args:
        program: as torch.export gives it, with its writes and its regions without gradients.
        arguments: the example's tensors, in the order of the program's inputs.
    """
    if not torch.is_grad_enabled():
        return None
    given = iter(arguments)
    inputs = []
    for spec in program.graph_signature.input_specs:
        kind = spec.kind.name
        tensor = next(given, None) if kind == "USER_INPUT" else program.state_dict.get(str(spec.target))
        inputs.append(_Value(isinstance(tensor, Tensor) and tensor.requires_grad))
    try:
        _follow(program.graph_module, inputs, True)
    except CaptureError as problem:
        return problem
    return None


@dataclasses.dataclass
class _Value:
    """The memory of a value and of all its views: whether gradients flow through it. `shown`: of what it is
    an alias whose writes gradients do not see."""

    flows: bool = False
    shown: _Value | None = None

    @property
    def hides(self) -> bool:
        return self.shown is not None and (self.shown.flows or self.shown.hides)


def _follow(module: fx.GraphModule, inputs: Sequence[_Value], enabled: bool) -> Any:
    """Follow gradients through a graph; what it says of the results."""
    placeholders = module.graph.find_nodes(op="placeholder")
    found = collections.defaultdict(_Value, zip(placeholders, inputs, strict=True))
    for node in module.graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], found.__getitem__)
        if node.op != "call_function" or node in found:  # a result of a region is known
            continue
        if "wrap_with_set_grad_enabled" in str(node.target):
            enables, body, *given = node.args
            values = [found[n] if isinstance(n, fx.Node) else _Value() for n in given]
            results = _follow(getattr(module, str(body.target)), values, bool(enables))
            found.update((user, results[user.args[1]]) for user in node.users)
            continue
        operands = [found[n] for n in node.all_input_nodes]
        own = found[node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else _Value()
        flows = enabled and any(v.flows for v in operands)
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            if own.hides or (own.flows and (not enabled or node.target in _UNDIFFERENTIATED)):
                _refuse(node)
            own.flows = own.flows or flows
            found[node] = own
        elif node.target is aten.detach.default:
            found[node] = _Value(shown=own)
        elif may_alias(node.target) or node.target is operator.getitem:
            found[node] = own
        else:
            found[node] = _Value(flows and _is_floating(node))
    return ()


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point()


def _refuse(node: fx.Node) -> None:
    line = source_of(node)
    what = (
        "gradients pass by what forward() writes in place under torch.no_grad(), to x.detach() or x.data, or "
        "by logical_not_() and the like"
    )
    raise CaptureError(
        f"{what}{f', at {line}' if line else ''}. A graph has no such writes.\n"
        "What to do: compute a new tensor (masked_fill for masked_fill_), call the model under "
        "torch.no_grad(), or compile without strict=True.",
        what,
        line,
    )
