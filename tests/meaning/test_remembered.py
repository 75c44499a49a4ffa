"""Constructors look up what they were asked before, within the passes of one graph."""

import gc
import weakref

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.simplify.remembered import remembered, remembering


def test_a_constructor_is_asked_once_in_a_block() -> None:
    asked: list[Expr] = []

    @remembered
    def twice(node: Expr) -> Expr:
        asked.append(node)
        return M.add(node, node)

    x = E.var("x")
    assert twice(x) is twice(x) and len(asked) == 2
    with remembering():
        assert twice(x) is twice(x) and len(asked) == 3
        with remembering():
            twice(x)
        assert twice(x) is M.mul(E.const(2), x) and len(asked) == 4


def test_nothing_is_held_on_to_after_the_block() -> None:
    """What expressions read are nodes of graphs, which have the model's weights."""

    class Tensor:
        pass

    source = Tensor()
    seen = weakref.ref(source)
    with remembering():
        M.not_(M.le(E.read(source, (E.var("x", E.const(3)),), "int"), E.var("y", E.const(5))))
        del source
        gc.collect()
        assert seen() is not None
    gc.collect()
    assert seen() is None
