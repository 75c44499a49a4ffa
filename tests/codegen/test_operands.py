"""What does not fit is left to PyTorch's operations, which raise errors: C is not given it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attngraph.codegen.cpu.carried import Keeping, sums_of, windows_of
from attngraph.codegen.cpu.decode import Decode
from attngraph.codegen.cpu.tokens.indices import require_in_range
from attngraph.codegen.cpu.tokens.run import TOKENS
from attngraph.codegen.remarks import UnsupportedError
from attngraph.ir.language import parser
from attngraph.ir.language.token_program import parse
from attngraph.ir.ops.cached_attention import Rows


def rows(table: list[list[int]], starts: list[int], first: list[int], held: list[int]) -> Rows:
    return Rows(*map(torch.tensor, (table, starts, first, held)))


GOOD = rows([[0, 1], [2, 3]], [0, 1, 2], [5, 3], [5, 3])


Shape = tuple[int, ...]


def attend(
    given: Rows = GOOD, q: Tensor | None = None, new: Shape = (1, 2, 2, 8), pages: Shape = (4, 2, 4, 8),
    values: Shape = (4, 2, 4, 8), read: Shape = (16,),
) -> Tensor | None:  # fmt: skip
    q = torch.randn(1, 4, 2, 8) if q is None else q
    k, v = torch.randn(new), torch.randn(*new[:3], values[-1])
    program, kept = parser.parse("s = dot + r0[k]"), (torch.randn(pages), torch.randn(values))
    return Decode().attend(program, q, (k, v), kept, [torch.randn(read)], (), given)


def test_operands_that_fit_are_computed_by_c() -> None:
    assert attend() is not None


@pytest.mark.parametrize(
    "given",
    [
        rows([[0, 1], [2, 4]], [0, 1, 2], [5, 3], [5, 3]), rows([[0, -1], [2, 3]], [0, 1, 2], [5, 3], [5, 3]),
        rows([[0, 1], [2, 3]], [0, 1, 3], [5, 3], [5, 3]), rows([[0, 1], [2, 3]], [0, 3, 2], [5, 3], [5, 3]),
        rows([[0, 1], [2, 3]], [1, 1, 2], [5, 3], [5, 3]), rows([[0, 1], [2, 3]], [0, 1, 2], [-5, 3], [5, 3]),
        rows([[0, 1], [2, 3]], [0, 1, 2], [5, 3], [5, -3]), rows([[0, 1]], [0, 1, 2], [5, 3], [5, 3]),
        rows([[0, 1], [2, 3]], [0, 1, 2], [5, 30], [5, 30]),
    ],
)  # fmt: skip
def test_numbers_of_rows_that_do_not_fit_are_not_given_to_c(given: Rows) -> None:
    assert attend(given) is None


@pytest.mark.parametrize(
    "shapes",
    [
        {"pages": (4, 2, 4, 6)}, {"pages": (4, 3, 4, 8)}, {"values": (3, 2, 4, 8)}, {"values": (4, 2, 2, 8)},
        {"new": (1, 2, 3, 8)}, {"new": (1, 1, 2, 8)}, {"new": (1, 2, 2, 4)}, {"read": (3,)},
        {"read": (16, 1)},
        {"q": torch.randn(2, 4, 2, 8)}, {"q": torch.randn(1, 4, 2, 8).double()}, {"pages": (4, 0, 4, 8)},
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_not_given_to_c(shapes: dict[str, tuple[int, ...]]) -> None:
    assert attend(**shapes) is None  # type: ignore[arg-type]


def test_windows_sums_and_what_is_kept_need_rows_that_fit() -> None:
    table, starts, first = torch.tensor([[0], [1]]), torch.tensor([0, 1, 2]), torch.tensor([1, 2])
    pages, new = torch.randn(2, 4, 3), torch.randn(1, 2, 3)
    assert windows_of(pages, new, table, starts, first, 0, 1, 2) is not None
    for bad in ((torch.tensor([[0], [2]]), starts, first), (table, torch.tensor([0, 1, 9]), first),
                (table, starts, torch.tensor([1])), (table, starts, torch.tensor([-1, 1]))):  # fmt: skip
        assert windows_of(pages, new, *bad, 0, 1, 2) is None
    assert windows_of(torch.randn(2, 4, 2), new, table, starts, first, 0, 1, 2) is None
    state, v, k = torch.zeros(2, 1, 3, 4), torch.randn(2, 1, 4), torch.randn(2, 1, 3)
    assert sums_of(None, k, v, None, state, starts) is not None
    assert sums_of(None, k[:, :, :2], v, None, state, starts) is None
    assert sums_of(None, k, v, None, state, torch.tensor([0, 1, 5])) is None
    assert sums_of(None, k, v[:, :, :3], None, state, starts) is None
    assert Keeping().add(new, pages, table, starts, first, 0, 1) is not None
    assert Keeping().add(new, torch.randn(2, 4, 2), table, starts, first, 0, 1) is None
    assert Keeping().add(new, pages, table, torch.tensor([0, 1, 5]), first, 0, 1) is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("r1[i0 < 5] = r0[0, t, i0]", "outside"), ("r1[i0 < 4] = r0[0, t, i0 + 1]", "outside"),
        ("r1[i0 < 4] = r0[1, t, i0]", "outside"), ("r1[i0 < 4] = r0[0, i0, t]", "outside"),
        ("r1[i0 < 4] = r0[0, i0]", "other indices"), ("r1[i0 < 4] = r0[0, t, i0 // (i0 - i0)]", "division"),
        ("r1[i0 < 4] = where(i0 < 3, r0[0, t, i0 + 2], 0.0)", "outside"),
        ("r1[i0 < 4000000000] = r0[0, t, 0]", "many elements"),
    ],
)  # fmt: skip
def test_a_token_program_that_reads_elsewhere_is_not_written_as_c(line: str, problem: str) -> None:
    program = parse(f"r0[1, t, 4]\n{line}\nreturn r1[1, t, {line.split('<')[1].split(']')[0].strip()}]")
    with pytest.raises(UnsupportedError, match=problem):
        require_in_range(program)


def test_what_a_selection_does_not_choose_may_be_elsewhere() -> None:
    line = "r1[i0 < 4] = where(i0 < 2, r0[0, t, i0 + 2], r0[0, t, i0 - 2])"
    require_in_range(parse(f"r0[1, t, 4]\n{line}\nreturn r1[1, t, 4]"))


def test_given_tensors_have_the_shapes_that_a_token_program_names() -> None:
    text = "r0[1, t, 4]\nr1[4]\nr2[i0 < 4] = r0[0, t, i0] * r1[i0]\nreturn r2[1, t, 4]"
    x, weight = torch.randn(1, 3, 4), torch.randn(4)
    (found,) = TOKENS.run(text, [x, weight]) or ()
    assert torch.allclose(found, x * weight)
    for bad in ([x, torch.randn(3)], [x, torch.randn(4, 1)], [torch.randn(1, 3, 2), weight]):
        assert TOKENS.run(text, bad) is None
