"""Results that are computed when somebody looks at them: the stage `Rate.LOOK` of a graph.

Such a result is a tensor that waits (`look.py`). Results that need the same weights, or share memory, are
computed together, from values that the call kept.

Where gradients are recorded, a fused value that follows from results in the model is tied to them
(`ir/ops/others.py`): it is one operation on these results, and on what else it is computed from. As long as
nobody has looked at a result, nobody can have asked for its gradient, and the fused value has all gradients.
Then the operation computes them as the model does: a part to each result, whose own operation hands it on.
A result that others are tied to stays one operation when it is computed, whose gradients are found by
computing it once more.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from attngraph.capture.guards import size_value
from attngraph.ir.graph.program_graph import Input, ProgramGraph, Rate, computed_from, part_of
from attngraph.ir.ops.others import laid_out, tying
from attngraph.runtime.look import Look, Seen, Unseen, of_operation, same, undisturbed
from attngraph.runtime.machine import Machine

Values = Mapping[str, fx.Node]
Tensors = Mapping[str, Tensor]
Sizes = Mapping[str, int]
About = tuple[ProgramGraph, Mapping[str, tuple[int, ...]], nn.Module]
Gradients = Callable[[Tensor], tuple[Tensor | None, ...]]
_SHAPES = 256
"""Sizes of calls for which the shapes of results are kept."""


class Looks:
    """The stage of one graph, ready to be computed for each of its calls.

    Args:
        stage: its results are those that wait, and what is tied to them. owner: the module whose constants it
            names.
    """

    def __init__(self, stage: ProgramGraph, owner: nn.Module) -> None:
        pairs = list(zip(stage.results(), stage.outputs, strict=True))
        self.places = tuple(o.place for _, o in pairs if o.place is not None)
        self.nodes: tuple[fx.Node, ...] = tuple(node for node, o in pairs if o.place is not None)
        orders = {node.name: output.order for node, output in pairs}
        self.groups: list[_Group] = []
        self.ties: dict[int, tuple[_Group, _Part]] = {}
        for look in dict.fromkeys(o.look for _, o in pairs):
            shown = {n.name: n for n, o in pairs if o.look == look and o.place is not None}
            tied = {int(o.name): n for n, o in pairs if o.look == look and o.place is None}
            group = _Group((stage, orders, owner), shown, tied.values())
            self.groups.append(group)
            self.ties |= {number: (group, group.part({"tied": node})) for number, node in tied.items()}
        self._shapes_for = functools.lru_cache(_SHAPES)(self._shapes)

    def run(
        self, run: Callable[[], Sequence[Any]], names: Sequence[str], sizes: Sizes
    ) -> tuple[Sequence[Any], list[Tensor]]:
        """The results of a call of these sizes, and those that wait. `names`: of the results that are kept;
        "" for the others."""
        shapes = self._shapes_for(tuple(sizes.items()))
        made = {group: _OfCall(group, shapes) for group in self.groups}

        def tie(number: int, value: Tensor, kept: Sequence[Tensor]) -> Tensor:
            group, part = self.ties[number]
            return made[group].tied(part, value, dict(zip(part.kept, kept, strict=True)))

        with tying(tie):
            results = run()
        kept = {name: t for name, t in zip(names, results, strict=True) if name}
        found: dict[str, Tensor] = {}
        for group, of_call in made.items():
            found |= of_call.results({name: kept[name] for name in group.whole.kept})
        return results, [found[node.name] for node in self.nodes]

    def _shapes(self, sizes: tuple[tuple[str, int], ...]) -> dict[str, tuple[int, ...]]:
        shapes = {node.name: node.meta["val"].shape for node in self.nodes}
        known = dict(sizes)
        return {
            name: tuple(n if isinstance(n, int) else int(size_value(n.node.expr, known)) for n in shape)
            for name, shape in shapes.items()
        }


class _Part:
    """Values of the stage, computed from what a call kept and from `given` values: the nearest results that
    others are tied to, which `before` computes.

    Args:
        about: the stage, how results are laid out, and the module whose constants the stage names.
    """

    def __init__(self, about: About, values: Values, given: Values = MappingProxyType({})) -> None:
        stage, orders, self.owner = about
        self.values = values
        inputs = {node: Input(Rate.LOOK.value, name) for name, node in given.items()}
        self.graph = part_of(stage, values, inputs)
        names = [i.name for i in self.graph.inputs if i.kind == Rate.LOOK.value]
        self.given = [name for name in names if name in given]
        self._before = _Part(about, {name: given[name] for name in self.given}) if self.given else None
        kept = {name for name in names if name not in given}
        self.kept: list[str] = sorted(kept.union(self._before.kept if self._before else ()), key=int)
        self._orders = [orders.get(name, ()) for name in values]
        self._machine: Machine | None = None
        self._flows: dict[tuple[bool, ...], frozenset[str]] = {}

    def before(self, kept: Tensors) -> dict[str, Tensor]:
        """The values that it begins at."""
        return self._before(kept) if self._before else {}

    def __call__(self, tensors: Tensors) -> dict[str, Tensor]:
        if self._machine is None:
            self._machine = Machine(self.graph, self.owner)
        results = map(laid_out, self._machine((), tensors), self._orders)
        return dict(zip(self.values, results, strict=True))

    def flows(self, kept: Tensors) -> frozenset[str]:
        """The values through which gradients flow to what was kept, found on tensors without data."""
        given = {name: kept[name] for name in self.kept}
        pattern = tuple(tensor.requires_grad for tensor in given.values())
        if any(pattern) and pattern not in self._flows:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with undisturbed(), saved_tensors_hooks(same, same), mode, torch.enable_grad():
                fakes = {n: mode.from_tensor(t.detach()) for n, t in given.items()}
                for fake, needs in zip(fakes.values(), pattern, strict=True):
                    fake.requires_grad_(needs)
                found = self(fakes)
            self._flows[pattern] = frozenset(name for name, value in found.items() if value.requires_grad)
        return self._flows.get(pattern, frozenset())


class _Group:
    """Results that are computed together, and how. `handed_out`: those that others are tied to."""

    def __init__(self, about: About, values: Values, tied: Iterable[fx.Node]) -> None:
        self.values, self._about = values, about
        above = computed_from(tied)
        floating = {n: v for n, v in values.items() if v.meta["val"].is_floating_point()}
        self.handed_out = {name: node for name, node in floating.items() if node in above}
        self.first = _Part(about, self.handed_out)
        self.alone = {name: _Part(about, {name: node}) for name, node in self.handed_out.items()}
        self.steps = {name: self.part({name: node}) for name, node in self.handed_out.items()}
        self.rest = self.part({n: v for n, v in values.items() if n not in self.handed_out})
        self.whole = _Part(about, values)

    def part(self, values: Values) -> _Part:
        """Values as they follow from other results that others are tied to."""
        given = {name: node for name, node in self.handed_out.items() if name not in values}
        return _Part(self._about, values, given)


class _OfCall:
    """The results of a group in one call.

    Attributes:
        made: the results that others are tied to: those that wait, or computed ones if the call is recorded.
        edges: for each of them through which gradients flow, a tensor of zeros that follows from it.
        data: what it becomes when somebody looks: until then a tensor without memory, of its operation.
    """

    def __init__(self, group: _Group, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.group, self.shapes = group, shapes
        self.kept: dict[str, Tensor] = {}
        self.made: dict[str, Tensor] = {}
        self.edges: dict[str, Tensor] = {}
        self.data: dict[str, Tensor] = {}
        self.look = Look(_computing(group.first, self.kept, self.data))

    def tied(self, part: _Part, value: Tensor, kept: Tensors) -> Tensor:
        """What takes the place of a fused value."""
        if _is_recorded(kept):
            if not self.made.keys() >= {*part.given}:
                self.made = part.before(kept) | self.made
            return part({**kept, **self.made})["tied"]
        self.kept |= {name: tensor for name, tensor in kept.items() if name in self.group.first.kept}
        return self._step(part, "tied", kept, self.look.seen, value.clone, value)

    def results(self, kept: Tensors) -> dict[str, Tensor]:
        """All results of the group; computed now where the call is recorded, to be repeated."""
        group, part = self.group, self.group.rest
        if _is_recorded(kept):
            first = group.first(kept) | self.made
            return first | part({**kept, **first})
        if self.made:
            self.kept |= {name: kept[name] for name in group.first.kept}
            for name in group.handed_out:
                self._hand_out(name)
            look = Look(self._computing_rest(kept))
        else:  # nothing is tied to them
            part, look = group.whole, Look(lambda grad: group.whole(kept))
        flows = group.whole.flows(kept) if look.grad else ()
        for name, node in part.values.items():
            make = functools.partial(Unseen.of, look, name, node.meta["val"], self.shapes[name])
            self.made[name] = self._step(part, name, kept, look.seen, make) if name in flows else make()
        return self.made

    def _hand_out(self, name: str) -> None:
        """Make a result that others are tied to."""
        if name in self.made:
            return
        example, shape, seen = self.group.handed_out[name].meta["val"], self.shapes[name], self.look.seen
        make = functools.partial(Unseen.of, self.look, name, example, shape)
        if self.look.grad and self.group.alone[name].flows(self.kept):
            about = {"dtype": example.dtype, "device": example.device}
            empty = functools.partial(torch.empty_strided, shape, [0] * len(shape), **about)
            self.data[name] = self._step(self.group.steps[name], name, self.kept, seen, empty)
            self.edges[name] = _following(self.data[name], lambda: empty().zero_())
            self.made[name] = of_operation(_following(self.edges[name], make))
        else:
            self.made[name] = make()

    def _step(
        self, part: _Part, name: str, kept: Tensors, seen: Seen, make: Callable[[], Tensor],
        *value: Tensor,
    ) -> Tensor:  # fmt: skip
        """A value as one operation on results that were handed out and on what was kept; on the fused value
        too, as long as nobody has looked at these."""
        for given in part.given:
            self._hand_out(given)
        edges = {name: self.edges[name] for name in part.given if name in self.edges}
        if value and not edges:
            return value[0]
        own = {name: kept[name] for name in part.kept}
        step = _Step(part, name, own, edges, seen, bool(value))
        waiting = (self.made[name] for name in edges)
        return of_operation(
            _Operation.apply(step.gradients, make, *value, *waiting, *edges.values(), *own.values())
        )

    def _computing_rest(self, kept: Tensors) -> Callable[[bool], dict[str, Tensor]]:
        """Computes the results that nothing is tied to, from the others."""
        group, look, edges = self.group, self.look, self.edges
        made = {name: weakref.ref(self.made[name]) for name in group.handed_out}

        def compute(grad: bool) -> dict[str, Tensor]:
            if not grad:
                return group.whole(kept)
            look.show()
            with torch.no_grad():
                values = group.rest.before(kept)
            plain = {name: t for name, ref in made.items() if type(t := ref()) is Tensor}
            return group.rest({**kept, **_joined(values, edges), **plain})

        return compute


def _computing(part: _Part, kept: Tensors, data: Tensors) -> Callable[[bool], dict[str, Tensor]]:
    """Computes results that others are tied to, which stay the results of their operations."""

    def compute(grad: bool) -> dict[str, Tensor]:
        with torch.no_grad():
            found = part(kept)
        if grad:
            for name, tensor in data.items():
                tensor.data = found[name]
            found |= data
        return found

    return compute


def _joined(values: Tensors, edges: Tensors) -> dict[str, Tensor]:
    """The values, following from the results that they are the values of."""
    return {name: edges[name] + value if name in edges else value for name, value in values.items()}


@dataclasses.dataclass
class _Step:
    """One value of a part in one call. `edges`: of the results that it follows from; `seen`: whether
    somebody has looked at these. `is_fused`: that otherwise the fused value has its gradients."""

    part: _Part
    name: str
    kept: Tensors
    edges: Tensors
    seen: Seen
    is_fused: bool

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Those of the fused value, of the results that wait, of the edges, and of what was kept."""
        fused: tuple[Tensor | None, ...] = (None,) if self.is_fused else ()
        if self.is_fused and not self.seen.is_seen:
            return (grad, *(None for _ in (*self.edges, *self.edges, *self.kept)))
        again = torch.is_grad_enabled()
        with torch.no_grad():
            values = self.part.before(self.kept)
        with torch.enable_grad():
            # New tensors, none of which follows from another one.
            given = _joined(values, self.edges)
            kept = {name: tensor.view_as(tensor) for name, tensor in self.kept.items()}
            found = self.part({**kept, **given})[self.name]
        inputs = [*(given[name] for name in self.edges), *kept.values()]
        wanted = [t for t in inputs if t.requires_grad]
        each = iter(torch.autograd.grad(found, wanted, grad, create_graph=again, allow_unused=True))
        gradients = [next(each) if t.requires_grad else None for t in inputs]
        of_results, of_kept = gradients[: len(self.edges)], gradients[len(self.edges) :]
        none = [None] * len(self.edges)
        both = (*none, *of_results) if self.seen.is_plain else (*of_results, *none)
        return (*fused, *both, *of_kept)


class _Operation(torch.autograd.Function):
    """A value as one operation on tensors, whose gradients it is told how to find."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, make: Callable[[], Tensor], *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.gradients, ctx.inputs = gradients, len(tensors)
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        return None, None, *([None] * ctx.inputs if grad is None else ctx.gradients(grad))


def _following(tensor: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Another tensor that follows from one as if it were the same."""
    return _Operation.apply(lambda grad: (grad,), make, tensor)  # type: ignore[no-any-return]


def _is_recorded(kept: Tensors) -> bool:
    """Whether the operations of this call are recorded: by a CUDA graph, or by a tracer that follows them."""
    on_cuda = any(tensor.is_cuda for tensor in kept.values())
    in_cuda_graph = on_cuda and torch.cuda.is_current_stream_capturing()
    return in_cuda_graph or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
