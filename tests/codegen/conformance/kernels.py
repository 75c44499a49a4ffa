"""The kernels that are held to the programs: one line each. A new backend is another line.

What a line says besides the kernel: the shape of its usual call, in which dtypes it is run, where (the
interpreter of Triton is chosen before triton is imported, so its kernels run in a process of their own), and
which directions take so long that only some of the programs are run by default (`CORE` and what is run in
other dtypes too).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import attngraph.codegen
from attngraph.codegen.cpu import compiled, source
from attngraph.codegen.remarks import UnsupportedError
from attngraph.codegen.triton import attempts, device, visits
from attngraph.codegen.triton.decode import Decode
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import KERNELS, Kernel

from . import simulated
from .paging import Paged
from .programs import Call, Shape

assert attngraph.codegen is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALVES = (torch.bfloat16, torch.float16)


def is_never_left(call: Call) -> str | None:
    return None


def is_left_by_c(call: Call) -> str | None:
    if not compiled.is_worth_compiling(call.operands):
        return "nothing to compute"
    try:
        source.write(compiled.plan_gradients(parse(call.text), call.operands, call.reads))
    except UnsupportedError as error:
        return str(error)
    return None


def is_left_by_triton(call: Call) -> str | None:
    kernel = Forward(Blocks(32, 16))
    planned = kernel._plan_backward(parse(call.text), call.operands, call.reads, call.sizes)
    return None if planned else "no kernel is planned"


def unprepared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    return []


def note_what_c_leaves(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    left: list[object] = []
    otherwise = compiled.Compiled._otherwise
    monkeypatch.setattr(
        compiled.Compiled, "_otherwise", lambda *call: (left.append(call), otherwise(*call))[1]
    )
    return left


def let_no_attempt_fail(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A kernel that does not run is an error here, not a reason to try others; lists of tiles are made for
    small calls too."""

    def fail(*said: object) -> None:
        raise AssertionError(said)

    monkeypatch.setattr(attempts._log, "warning", fail)
    monkeypatch.setattr(visits, "WORTH", 1)
    return []


def is_left_by_groups(call: Call) -> str | None:
    return simulated.why_left(simulated.Simulated(), call)


