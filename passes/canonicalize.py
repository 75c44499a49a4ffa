"""Canonicalize: remove operations that compute nothing.

Matches assertions about metadata, contiguity and aliasing markers, and, where no gradient flows (a mask
that is built under `no_grad`), `detach`. These are identities on values. Unused nodes are
removed as well. A `view`, which is only valid for some strides, becomes a `reshape`, which is valid for any,
so that later passes may change memory layouts. For the same reason a copy made only for contiguity becomes
`contiguous`, which copies only if needed. A copy of an intermediate value that is not returned (dropout in
eval, in torch older than 2.15) is removed, because nothing writes to either; what is returned stays a
tensor of its own. A `copy` into a tensor is replaced by the value that is copied. An einsum of more than two
operands becomes einsums of two, the pair with the smallest result first, because an attention may be part of
it.

Picking places that follow each other is a slice: `x[:, [-2]]`, `x[:, torch.arange(4, 8)]`, and `index_select`
where the list's formula says that its places are equally far apart. Passes that divide, join or repeat
movements know slices; a pick by a list is an operation of its own to them. Left alone: several lists at once,
lists of several dimensions, places that data decide or that go backwards, a result of another layout, and
dimensions of which the trace does not know that the places are in range (there a pick raises an error, a
slice none).

Forward substitution written row by row becomes one triangular system: a loop rewrites one row after the other
of a matrix A, zero on and above its diagonal, so that each becomes A's row plus A's row times the new rows
before it (the inverse of I - A, without the I). Unrolled it is a chain of hundreds of operations; it is

    Y = A + A Y,   that is   (I - A) Y = A.

That A is zero there follows from its elements. What the chain computes is shown by running both in float64.
Any other chain of writes stays as it is. Refuses nothing.
"""

import dataclasses
import itertools
import string
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import Level, ProgramGraph, is_size, memory_of, op_name
from attngraph.ir.language import E
from attngraph.meaning import M, Meaning, Unliftable, size_expression, tried
from attngraph.meaning.check.comparison import compare, elementwise
from attngraph.meaning.check.region import bytes_in_float64, fingerprint, region, shape_at
from attngraph.meaning.check.sample import Sample
from attngraph.meaning.rules.contraction import subscripts
from attngraph.meaning.rules.movement import is_mask
from attngraph.passes.build import Builder, Refused
from attngraph.passes.proposal import Proposal
from attngraph.pipeline import Outcome

aten = torch.ops.aten
_NEW = {
    aten.new_empty.default: aten.empty.memory_format, aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default, aten.new_full.default: aten.full.default,
}  # fmt: skip
_CONVERTED = (aten.type_as.default, aten.to.other)
_IDENTITY = ("aten.alias.", "aten.lift_fresh.", "aten.lift_fresh_copy.")
_STRIDED_VIEWS = ("aten.view.default", "aten._unsafe_view.default")
_ASSERTIONS = ("aten._assert_tensor_metadata.",)
_PICKS = (aten.index.Tensor, aten.index_select.default)
WRITES = (aten.select_scatter.default, aten.slice_scatter.default)
ROWS = 4
"""Chains of fewer writes are left alone."""
EQUAL = elementwise(1e-10)


@dataclasses.dataclass(frozen=True)
class Canonicalize:
    name: str = "canonicalize"
    requires: Level = Level.CAPTURED
    yields: Level = Level.CANONICAL

    def run(self, graph: ProgramGraph) -> Outcome:
        removed: Counter[str] = Counter()
        results = set(graph.graph.output_node().all_input_nodes)
        returned = set(map(memory_of, results))
        differentiable = _differentiable(graph)

        def remove(node: fx.Node, instead: Any = None) -> None:
            removed[op_name(node)] += 1
            if instead is not None:
                node.replace_all_uses_with(instead)
            graph.graph.erase_node(node)

        for node in list(graph.graph.nodes):
            target = str(node.target)
            if node.op != "call_function":
                continue
            if target.startswith(_ASSERTIONS):
                remove(node)
            elif node not in results and target.startswith(
                _IDENTITY if node in differentiable else (*_IDENTITY, "aten.detach.")
            ):
                remove(node, node.args[0])
            elif target == "aten.clone.default" and (
                (memory := memory_of(node.args[0])).op != "placeholder" and memory not in returned
            ):  # nobody but the graph writes to the memory or looks into it: it need not be copied
                if node.kwargs.get("memory_format") is torch.contiguous_format:
                    node.target, node.kwargs = aten.contiguous.default, {}
                elif node not in returned and _strides(node) == _strides(node.args[0]):
                    remove(node, node.args[0])
            elif target == "aten.einsum.default" and len(node.args[1]) > 2:
                remove(node, _two_at_a_time(graph, node))
            elif target == "aten.copy.default":
                remove(node, _copied(graph, node, node in returned))
            elif is_of_value(node):
                measure_input(graph, node)
            elif target in _STRIDED_VIEWS:
                node.target = aten.reshape.default
        notes = [f"removed {count} x {name}" for name, count in sorted(removed.items())]
        return Outcome([*notes, *_slice_lists(graph), *join_rows(graph)])


