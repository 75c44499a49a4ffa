"""Token programs as text: what is written is read back, and what is no program is refused with its line."""

from __future__ import annotations

import pytest
import torch

from attngraph.ir.language.token_program import TokenProgramError, parse
from attngraph.ir.ops.token_program import reference

PROGRAM = """
r0[1, t, 8]
r1[4, 8]
r2[] = sum[j < 8] r0[0, t, j]
r3[i0 < 8] = r0[0, t, i0] - r2[] / 8
r4[i0 < 4] = sum[j < 8] r3[j] * r1[i0, j]
r5[i0 < 2, i1 < 2] = where(i0 < 1, r4[i1], amax(r4[2 * i0], r4[i1]))
return r4[1, t, 4], r5[2, t, 1, 2]
""".replace("amax(r4", "max(r4")


def test_a_text_is_read_back() -> None:
    program = parse(PROGRAM)
    assert parse(program.text) == program and hash(parse(program.text)) == hash(program)
    assert program.product(4) == (3, 1, False)
    assert [r.token_dim for r in program.results] == [1, 1]
    assert program.product(3) is None and program.definition(1) is None


SHORT = """
r0[1, t, 8] bfloat16
r1[4, 8] bfloat16
r2[i0 < 8] = r0[0, t, i0] + 1.0
r3[i0 < 4] = sum[j < 8] r2[j] * r1[i0, j]
return r3[1, t, 4] bfloat16, r3[t, 4], r2[1, t, 8] float16
"""


def test_values_of_16_bits_are_computed_in_float32() -> None:
    program = parse(SHORT)
    assert parse(program.text) == program and program.product(3) == (2, 1, False)
    assert [r.dtype for r in program.results] == ["bfloat16", "float32", "float16"]
    x, w = torch.randn(1, 5, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    short, whole, before = reference(program, [x, w])
    wanted = (x.float() + 1) @ w.float().T
    assert (short.dtype, whole.dtype, before.dtype) == (torch.bfloat16, torch.float32, torch.float16)
    torch.testing.assert_close(whole, wanted[0])
    assert torch.equal(short[0], whole.bfloat16()) and torch.equal(before, (x.float() + 1).half())
    exact = reference(program, [x.double(), w.double()])
    assert all(t.dtype == torch.float64 for t in exact)


def test_its_meaning() -> None:
    x, w = torch.randn(1, 5, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    out, pairs = reference(parse(PROGRAM), [x, w])
    y = (x - x.mean(-1, keepdim=True)) @ w.T
    torch.testing.assert_close(out, y)
    other = torch.maximum(y[0, :, 2:3], y[0, :, :2])
    torch.testing.assert_close(pairs, torch.stack([y[0, :, :2], other]).unsqueeze(2))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("r0[t, 4]", "returns nothing"),
        ("r1[t, 4]\nreturn r1[t, 4]", "expected r0"),
        ("r0[t, 4] int8\nr1[] = 1.0\nreturn r1[t]", "weights may be"),
        ("r0[4] int64\nr1[] = 1.0\nreturn r1[t]", "weights may be"),
        ("r0[t, 4]\nr1[] = 1.0\nreturn r1[t] int8", "results may be"),
        ("r0[t, t]\nr1[] = 1.0\nreturn r1[t]", "at most one t"),
        ("r0[t, x]\nr1[] = 1.0\nreturn r1[t]", "at most one t"),
        ("r0[t, 4]\nr1[] = r2[]\nreturn r1[t]", "before it is defined"),
        ("r0[t, 4]\nr1[] = r1[]\nreturn r1[t]", "before it is defined"),
        ("r0[t, 4]\nr1[i0 < n] = r0[t, i0]\nreturn r1[t, 4]", "index < extent"),
        ("r0[t, 4]\nr1[i0 < 4] = r0[t, i0]\nreturn r1[t, 5]", "other extents"),
        ("r0[t, 4]\nr1[i0 < 4] = r0[t, i0]\nreturn r0[t, 4]", "no value of each token"),
        ("r0[t, 4]\nr1[i0 < 4] = r0[t, i0]\nreturn r1[4]", "no value of each token"),
        ("r0[t, 4]\nr1[i0 < 4] = r0[t, i0]\nr2[4]\nreturn r1[t, 4]", "stand before definitions"),
        ("r0[t, 4]\nr1[i0 < 4] = r0[t, i0]\nreturn r1[t, 4]\nr2[] = 1.0", "may follow the results"),
    ],
)
def test_what_is_no_program_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as found:
        parse(text)
    assert isinstance(found.value, TokenProgramError)
