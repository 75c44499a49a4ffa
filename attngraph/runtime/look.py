"""Attributes that are computed when somebody looks at them: the stage `Rate.LOOK` of a graph.

Such an attribute is set to an `Unseen`, a tensor that knows its shape, dtype and device, and computes itself
at the first operation on it, from values that the call kept, under the call's grad mode. From then on it is
the computed tensor: writing to it, saving it and printing it are done with that one. Attributes that share
memory are computed together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from attngraph.capture.guards import size_value
from attngraph.ir.graph.program_graph import ProgramGraph, Rate, memory_of, part_of
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
_PROPERTIES = ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "itemsize", "_version")
_KNOWN_BEFORE = {getattr(Tensor, n) for n in _METHODS} | {getattr(Tensor, n).__get__ for n in _PROPERTIES}
"""What is asked of a tensor without its values."""


_NUMBERS = itertools.count()


class Unseen(Tensor):
    """A tensor that is computed when it is first used."""

    look: _Look
    value_name: str
    serial_number: tuple[str, int]
    """Tells it from all others in fingerprints (`capture/state.py`): a graph that reads it has its value as a
    constant and not itself, so another one may get its address."""

    @staticmethod
    def of(look: _Look, name: str, example: Tensor, shape: Sequence[int]) -> Unseen:
        """A tensor of this shape, like the example in the rest, whose values the look has by this name."""
        made: Unseen = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Unseen, shape, dtype=example.dtype, device=example.device
        )
        made.look, made.value_name = look, name
        made.serial_number = "unseen", next(_NUMBERS)
        return made

    def computed(self) -> Tensor:
        return self.look.values()[self.value_name]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Unseen)]
        if func in _KNOWN_BEFORE and not any(t.look.is_computed for t in found):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        unseen = {id(t.computed()): t for t in found}
        args, kwargs = tree_map_only(Unseen, Unseen.computed, (tuple(args), dict(kwargs or {})))
        result = func(*args, **kwargs)
        return unseen.get(id(result), result)  # what writes to a tensor returns it

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What asks nobody on its way here, such as an operation inside another subclass of Tensor.

        Raises:
            RuntimeError: gradients would have to flow through it; they would be lost.
        """
        found = [t.computed() for t in tree_leaves((args, kwargs)) if isinstance(t, Unseen)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in found):
            raise RuntimeError(
                f"{func}: gradients of an attribute that attngraph computes when it is looked at do not flow "
                "through this operation.\nWhat to do: give it a copy of the attribute, `.clone()`."
            )
        args, kwargs = tree_map_only(Unseen, Unseen.computed, (args, kwargs or {}))
        return func(*args, **kwargs)


class Looks:
    """The stage of one graph, ready to be computed for each of its calls.

    Args:
        stage: its results are attributes. owner: the module whose constants it names.
    """

    def __init__(self, stage: ProgramGraph, owner: nn.Module) -> None:
        results: Any = stage.graph.output_node().args[0]
        self.places = tuple(o.place for o in stage.outputs if o.place is not None)
        self._nodes: tuple[fx.Node, ...] = tuple(results)
        together: dict[fx.Node, dict[str, fx.Node]] = {}
        for node in results:
            together.setdefault(memory_of(node), {})[node.name] = node
        self._groups = [_Group(stage, values, owner) for values in together.values()]
        self._shapes: dict[tuple[int, ...], dict[fx.Node, tuple[int, ...]]] = {}

    def __call__(self, kept: Mapping[str, Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
        """The attributes of a call that kept these values and had these sizes."""
        shapes = self._shapes.setdefault(tuple(sizes.values()), {})
        if not shapes:
            shapes |= {node: _shape(node, dict(sizes)) for node in self._nodes}
        if len(self._shapes) > _SHAPES:
            self._shapes = {}
        made: dict[str, Tensor] = {}
        for group in self._groups:
            look = _Look(group, kept)
            for name, node in group.values.items():
                made[name] = Unseen.of(look, name, node.meta["val"], shapes[node])
        return [made[node.name] for node in self._nodes]


_SHAPES = 256
"""Sizes of calls for which the shapes of attributes are kept."""


def _shape(node: fx.Node, sizes: dict[str, int]) -> tuple[int, ...]:
    extents = node.meta["val"].shape
    return tuple(s if isinstance(s, int) else int(size_value(s.node.expr, sizes)) for s in extents)


class _Group:
    """Results that share memory, and the part of the stage that computes them."""

    def __init__(self, stage: ProgramGraph, values: Mapping[str, fx.Node], owner: nn.Module) -> None:
        self.values, self.owner = values, owner
        self.part = part_of(stage, values)
        self.inputs = [i.name for i in self.part.inputs if i.kind == Rate.LOOK.value]
        self._machine: Machine | None = None

    def computed(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._machine is None:
            self._machine = Machine(self.part, self.owner)
        return dict(zip(self.values, self._machine((), kept), strict=True))


class _Look:
    """One call's values of a group: what they are computed from until somebody looks, then themselves."""

    def __init__(self, group: _Group, kept: Mapping[str, Tensor]) -> None:
        self.group = group
        self.kept: dict[str, Tensor] | None = {name: kept[name] for name in group.inputs}
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.found: dict[str, Tensor] = {}

    @property
    def is_computed(self) -> bool:
        return self.kept is None

    def values(self) -> dict[str, Tensor]:
        kept = self.kept
        if kept is not None:
            with (
                _disable_current_modes(),
                torch.inference_mode(self.inference),
                torch.set_grad_enabled(self.grad),  # made last: it sets the mode when it is made
            ):
                self.found = self.group.computed(kept)
            self.kept = None
        return self.found
