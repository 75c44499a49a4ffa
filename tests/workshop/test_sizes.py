"""The search around sizes: random functions are eager's, and an error of the compiler is noticed."""

from __future__ import annotations

import pytest

from attngraph.passes.build import Builder
from workshop.fuzz import sizes


@pytest.mark.parametrize("number", range(40))
def test_random_functions_are_eagers_without_an_error_of_the_compiler(number: int) -> None:
    assert not sizes.check(number), sizes.text_of(number)


def test_an_error_of_the_compiler_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("a part")

    monkeypatch.setattr(Builder, "operand", fails)
    assert any("a part" in sizes.check(number) for number in range(12))
