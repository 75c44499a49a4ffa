"""What the tests of fuzzing share: compilers that are wrong on purpose, and eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngraph
from workshop.fuzz.grammar import Case
from workshop.fuzz.source import render


@pytest.fixture
def call_eagerly() -> Callable[[Case], list[Any]]:
    """Runs the function of a case on the inputs of each of its calls."""

    def call(case: Case) -> list[Any]:
        source = render(case)
        function = source.function("case_under_test.py")
        results = []
        for sizes in case.calls:
            inputs = [
                x.requires_grad_(case.grad and x.is_floating_point()).clone() for x in source.make(sizes, 0)
            ]
            with torch.set_grad_enabled(case.grad):
                results.append(function(*inputs))
        return results

    return call


@pytest.fixture
def compile_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Puts another compiler in the place of attngraph's for the rest of the test."""
    return lambda wrong: monkeypatch.setattr(attngraph, "compile", lambda f, **_: wrong(f))
