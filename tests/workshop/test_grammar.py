"""The grammar: cases of every choice make sense, and graph n of a seed is always the same."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from workshop.fuzz.grammar import CHOICES, NEAR_MISSES, Case
from workshop.fuzz.repair import repaired
from workshop.fuzz.sample import case_of

BASES = (
    Case(),
    Case(mask="causal"),
    Case(mask="causal", second=True),
    Case(mask="causal", mask2="padding"),
    Case(groups="repeat_interleave", repeats=2),
    Case(tokens="cross"),
    Case(tokens="cross", second=True),
)
"""Cases of which at least one can take any choice."""
OPTIONS = [(name, option) for name, options in CHOICES.items() for option in options]


def with_option(name: str, option: Any) -> list[Case]:
    """The bases with one field changed, where that choice survives the repairs."""
    cases = [repaired(dataclasses.replace(base, **{name: option})) for base in BASES]
    return [case for case in cases if getattr(case, name) == option]


def test_the_fields_of_a_case_are_the_choices_with_the_simplest_as_default() -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(Case)}
    assert defaults == {name: options[0] for name, options in CHOICES.items()}
    assert Case().complexity == 0
    assert repaired(Case()) == Case()


def test_near_misses_are_choices() -> None:
    assert all(misses < set(CHOICES[name]) for name, misses in NEAR_MISSES.items())
    assert Case().is_attention
    assert not Case(change="sigmoid").is_attention


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=str)
def test_each_choice_renders_as_python_that_runs_in_eager(
    name: str, option: Any, call_eagerly: Callable[[Case], list[Any]]
) -> None:
    cases = with_option(name, option)
    assert cases, "no case can take this choice"
    for case in cases:
        assert len(call_eagerly(case)) == len(case.calls)


def test_random_cases_run_in_eager_and_use_every_choice(call_eagerly: Callable[[Case], list[Any]]) -> None:
    seen = set()
    for number in range(1500):
        case = case_of(0, number)
        seen |= set(dataclasses.asdict(case).items())
        if number < 400:
            call_eagerly(case)
    assert set(OPTIONS) <= seen


def test_a_repaired_case_needs_no_repair() -> None:
    assert all(repaired(case_of(3, number)) == case_of(3, number) for number in range(500))


def test_rows_that_keep_a_key_are_told_from_rows_that_may_not(
    call_eagerly: Callable[[Case], list[Any]],
) -> None:
    """No NaN under minus infinity where a case says that each query keeps a key; some where it does not."""
    may = []
    for number in range(1500):
        case = case_of(1, number)
        if case.mask == "none" or case.numbers == "nan_query" or case.fill != "-inf" or case.fill2 != "-inf":
            continue
        case = Case(**{**dataclasses.asdict(case), "softmax": "softmax", "weights": "none", "change": "none"})
        found = any(result.isnan().any() for result in call_eagerly(case))
        assert case.may_hide_rows or not found, case
        may += [found] if case.may_hide_rows else []
    assert any(may)


def test_about_half_of_the_cases_are_attention() -> None:
    share = sum(case_of(0, number).is_attention for number in range(1000)) / 1000
    assert 0.3 < share < 0.7


def test_graph_n_of_a_seed_is_the_same_in_another_process() -> None:
    program = "from workshop.fuzz.sample import case_of\nfor n in range(20): print(repr(case_of(5, n)))"
    printed = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": "7"},
    )
    assert printed.stdout.splitlines() == [repr(case_of(5, number)) for number in range(20)]
    assert case_of(5, 0) != case_of(6, 0)
