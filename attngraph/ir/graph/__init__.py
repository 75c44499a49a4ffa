"""The program graph, its conditions, and its text: printed, and read back."""

from attngraph.ir.graph.call import argument, arguments, described, implied, infer, infer_once
from attngraph.ir.graph.formula import are_few, holds
from attngraph.ir.graph.printer import format_file
from attngraph.ir.graph.ranks import Axis, Numbers, Ranks, Shard
from attngraph.ir.graph.reader import read_graph
from attngraph.ir.graph.source import ORIGIN, caller_of, module_of, own_line, short_path, source_of

from attngraph.ir.graph.program_graph import (  # isort: skip
    RESULTS, Input, Level, Output, ProgramGraph, Rate, as_module, computed_from, dependence, is_empty,
    is_measured, is_random, is_size, keep_sizes, makes_a_size, may_alias, measured_sizes, memory_of,
    move_to_stage, op_name, part_of, replace_in_other_users, sort,
)  # fmt: skip

__all__ = [
    "ORIGIN", "RESULTS", "Axis", "Input", "Level", "Numbers", "Output", "ProgramGraph", "Ranks", "Rate",
    "Shard", "are_few", "argument", "arguments", "as_module", "caller_of", "computed_from", "dependence",
    "described", "format_file", "holds", "implied", "infer", "infer_once", "is_empty", "is_measured",
    "is_random", "is_size", "keep_sizes", "makes_a_size", "may_alias", "measured_sizes", "memory_of",
    "module_of", "move_to_stage", "op_name", "own_line", "part_of", "read_graph", "replace_in_other_users",
    "short_path", "sort", "source_of",
]  # fmt: skip
