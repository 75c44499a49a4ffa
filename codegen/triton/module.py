"""The module around emitted kernels: its name, header, functions, and their arguments.

Parts that all emitters share; what a kernel does is written by `emit.py` and the files beside it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from attngraph.codegen.triton.helpers import helpers
from attngraph.codegen.triton.plan import Plan
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.score import Keep, Score, ScoreProgram, Sink, Weight
from attngraph.meaning.masks.causal import examine

Groups = Sequence[tuple[str, ...]]
"""The arguments of a kernel in order, grouped by line."""
_COUNTS = re.compile(r"n\d+|batch|first_row")
"""Arguments on whose values Triton must not specialise: they differ from call to call."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The source of a module, the name of its (first) kernel, and the names of the kernel's arguments."""

    source: str
    name: str
    arguments: tuple[str, ...]


def name_of(plan: Plan) -> str:
    """What a kernel computes, in words: "causal_window_softcap_attention"."""
    program, own = plan.program, plan.diagonal and plan.diagonal[0]
    scores = [s.value for s in plan.statements if isinstance(s, Score)]
    others = [s for s in plan.statements if isinstance(s, Keep) and s != own]
    has_softcap = any(n.op == "tanh" for n in _nodes(scores))
    has_reads = any(n.op == "read" for n in _nodes(scores))
    words = {
        "causal": plan.diagonal is not None,
        "window": bool(window_of(program)),
        "masked": len(others) > bool(window_of(program)),
        "softcap": has_softcap,
        "biased": has_reads,
        "scored": bool(scores) and not (plan.is_linear or has_softcap or has_reads),
        "sink": any(isinstance(s, Sink) for s in program.statements),
        "dropout": any(n.op == "random" for n in _nodes(s.value for s in _weights(program))),
    }
    return "_".join([*(word for word, is_said in words.items() if is_said), "attention"])


def window_of(program: ScoreProgram) -> int:
    """The most keys that a query sees, itself included; 0: no limit, or it sees later keys too."""
    return examine(program, True, frozenset()).window or 0


def _weights(program: ScoreProgram) -> list[Weight]:
    return [s for s in program.statements if isinstance(s, Weight)]


def _nodes(formulas: Iterable[Expr]) -> list[Expr]:
    return [n for formula in formulas for n in E.walk(formula)]


def names_of_reads(plan: Plan) -> list[tuple[str, ...]]:
    """The last arguments of any kernel: for each read its tensor, strides and the extents that its indices
    are checked against, then the sizes."""
    found: list[tuple[str, ...]] = []
    for read in plan.reads:
        name = f"r{read.number}"
        strides = [f"{name}_stride{axis}" for axis in range(read.rank)]
        found.append((name, *strides, *(f"{name}_size{axis}" for axis in plan.guarded_axes(read.number))))
    return [*found, tuple(f"n{i}" for i in range(plan.program.sizes))]


def flat(groups: Groups) -> tuple[str, ...]:
    return tuple(name for group in groups for name in group)


def header(
    title: str, plan: Plan, about: Sequence[str], constants: Sequence[str],
    extents: tuple[str, str] = ("BLOCK_Q", "BLOCK_K"),
) -> str:  # fmt: skip
    """Comments on what the module computes and its tensors, then imports and constants.

    Args:
        title: the first comment, which introduces the program's lines. about: further lines, on tensors and
        schedule. extents: the names of a tile's extents.
    """
    rows, columns = extents
    program = [f"#     {line}" for line in (str(plan.program) or "s = dot").split("\n")]
    return "\n".join([
        f"# {title}:", *program, *(f"# {line}" for line in about), "",
        "import triton", "import triton.language as tl", "",
        f"{rows} = tl.constexpr({plan.blocks.q})", f"{columns} = tl.constexpr({plan.blocks.k})", *constants,
    ])  # fmt: skip


def rate(plan: Plan) -> list[str]:
    """The constant by which linear scores are multiplied."""
    return [f"RATE = tl.constexpr({plan.rate!r})  # scale times log2(e)"] if plan.is_linear else []


LOG2E = f"LOG2E = tl.constexpr({math.log2(math.e)!r})"


def function(name: str, groups: Groups, contract: str, lines: Sequence[str]) -> str:
    """A kernel with a docstring."""
    counts = [a for a in flat(groups) if _COUNTS.fullmatch(a)]
    decorator = f"@triton.jit(do_not_specialize={counts!r})" if counts else "@triton.jit"
    signature = [f"{', '.join(group)}," for group in groups if group]
    body = [f'"""{contract}"""', *lines]
    return "\n".join([decorator, f"def {name}(", *indented(signature), "):", *indented(body)])


def assemble(name: str, groups: Groups, head: str, called: set[str], functions: Sequence[str]) -> Kernel:
    """The kernel called `name`: a module of `head`, the helpers that are called, and functions."""
    text = "\n\n\n".join([head, *(h.rstrip() for h in helpers(called)), *functions])
    return Kernel(text + "\n", name, flat(groups))


def indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
