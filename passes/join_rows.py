"""Forward substitution written row by row becomes one triangular system.

Matches a matrix A, zero on and above its diagonal, of which a loop rewrites one row after the other, so that
each becomes A's row plus A's row times the new rows before it (the inverse of I - A, without the I). Unrolled
it is a chain of hundreds of operations; it is

    Y = A + A Y,   that is   (I - A) Y = A.

That A is zero there follows from its elements. What the chain computes is shown by running both in float64.
Used by `canonicalize`, so that later passes see one operation. Refuses, silently, any other chain of writes:
it stays as it is.
"""

from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph, is_size
from attngraph.ir.language import expr as E
from attngraph.meaning import M, Meaning
from attngraph.meaning.check.comparison import compare, elementwise
from attngraph.meaning.check.region import bytes_in_float64, fingerprint, region, shape_at
from attngraph.meaning.check.sample import Sample
from attngraph.meaning.rule import tried
from attngraph.passes.build import Builder

aten = torch.ops.aten
WRITES = (aten.select_scatter.default, aten.slice_scatter.default)
ROWS = 4
"""Chains of fewer writes are left alone."""
EQUAL = elementwise(1e-10)


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
    *batch, height, _ = meaning.shape(matrix)
    row, more = E.var("row", height), E.var("more", height)
    at = (*(E.var(f"o{dim}", extent) for dim, extent in enumerate(batch)), row, M.add(row, more))
    most = budgets.FORMULA_WORDS
    found = tried(lambda: meaning.elementwise(meaning.element(matrix, at), most=most))
    return found is not None and E.is_const(found, 0)


def _is_substitution(graph: ProgramGraph, matrix: fx.Node, last: fx.Node, known: dict[Any, bool]) -> bool:
    """Whether the nodes solve the system, by a test in float64. `known`: what equal nodes do."""
    order = region([last], [matrix])
    begins = [n for n in order if not is_size(n) and not n.all_input_nodes and n is not matrix]
    if matrix not in order or begins or bytes_in_float64(order, graph.hints) > budgets.CHECK_BYTES:
        return False
    key = fingerprint(order, {matrix: ""})
    if key not in known:
        known[key] = all(_solves(graph, order, matrix, last, seed) for seed in range(2))
    return known[key]


def _solves(graph: ProgramGraph, order: list[fx.Node], matrix: fx.Node, last: fx.Node, seed: int) -> bool:
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
