"""Graphs that were traced for one number of tokens: a loop over tokens, or sizes that torch cannot follow.

The number was chosen such that it is a size of nothing else. So wherever an operation is given it as a size,
it counts the tokens. (Where an operation computes with it, as in `distance < 22`, that is not known; another
number of tokens tells.) Once everything that mixes tokens is replaced, each such number becomes the number of
tokens that a step gets. That this is right for other numbers is shown by running the model itself on longer
sequences (`runtime/proof.py`). Used by `insert_kv_cache`.
"""

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from attngraph.errors import NoDecoderError
from attngraph.ir.graph import ProgramGraph, infer, infer_once, is_size, op_name, source_of
from attngraph.ir.language.expr import Expr
from attngraph.meaning.algebra import M, size_expression
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder

aten = torch.ops.aten
_RANGES = "aten.arange"


def computed_with(graph: ProgramGraph, number: int) -> frozenset[int]:
    """The multiples of a number that operations compute with, other than as sizes; none for 0."""
    found: set[int] = set()
    for node in graph.graph.nodes if number else ():
        schema = getattr(node.target, "_schema", None)
        if schema is None or str(node.target).startswith(_RANGES):
            continue
        for given, argument in zip(node.args, schema.arguments, strict=False):
            if isinstance(given, (int, float)) and "int" not in str(argument.type) and given % number == 0:
                found.add(abs(int(given)))
    return frozenset(found - {0})


def replace_number(node: fx.Node, number: int, value: Any, mode: Any) -> None:
    """Give an operation `value` wherever it has the number as a size (multiples of it alike), and infer its
    result anew. Raises `NoDecoderError`: it has one result for every few tokens."""

    def changed(given: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return type(given)(map(changed, given))
        if isinstance(given, bool) or not isinstance(given, int) or given == 0 or given % number:
            return given
        if given == number:
            return value
        if not isinstance(value, fx.Node):
            return value * (given // number)
        with node.graph.inserting_before(node):
            made: fx.Node = node.graph.call_function(operator.mul, (value, given // number))
        made.meta = {"val": value.meta["val"] * (given // number)}
        return made

    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        ranges = str(node.target).startswith(_RANGES)
        given = zip(node.args, schema.arguments, strict=False)
        node.args = tuple(changed(a) if ranges or "int" in str(of.type) else a for a, of in given)
    elif isinstance(node.meta.get("val"), (int, torch.SymInt)):  # a formula of sizes
        node.args = tuple(map(changed, node.args))
    if isinstance(node.meta.get("val"), (Tensor, torch.SymInt, int, tuple, list)):
        try:
            node.meta["val"] = infer_once(node.target, node.args, node.kwargs, mode)
        except GuardOnDataDependentSymNode as problem:
            if not isinstance(node.meta["val"], (tuple, list)):
                raise
            raise NoDecoderError(
                f"{op_name(node)} at {source_of(node)}: how many results it has follows from how many tokens "
                "there are."
            ) from problem


def repeated(
    tokens: Tokens, builder: Builder, node: fx.Node, done: dict[fx.Node, fx.Node], sizes: dict[Expr, Any],
    extents: Collection[Expr] = (),
) -> fx.Node:  # fmt: skip
    """One operation on other operands: those in `done`, to which sizes computed from `sizes` are added.
    `extents`: sizes that some tensor has, and so are not negative."""
    for size in (n for n in node.all_input_nodes if is_size(n) and n not in done):
        formula = size_expression(size.meta["val"])
        done[size] = builder.size(tokens.meaning.renamed(formula), sizes)
        if formula in extents and isinstance(done[size], fx.Node):
            # Torch does not see it in every formula of an unknown number.
            torch._check(done[size].meta["val"] >= 0)
    count = builder.size(tokens.space.tokens, sizes) if tokens.space.is_of_one_length else None
    made = builder.again(node, lambda n: done.get(n, n))
    if count is not None:
        replace_number(made, tokens.traced, count, tokens.graph.fake_mode())
    return made


def resized(tokens: Tokens, node: fx.Node, sizes: dict[Expr, Any], rows: Expr | None = None) -> None:
    """Give an operation, some of whose operands have been replaced, the sizes that these have, and infer its
    result anew. `rows`: how many sequences there are, where `sizes` do not tell."""
    space, graph = tokens.space, tokens.graph
    for size in [n for n in node.all_input_nodes if is_size(n)]:
        value = tokens.meaning.renamed(size_expression(size.meta["val"]))
        if space.counts(value):
            value = value if rows is None else M.substitute(value, {space.rows: rows})
            node.replace_input_with(size, Builder(graph, node).size(value, sizes))
    if space.is_of_one_length:
        count = Builder(graph, node).size(space.tokens, sizes)
        replace_number(node, tokens.traced, count, graph.fake_mode())
    # Later passes build sizes from the shape that a value is said to have.
    node.meta["val"] = infer(node.target, node.args, node.kwargs, graph.fake_mode())


def free_tokens(graph: ProgramGraph, ids: fx.Node, number: int, follow: tuple[fx.Node, ...]) -> Any:
    """Make the number of tokens a symbol, which is returned.

    Args:
        follow: inputs with an entry for every token in their first dimension.
    """
    mode = graph.fake_mode()

    def counts(extent: Any) -> bool:
        """Whether a traced size is the number (a symbol that a condition makes a number is one too)."""
        return bool((extent if isinstance(extent, int) else extent.node.expr) == number)

    place = next(dim for dim, n in enumerate(ids.meta["val"].shape) if counts(n))
    with mode:
        tokens = mode.shape_env.create_unbacked_symint()
        torch._check(tokens >= 2)
        for node in graph.placeholders():
            value = node.meta["val"]
            if node is ids or node in follow:
                shape = [tokens if counts(n) else n for n in value.shape]
                node.meta["val"] = torch.empty(shape, dtype=value.dtype, device=value.device)
    first = next(n for n in graph.graph.nodes if n.op != "placeholder")
    with graph.graph.inserting_before(first):
        size = graph.graph.call_function(aten.sym_size.int, (ids, place))
    size.meta = {"val": tokens}
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node is not size:
            replace_number(node, number, size, mode)
    return tokens
