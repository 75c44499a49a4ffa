"""Are the keys and values of an attention made from one narrow vector per token?

Asked of a fused attention: what does one element of its keys (values) equal? Views, joins and slices are
looked through until stretches of the width are left, each of which is either

    direct     some tensor's elements that are the same for all heads (a shared rotary key), or
    projected  for each head another linear image of a tensor that is the same for all heads: the latent

Names of modules and ops play no part. How the latent is computed does not matter: it may follow a norm, say.
Anything between the projection and the attention that is not linear, or that depends on the token's position
(rotary embeddings), prevents the claim and is reported. What is returned is a claim; the pass that uses it
checks it in float64.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from attngraph.ir.graph import op_name, source_of
from attngraph.ir.language import E, Expr
from attngraph.ir.walk import reached
from attngraph.meaning.algebra import M, recombined, split_digits, sum_of_products
from attngraph.meaning.attention import layout
from attngraph.meaning.attention.claim import View
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Unliftable, UnliftableBecause


@dataclasses.dataclass(frozen=True)
class Stretch:
    """A contiguous range of the width of a key or a value.

    `source` is the tensor that all heads share, as `[B, 1, S, n]`; `of` is equal for equal sources. `up`,
    `[G, width, n]`, projects it for every head, and `bias`, `[1, G, 1, width]`, is added (None: not done).
    """

    start: int
    width: int
    source: View
    of: tuple[Any, ...]
    up: View | None = None
    bias: View | None = None

    @property
    def bases(self) -> list[fx.Node]:
        """The tensors that it is computed from."""
        return [view.base for view in (self.source, self.up, self.bias) if view is not None]


@dataclasses.dataclass(frozen=True)
class Latent:
    """A claim: keys are the concatenation of these stretches, values are one stretch. Both can be computed
    from `width` numbers per token."""

    keys: tuple[Stretch, ...]
    values: Stretch
    width: int

    @property
    def bases(self) -> list[fx.Node]:
        """The tensors that both are computed from."""
        return [base for stretch in (*self.keys, self.values) for base in stretch.bases]

    @property
    def projected(self) -> Stretch | None:
        """The stretch of the keys that is projected up, if there is one."""
        return next((s for s in self.keys if s.up is not None), None)


class NoLatent(UnliftableBecause):
    """Why keys or values are not claimed to be projections of a latent. `tell`: there is a latent, but
    something prevents the claim."""

    def __init__(self, reason: str, tell: bool = False) -> None:
        super().__init__(reason)
        self.tell = tell


def find_latent(meaning: Meaning, k: fx.Node, v: fx.Node) -> Latent:
    """What keys `[B, G, S, D]` and values `[B, G, S, V]` are made from; NoLatent where that is no latent."""
    found = _stretches(meaning, v, "values")
    keys = _stretches(meaning, k, "keys", {s.source.base for s in found})
    if len(found) != 1:
        raise NoLatent("its values are made from several tensors")
    if sum(s.up is not None for s in keys) > 1:
        raise NoLatent("its keys are projected up from more than one latent", tell=True)
    # From how many numbers per token each source is computed.
    widths: dict[Any, int] = {s.of: s.width if s.up is None else s.of[-1] for s in (*keys, *found)}
    return Latent(tuple(keys), found[0], sum(widths.values()))


def find_projection(meaning: Meaning, node: fx.Node, what: str) -> Stretch:
    """What a tensor `[B, H, S, n]` is projected from; NoLatent if it is no projection for each head."""
    found = _stretches(meaning, node, what)
    if len(found) != 1 or found[0].up is None:
        raise NoLatent(f"its {what} are no projection of one tensor")
    return found[0]


def _stretches(
    meaning: Meaning, node: fx.Node, what: str, wanted: Iterable[fx.Node] | None = None
) -> list[Stretch]:
    try:
        return _Side(meaning, node, what, wanted).stretches()
    except Unliftable as problem:
        raise NoLatent(str(problem), getattr(problem, "tell", False)) from problem


class _Side:
    """Keys or values. Tensors that are the same for all heads are followed up to those in `wanted`."""

    def __init__(
        self, meaning: Meaning, node: fx.Node, what: str, wanted: Iterable[fx.Node] | None = None
    ) -> None:
        self.meaning, self.node, self.what = meaning, node, what
        self.wanted = None if wanted is None else frozenset(wanted)
        shape = meaning.shape(node)
        self.batch, self.head, self.token = (E.var(n, s) for n, s in zip("bht", shape[:3], strict=True))
        self.heads = shape[1]
        if shape[3].op != "const":
            raise NoLatent(f"the width of its {what} is not a number")
        self.width = int(shape[3].value)

    def stretches(self) -> list[Stretch]:
        place = E.var("d", E.const(self.width))
        read = self.meaning.read(self.node, (self.batch, self.head, self.token, place))
        return self._cut(read, place, 0)

    def _cut(self, read: Expr, place: Expr, start: int) -> list[Stretch]:
        """The stretches that `read` covers as `place` varies: views of the deepest tensors possible."""
        problem: NoLatent | None = None
        if self.meaning.category(read.value) is Category.MOVEMENT and self._leads_on(read):
            try:
                found: list[Stretch] = []
                for piece, inner, offset in pieces(self.meaning.element(read.value, read.args), place):
                    found += self._cut(piece, inner, start + offset)
                return found
            except Unliftable as stop:
                problem = stop if isinstance(stop, NoLatent) else None
        if self.head not in read.free:
            view = self._view(read, ((self.batch,), (), (self.token,), (place,)))
            width = int(place.args[0].value)
            return [Stretch(start, width, view, (read.value, self._key(read, place), width))]
        if problem is not None:
            raise problem
        return [self._projected(read, place, start)]

    def _leads_on(self, read: Expr) -> bool:
        """Whether to look through a view; always if its elements differ by head."""
        if self.head in read.free or self.wanted is None:
            return True

        def moved(node: fx.Node) -> Sequence[fx.Node]:
            return node.all_input_nodes if self.meaning.category(node) is Category.MOVEMENT else ()

        found = next((n for n in reached([read.value], moved) if n in self.wanted), None)
        return found is not None and found is not read.value

    def _projected(self, read: Expr, place: Expr, start: int) -> Stretch:
        """A contraction of a shared tensor and weights of each head."""
        node: fx.Node = read.value
        if self.meaning.category(node) is not Category.CONTRACTION:
            raise self._in_the_way(node)
        where = f"{op_name(node)} at {source_of(node)}"
        no_image = NoLatent(f"{where} is no projection of a tensor that all heads share")
        found, of_token = sum_of_products(self.meaning.element(node, read.args)), {self.batch, self.token}
        if found is None or len(found.summed) != 1:
            raise no_image
        (inner,), bias = found.summed, found.added
        source, weight = sorted(found.factors, key=lambda f: not f.free & of_token)
        if not source.free & of_token or weight.free & of_token or source.free & {self.head, place}:
            raise no_image
        if inner not in weight.free & source.free:
            raise no_image
        if bias is not None and (bias.op != "read" or bias.free & of_token):
            raise no_image
        if inner.args[0].op != "const":
            raise NoLatent(f"the width of the latent of its {self.what} is not a number")
        up = self._view(weight, ((self.head,), (place,), (inner,)))
        added = None if bias is None else self._view(bias, ((), (self.head,), (), (place,)))
        latent, view = self._deepest(source, inner)
        of = (latent.value, self._key(latent, inner), int(inner.args[0].value))
        up = dataclasses.replace(up, factor=found.factor)
        return Stretch(start, int(place.args[0].value), view, of, up, added)

    def _deepest(self, read: Expr, inner: Expr) -> tuple[Expr, View]:
        """The tensor that a latent is a view of: the same for keys and values if they share the latent."""
        roles = ((self.batch,), (), (self.token,), (inner,))
        found = read, self._view(read, roles)
        while self.meaning.category(read.value) is Category.MOVEMENT:
            try:
                below = self.meaning.element(read.value, read.args)
                if below.op != "read":
                    break
                found = below, self._view(below, roles)
            except Unliftable:
                break
            read = below
        return found

    def _view(self, read: Expr, roles: layout.Roles) -> View:
        digits = split_digits([v for role in roles for v in role], read.args) or {}
        whole = {v: recombined(found) for v, found in digits.items()}
        index = tuple(M.substitute(i, whole) for i in read.args)
        cut = tuple(tuple(d for v in role for d in digits.get(v, (v,))) for role in roles)
        try:
            return View(read.value, layout.solve(self.meaning.shape(read.value), index, cut))
        except layout.NoView as problem:
            raise NoLatent(f"what its {self.what} are made from is no view of a tensor") from problem

    def _key(self, read: Expr, place: Expr) -> tuple[Expr, ...]:
        """A key that is equal for equal elements, whatever the name of the variable along the width."""
        return tuple(M.substitute(i, {place: E.var("n", place.args[0])}) for i in read.args)

    def _in_the_way(self, node: fx.Node) -> NoLatent:
        """The reason to stop: what is done to keys after the projection."""
        where = f"{op_name(node)} at {source_of(node) or 'an unknown line'}"
        if not self.meaning.contracts(node):
            return NoLatent(f"its {self.what} differ by head and come from {where}")
        lifted = self.meaning.elementwise(self.meaning.read(node, self.meaning.places(node)[0]))
        turned = any(n.op in ("sin", "cos") for n in E.walk(lifted))
        by = ", by an angle that follows the token's place (rotary positions)" if turned else ""
        contractions = [n for n in E.reads(lifted) if self.meaning.category(n.value) is Category.CONTRACTION]
        if len(contractions) > 1 and not turned and "add" in str(node.target):
            by = " (a sum of several products, as of a weight and its adapter)"
        whole = self.width * float(self.heads.value) if self.heads.op == "const" else 0.0
        elements = (self.meaning.element(n.value, n.args) for n in contractions)
        widths = (n.args[0].args[0] for element in elements for n in E.walk(element) if n.op == "sum")
        near = any(n.op == "const" and n.value < whole for n in widths)  # of what is projected
        return NoLatent(f"its {self.what} are changed after they are projected up, by {where}{by}", near)


def pieces(element: Expr, place: Expr) -> list[tuple[Expr, Expr, int]]:
    """An element that is a different read in each stretch of `place`, as (read, its own variable for the
    stretch, where the stretch starts).

    Raises:
        Unliftable: the element has another form.
    """
    if element.op == "read":
        return [(element, place, 0)]
    cut = M.stretches(place, element) or []
    found = [(M.substitute(element, {place: M.add(start, own)}), own, start) for start, own in cut]
    if not cut or any(read.op != "read" or start.op != "const" for read, _, start in found):
        raise Unliftable("elements that are not read in stretches")
    return [(read, own, int(start.value)) for read, own, start in found]