def simulate_groups(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """As `let_no_attempt_fail`; with a version of Triton that has all that kernels in Gluon need."""
    let_no_attempt_fail(monkeypatch)
    monkeypatch.setattr(device, "triton_version", lambda: (3, 8))
    left: list[object] = []
    otherwise = simulated.Simulated._leave
    monkeypatch.setattr(simulated.Simulated, "_leave", lambda self: (left.append(self), otherwise(self))[1])
    return left


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kernel under test.

    Attributes:
        dtypes: of the operands; the first is that of every program, the others are those of `CORE`.
        left: why the gradients of a call are left to PyTorch's operations, or None.
        slow: the directions in which most programs are slow tests.
        fixtures, prepare: what has to be set up; `prepare` returns a list in which calls that are left to
            another kernel are noted.
        examples: how many random programs are run forward and backward; with the slow tests forty times
            as many. None if there are none.
        of_lse: what the gradients of the log-sum-exp are multiplied with; none at all may be a special case.
        rounding: of gradients in float32, relative to the largest one.
        random: what their calls have instead of the usual shape.
        has_lse_of_nothing: whether the log-sum-exp of a row that sees no key is the reference's.
        unpromised: programs with rows of NaN whose gradients have it in other places than the reference's.
    """

    name: str
    kernel: Callable[[], Kernel]
    shape: Shape
    dtypes: Sequence[torch.dtype]
    left: Callable[[Call], str | None] = is_never_left
    slow: frozenset[str] = frozenset()
    fixtures: tuple[str, ...] = ()
    prepare: Callable[[pytest.MonkeyPatch], list[object]] = unprepared
    device: str = "cpu"
    of_lse: tuple[float, ...] = (0.3,)
    rounding: float = 1e-5
    examples: tuple[int, int] | None = None
    random: dict[str, int] = dataclasses.field(default_factory=dict)
    has_lse_of_nothing: bool = True
    unpromised: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    def allowed(self, dtype: torch.dtype) -> float:
        """How far a gradient may be off, relative to the largest one, besides what the flash rule allows."""
        return {torch.float64: 1e-9, torch.float32: self.rounding}.get(dtype, 1e-2)


SMALL, LARGE = Shape(2, 4, 2, 70, 6, 5), Shape(2, 4, 2, 130, 20, 12)
RANDOM = {"B": 1, "Hq": 2, "Hkv": 1, "Sq": 66, "Skv": 130, "D": 2, "Dv": 2}
UNPROMISED = frozenset({"rows without keys, weights masked", "scores of minus infinity"})
HERE = (
    Subject("reference", lambda: KERNELS["reference"], SMALL, (torch.float64, torch.float32, *HALVES)),
    Subject(
        "cpu.tiled", lambda: KERNELS["cpu.tiled"], SMALL, (torch.float64, torch.float32, *HALVES),
        examples=(80, 20), random=RANDOM,
    ),
    Subject(
        "cpu.flash", lambda: KERNELS["cpu.flash"], SMALL, (torch.float64, torch.float32, *HALVES),
        of_lse=(0.0, 0.3),
    ),
    Subject(
        "cpu.compiled", lambda: KERNELS["cpu.compiled"], LARGE, (torch.float32, *HALVES), is_left_by_c,
        frozenset({"forward", "backward"}), ("compiled_at_any_size",), examples=(6, 3), random=RANDOM,
        prepare=note_what_c_leaves, unpromised=UNPROMISED,
    ),
)  # fmt: skip
INTERPRETED = (
    Subject(
        "triton.forward", lambda: Forward(Blocks(32, 16)), Shape(2, 2, 1, 40, 16, 10),
        (torch.float32, torch.float16), is_left_by_triton, frozenset({"forward", "backward"}),
        prepare=let_no_attempt_fail, examples=(6, 3), random={"Hq": 4, "Sq": 18, "Skv": 21},
        has_lse_of_nothing=False, unpromised=UNPROMISED, rounding=2e-4,
    ),
)  # fmt: skip
IN_THE_SIMULATOR = (
    Subject(
        "gluon.forward", simulated.Simulated, Shape(2, 2, 1, 150, 64, 64), HALVES, is_left_by_groups,
        frozenset({"forward", "backward"}), prepare=simulate_groups, has_lse_of_nothing=False,
        unpromised=UNPROMISED, rounding=2e-4,
    ),
)  # fmt: skip
ON_A_GPU = (
    Subject(
        "triton.forward on a GPU", Forward, Shape(2, 8, 2, 1023, 64, 64), HALVES, is_left_by_triton,
        frozenset({"forward", "backward"}), prepare=let_no_attempt_fail, device="cuda",
        has_lse_of_nothing=False, unpromised=UNPROMISED, rounding=2e-4,
    ),
)  # fmt: skip
SIMULATED = IN_THE_SIMULATOR if device.no_triton() is None else ()
SUBJECTS = {s.name: s for s in (INTERPRETED if IS_INTERPRETED else (*HERE, *SIMULATED, *ON_A_GPU))}


# --- over a cache ---

Attend = Callable[[Call, Paged], Tensor | None]


def by_op(by: str) -> Attend:
    def attend(call: Call, paged: Paged) -> Tensor:
        args = (paged.packed(call.operands[0]), *paged.new, *paged.pages, call.reads, call.sizes, call.text)
        found: Tensor = torch.ops.attngraph.cached_attention(*args, *paged.rows, by)
        return found

    return attend


def by_triton(call: Call, paged: Paged) -> Tensor | None:
    q, kernel = paged.packed(call.operands[0]), Decode(Blocks(16, 16), 2)
    return kernel.attend(parse(call.text), q, paged.new, paged.pages, call.reads, call.sizes, paged.rows)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A kernel for new tokens over a cache; `refuses` are programs for which it gives nothing."""

    name: str
    attend: Attend
    shape: Shape
    fixtures: tuple[str, ...] = ()
    slow: bool = False
    refuses: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name


NO_MULTIPLE = frozenset({
    "rows without keys, mean instead", "weights moved", "weights squared", "weights above a threshold",
})  # fmt: skip
"""Weights that are no multiple of the softmax's."""
DECODERS = (
    (Decoder("triton.decode", by_triton, Shape(2, 4, 2, 22, 16, 10), slow=True, refuses=NO_MULTIPLE),)
    if IS_INTERPRETED
    else (
        Decoder("reference", by_op("reference"), SMALL),
        Decoder("cpu.decode", by_op("cpu.decode"), LARGE, ("compiled_at_any_size",), slow=True),
    )
)  # fmt: skip
