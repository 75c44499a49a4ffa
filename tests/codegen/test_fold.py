"""A kernel's file is folded to a source: each rule, and that nothing is left which a plan should know."""

import symtable
from collections.abc import Iterator

import pytest
import torch

from attngraph.codegen.triton.emit import Kernel, emit, emit_backward, emit_decode, emit_sums
from attngraph.codegen.triton.fold import NOTHING, File
from attngraph.codegen.triton.plan import BackwardPlan, Blocks, DecodePlan, Plan, Read, SumsPlan
from attngraph.ir.language.parser import parse


def folded(text: str, **values: object) -> str:
    return File(text).fold(values).rstrip("\n")


F = "def f():"


@pytest.mark.parametrize(
    ("text", "values", "wanted"),
    [
        ("x = A + y  # why", {"A": 3}, "x = 3 + y  # why"),
        ("x = f(A * 2, y)", {"A": 3}, "x = f(6, y)"),
        ("x = A * y", {"A": "(b + c)"}, "x = (b + c) * y"),
        ("x = y if A > 1 else z", {"A": 1}, "x = z"),
        ("x = (y if A else z).to(f)", {"A": True}, "x = (y).to(f)"),
        ("x = f(\n    y,\n    A,\n)", {"A": 1}, "x = f(y, 1)"),
        ("# of A\nif A:\n    # of x\n    x = 1\nelse:\n    x = 2", {"A": True}, "# of x\nx = 1"),
        ("if A:\n    x = 1\nelif B:\n    x = 2", {"A": False, "B": True}, "x = 2"),
        ("if y > A:\n    x = A\nelse:\n    x = y", {"A": 1}, "if y > 1:\n    x = 1\nelse:\n    x = y"),
        ("for i in f(A):  # each\n    x = A", {"A": 2}, "for i in f(2):  # each\n    x = 2"),
        ("for N, M in A:\n    N = f(M)", {"A": [("a", 1), ("b", 2)]}, "a = f(1)\nb = f(2)"),
        (f"{F}\n    A\n    x = 1", {"A": ["y = 2", "z = 3"]}, f"{F}\n    y = 2\n    z = 3\n    x = 1"),
        ("x = f(y, rest, mode=rest)", {"rest": NOTHING}, "x = f(y)"),
        ("rest = f(y)\nx = y", {"rest": NOTHING}, "x = y"),
        ("x = f(rest + 1)\ny = 2", {"rest": NOTHING}, "y = 2"),
        ("x, rest = f(y)", {"rest": NOTHING}, "x = f(y)"),
        ("x = f(y, mask=(a < b) & A, other=0)", {"A": True}, "x = f(y, mask=a < b, other=0)"),
        ("x = f(y, mask=(a < b) & A, other=0)", {"A": "d < 3"}, "x = f(y, mask=(a < b) & (d < 3), other=0)"),
        ("x = f(y, mask=B & A, other=0)", {"A": True, "B": True}, "x = f(y)"),
        ("def A(x, B, *, y):\n    return x", {"A": "g", "B": NOTHING}, "def g(x, *, y):\n    return x"),
        ("def f(\n    x,\n    B,\n):\n    x", {"B": "r\ns"}, "def f(\n    x,\n    r,\n    s,\n):\n    x"),
        ("def f(B):\n    x\ndef g(*f):\n    x", {"B": "b"}, "def f(b):\n    x\n\n\ndef g(b):\n    x"),
        ("@part\ndef f(x):\n    'Why.'\n    y = x + A\nf(z * 2)", {"A": 1}, "y = z * 2 + 1"),
        ("f = part(lambda x: g(x) if A else x)\ny = f(z) + 1", {"A": True}, "y = g(z) + 1"),
    ],
    ids=range(24),
)  # fmt: skip
def test_what_is_known_is_worked_out(text: str, values: dict[str, object], wanted: str) -> None:
    assert folded(text, **values) == wanted


READS = (Read(0, 3, "float"), Read(1, 2, "half"))
TEXTS = (
    "",
    "keep k <= q",
    "s = dot + r0[h, q, k] + r1[b, k]; keep k <= q + n0 else -1e9; sink n0; p = p * 2",
)


def kernels() -> Iterator[Kernel]:
    for text in TEXTS:
        for listed, ahead, split, width in (
            (False, False, True, 80),
            (True, True, False, 64),
            (True, False, True, 6),
        ):
            blocks = Blocks(64, 32, 4, 2, split, ahead)
            reads = READS if "r0" in text else ()
            given = parse(text), torch.float32, width, 64, 2, reads, blocks, ahead, listed
            yield emit(Plan(*given))
            yield emit_backward(BackwardPlan(*given, wanted=tuple(read.number for read in reads)))
            yield emit_decode(
                DecodePlan(*given, shared=width == 80, kept=torch.int8 if listed else None, page=width)
            )
    for decay, vectors in (("", 0), ("one", 2), ("each", 1)):
        yield emit_sums(SumsPlan(20, True, bool(vectors), decay, vectors, True, torch.float16, torch.float32))


def test_a_source_names_nothing_that_is_not_there() -> None:
    for kernel in kernels():
        module = symtable.symtable(kernel.source, "kernel", "exec")
        known = {
            symbol.get_name()
            for symbol in module.get_symbols()
            if symbol.is_assigned() or symbol.is_imported()
        }
        for function in module.get_children():
            unknown = (
                {s.get_name() for s in function.get_symbols() if s.is_global()} - known - {"float", "range"}
            )
            assert not unknown, (kernel.name, unknown)
            local = {s.get_name() for s in function.get_symbols() if s.is_local() and not s.is_assigned()}
            assert local <= set(function.get_parameters()), kernel.name  # type: ignore[attr-defined]
