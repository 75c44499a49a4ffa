"""The models of `attngraph demo`, and tiny ones under --small: compiled, checked and timed, as rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from attngraph.cli import demo
from attngraph.cli.arguments import parser
from attngraph.cli.compile import compile_target
from workshop.harness import Cell, Options, Row, Suite


def measured(target: str, tokens: int, rounds: int) -> dict[str, Row]:
    """What the demo prints of a model, and its times; `holds`: whether it agrees with eager."""
    given = parser().parse_args(["demo", "--rounds", str(rounds)])
    _, found = compile_target(target, given, tokens)
    holds = found["agreement"]["holds"]
    return {name: {**row, "holds": holds} for name, row in found["measured"].items()}


def cells(options: Options) -> Iterator[Cell]:
    small = (
        ("attngraph.models.targets:tiny_decoder_lm", 64),
        ("attngraph.models.targets:causal_attention", 128),
    )
    for target, tokens in small if options.small else demo.DEMO:
        measure = functools.partial(measured, target, tokens, 1 if options.small else 5)
        yield Cell(f"{target.partition(':')[2]}, {tokens} tokens", measure)


def disagrees(rows: Sequence[Row]) -> bool:
    return not all(row["holds"] for row in rows)


MAIN = Suite("models", __doc__, cells, base="eager", fails=disagrees).main
