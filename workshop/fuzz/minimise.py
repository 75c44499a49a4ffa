"""Reducing a failing case to the simplest one, and writing the test file that shows it.

Greedy: runs of neighbouring fields are all set to their simplest choices, then for each field alone the
simpler choices are tried in order. A change is kept if the case still fails in the same way. Repeated until
nothing changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from workshop.fuzz.compare import GRADIENT_FACTOR, Outcome, tolerance
from workshop.fuzz.grammar import CHOICES, Case
from workshop.fuzz.repair import repaired
from workshop.fuzz.source import render


def minimise(
    case: Case, kind: str, run: Callable[[Case], Outcome], may_go_on: Callable[[], bool] = lambda: True
) -> Case:
    """The simplest case found, starting at `case`, for which `run` gives an outcome of kind `kind`.

    `may_go_on` is called before each run; once it returns False, the simplest case so far is returned.
    """
    best, tried = case, {case}

    def still_fails(candidate: Case) -> bool:
        if candidate in tried or candidate.complexity >= best.complexity or not may_go_on():
            return False
        tried.add(candidate)
        return run(candidate).kind == kind

    changed = True
    while changed:
        changed = False
        for names in _runs_of_fields():
            for candidate in _simpler(best, names):
                if still_fails(candidate):
                    best, changed = candidate, True
                    break
    return best


def _runs_of_fields() -> Iterator[tuple[str, ...]]:
    names = tuple(CHOICES)
    for length in (16, 8, 4, 1):
        for start in range(0, len(names), length):
            yield names[start : start + length]


def _simpler(case: Case, names: tuple[str, ...]) -> Iterator[Case]:
    """The case with several fields at their simplest, or with one field at each simpler choice."""
    if len(names) > 1:
        yield repaired(dataclasses.replace(case, **{name: CHOICES[name][0] for name in names}))
        return
    (name,) = names
    for option in CHOICES[name][: CHOICES[name].index(getattr(case, name))]:
        yield repaired(dataclasses.replace(case, **{name: option}))


def reproducer(case: Case, outcome: Outcome, seed: int, origin: str) -> str:
    """A Python file that fails if the case does: run by pytest, or as a script.

    `seed` is that of the inputs, `origin` says how the case was found.
    """
    source = render(case)
    calls = []
    for place, sizes in enumerate(case.calls):
        inputs = source.expressions(sizes)
        calls.append(f"def call_{place + 1}():\n    g = torch.Generator().manual_seed({seed + place})\n")
        calls[-1] += "    return (\n" + "".join(
            f"        {text},  # {name}\n" for name, text in inputs.items()
        )
        calls[-1] += "    )\n"
    names = ", ".join(f"call_{place + 1}" for place in range(len(calls)))
    return _TEST.format(
        kind=outcome.kind, detail=outcome.detail.splitlines()[0] if outcome.detail else "", origin=origin,
        case=case, function=source.text, calls="\n\n".join(calls), names=names, grad=case.grad,
        static=case.sizes == "numbers",
        limit=tolerance(case), factor=GRADIENT_FACTOR,
    )  # fmt: skip


_TEST = '''"""attngraph and eager disagree: {kind} ({detail}).

Found by {origin}: {case}
"""

import math

import torch
import torch.nn.functional as F

import attngraph

GRAD = {grad}
STATIC = {static}
LIMIT = {limit!r}


{function}

{calls}

def run(function, inputs):
    """Results, arguments after the call, gradients of a fixed random combination of the finite results."""
    given = [x.clone().requires_grad_(GRAD and x.is_floating_point()) for x in inputs]
    for x in given if STATIC else ():
        torch._dynamo.mark_static(x)
    with torch.set_grad_enabled(GRAD):
        made = function(*given)
    results = made if isinstance(made, tuple) else (made,)
    g = torch.Generator().manual_seed(1)
    terms = [
        (torch.where(r.isfinite(), r, 0) * torch.randn(r.shape, generator=g, dtype=r.dtype)).sum()
        for r in results
        if r.requires_grad
    ]
    wanted = [x for x in given if x.requires_grad]
    gradients = torch.autograd.grad(torch.stack(terms).sum(), wanted, materialize_grads=True) if terms else ()
    return {{"result": results, "argument": given, "gradient": gradients}}


def check(what, place, wanted, found):
    assert wanted.requires_grad == found.requires_grad, f"{{what}} {{place}}: requires_grad"
    wanted, found = wanted.detach(), found.detach()
    finite = wanted[wanted.isfinite()].double().abs()
    scale = max(1.0, float(finite.max()) if finite.numel() else 0.0)
    limit = LIMIT * scale * ({factor} if what == "gradient" else 1)
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=limit, equal_nan=True, msg=lambda text: f"{{what}} {{place}}: {{text}}"
    )


def test_compiled_equals_eager():
    compiled = attngraph.compile(f, min_scores=0)
    for inputs in ({names},):
        wanted, found = run(f, inputs()), run(compiled, inputs())
        for what in wanted:
            assert len(wanted[what]) == len(found[what]), what
            for place, (a, b) in enumerate(zip(wanted[what], found[what])):
                check(what, place, a, b)


if __name__ == "__main__":
    test_compiled_equals_eager()
'''
