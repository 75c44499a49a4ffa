"""What stands for a size in a description can be compared with what stands for a number."""

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attngraph.ir.graph.call import described


def test_a_size_is_another_argument_than_a_number() -> None:
    size = torch.SymInt(SymNode(sympy.Integer(4), ShapeEnv(), int, 4))
    assert described((size, "x")) != described((4, "x")) and described([size]) == described((size,))
