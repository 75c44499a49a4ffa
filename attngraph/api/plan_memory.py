"""The memory that a rank needs beside weights, and models that are built without any.

What autograd keeps is asked of torch: each operation runs on tensors without memory, and the tensors that it
saves are noted, each storage once, whatever views of it are saved. Weights and the inputs of the call are not
counted, as they are there anyway. What an operation of ours keeps is known: attention its operands, its
output and a number for each row.

A model of which shapes alone are of interest is built `WithoutMemory`; what it computes while it is built
(positions, masks) has its contents, because masks are derived from it. Parameters then become zeros that the
system gives memory to when they are written to, which nobody does (`fill`), so that nothing but their values
is different from the model's.
"""

import mmap
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops import nodes
from attngraph.ir.ops.collectives import ALL_REDUCE, SUM_GRADIENTS
from attngraph.ir.ops.others import EXPERT_ROWS
from attngraph.ir.ops.token_collectives import FETCH_KEYS
from attngraph.meaning import evaluate_size, is_part, size_expression
from attngraph.meaning.check.region import shape_at
from attngraph.runtime.parallel.parameters import replace


def bytes_of(node: fx.Node, graph: ProgramGraph) -> int:
    """The bytes of a value at the sizes of the example; of several results, of all."""
    value = node.meta["val"]
    each = value if isinstance(value, tuple | list) else [value]
    return sum(
        torch.Size(shape_at(v, graph.hints)).numel() * v.dtype.itemsize for v in each if isinstance(v, Tensor)
    )


def without_memory(node: fx.Node, graph: ProgramGraph, learns: Iterable[fx.Node] = ()) -> Any:
    """A tensor or size of a graph as operations without memory take it; those in `learns` have gradients."""
    value = node.meta["val"]
    if isinstance(value, Tensor):
        made = torch.empty(shape_at(value, graph.hints), dtype=value.dtype, device="meta")
        return made.requires_grad_(node in learns and value.dtype.is_floating_point)
    if isinstance(value, torch.SymInt | int):
        return int(evaluate_size(size_expression(value), graph.hints))
    raise ValueError("no tensor and no size")


def fetched_at_once(graph: ProgramGraph) -> int:
    """The bytes of keys and values that a rank fetches for one attention, at most: room for all tokens."""
    fetched = ([n for n in node.all_input_nodes if n.target is FETCH_KEYS] for node in graph.attentions())
    return max((sum(bytes_of(n, graph) for n in set(nodes)) for nodes in fetched), default=0)


class KeptForBackward:
    """Counts what a backward pass keeps of a call. `base`: of a node, the value whose memory it has; `kept`:
    the bytes of each value that is kept, and of what operations keep beside values of the graph."""

    def __init__(self, graph: ProgramGraph) -> None:
        self.graph = graph
        self.base: dict[fx.Node, fx.Node] = {}
        self.kept: dict[Any, int] = {}
        self.learns: set[fx.Node] = set()
        self.there = set(graph.placeholders())

    def count(self) -> tuple[int, set[str]]:
        """The bytes that are kept, and the operations of which they are not known."""
        given = self.graph.given().items()
        self.learns.update(node for node, told in given if told.kind in ("parameter", "shard"))
        failed = set[str]()
        for node in self.graph.graph.nodes:
            if node.op != "call_function" or not any(n in self.learns for n in node.all_input_nodes):
                continue
            self.learns.add(node)
            try:
                self._note(node)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                failed.add(str(node.target))
        return sum(self.kept.values()), failed

    def _keep(self, node: fx.Node) -> None:
        base = self.base.get(node, node)
        if base not in self.there:
            self.kept[base] = bytes_of(base, self.graph)

    def _note(self, node: fx.Node) -> None:
        if is_part(node) or node.target is SUM_GRADIENTS:
            source: Any = node.args[0]
            self.base[node] = self.base.get(source, source)
        elif nodes.view(node) is not None or node.target is EXPERT_ROWS:
            for operand in node.all_input_nodes:
                if isinstance(operand.meta["val"], Tensor):
                    self._keep(operand)
            if node.target is not EXPERT_ROWS:
                self._keep(node)
        elif node.target is not ALL_REDUCE and str(node.target).startswith("aten."):
            self._ask(node)

    def _ask(self, node: fx.Node) -> None:
        """Run one operation of torch, and note what it saves and whose memory its result has."""
        given: dict[fx.Node, Any] = {
            n: without_memory(n, self.graph, self.learns) for n in node.all_input_nodes
        }
        saved: list[Tensor] = []
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        target: Any = node.target

        def note(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            made = target(*args, **kwargs)
        whose = {_memory(t): n for n, t in given.items() if isinstance(t, Tensor)}
        for result in made if isinstance(made, tuple | list) else [made]:
            owner = whose.setdefault(_memory(result), node)
            self.base[node] = self.base.get(owner, owner)
        for number, tensor in enumerate(saved):
            if _memory(tensor) in whose:
                self._keep(whose[_memory(tensor)])
            else:
                self.kept[node, number] = tensor.numel() * tensor.dtype.itemsize


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class WithoutMemory(TorchFunctionMode):
    """A context in which `torch.empty` gives tensors without memory, where no device is named."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        given = dict(kwargs or {})
        if function is torch.empty and given.get("device") is None and "out" not in given:
            given["device"] = "meta"
        return function(*args, **given)


_RESERVES_NOTHING = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def _zeros(parameter: Tensor) -> Tensor:
    """Zeros of a parameter's shape, whose pages nobody has written to and which so take no memory."""
    count = parameter.numel() * parameter.itemsize
    if not (_RESERVES_NOTHING and count):
        return torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    room = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _RESERVES_NOTHING)
    return torch.frombuffer(room, dtype=parameter.dtype).view(parameter.shape)


def fill(model: nn.Module, inputs: Any) -> bool:
    """Let parameters without memory be zeros that take none, in place; whether all else then has contents."""
    replace(model, lambda p: nn.Parameter(_zeros(p), p.requires_grad) if p.is_meta else p)
    leaves = [*tree_leaves(inputs), *model.buffers()]  # and attributes of modules
    for module in model.modules():
        leaves += tree_leaves({k: v for k, v in vars(module).items() if k not in _REGISTERED})
    return not any(leaf.is_meta for leaf in leaves if isinstance(leaf, Tensor))


_REGISTERED = ("_parameters", "_modules", "_buffers")
