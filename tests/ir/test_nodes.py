"""Views of attention nodes: the arguments of our ops by name, read and written back."""

from typing import Any

import pytest
import torch
from torch import fx

from attngraph.ir.language.parser import parse
from attngraph.ir.ops import nodes

OPS = list(nodes.VIEWS)


def named(op: Any) -> dict[str, Any]:
    """An argument for every name of an op's schema, unlike all others."""
    texts = {"program": "keep k <= q", "kernel": "k", "by": "b", "family": "f", "absorb": "never"}
    lists = {"reads": ["r0", "r1"], "sizes": [7], "values": [0, 4]}
    return {a.name: {**texts, **lists}.get(a.name, f"the {a.name}") for a in op._schema.arguments}


@pytest.mark.parametrize("op", OPS, ids=str)
def test_every_argument_is_read_and_written_back_where_the_schema_has_it(op: Any) -> None:
    given = named(op)
    found = nodes.called(op, tuple(given.values()), {})
    assert isinstance(found, nodes.VIEWS[op])
    assert found.program is parse("keep k <= q")
    for name in given.keys() - {"program", "reads", "sizes", "values"}:
        assert getattr(found, name) == given[name]
    assert found.args == tuple(given.values())
    assert nodes.called(op, (), given) == found


@pytest.mark.parametrize("op", OPS, ids=str)
def test_arguments_left_out_are_the_defaults_of_the_schema(op: Any) -> None:
    needed = {a.name for a in op._schema.arguments if not a.has_default_value()}
    found = nodes.called(op, (), {n: v for n, v in named(op).items() if n in needed})
    assert found is not None
    assert all(
        getattr(found, a.name) == a.default_value for a in op._schema.arguments if a.name not in needed
    )


def test_every_attention_of_the_dialect_with_a_kernel_to_choose_has_a_view() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("attngraph::")]
    ops = [getattr(torch.ops.attngraph, n.removeprefix("attngraph::")).default for n in names]
    asked = {op for op in ops if {"kernel", "by", "family"} & {a.name for a in op._schema.arguments}}
    assert asked - {torch.ops.attngraph.attention_backward.default} == set(OPS)


def test_a_view_that_does_not_follow_the_schema_is_refused() -> None:
    class Renamed(nodes.Cached):
        query: Any

    with pytest.raises(AssertionError, match="names other arguments"):
        nodes._views(torch.ops.attngraph.cached_attention.default)(Renamed)


@pytest.mark.parametrize("op", OPS, ids=str)
def test_the_reference_is_the_same_call_told_to_use_it(op: Any) -> None:
    found = nodes.called(op, (), named(op))
    assert found is not None
    ways = found.references()
    for way in ways:
        assert getattr(way, way.told_kernel) == "reference"
        changed = {name for name, value in way.named.items() if value != found.named[name]}
        assert changed <= {way.told_kernel, "absorb"}
    orders = {"always", "never"} if isinstance(found, nodes.LatentAttention) else {None}
    assert len(ways) == len(orders)
    assert {getattr(way, "absorb", None) for way in ways} == orders


@pytest.mark.parametrize("op", OPS[:2], ids=str)
def test_over_a_cache_an_attention_says_the_same_of_its_scores(op: Any) -> None:
    found = nodes.called(op, (), named(op))
    assert found is not None
    new = [f"new {n}" for n in range(len(found.keys))]
    rows = {"table": "t", "starts": "s", "first": "f", "held": "h"}
    cached = found.over_cache(new, [f"page {n}" for n in new], reads=("r",), **rows)
    assert (cached.q, cached.sizes, cached.program) == (found.q, found.sizes, found.program)
    assert cached.keys == tuple(new)
    assert cached.projections == found.projections
    assert cached.reads == ("r",)
    assert getattr(cached, cached.told_kernel) == getattr(found, found.told_kernel)


def test_other_nodes_have_no_view() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.relu.default, (x,))
    assert nodes.view(x) is None
    assert nodes.view(node) is None
    with pytest.raises(TypeError, match="no AttentionOp"):
        nodes.AttentionOp.of(node)
