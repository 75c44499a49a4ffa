"""What is computed from all earlier tokens, written as a program that a step runs for each row by itself.

The model's own operations are written, twice at most: for the row's new tokens alone where an element at
token t reads others at t (`own`), and for all of its tokens where it reads them anywhere (`of_all`). Queries
are of new tokens, keys of all. What follows from places alone is written as its formula, at the positions of
the new tokens. An operation that is neither (a shift, a `tril` of scores) is run for all tokens, and the new
ones are picked from its result.

A stream's program (`meaning/tokens/streams.py`) runs its operations on the blocks that become full and on
those before that they need; what follows from places is computed from the row's beginning on, and picked.
Used by `look_back`.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from attngraph.ir.graph import argument, is_size
from attngraph.ir.language import E, Expr, Weight
from attngraph.ir.language.step_program import written
from attngraph.ir.ops import nodes
from attngraph.ir.ops.chosen_keys import hiding
from attngraph.meaning import M, Unliftable, is_part, recombined, size_expression
from attngraph.meaning.attention.program import rewritten
from attngraph.meaning.masks.fold import keeps_zero
from attngraph.meaning.tokens.facts import Axes, Fact, Kind, outside_reads
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder, NoSize
from attngraph.passes.insert_kv_cache.write_formula import ByIndex, NotWritten

_SIGNS = {"add": " + ", "mul": " * ", "floordiv": " // ", "mod": " % "}


def _numbered(letter: str, values: list[fx.Node], node: fx.Node) -> str:
    if node not in values:
        values.append(node)
    return f"{letter}{values.index(node)}"


class _NotOwn(Exception):
    """An operation that cannot be run for new tokens alone."""


class Writer:
    """Writes operations of a region as lines of a program.

    Args:
        operands: values of tokens that the region begins with.

    Attributes:
        whole: those of them that are read for all tokens, `h0, h1, ...`. shared: `s0, s1, ...`.
    """

    def __init__(self, tokens: Tokens, region: Sequence[fx.Node], operands: Sequence[fx.Node]) -> None:
        self.tokens, self.space, self.meaning = tokens, tokens.space, tokens.meaning
        self.region, self.operands = set(region), set(operands)
        self.whole: list[fx.Node] = []
        self.shared: list[fx.Node] = []
        self.lines: list[str] = []
        self._made: dict[Any, str] = {}

    def line(self, text: str) -> str:
        self.lines.append(f"    v{len(self.lines)} = {text}")
        return f"v{len(self.lines) - 1}"

    def program(self, result: str) -> str:
        return "\n".join(["row:", *self.lines, f"    return {result}"])

    def of_all(self, node: fx.Node) -> str:
        """A value for all tokens of the row."""
        if node in self.operands:
            return _numbered("h", self.whole, node)
        if node not in self.region:
            return self.of_shared(node)
        if node not in self._made:
            self._made[node] = self._computed(node, self.of_all, lambda n, _: self.size(n))
        return self._made[node]

    def of_shared(self, node: fx.Node) -> str:
        fact = self.tokens.facts.get(node)
        if fact is None or not fact.is_shared:
            raise NotWritten(f"%{node.name}")
        return _numbered("s", self.shared, node)

    def size(self, node: fx.Node, word: str = "tokens") -> str:
        return self.number(self.meaning.renamed(size_expression(node.meta["val"])), word)

    def number(self, size: Expr, word: str) -> str:
        """A size as a formula of how many tokens there are."""
        if size.op == "const":
            return str(size.value)
        if size is self.space.tokens:
            return word
        if size is self.space.rows:
            return "1"
        parts = [self.number(part, word) for part in size.args]
        if size.op in _SIGNS:
            return f"({_SIGNS[size.op].join(parts)})"
        if size.op in ("min", "max"):
            return f"{size.op}({', '.join(parts)})"
        raise NotWritten(f"the size {size!r}")

    def _computed(
        self, node: fx.Node, operand: Callable[[fx.Node], str], size: Callable[[fx.Node, int | None], str],
        rank: int = -1,
    ) -> str:  # fmt: skip
        """A call as a line. `size`: the text of a size, beside it the dimension of the result that it is the
        extent of, where a list has one for each of `rank` dimensions."""
        if is_part(node):
            return self.line(f"{operand(node.args[0])}[{node.args[1]}]")  # type: ignore[arg-type]
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            raise NotWritten(f"%{node.name}")
        names: dict[fx.Node, str] = {}

        def text(value: Any, dim: int | None = None) -> str:
            if isinstance(value, (list, tuple)) and value:
                of_dims = len(value) == rank
                return f"[{', '.join(text(v, d if of_dims else None) for d, v in enumerate(value))}]"
            if isinstance(value, fx.Node):
                names[value] = size(value, dim) if is_size(value) else operand(value)
            try:
                return written(value, names)
            except ValueError as problem:
                raise NotWritten(str(problem)) from problem

        named = dict(node.kwargs)
        if "dtype" in (a.name for a in node.target._schema.arguments[len(node.args) :]):
            value = node.meta["val"]
            named["dtype"] = named.get("dtype") or getattr(value, "dtype", None)
        args = [*map(text, node.args), *(f"{name}={text(value)}" for name, value in named.items())]
        return self.line(f"{node.target}({', '.join(args)})")


class OwnWriter(Writer):
    """Writes a value for the row's new tokens: of `new` it has those alone, `t0, t1, ...`, and of `read` what
    stands at some places, `k0, k1, ...`."""

    def __init__(
        self, tokens: Tokens, region: Sequence[fx.Node], operands: Sequence[fx.Node],
        streams: Collection[fx.Node], builder: Builder, positions: fx.Node,
    ) -> None:  # fmt: skip
        super().__init__(tokens, region, operands)
        self.streams, self.builder, self.positions = streams, builder, positions
        self.new: list[fx.Node] = []
        self.read: list[fx.Node] = []

    def own(self, node: fx.Node, axes: Axes) -> str:
        """A value whose dimension with these axes holds tokens, for the new ones."""
        if self.space.place(axes, self.space.token) is None:
            return self.of_all(node)
        if node in self.operands and axes == self.tokens[node].axes and node not in self.streams:
            return _numbered("t", self.new, node)
        key = node, axes
        if key not in self._made:
            try:
                with self._attempt():
                    self._made[key] = self._of_own(node, axes)
            except _NotOwn:
                self._made[key] = self._picked(self.of_all(node), axes)
        return self._made[key]

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Where the body raises, nothing that it wrote stays."""
        every: list[list[Any]] = [self.lines, self.whole, self.new, self.shared, self.read]
        before, made = [*map(len, every)], dict(self._made)
        try:
            yield
        except BaseException:
            self._made = made
            for values, count in zip(every, before, strict=True):
                del values[count:]
            raise

    def _picked(self, name: str, axes: Axes) -> str:
        place = self.space.place(axes, self.space.token)
        if place is None or axes[place] != (self.space.token,):
            raise NotWritten("tokens that share a dimension")
        return self.line(f"aten.index_select.default({name}, {place}, p0)")

    def _of_own(self, node: fx.Node, axes: Axes) -> str:
        if self.space.is_of_one_length or node not in self.region:
            raise _NotOwn
        if self.tokens.facts.of_sizes(node):
            return self._formula(node, axes)
        roles = self._roles(node, axes)
        called: Any = node.args[0] if is_part(node) else node

        def operand(given: fx.Node) -> str:
            wanted = roles.get(given)
            return self.of_all(given) if wanted is None else self.own(given, wanted)

        def size(given: fx.Node, dim: int | None) -> str:
            of_tokens = dim is not None and self.space.token in axes[dim]
            return self.size(given, "new" if of_tokens else "tokens")

        if nodes.view(called) is not None:
            return self._attention(called, None if called is node else node.args[1], roles, operand)
        if called is node:
            return self._computed(node, operand, size, len(axes))
        key = called, axes
        if key not in self._made:
            self._made[key] = self._computed(called, operand, size, len(axes))
        return self.line(f"{self._made[key]}[{node.args[1]}]")

    def _attention(
        self, node: fx.Node, place: Any, roles: Mapping[fx.Node, Axes | None], operand: Callable[..., str]
    ) -> str:
        """One of the results of an attention of new queries, which stand behind all earlier ones; its one
        result, if it attends to latents."""
        view = nodes.view(node)
        if not isinstance(view, (nodes.Attention, nodes.LatentAttention)):
            raise _NotOwn
        own = [place for place, read in enumerate(view.reads) if roles.get(read) is not None]
        first, query = E.size(f"n{len(view.sizes)}"), E.var("q")

        def later(part: Expr, args: tuple[Expr, ...]) -> Expr:
            if part is query:
                return M.add(query, first)
            return part if part.op == "read" and part.value in own else M.construct(part, args)

        def changed(formula: Expr) -> Expr:
            return rewritten(E.rebuild(formula, later), view.program) if query in formula.free else formula

        program = view.program.mapped(changed)
        sizes = [self.size(n) if isinstance(n, fx.Node) else str(n) for n in view.sizes]
        sizes += ["first"] * (program != view.program)
        lists = ", ".join(f"[{', '.join(each)}]" for each in (map(operand, view.reads), sizes))
        if isinstance(view, nodes.LatentAttention):
            ups = ("None" if up is None else operand(up) for up in (view.key_up, view.value_up))
            given = [*map(operand, (view.q, view.latent)), *ups, str([*view.values]), lists]
            return self.line(f"{node.target}({', '.join(given)}, {str(program)!r}, {view.absorb!r})")
        weights = (s.value for s in program.statements if isinstance(s, Weight))
        if place == 0 and any(hiding(program)) and all(map(keeps_zero, weights)):
            asking = operand(view.q)
            with contextlib.suppress(NotWritten, Unliftable), self._attempt():
                return self._at_chosen(view, asking, lists, repr(str(program)))
        call = ", ".join([*map(operand, (view.q, view.k, view.v)), lists, repr(str(program)), "''"])
        return self.line(f"{self.line(f'{node.target}({call})')}[{place}]")

    def _at_chosen(self, view: nodes.Attention, query: str, lists: str, program: str) -> str:
        """Attention to the keys alone that its masks leave. Raises `NotWritten` or `Unliftable`: keys and
        values are no views of operands."""
        count = self.number(self.meaning.shape(view.k)[2], "tokens")
        places = self.line(f"attngraph.visible_keys.default({query}, {count}, {lists}, {program})")
        k, v = (self._chosen(n, 2, places) for n in (view.k, view.v))
        return self.line(f"attngraph.attention_at.default({query}, {k}, {v}, {places}, {lists}, {program})")

    def _chosen(self, node: fx.Node, dim: int, places: str) -> str:
        """What stands at these places of a dimension of a value, of operands that have tokens there."""
        if (node, dim, places) not in self._made:
            self._made[node, dim, places] = self._at_places(node, dim, places)
        return self._made[node, dim, places]

    def _at_places(self, node: fx.Node, dim: int, places: str) -> str:
        if node in self.operands:
            if self.tokens.token_dim(node) != dim:
                raise NotWritten(f"%{node.name}")
            return self.line(f"at({_numbered('k', self.read, node)}, {places})")
        if node not in self.region:
            raise NotWritten(f"%{node.name}")
        own = self.meaning.places(node)[0]
        if str(node.target) == "aten.cat.default" and int(argument(node, "dim")) % len(own) == dim:
            begin, parts = "0", list[str]()
            for part in node.all_input_nodes:
                if is_size(part) or len(self.meaning.shape(part)) != len(own):
                    continue  # (an empty vector may stand beside tensors of any rank)
                end = f"({begin} + {self.number(self.meaning.shape(part)[dim], 'tokens')})"
                within = self.line(f"attngraph.within.default({places}, {begin}, {end})")
                parts.append(self._chosen(part, dim, within))
                begin = end
            return self.line(f"aten.cat.default([{', '.join(parts)}], {dim})")
        dims = self._entry_wise(node, own, own[dim])

        def operand(given: fx.Node) -> str:
            found = dims[given]
            return self.of_all(given) if found is None else self._chosen(given, found, places)

        def size(given: fx.Node, _: int | None) -> str:
            if self.meaning.renamed(size_expression(given.meta["val"])) is not self.meaning.shape(node)[dim]:
                return self.size(given)
            return self.line(f"aten.sym_size.int({places}, 0)")

        return self._computed(node, operand, size)

    def _entry_wise(self, node: fx.Node, at: tuple[Expr, ...], entry: Expr) -> dict[fx.Node, int | None]:
        """Of each operand the dimension whose entry an element is computed from, which is its own; None where
        there is none. Raises `NotWritten`: it is computed from other entries."""
        given = [n for n in node.all_input_nodes if not is_size(n)]
        element, found = self.meaning.element(node, at), dict[fx.Node, int | None]()
        for read in E.reads(element):
            moving = [d for d, index in enumerate(read.args) if entry in index.free]
            place = next((d for d in moving if len(moving) == 1 and read.args[d] is entry), None)
            if read.value not in given or (moving and place is None):
                raise NotWritten(f"%{node.name}")
            if found.setdefault(read.value, place) != place:
                raise NotWritten(f"%{node.name}")
        if entry in set(outside_reads(element)) or found.keys() != set(given):
            raise NotWritten(f"%{node.name}")
        return found

    def _roles(self, node: fx.Node, axes: Axes) -> dict[fx.Node, Axes | None]:
        """Of each operand: the axes of the new tokens that it is read for, or None: it is read for all."""
        at, shape = self.space.indices(axes, self.meaning.shape(node)), self.meaning.shape(node)
        called: Any = node.args[0] if is_part(node) else node
        given = [n for n in called.all_input_nodes if not is_size(n)]
        try:
            element = self.tokens._element(node, at)
        except Unliftable:
            raise _NotOwn from None
        reads = list(E.reads(element))
        if any(read.value not in given for read in reads):
            return self._aligned(called, given, axes)
        if nodes.view(called) is None and self.space.token in set(outside_reads(element)):
            raise _NotOwn
        found = dict[fx.Node, Axes | None]()
        for read in reads:
            wanted = self._axes_of(read)
            if found.setdefault(read.value, wanted) != wanted:
                raise _NotOwn
        for other in given:
            if other not in found:  # asked for its shape, or for its dtype
                found[other] = axes if self.meaning.shape(other) == shape else None
        extents = (n for other in given for n in self.meaning.shape(other))
        if not any(found.values()) and any(map(self.space.counts_tokens, extents)):
            raise _NotOwn  # of all tokens it makes something for all
        return found

    def _axes_of(self, read: Expr) -> Axes | None:
        found = list[Any]()
        for index in read.args:
            row = () if self.space.row is None else (self.space.row,)
            joined = ((self.space.token,), (*row, self.space.token), row)
            digits = next((d for d in joined if d and index is recombined(d)), ())
            if not digits and self.space.token in {*outside_reads(index), *index.free}:
                raise _NotOwn
            found.append(digits)
        has_tokens = any(self.space.token in digits for digits in found)
        return tuple(found) if has_tokens else None

    def _aligned(self, node: fx.Node, given: Sequence[fx.Node], axes: Axes) -> dict[fx.Node, Axes | None]:
        """The same of an operation whose formula reads through others: a scatter along another dimension."""
        place = self.space.place(axes, self.space.token)
        if not str(node.target).startswith(("aten.scatter", "aten.gather")):
            raise _NotOwn
        if int(argument(node, "dim")) % len(axes) == place:
            raise _NotOwn
        return {n: axes if len(self.meaning.shape(n)) == len(axes) else None for n in given}

    def _formula(self, node: fx.Node, axes: Axes) -> str:
        """A value that follows from places, at the positions of the new tokens."""
        at = self.space.indices(axes, self.meaning.shape(node))
        builder = Builder(self.tokens.graph, self.builder.anchor)
        try:
            read = self.meaning.read(node, at)
            lifted = self.meaning.lift(read, lambda r: self.tokens.facts.of_sizes(r.value))
            facts = [self.tokens.facts.get(r.value) for r in E.reads(lifted)]
            if any(f is None or not f.is_shared for f in facts):
                raise _NotOwn
            fact = Fact(Kind.POSITION, axes, formula=lifted)
            result = ByIndex(builder, self.tokens, node, fact, self.positions).write()
            names: dict[fx.Node, str] = {self.positions: "p0"}
            for made in builder.made:
                if is_size(made):
                    continue

                def operand(given: fx.Node) -> str:
                    return names[given] if given in names else self.of_shared(given)

                names[made] = self._computed(made, operand, lambda n, _: self.size(n))
            return names[result]
        except (NotWritten, NoSize, Unliftable, RuntimeError) as problem:
            raise _NotOwn from problem
        finally:
            builder.discard()


