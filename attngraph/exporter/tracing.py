"""torch.export's trace of a rewritten module, with the sizes that were symbolic still symbolic, and the sizes
that the program is valid for.

A trace takes one branch where a model asks for a size. A compiled model traces again for other sizes; a file
must refuse them, one row or one token among them where the model asks for that and does something else. In
pt2 it is an assertion with a message. ONNX has none: there an index is out of range unless the conditions
hold, so that the runtime fails instead of computing something else."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from attngraph.capture.instead import LOCK
from attngraph.capture.sides import UNASKED, Sides, assumed, in_words
from attngraph.errors import ExportError, first_line, told_as
from attngraph.exporter.formats import Format, quiet
from attngraph.ir.graph.formula import test_of
from attngraph.ir.modes import without_autocast

_SIZES = "torch.fx.experimental.symbolic_shapes"


def traced(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Sequence[Sequence[int]]
) -> ExportedProgram:
    """The program of a call. `dynamic`: for each tensor in order, which dimensions are symbolic. ExportError
    where torch.export cannot trace it."""
    counted = iter(dynamic)

    def dims(leaf: Any) -> Any:
        return dict.fromkeys(next(counted), Dim.AUTO) if isinstance(leaf, Tensor) else None

    of_args, of_kwargs = pytree.tree_map(dims, (args, dict(kwargs)))
    shapes: Any = {**({"args": of_args} if args else {}), **of_kwargs}
    if not any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(module.forward).parameters.values()):
        shapes = of_args
    before = "torch.export cannot trace the rewritten model: "
    with told_as(ExportError, Exception, before=before, words=first_line):
        with LOCK.trace(), torch.no_grad(), without_autocast(), quiet(_SIZES):
            made = torch.export.export(module, args, dict(kwargs), dynamic_shapes=shapes, strict=False)
        # Torch's text of guards fails on inputs of several kinds; sizes are checked by the range constraints.
        made._guards_code = []
        return made


def varies(size: Any) -> bool:
    """Whether a size, as a number, a symbol of torch or a formula, is no fixed number."""
    formula = size.node.expr if isinstance(size, torch.SymInt) else size
    return bool(getattr(formula, "free_symbols", ()))


def became_numbers(
    program: ExportedProgram, names: Sequence[str], dynamic: Sequence[Sequence[int]]
) -> list[str]:
    """Remarks on dimensions that were to vary and do not."""
    nodes = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    inputs = [nodes[str(given)] for given in program.graph_signature.user_inputs if str(given) in nodes]
    tensors = [n.meta["val"] for n in inputs if isinstance(n.meta.get("val"), Tensor)]
    return [
        f"dimension {d} of {name} is always {value.shape[d]}"
        for name, value, dims in zip(names, tensors, dynamic, strict=True)
        for d in dims
        if not varies(value.shape[d])
    ]


class Limits:
    """Conditions on sizes, and what a trace decided about them; `names` has the name of each size that they
    mention, for people."""

    def __init__(self, conditions: Sequence[Any], names: Mapping[str, str], sides: Sides = UNASKED) -> None:
        every = [*assumed(conditions), *sides.strictly()]
        self.conditions = [c for c in dict.fromkeys(every) if {str(s) for s in c.free_symbols} <= set(names)]
        self._names = names

    def words(self) -> list[str]:
        """The conditions as users may read them: `x.shape[1] <= 64`."""
        return [in_words(c, self._names) for c in self.conditions]

    def checked(self, tensor: Tensor, sizes: Mapping[str, Any], format: Format) -> Tensor:
        """The tensor, in a program that fails where the conditions do not hold of these sizes. One that is a
        tensor is one of each row."""
        if not self.conditions:
            return tensor
        device = tensor.device
        known = {
            n: s if isinstance(s, Tensor) else torch.scalar_tensor(s, dtype=torch.int64, device=device)
            for n, s in sizes.items()
        }
        holds = functools.reduce(torch.bitwise_and, (_holds(c, known).all() for c in self.conditions))
        return format.guarded(tensor, holds, " and ".join(self.words()))


def _holds(condition: Any, sizes: Mapping[str, Tensor]) -> Tensor:
    if isinstance(condition, (sympy.And, sympy.Or)):
        join = torch.logical_and if isinstance(condition, sympy.And) else torch.logical_or
        return functools.reduce(join, (_holds(part, sizes) for part in condition.args))
    names, test = test_of(condition)
    device = next(iter(sizes.values())).device
    return torch.as_tensor(test(*(sizes[name] for name in names)), device=device)
