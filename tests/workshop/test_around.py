"""The search for answers that go stale: each program is eager's before and after something around it changes,
and a guard that is left out is noticed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attngraph.capture import guards
from attngraph.capture.state.walk import Walk
from workshop.fuzz.around import asking, programs
from workshop.fuzz.around.places import SOURCES, WRAPPERS
from workshop.fuzz.around.programs import Program

SOURCE = {source.name: source for source in SOURCES}
WRAPPER = {wrapper.name: wrapper for wrapper in WRAPPERS}


def program(source: str, wrapper: str = "forward", kind: str = "module") -> Program:
    return Program(SOURCE[source], WRAPPER[wrapper], kind, (3.0, 2.0))


@pytest.mark.parametrize("source", SOURCE)
def test_a_number_is_watched_wherever_it_is_kept(source: str, tmp_path: Path) -> None:
    assert not programs.check(program(source, "helper of a helper"), tmp_path)


@pytest.mark.parametrize("wrapper", reversed(WRAPPER))
def test_it_is_watched_whatever_code_reads_it(wrapper: str, tmp_path: Path) -> None:
    assert not programs.check(program("global", wrapper), tmp_path)


@pytest.mark.parametrize("kind", ["decoder", "saved", "pieces", "cached", "thread", "function", "default"])
def test_it_is_watched_in_everything_that_is_compiled(kind: str, tmp_path: Path) -> None:
    assert not programs.check(program("other file", "method", kind), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_programs_are_eagers(seed: int, tmp_path: Path) -> None:
    for each in itertools.islice(programs.programs(seed), 60):
        assert not programs.check(each, tmp_path), each


@pytest.mark.parametrize("seed", range(40))
def test_what_a_function_asks_of_its_argument_is_eagers(seed: int) -> None:
    assert not asking.check(seed)


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any], Callable[[Path], str]]] = {
    "globals": (Walk, "variables", lambda *_: None, lambda p: programs.check(program("global"), p)),
    "closures": (Walk, "inside_of", lambda *_: None, lambda p: programs.check(program("closure"), p)),
    "classes": (Walk, "members", lambda *_: (), lambda p: programs.check(program("class attribute"), p)),
    "objects": (Walk, "attributes", lambda *_: None, lambda p: programs.check(program("namespace"), p)),
    "entries": (Walk, "entry", lambda *_: None, lambda p: programs.check(program("global dict"), p)),
    "environment": (
        Walk, "environment", lambda *_: None, lambda p: programs.check(program("environment"), p),
    ),
    "attributes of tensors": (
        Walk, "attributes_of_tensor", lambda *_: None,
        lambda p: programs.check(program("tensor's attribute"), p),
    ),
    "settings": (guards, "settings", lambda: (), lambda p: programs.check(program("deterministic"), p)),
    "what is asked": (guards, "answers", lambda *_: (), lambda p: _first_that_fails()),
    "modes": (guards, "surroundings", lambda: "", lambda p: _first_that_fails()),
}  # fmt: skip


def _first_that_fails() -> str:
    return next(filter(None, map(asking.check, range(40))), "")


@pytest.mark.parametrize("guard", MUTANTS)
def test_a_guard_that_is_left_out_is_noticed(
    guard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, nothing, search = MUTANTS[guard]
    monkeypatch.setattr(owner, name, nothing)
    assert search(tmp_path)
