"""The oracle: a compiled function against the eager one, in float64.

Results (number, shape, dtype, NaN and infinities in the same places, values), then the arguments after the
call, then gradients of a fixed random combination of the results, at each of a case's sizes in turn,
through one compiled function. Every case goes through all of `attngraph.compile`; in most cases the inputs'
sizes are marked as fixed, so they are numbers in the graph and capture is several times faster, in the others
they are symbols. If eager itself raises, the only check is that the compiled function raises as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import attngraph
from attngraph.meaning.check.comparison import Rule, compare
from workshop.fuzz.grammar import ADDITIVE, Case
from workshop.fuzz.source import forget, render

TOLERANCE = 1e-9
"""Allowed difference of a value, relative to the largest finite one of its tensor, at least 1."""
GRADIENT_FACTOR = 10.0
FAULT = "an error of the compiler"
"""The beginning of the compiler's reason for not fusing something because of an error of its own."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a case.

    `kind` is empty where compiled and eager agree, "eager raises" where there was nothing to compare, else
    what differs; `detail` says where and how much. From the report: `fused` is the number of attentions
    fused, `missed` the reasons for softmaxes not fused, `graphs` the number of graphs traced.
    """

    kind: str = ""
    detail: str = ""
    fused: int = 0
    missed: tuple[str, ...] = ()
    graphs: int = 0

    @property
    def failed(self) -> bool:
        return self.kind not in {"", "eager raises"}


def tolerance(case: Case) -> float:
    """How large an error may be: larger where the function itself rounds its scores.

    Scores cast to float32 are rounded to it, which the fused node does not do. A row in which a large number
    is added to every score keeps fewer digits of them; so does the logarithm of its sum.
    """
    found = 2e-5 if case.softmax == "to_float32" else TOLERANCE
    for apply, fill in ((case.apply, case.fill), (case.apply2, case.fill2)):
        rounds = apply in ADDITIVE or case.softmax == "logsumexp"
        if rounds and case.may_hide_rows and fill in {"-1e9", "-1e4"}:
            found = max(found, 8 * torch.finfo(torch.float64).eps * -float(fill))
    return found


def check(case: Case, name: str = "fuzz_case.py", seed: int = 0) -> Outcome:
    """Run a case eager and compiled. `name` is the file name in tracebacks; `seed` that of the inputs."""
    source = render(case)
    function = source.function(name)
    compiled = attngraph.compile(function, min_scores=0)
    kind = detail = ""
    try:
        for place, sizes in enumerate(case.calls):
            inputs = source.make(sizes, seed + place)
            kind, detail = _check_call(function, compiled, inputs, case)
            if kind:
                detail = f"call {place + 1}: {detail}"
                break
        report = getattr(compiled, "report", None)
    finally:
        forget(name)
    if report is None:
        return Outcome(kind, detail)
    missed = [m.reason for m in report.missed] + [f"in pieces: {b.reason}" for b in report.breaks]
    faults = [reason for reason in missed if reason.startswith(FAULT)]
    if faults and not kind:
        kind, detail = "the compiler fails inside", faults[0]
    return Outcome(kind, detail, len(report.attention), tuple(missed), report.graphs)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The outcome of a call: results, the arguments after it, gradients; or the exception."""

    results: tuple[Tensor, ...] = ()
    arguments: tuple[Tensor, ...] = ()
    gradients: tuple[Tensor, ...] = ()
    error: str = ""


def _check_call(
    function: Callable[..., Any], compiled: Callable[..., Any], inputs: Sequence[Tensor], case: Case
) -> tuple[str, str]:
    wanted = _run(function, inputs, case)
    found = _run(compiled, inputs, case)
    if wanted.error:
        if found.error:
            return "eager raises", wanted.error
        return "eager raises, compiled does not", wanted.error
    if found.error:
        return f"compiled raises {found.error.partition(':')[0]}", found.error
    allowed = tolerance(case)
    for what, a, b, limit in (
        ("result", wanted.results, found.results, allowed),
        ("argument", wanted.arguments, found.arguments, allowed),
        ("gradient", wanted.gradients, found.gradients, GRADIENT_FACTOR * allowed),
    ):
        if len(a) != len(b):
            return f"{what}: another number", f"{len(b)} instead of {len(a)}"
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            problem, much = difference(x, y, limit)
            if problem:
                return f"{what}: {problem}", f"{what} {place}: {much}"
    return "", ""


def _run(function: Callable[..., Any], inputs: Sequence[Tensor], case: Case) -> _Run:
    grad = case.grad
    given = [x.clone().requires_grad_(grad and x.is_floating_point()) for x in inputs]
    if case.sizes == "numbers":
        for tensor in given:
            torch._dynamo.mark_static(tensor)
    try:
        with contextlib.nullcontext() if grad else torch.no_grad():
            made = function(*given)
        results = made if isinstance(made, tuple) else (made,)
        gradients = _gradients(results, [x for x in given if x.requires_grad])
    except Exception as problem:
        last = traceback.extract_tb(problem.__traceback__)[-1]
        text = str(problem).strip().splitlines() or [""]
        return _Run(error=f"{type(problem).__name__}: {text[0]} ({last.name}, line {last.lineno})")
    return _Run(results, tuple(given), gradients)


def _gradients(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a fixed random combination of the finite results; zeros where none flows."""
    generator = torch.Generator().manual_seed(1)
    terms = [
        (torch.where(r.isfinite(), r, 0) * torch.randn(r.shape, generator=generator, dtype=r.dtype)).sum()
        for r in results
        if r.requires_grad
    ]
    if not terms:
        return ()
    return torch.autograd.grad(torch.stack(terms).sum(), wanted, allow_unused=True, materialize_grads=True)


def difference(wanted: Tensor, found: Tensor, limit: float) -> tuple[str, str]:
    """What differs and by how much; two empty strings where nothing does."""
    if wanted.requires_grad != found.requires_grad:
        return "another requires_grad", f"{found.requires_grad} instead of {wanted.requires_grad}"
    result = compare(found, wanted, Rule(limit, floor=1.0))
    if result.holds:
        return "", ""
    off = f"off by {result.error:.3g}, values up to {result.scale:.3g}: {result.detail}"
    return (result.problem, result.detail) if result.problem else ("wrong", off)
