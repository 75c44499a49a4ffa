"""At which dimension of what it reads a program uses a row or a head, and where it uses them otherwise."""

import pytest

from attngraph.ir.language.parser import parse
from attngraph.ir.ops.shardings import read_dims


@pytest.mark.parametrize(
    "program, rows, heads",
    [
        ("s = dot; keep k <= q", [None], [None]),
        ("s = dot + r0[h, q]", [None], [0]),
        ("s = dot + r0[b, h, q, k]", [0], [1]),
        ("s = dot + r0[q, h] + r1[b]", [None, 0], [1, None]),
        ("s = dot + r0[h] * h", [None], None),  # the number itself
        ("s = dot + r0[h // 2]", [None], None),
        ("s = dot + r0[h + 1]", [None], None),
        ("s = dot + r0[h, q] + r0[q, k]", [None], None),  # both at the head and elsewhere
        ("s = dot + r0[r1[b]]", [None, 0], [None, None]),
        ("s = dot; keep k <= q + b", None, [None]),
    ],
)
def test_where_a_program_uses_rows_and_heads(
    program: str, rows: list[int | None] | None, heads: list[int | None] | None
) -> None:
    count = len(rows or heads or ())
    assert read_dims(parse(program), "b", count) == rows
    assert read_dims(parse(program), "h", count) == heads
