"""Flattens the arguments and results of a model into tensors and other leaves, and rebuilds them.

Torch's pytrees support tuples, lists, dicts and classes that libraries registered. Here dataclasses and plain
objects that hold tensors (a cache, say) are flattened as well, into their class and attributes, without
registering anything globally. Anything that holds no tensor is a leaf.
"""

import dataclasses
import functools
import operator
import re
import types
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attngraph.capture.pairs import PairRule

TreeSpec = pytree.TreeSpec
Target = Callable[..., Any]
"""What is captured."""
Args = tuple[Any, ...]
Named = dict[str, Any]
"""The arguments of a call, by position and by name."""


class _Object:
    """A flattened object: its class, the names of its attributes, and their values."""

    def __init__(self, kind: type, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
        self.kind, self.names, self.values = kind, names, values


pytree.register_pytree_node(
    _Object,
    lambda o: (list(o.values), (o.kind, o.names)),
    lambda values, about: _Object(about[0], about[1], tuple(values)),
    serialized_type_name="attngraph.capture.structure._Object",
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where an argument has an entry for each token in another place than `[B, T, ...]`. `axes` has a letter
    for each dimension: B (rows), T (tokens), 1 (of size 1), . (another). A mask `[B, 1, 1, T]` is "B11T".

    Without B its entries are those of every row: the model is then given one dimension more (or one of size 1
    less) than the caller gives, and has to compute the same with it.

    Where it has an entry for each pair of tokens, Q and T are their dimensions, and the dtype and the rule of
    the entries stand behind (`pairs.py`); what is `[B, T]` then says how many there are."""

    axes: str

    @classmethod
    def of_pairs(cls, rule: PairRule) -> "Layout":
        return cls(":".join(rule))

    @functools.cached_property
    def pairs(self) -> PairRule | None:
        """The rule of entries for pairs of tokens."""
        return PairRule(*self.axes.split(":", 3)) if ":" in self.axes else None

    @property
    def is_shared(self) -> bool:
        return self.pairs is None and "B" not in self.axes

    def fits(self, value: Tensor) -> bool:
        """Whether a value may be in this layout."""
        ones = (n == 1 for n, axis in zip(value.shape, self.axes, strict=False) if axis == "1")
        return value.ndim == len(self.axes) and all(ones)

    def taken(self, value: Tensor, rows: int) -> Tensor:
        """What a caller gave, as `[B, T, ...]`."""
        axes = self.axes.replace("1", "")
        value = value.squeeze([n for n, axis in enumerate(self.axes) if axis == "1"])
        if self.is_shared:
            axes, value = f"B{axes}", value.expand(rows, *value.shape)
        return value.movedim((axes.index("B"), axes.index("T")), (0, 1))

    def given(self, value: Tensor) -> Tensor:
        """What is `[B, T, ...]`, as the model takes it."""
        if self.pairs is not None:
            return self.pairs.given(value.shape[0], value.shape[1], value.device)
        axes = f"B{self.axes.removeprefix('1')}" if self.is_shared else self.axes
        order = axes.replace("1", "")
        if not order.startswith("BT"):
            value = value.movedim((0, 1), (order.index("B"), order.index("T")))
        for place in (n for n, axis in enumerate(axes) if axis == "1"):
            value = value.unsqueeze(place)
        return value


@dataclasses.dataclass(frozen=True)
class Laid:
    """An argument in another layout. Flattened it is the tensor `[B, T, ...]`; unflattened what the model
    takes."""

    tensor: Tensor
    layout: Layout


pytree.register_pytree_node(
    Laid,
    lambda laid: ([laid.tensor], laid.layout.axes),
    lambda leaves, axes: next(
        Layout(axes).given(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ),
    serialized_type_name="attngraph.capture.structure.Laid",
)


_PART = re.compile(r"([^.\[]+)(?:\.(\d+)|\[(\d+)\])")
"""The name of a part: `name.0` of a tuple, `name[0]` of a list."""


def taken_apart(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with tuples and lists of tensors as arguments of their own, called `name.0` or `name[0]`."""
    found = dict[str, Any]()
    for name, value in inputs.items():
        if type(value) in (tuple, list) and value and all(isinstance(v, Tensor) for v in value):
            text = "{}.{}" if isinstance(value, tuple) else "{}[{}]"
            found |= {text.format(name, n): part for n, part in enumerate(value)}
        else:
            found[name] = value
    return found


def whole_name(name: str) -> str:
    """The name of the argument that one belongs to which was taken apart."""
    part = _PART.fullmatch(name)
    return name if part is None else part[1]


def put_together(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that were `taken_apart`."""
    found = dict[str, Any]()
    for name, value in inputs.items():
        part = _PART.fullmatch(name)
        if part is None:
            found[name] = value
        elif part[2] is not None:
            found[part[1]] = (*found.get(part[1], ()), value)
        else:
            found[part[1]] = [*found.get(part[1], ()), value]
    return found


def flatten(tree: Any, whole: Container[int] = ()) -> tuple[list[Any], TreeSpec]:
    """The leaves and the structure of a tree; objects that hold tensors are flattened too. `whole` are leaves
    by their identity."""
    leaves, spec = pytree.tree_flatten(tree, is_leaf=(lambda x: id(x) in whole) if whole else None)
    if whole or any(map(_holds_tensors, leaves)):
        leaves, spec = pytree.tree_flatten(_opened(tree, frozenset(), whole), lambda x: id(x) in whole)
    return leaves, spec


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """The tree with these leaves; flattened objects are rebuilt as objects of their class."""
    tree = pytree.tree_unflatten(leaves, spec)
    if "_Object" not in str(spec):
        return tree
    return pytree.tree_map(_close, tree, is_leaf=lambda x: isinstance(x, _Object))


def classes_in(spec: TreeSpec) -> Iterator[type]:
    """The classes of the objects that were flattened."""
    if spec.type is _Object:
        yield spec.context[0]
    for child in spec.children():
        yield from classes_in(child)


def is_value(leaf: Any) -> bool:
    """Whether a leaf is an immutable plain value: a number, a string, None, a dtype."""
    plain = (
        int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device,
        torch.SymInt, torch.SymFloat, torch.SymBool,
    )  # fmt: skip
    return isinstance(leaf, plain)


def attributes_of(leaf: Any) -> dict[str, Any] | None:
    """The attributes of an object that has no other state; None for any other object."""
    if is_value(leaf) or isinstance(leaf, (Tensor, nn.Module, type, types.ModuleType)) or callable(leaf):
        return None
    if dataclasses.is_dataclass(leaf) and not hasattr(leaf, "__dict__"):
        return {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
    return getattr(leaf, "__dict__", None)


def parts_of(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """What a dictionary, a list, a tuple or an object holds, and the step to it: ("item", key), or
    ("attribute", name)."""
    if isinstance(value, (dict, list, tuple)):
        items: Any = value.items() if isinstance(value, dict) else enumerate(value)
        return ((("item", key), part) for key, part in items)
    return ((("attribute", name), part) for name, part in (attributes_of(value) or {}).items())


def _holds_tensors(leaf: Any) -> bool:
    """Whether a tensor is reachable through the object's attributes. Objects and containers may contain
    themselves."""
    seen: dict[int, Any] = {}
    waiting = list((attributes_of(leaf) or {}).values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            return True
        if id(value) not in seen:
            seen[id(value)] = value
            # Else what a container of a pytree holds, which nothing else does.
            inside = functools.partial(operator.is_not, value)
            waiting += (attributes_of(value) or {}).values() or pytree.tree_leaves(value, is_leaf=inside)
    return False


def _opened(tree: Any, above: frozenset[int], whole: Container[int]) -> Any:
    """The tree with flattened objects in the places of those that hold tensors."""
    return pytree.tree_map(lambda leaf: _open(leaf, above, whole), tree, is_leaf=lambda x: id(x) in whole)


def _open(leaf: Any, above: frozenset[int], whole: Container[int]) -> Any:
    """The flattened object, if it holds tensors; a reference to an object that contains it stays a leaf."""
    if id(leaf) in above or id(leaf) in whole or not _holds_tensors(leaf):
        return leaf
    above |= {id(leaf)}
    attributes = attributes_of(leaf) or {}
    values = tuple(_opened(value, above, whole) for value in attributes.values())
    return _Object(type(leaf), tuple(attributes), values)


def _close(node: Any) -> Any:
    if not isinstance(node, _Object):
        return node
    made: Any = object.__new__(node.kind)
    for name, value in zip(node.names, node.values, strict=True):
        closed = pytree.tree_map(_close, value, is_leaf=lambda x: isinstance(x, _Object))
        object.__setattr__(made, name, closed)
    return made
