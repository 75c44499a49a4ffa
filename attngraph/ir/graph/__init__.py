"""The program graph, its conditions, and its text: printed, and read back."""

from attngraph.ir.graph.call import argument, arguments, implied, infer_once
from attngraph.ir.graph.formula import holds
from attngraph.ir.graph.printer import format_file
from attngraph.ir.graph.ranks import Axis, Ranks
from attngraph.ir.graph.reader import read_graph
from attngraph.ir.graph.source import ORIGIN, module_of, short_path, source_of

from attngraph.ir.graph.program_graph import (  # isort: skip
    Input, Level, Output, ProgramGraph, Rate, computed_from, is_measured, is_random, is_size, may_alias,
    op_name,
)  # fmt: skip

__all__ = [
    "ORIGIN", "Axis", "Input", "Level", "Output", "ProgramGraph", "Ranks", "Rate", "argument", "arguments",
    "computed_from", "format_file", "holds", "implied", "infer_once", "is_measured", "is_random", "is_size",
    "may_alias", "module_of", "op_name", "read_graph", "short_path", "source_of",
]  # fmt: skip
