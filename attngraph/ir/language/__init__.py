"""Expressions and score programs: the language in which an attention's scores are written."""

from attngraph.ir.language import evaluate
from attngraph.ir.language import expr as E
from attngraph.ir.language import score as S
from attngraph.ir.language.evaluate import Environment, Tile
from attngraph.ir.language.expr import Expr, format_expr, format_number
from attngraph.ir.language.functions import FUNCTIONS, OPERATORS, Operation, operation_of
from attngraph.ir.language.packed import Packed
from attngraph.ir.language.parser import expression, operation, parse
from attngraph.ir.language.register import register_function

from attngraph.ir.language.score import (  # isort: skip
    DOT, INDICES, SCORE, WEIGHT, Keep, ProgramError, Score, ScoreProgram, Sink, Statement, Weight,
    format_statement, formulas, is_moderate, reindexed,
)  # fmt: skip

__all__ = [
    "DOT", "FUNCTIONS", "INDICES", "OPERATORS", "SCORE", "WEIGHT", "E", "Environment", "Expr", "Keep",
    "Operation", "Packed", "ProgramError", "S", "Score", "ScoreProgram", "Sink", "Statement", "Tile",
    "Weight", "evaluate", "expression", "format_expr", "format_number", "format_statement", "formulas",
    "is_moderate", "operation", "operation_of", "parse", "register_function", "reindexed",
]  # fmt: skip
