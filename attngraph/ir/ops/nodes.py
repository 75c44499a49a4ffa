"""Typed views of attention nodes: the arguments of each attngraph op by name, and properties of them.

A view is a dataclass whose fields are the arguments of the op's schema, with the program parsed. `view` gives
the view of a graph node, `called` that of a call with actual values; `args` are the arguments to write back.
A new op or argument is added here only: no other code knows the position of an argument.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import torch
from torch import fx

from attngraph.ir.language import ScoreProgram, parse
from attngraph.ir.ops import attention, divided_attention, history, latent_attention, others
from attngraph.ir.ops.cost import LatentSizes

assert attention and divided_attention and history and latent_attention and others
# (imported for the ops that they register)
Value = Any
"""A graph node, or the value passed for it in a call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOp:
    """The arguments that all attention ops have."""

    target: ClassVar[Any]
    told_kernel: ClassVar[str] = "kernel"
    """The name of the argument that selects the kernel or the family of kernels."""
    key_names: ClassVar[tuple[str, ...]] = ("k", "v")
    projection_names: ClassVar[tuple[str, ...]] = ()
    q: Value
    reads: Sequence[Value]
    sizes: Sequence[Value]
    program: ScoreProgram

    @classmethod
    def of(cls, node: fx.Node) -> Self:
        """The view of a node that is known to be of this kind."""
        found = view(node)
        if not isinstance(found, cls):
            raise TypeError(f"{node} is {node.target}, no {cls.__name__}")
        return found

    @property
    def keys(self) -> tuple[Value, ...]:
        """The tensors that are attended to: keys and values, or the latents that both are made from. Over a
        cache, those of the new tokens."""
        return tuple(getattr(self, name) for name in self.key_names)

    @property
    def projections(self) -> tuple[Value, ...]:
        """The weights that project keys and values up."""
        return tuple(w for n in self.projection_names if (w := getattr(self, n)) is not None)

    def over_cache(self, keys: Sequence[Value], pages: Sequence[Value], **given: Value) -> "Cached":
        """The same attention over a cache: `keys` of new tokens, `pages` of earlier ones, and the `given`
        other arguments of the cached op."""
        raise NotImplementedError

    @property
    def named(self) -> dict[str, Value]:
        """The arguments by name, in the order of the schema."""
        return {a.name: getattr(self, a.name) for a in self.target._schema.arguments}

    @property
    def args(self) -> tuple[Value, ...]:
        """The arguments in the op's order, with the program as text."""
        given = {**self.named, "program": str(self.program)}
        return tuple(list(a) if isinstance(a, tuple) else a for a in given.values())

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    def with_kernel(self, name: str) -> Self:
        return self.replace(**{self.told_kernel: name})

    def references(self) -> tuple[Self, ...]:
        """The same attention computed by the reference kernel, in each order of multiplication it allows."""
        return (self.with_kernel("reference"),)


VIEWS: dict[Any, type[AttentionOp]] = {}
"""The view class of each op."""
NAMED: dict[str, type[AttentionOp]] = {}
"""The same by the op's name."""
_View = TypeVar("_View", bound=AttentionOp)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _views(target: Any) -> Callable[[type[_View]], type[_View]]:
    """Register a dataclass as the view of an op; its fields must follow the op's schema."""

    def register(cls: type[_View]) -> type[_View]:
        cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        schema = {a.name: a for a in target._schema.arguments}
        fields = {f.name: f.default for f in dataclasses.fields(cls)}
        assert fields.keys() == schema.keys(), f"{cls.__name__} names other arguments than {target._schema}"
        assert all(fields[n] == a.default_value for n, a in schema.items() if a.has_default_value())
        cls.target, VIEWS[target], NAMED[target._schema.name.partition("::")[2]] = target, cls, cls
        return cls

    return register


def view(node: fx.Node) -> AttentionOp | None:
    """The view of a node; None if it is not an attention."""
    return called(node.target, node.args, node.kwargs)


