"""A planted fault is reduced to what causes it, and the test that is printed shows it."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from workshop.fuzz.compare import check
from workshop.fuzz.grammar import CHOICES, Case
from workshop.fuzz.minimise import minimise, reproducer
from workshop.fuzz.sample import case_of

CompileAs = Callable[[Callable[[Callable[..., Any]], Callable[..., Any]]], None]


@contextmanager
def without_tanh() -> Iterator[None]:
    with mock.patch.object(torch, "tanh", lambda x: x):
        yield


def forgets_softcaps(f: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Tensor) -> Any:
        with without_tanh():
            return f(*inputs)

    return call


def forgets_other_sizes(f: Callable[..., Any]) -> Callable[..., Any]:
    lengths: list[int] = []

    def call(*inputs: Tensor) -> Any:
        lengths.append(inputs[0].shape[-1])
        result = f(*inputs)
        return result if lengths[-1] == lengths[0] else result * 2

    return call


def first_failing(seed: int) -> tuple[Case, str]:
    """A complex case of that seed that fails, and how."""
    for number in range(200):
        case = case_of(seed, number)
        outcome = check(case)
        if outcome.failed and case.complexity > 20:
            return case, outcome.kind
    raise AssertionError("the planted fault was never met")


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_fault_is_reduced_to_its_cause(seed: int, compile_as: CompileAs) -> None:
    compile_as(forgets_softcaps)
    case, kind = first_failing(seed)
    small = minimise(case, kind, check)
    assert small.softcap != "none"
    assert dataclasses.replace(small, softcap="none", grad=True) == Case()


def test_a_fault_of_the_second_call_keeps_the_size_that_matters(compile_as: CompileAs) -> None:
    compile_as(forgets_other_sizes)
    case = Case(mask="causal", bias="alibi", scale="tensor", second=True, width2=5, queries2=4, keys2=4)
    small = minimise(case, check(case).kind, check)
    assert small == Case(second=True, width2=3)


def test_minimising_stops_when_told_and_keeps_a_failing_case(compile_as: CompileAs) -> None:
    compile_as(forgets_softcaps)
    case, kind = first_failing(0)
    runs = iter([True] * 3)
    small = minimise(case, kind, check, lambda: next(runs, False))
    assert next(runs, None) is None
    assert small.complexity <= case.complexity
    assert check(small).kind == kind


@pytest.mark.parametrize(
    "case",
    [
        Case(softcap="before_bias"),
        case_of(0, 2),
        Case(softcap="after_bias", mask="constant", second=True, queries2=3, keys2=3, grad=False),
    ],
    ids=["the simplest", "a random one", "a constant, twice"],
)
def test_the_printed_test_fails_with_the_fault_and_passes_without(
    case: Case, compile_as: CompileAs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dataclasses.replace(case, softcap=CHOICES["softcap"][1], numbers="normal")
    with monkeypatch.context() as planted:
        planted.setattr("attngraph.compile", lambda f, **_: forgets_softcaps(f))
        outcome = check(case, seed=11)
        assert outcome.failed
        path = tmp_path / "test_found.py"
        path.write_text(reproducer(case, outcome, 11, "a test"), encoding="utf-8")
        with pytest.raises(AssertionError):
            runpy.run_path(str(path), run_name="__main__")
    runpy.run_path(str(path), run_name="__main__")


def test_the_printed_test_says_how_it_was_found_and_shows_the_function(compile_as: CompileAs) -> None:
    compile_as(forgets_softcaps)
    case = Case(softcap="before_bias")
    text = reproducer(case, check(case), 3, "python -m workshop fuzz --seed 0 --only 3")
    assert text.startswith('"""attngraph and eager disagree: result: wrong (call 1: result 0: off by')
    assert "Found by python -m workshop fuzz --seed 0 --only 3: softcap=before_bias" in text
    assert "def f(q, k, v):\n    scores = q @ k.mT\n" in text
    assert "torch.randn(2, 2, 2, 2, generator=g, dtype=torch.float64),  # q" in text
