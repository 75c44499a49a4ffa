"""The table of public reports, each a tiny program, and what the programs share.

A program gets a `Compiler`, whose compiled models are looked at afterwards, and asserts eager's answer
itself. The tests of this folder enter them; docs/reports.md lists them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph

ONE, DECODER = "right: one graph", "right: a decoder"
PIECES, WRONG = "right: in pieces, because ", "wrong: "


class Compiler:
    """Compiles as a user does, and remembers the compiled models."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []

    def __call__(self, model: Any) -> Any:
        self.compiled.append(attngraph.compile(model, min_scores=0))
        return self.compiled[-1]

    def two(self, make: Callable[[], Any]) -> tuple[Any, Any]:
        """One model compiled, and an equal one for eager: for models that their calls change."""
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(make())
        return self(models[0]), models[1]


@dataclasses.dataclass(frozen=True)
class Report:
    result: str
    program: Callable[[Compiler], None]


REPORTS: dict[str, Report] = {}
"""By `owner/repository#number`. What a report is about is the docstring of its program."""


def report(key: str, result: str = ONE) -> Callable[[Callable[[Compiler], None]], None]:
    def enter(program: Callable[[Compiler], None]) -> None:
        REPORTS[key] = Report(result, program)

    return enter


def cases(file: str) -> list[Any]:
    """The reports of a file, for `parametrize`. Their last digits mix them: those that run by default are of
    many kinds. What is wrong comes last, and is expected to fail."""
    found = [(key, r.result) for key, r in REPORTS.items() if r.program.__module__ == file]
    found.sort(key=lambda case: (WRONG in case[1], case[0][::-1]))
    fails = {
        key: pytest.mark.xfail(strict=True, reason=result, raises=(AssertionError, RuntimeError))
        for key, result in found
        if WRONG in result
    }
    return [pytest.param(key, marks=fails.get(key, ())) for key, _ in found]


def check(case: Report) -> None:
    """The answers are eager's, and the model is captured whole or in pieces as the table says."""
    torch._dynamo.reset()
    compiler = Compiler()
    case.program(compiler)
    pieces = any(compiled.report.breaks for compiled in compiler.compiled)
    assert pieces == case.result.startswith(PIECES), compiler.compiled[0].report
    torch._dynamo.reset()


def same(found: Any, expected: Any, layout: bool = False) -> None:
    """Equal values, dtypes and need of gradients; with `layout` also strides. NaN equals NaN."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True, check_stride=layout)
    if isinstance(found, Tensor):
        assert found.requires_grad == expected.requires_grad
    elif isinstance(found, list | tuple):
        assert [f.requires_grad for f in found] == [e.requires_grad for e in expected]


def tokens(count: int = 5, rows: int = 2, grad: bool = False) -> Tensor:
    return torch.randn(rows, count, 8).requires_grad_(grad)


def attend(x: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = x @ x.mT
    return torch.softmax(scores if mask is None else scores + mask, -1) @ x


def same_gradients(compiled: Callable[..., Any], eager: Callable[..., Any], *given: Tensor) -> None:
    """Results, and gradients with respect to what is given, weighted so that no two elements are alike."""
    found = []
    for function in (compiled, eager):
        copies = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in given]
        result = function(*copies)
        (result * torch.linspace(0.5, 2, result.numel()).view(result.shape)).sum().backward()
        found.append([result.detach(), *(x.grad for x in copies if x.is_floating_point())])
    same(*found)