def is_of_value(node: fx.Node) -> bool:
    """Whether a node measures a value that is computed."""
    return node.target is aten.sym_size.int and node.args[0].op != "placeholder"  # type: ignore[union-attr]


def measure_input(graph: ProgramGraph, node: fx.Node) -> None:
    """Let a size be one of inputs, so that the tensor it was read from can be removed."""
    with Proposal(graph, node) as proposal:  # refused where it depends on data
        proposal.replace(node, proposal.size(size_expression(node.meta["val"])))


def _strides(node: Any) -> str:
    """As text, which can be compared without a condition on sizes."""
    return str(node.meta["val"].stride())


def _differentiable(graph: ProgramGraph) -> set[fx.Node]:
    """Nodes that may get a gradient: computed from floating-point inputs through floating-point values."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes if graph.gradients else ():
        value = node.meta.get("val")
        floating = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        from_some = node.op == "placeholder" or any(n in found for n in node.all_input_nodes)
        if from_some and (floating or isinstance(value, (tuple, list))):
            found.add(node)
    return found


def _copied(graph: ProgramGraph, node: fx.Node, returned: bool) -> fx.Node:
    """The value that a `copy` into a tensor copies, which has no derivative itself."""

    def copied(whole: Any, value: Any) -> Any:
        value = value.to(node.meta["val"].dtype)
        value = value if value.shape == node.meta["val"].shape else value.expand_as(whole)
        return value.clone() if returned else value

    return Builder(graph, node).trace(copied, *node.args[:2])  # type: ignore[no-any-return]


def _two_at_a_time(graph: ProgramGraph, node: fx.Node) -> fx.Node:
    """An einsum of many operands by einsums of two."""
    builder = Builder(graph, node)
    operands: list[fx.Node] = list(node.args[1])  # type: ignore[arg-type]
    terms, output = subscripts(str(node.args[0]), [n.meta["val"].ndim for n in operands])
    names = dict(zip(dict.fromkeys(n for t in terms for n in t), string.ascii_letters, strict=False))
    texts = ["".join(names[n] for n in term) for term in (*terms, output)]
    parts, wanted = list(zip(texts[:-1], operands, strict=True)), texts[-1]
    while len(parts) > 1:
        ways = itertools.combinations(range(len(parts)), 2)
        i, j = min(ways, key=lambda pair: len(_kept(parts, pair[0], pair[1], wanted)))
        kept = _kept(parts, i, j, wanted) if len(parts) > 2 else wanted
        (a, x), (b, y) = parts[i], parts[j]
        made = builder.call(aten.einsum.default, f"{a},{b}->{kept}", [x, y])
        parts = [part for place, part in enumerate(parts) if place not in (i, j)] + [(kept, made)]
    return parts[0][1]


def _kept(parts: list[tuple[str, fx.Node]], i: int, j: int, output: str) -> str:
    """The subscripts of a product of two operands that the other operands or the result still need."""
    rest = output + "".join(term for place, (term, _) in enumerate(parts) if place not in (i, j))
    return "".join(dict.fromkeys(c for c in parts[i][0] + parts[j][0] if c in rest))


def _slice_lists(graph: ProgramGraph) -> list[str]:
    """Replace every pick of places that follow each other; notes for the report."""
    found: Counter[str] = Counter()
    meaning: Meaning | None = None
    for node in [n for n in graph.graph.nodes if n.target in _PICKS]:
        meaning = meaning or Meaning.of(graph)
        cut = _cut(meaning, node)
        if cut is None:
            continue
        with Proposal(graph, node) as proposal:
            part = proposal.call(aten.slice.Tensor, node.args[0], *cut)
            made = proposal.call(aten.clone.default, part, memory_format=torch.contiguous_format)
            if made.meta["val"].stride() != node.meta["val"].stride():
                raise Refused("a result of another layout")
            proposal.replace(node, made)
        found[op_name(node)] += proposal.done
    slices = sorted((name, count) for name, count in found.items() if count)
    return [f"{count} x {name} of places that follow each other became slices" for name, count in slices]


def _cut(meaning: Meaning, node: fx.Node) -> tuple[int, int, int, int] | None:
    """The dimension, the first place, the end and the step of the slice that a pick is."""
    args: Any = node.args
    is_one = node.target is aten.index_select.default
    lists = [(args[1], args[2])] if is_one else [(d, p) for d, p in enumerate(args[1]) if p is not None]
    source, ((dim, pick), *others) = args[0], lists
    extent = source.meta["val"].shape[dim]
    if others or is_mask(pick) or pick.meta["val"].ndim != 1 or not isinstance(extent, int):
        return None
    try:
        (count,) = meaning.shape(pick)
        place = E.var("i", count)
        formula = meaning.index_expression(pick, (place if count is not E.ONE else E.ZERO,))
    except Unliftable:
        return None
    if formula is None or count.op != "const" or count.value == 0:
        return None
    first = M.substitute(formula, {place: E.ZERO})
    step, rest = M.coefficient(M.sub(formula, first))
    if first.op != "const" or (count.value > 1 and (rest is not place or step < 1)):
        return None
    step = int(step) if count.value > 1 else 1
    begin = int(first.value) + (extent if first.value < 0 else 0)
    end = begin + step * (int(count.value) - 1) + 1
    passes_zero = first.value < 0 <= int(first.value) + step * (int(count.value) - 1)
    return None if begin < 0 or end > extent or passes_zero else (dim, begin, end, step)


def forget_operands_of_dtype(graph: ProgramGraph) -> None:
    """Replace operands that are used for their dtype and device alone: `x.new_zeros(...)` and `y.type_as(x)`
    would keep all of x alive where ranks have parts of it, and seem to read all tokens of x where a decoder
    is derived."""
    for node in list(graph.graph.nodes):
        if node.target not in _NEW and node.target not in _CONVERTED:
            continue
        args: Any = node.args
        value, builder = node.meta["val"], Builder(graph, node)
        about = {"dtype": value.dtype, "device": value.device}
        if node.target in _NEW:
            given = {k: v for k, v in node.kwargs.items() if v is not None}
            made = builder.call(_NEW[node.target], *args[1:], **{**given, **about})
        elif args[0].meta["val"].dtype == value.dtype and args[0].meta["val"].device == value.device:
            made = args[0]
        else:
            made = builder.call(aten._to_copy.default, args[0], **about)
        node.replace_all_uses_with(made)
    graph.clean()


def join_rows(graph: ProgramGraph) -> list[str]:
    """Replace every such chain of a graph; notes for the report."""

    def solved(a: Any) -> Any:
        return aten.linalg_solve_triangular.default(-a, a, upper=False, unitriangular=True)

    notes: list[str] = []
    known: dict[Any, bool] = {}
    meaning: Meaning | None = None
    for node in list(graph.graph.nodes):
        chain = _chain(node)
        if len(chain) < ROWS:
            continue
        meaning = meaning or Meaning.of(graph)
        matrix: fx.Node = chain[-1].args[0]  # type: ignore[assignment]
        if _is_below_the_diagonal(meaning, matrix) and _is_substitution(graph, matrix, node, known):
            node.replace_all_uses_with(Builder(graph, node).trace(solved, matrix))
            notes.append(f"{len(chain)} writes of rows became one triangular system")
    if notes:
        graph.graph.eliminate_dead_code()
    return notes


def _chain(last: fx.Node) -> list[fx.Node]:
    """The writes that end here, the last first; none where one follows, or the matrix is not square."""
    value = last.meta.get("val")
    if last.target not in WRITES or not isinstance(value, Tensor) or value.ndim < 2:
        return []
    height, width = value.shape[-2:]
    if not isinstance(height, int) or height != width or value.dtype not in (torch.float32, torch.float64):
        return []
    if any(user.target in WRITES and user.args[0] is last for user in last.users):
        return []
    found: list[fx.Node] = []
    while last.target in WRITES and last.meta["val"].shape == value.shape:
        found.append(last)
        last = last.args[0]  # type: ignore[assignment]
    return found if ROWS <= len(found) <= height else []


def _is_below_the_diagonal(meaning: Meaning, matrix: fx.Node) -> bool:
    """Whether all elements on the diagonal and above it are zero."""
    (*batch, row, _), _ = meaning.places(matrix)
    at = (*batch, row, M.add(row, E.var("more", row.args[0])))
    most = budgets.FORMULA_WORDS
    found = tried(lambda: meaning.elementwise(meaning.element(matrix, at), most=most))
    return found is not None and E.is_const(found, 0)


def _is_substitution(graph: ProgramGraph, matrix: fx.Node, last: fx.Node, known: dict[Any, bool]) -> bool:
    """Whether the nodes solve the system, by a test in float64. `known`: what equal nodes do."""
    order = region([last], [matrix])
    begins = [n for n in order if not is_size(n) and not n.all_input_nodes and n is not matrix]
    if matrix not in order or begins or bytes_in_float64(order, graph.hints) > budgets.CHECK_BYTES:
        return False

    def solves(seed: int) -> bool:
        shape = shape_at(matrix.meta["val"], graph.hints)
        run = Sample(graph.known_values(), graph.hints, seed)
        drawn = torch.randn(shape, generator=run.generator, dtype=torch.float64)
        given = drawn.tril(-1) / shape[-1] ** 0.5
        try:
            (found,) = run.evaluate(order, {matrix: given}, last)
        except Exception:  # it cannot be run like this, so nothing is shown
            return False
        wanted = torch.linalg.solve_triangular(-given, given, upper=False, unitriangular=True)
        return compare(found, wanted, EQUAL).holds

    key = fingerprint(order, {matrix: ""})
    if key not in known:
        known[key] = all(map(solves, range(2)))
    return known[key]