class BlockWriter(Writer):
    """Writes a stream for blocks of a row: `tokens` counts those of the blocks, `new` all until their end."""

    def __init__(
        self, tokens: Tokens, region: Sequence[fx.Node], operands: Sequence[fx.Node], size: int
    ) -> None:
        super().__init__(tokens, region, operands)
        self.of_blocks = M.floordiv(self.space.tokens, E.const(size))
        self.block = size

    def of_all(self, node: fx.Node) -> str:
        if node not in self.region or not self.tokens.facts.of_sizes(node):
            return super().of_all(node)
        key = node, "picked"
        if key not in self._made:
            name = self._from_the_beginning(node)
            for dim, extent in enumerate(self.meaning.shape(node)):
                if self.space.counts_tokens(extent):
                    of_tokens = extent in (self.space.tokens, M.mul(self.of_blocks, E.const(self.block)))
                    if not of_tokens and extent is not self.of_blocks:
                        raise NotWritten(f"%{node.name}")
                    name = self.line(f"aten.index_select.default({name}, {dim}, p{0 if of_tokens else 1})")
            self._made[key] = name
        return self._made[key]

    def _from_the_beginning(self, node: fx.Node) -> str:
        if node not in self.region:
            return self.of_shared(node)
        if node not in self._made:
            size: Callable[[fx.Node, int | None], str] = lambda n, _: self.size(n, "new")  # noqa: E731
            self._made[node] = self._computed(node, self._from_the_beginning, size)
        return self._made[node]
