"""Results that are computed when somebody looks at them: the stage `Rate.LOOK` of a graph.

Such a result is an `Unseen`, a tensor that knows its shape, dtype and device, and whether gradients flow
through it. The first operation on it computes it, from values that the call kept, under the call's grad mode;
from then on it *is* the computed tensor, a plain one. Results that need the same weights, or share memory,
are computed together.

Python's functions ask a tensor on their way (`__torch_function__`); code in C does not, such as
`autograd.Function.apply` or the autograd engine. There an `Unseen` is one operation, whose values are
computed below autograd (`__torch_dispatch__`), and whose gradients by computing them once more (`_Waiting`).
While C holds it, it cannot become another tensor, and stays that operation.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from attngraph.capture.guards import size_value
from attngraph.ir.graph.program_graph import ProgramGraph, Rate, part_of
from attngraph.ir.ops.transforms import autograd_inside
from attngraph.runtime.layout import laid_out
from attngraph.runtime.machine import Machine

_METHODS = (
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "size",
    "element_size",
    "is_floating_point",
    "is_complex",
)
_PROPERTIES = (
    "shape", "ndim", "dtype", "device", "layout", "is_cuda", "itemsize", "_version", "requires_grad",
    "is_leaf",
)  # fmt: skip
_KNOWN_BEFORE = {getattr(Tensor, n) for n in _METHODS} | {getattr(Tensor, n).__get__ for n in _PROPERTIES}
"""What is asked of a tensor without its values."""


_NUMBERS = itertools.count()
_ONE_AT_A_TIME = threading.Lock()
"""Held while tensors become the computed ones."""


class Unseen(Tensor):
    """A tensor that is computed when it is first used."""

    look: _Look
    value_name: str
    serial_number: tuple[str, int]
    """Tells it from all others in fingerprints (`capture/state/`): another one may get its address."""

    @staticmethod
    def of(look: _Look, name: str, example: Tensor, shape: Sequence[int]) -> Unseen:
        """A tensor of this shape, like the example in the rest, whose values the look has by this name."""
        made: Unseen = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Unseen, shape, dtype=example.dtype, device=example.device
        )
        made.look, made.value_name = look, name
        made.serial_number = "unseen", next(_NUMBERS)
        look.tensors[name] = weakref.ref(made)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        if func not in _KNOWN_BEFORE:
            show(*leaves)
        if not any(type(tensor) is Unseen for tensor in leaves):
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = {
            id(t.look.values()[t.value_name]): t for t in tree_leaves((args, kwargs)) if type(t) is Unseen
        }
        args, kwargs = tree_map_only(Unseen, lambda t: t.look.values()[t.value_name], (args, kwargs or {}))
        result = func(*args, **kwargs)
        return found.get(id(result), result)  # what writes to a tensor returns it


def show(*results: Any) -> None:
    """Compute what waits among tensors."""
    for tensor in results:
        if type(tensor) is Unseen:
            tensor.look.show()


class _Waiting(torch.autograd.Function):
    """An `Unseen` as one operation on the values that its call kept."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, look: _Look, name: str, example: Tensor, shape: Sequence[int], *kept: Tensor
    ) -> Unseen:
        ctx.group, ctx.name, ctx.kept = look.group, name, look.kept
        return Unseen.of(look, name, example, shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        creates = torch.is_grad_enabled()
        with torch.enable_grad():
            value = ctx.group.computed(ctx.kept)[ctx.name]
        wanted = [t for t in ctx.kept.values() if t.requires_grad]
        found = iter(torch.autograd.grad(value, wanted, grad, create_graph=creates, allow_unused=True))
        gradients = (next(found) if t.requires_grad else None for t in ctx.kept.values())
        return None, None, None, None, *gradients


class Looks:
    """The stage of one graph, ready to be computed for each of its calls.

    Args:
        stage: its results are those that wait. owner: the module whose constants it names.
    """

    def __init__(self, stage: ProgramGraph, owner: nn.Module) -> None:
        results: Any = stage.graph.output_node().args[0]
        self.places = tuple(o.place for o in stage.outputs if o.place is not None)
        self._nodes: tuple[fx.Node, ...] = tuple(results)
        orders = {node: output.order for node, output in zip(results, stage.outputs, strict=True)}
        together: dict[int | None, dict[str, fx.Node]] = {}
        for node, output in zip(results, stage.outputs, strict=True):
            together.setdefault(output.look, {})[node.name] = node
        self._groups = [_Group(stage, values, orders, owner) for values in together.values()]
        self._shapes: dict[tuple[int, ...], dict[fx.Node, tuple[int, ...]]] = {}

    def __call__(self, kept: Mapping[str, Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
        """The results that wait of a call that kept these values and had these sizes. Where the call is
        recorded, to be repeated with other values, they are computed now."""
        made: dict[str, Tensor] = {}
        if _is_recorded(kept):
            for group in self._groups:
                made |= group.computed({name: kept[name] for name in group.inputs})
            return [made[node.name] for node in self._nodes]
        shapes = self._shapes.setdefault(tuple(sizes.values()), {})
        if not shapes:
            shapes |= {node: _shape(node, dict(sizes)) for node in self._nodes}
        if len(self._shapes) > _SHAPES:
            self._shapes = {}
        for group in self._groups:
            look = _Look(group, {name: kept[name] for name in group.inputs})
            flows = group.flows(look.kept) if torch.is_grad_enabled() else ()
            for name, node in group.values.items():
                about = look, name, node.meta["val"], shapes[node]
                made[name] = (
                    _Waiting.apply(*about, *look.kept.values()) if name in flows else Unseen.of(*about)  # type: ignore[no-untyped-call]
                )
        return [made[node.name] for node in self._nodes]


def _is_recorded(kept: Mapping[str, Tensor]) -> bool:
    """Whether the operations of this call are recorded: by a CUDA graph, or by a tracer that follows them."""
    on_cuda = any(tensor.is_cuda for tensor in kept.values())
    in_cuda_graph = on_cuda and torch.cuda.is_current_stream_capturing()
    return in_cuda_graph or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


_SHAPES = 256
"""Sizes of calls for which the shapes of attributes are kept."""


def _shape(node: fx.Node, sizes: dict[str, int]) -> tuple[int, ...]:
    extents = node.meta["val"].shape
    return tuple(s if isinstance(s, int) else int(size_value(s.node.expr, sizes)) for s in extents)


class _Group:
    """Results that are computed together, and the part of the stage that does it."""

    def __init__(
        self, stage: ProgramGraph, values: Mapping[str, fx.Node], orders: Mapping[fx.Node, tuple[int, ...]],
        owner: nn.Module,
    ) -> None:  # fmt: skip
        self.values, self.owner = values, owner
        self.part = part_of(stage, values)
        self.inputs = [i.name for i in self.part.inputs if i.kind == Rate.LOOK.value]
        self._orders = [orders[node] for node in values.values()]
        self._machine: Machine | None = None
        self._flows: dict[tuple[bool, ...], frozenset[str]] = {}

    def computed(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._machine is None:
            self._machine = Machine(self.part, self.owner)
        results = map(laid_out, self._machine((), kept), self._orders)
        return dict(zip(self.values, results, strict=True))

    def flows(self, kept: Mapping[str, Tensor]) -> frozenset[str]:
        """The values through which gradients flow to what was kept, found on tensors without data."""
        pattern = tuple(tensor.requires_grad for tensor in kept.values())
        if any(pattern) and pattern not in self._flows:
            with _undisturbed(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
                fakes = {n: mode.from_tensor(t.detach()) for n, t in kept.items()}
                for fake, needs in zip(fakes.values(), pattern, strict=True):
                    fake.requires_grad_(needs)
                found = self.computed(fakes)
            self._flows[pattern] = frozenset(name for name, value in found.items() if value.requires_grad)
        return self._flows.get(pattern, frozenset())


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Compute as if nothing were going on around: the modes and transformations in which a result is looked
    at are not those of the call that it is a result of."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        temporarily_clear_interpreter_stack(),
        autograd_inside(),
    ):
        yield


def _hooks() -> Any:
    """What is called with tensors that are saved for gradients, as where parts of a model are recomputed."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Look:
    """One call's values of a group, once they are needed.

    Attributes:
        tensors: those that wait, by the names of their values.
    """

    def __init__(self, group: _Group, kept: Mapping[str, Tensor]) -> None:
        self.group, self.kept = group, kept
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.hooks = _hooks()
        self.tensors: dict[str, weakref.ref[Unseen]] = {}
        self._values: dict[str, Tensor] | None = None

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def show(self) -> None:
        """Let the tensors become the computed ones; where code in C holds one of them, none does."""
        if self._values is not None:
            return
        found = self._computed(self.grad)
        with _ONE_AT_A_TIME:
            waiting = {name: tensor for name, ref in self.tensors.items() if (tensor := ref()) is not None}
            if self._values is not None or any(type(t) is not Unseen for t in waiting.values()):
                return  # another thread was faster
            if any(_uses(tensor) > 1 for tensor in waiting.values()):
                return
            for name, tensor in waiting.items():
                _become(tensor, found[name])

    def values(self) -> dict[str, Tensor]:
        """The values below autograd, of tensors that wait for good."""
        if self._values is None:
            self._values = self._computed(False)
        return self._values

    def _computed(self, grad: bool) -> dict[str, Tensor]:
        ours = saved_tensors_hooks(_same, _same) if _hooks() != self.hooks else contextlib.nullcontext()
        with (
            _undisturbed(),
            ours,
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(grad),  # made last: it sets the mode when it is made
        ):
            return self.group.computed(self.kept)


def _uses(tensor: Tensor) -> int:
    """How many references to the tensor there are in C, that of its Python object included."""
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor._use_count())  # type: ignore[attr-defined]


def _become(unseen: Unseen, computed: Tensor) -> None:
    """Let the object be the computed tensor."""
    del unseen.look, unseen.value_name, unseen.serial_number
    if _uses(computed) > 1:  # its gradient needs it
        computed = torch.ops.aten.alias.default(computed)
    torch._C._swap_tensor_impl(unseen, computed)  # type: ignore[attr-defined]
    unseen.__class__ = Tensor  # type: ignore[assignment]