def called(target: Any, args: Sequence[Value], kwargs: Mapping[str, Value]) -> AttentionOp | None:
    """The view of a call; None if it does not call an attention op."""
    if target not in VIEWS:
        return None
    given = dict(zip((a.name for a in target._schema.arguments), args, strict=False), **kwargs)
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return VIEWS[target](**given | {"program": parse(given["program"])})


def whole(node: fx.Node) -> AttentionOp | None:
    """The view of an attention over whole sequences; None for any other node."""
    found = view(node)
    return None if isinstance(found, Cached) else found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cached(AttentionOp):
    """Attention over a cache: also which tokens belong to which row (`ir/ops/cached_attention.py`)."""

    page_names: ClassVar[tuple[str, ...]] = ("k_pages", "v_pages")
    """Of the arguments that are pages."""
    scale_names: ClassVar[tuple[str, ...]] = ("k_scales", "v_scales")
    """Of the arguments that are their scales."""
    table: Value
    starts: Value
    first: Value
    held: Value


@_views(torch.ops.attngraph.attention.default)
class Attention(AttentionOp):
    """`ir/ops/attention.py`"""

    k: Value
    v: Value
    kernel: str = ""

    def over_cache(self, keys: Sequence[Value], pages: Sequence[Value], **given: Value) -> Cached:
        (k, v), (k_pages, v_pages) = keys, pages
        same = {"q": self.q, "sizes": self.sizes, "program": self.program, "by": self.kernel}
        return CachedAttention(k=k, v=v, k_pages=k_pages, v_pages=v_pages, **same | given)


@_views(torch.ops.attngraph.latent_attention.default)
class LatentAttention(AttentionOp):
    """`ir/ops/latent_attention.py`"""

    told_kernel, key_names, projection_names = "family", ("latent",), ("key_up", "value_up")
    latent: Value
    key_up: Value | None
    value_up: Value | None
    values: Sequence[int]
    absorb: str = "auto"
    family: str = ""

    def traced_sizes(self) -> LatentSizes:
        """The sizes of a node's operands."""
        up_k, up_v = (None if w is None else w.meta["val"] for w in (self.key_up, self.value_up))
        return latent_attention.sizes_of(self.q.meta["val"], self.latent.meta["val"], up_k, up_v, self.values)

    def expanded(self) -> tuple[Value, Value]:
        """Keys and values of every head, of a call."""
        about: Any = self.key_up, self.value_up, self.values
        return latent_attention.LatentNode(self.q, self.latent, *about).expanded(self.latent)

    def references(self) -> tuple[Self, ...]:
        return tuple(self.replace(absorb=way, family="reference") for way in ("always", "never"))

    def over_cache(self, keys: Sequence[Value], pages: Sequence[Value], **given: Value) -> Cached:
        (latent,), (latent_pages,) = keys, pages
        return CachedLatentAttention(**vars(self) | {"latent": latent, "pages": latent_pages} | given)


@_views(torch.ops.attngraph.cached_attention.default)
class CachedAttention(Cached):
    """`ir/ops/cached_attention.py`"""

    told_kernel = "by"
    k: Value
    v: Value
    k_pages: Value
    v_pages: Value
    by: str = ""
    k_scales: Value | None = None
    v_scales: Value | None = None


@_views(torch.ops.attngraph.cached_latent_attention.default)
class CachedLatentAttention(Cached, LatentAttention):
    """`ir/ops/latent_attention.py`"""

    page_names, scale_names = ("pages",), ("scales",)
    pages: Value
    scales: Value | None = None


@_views(torch.ops.attngraph.divided_attention.default)
class DividedAttention(CachedAttention):
    """`ir/ops/divided_attention.py`"""

    team: int = 1
    ranks: int = 1
    group: str = ""


@_views(torch.ops.attngraph.divided_latent_attention.default)
class DividedLatentAttention(CachedLatentAttention):
    """`ir/ops/divided_attention.py`"""

    team: int = 1
    ranks: int = 1
    group: str = ""
