"""The oracle sees each kind of difference, and no difference where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workshop.fuzz.compare import TOLERANCE, check, difference, tolerance
from workshop.fuzz.grammar import Case

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
CompileAs = Callable[[Compile], None]

ROWS_HIDDEN = Case(mask="strict")
SECOND = Case(second=True, queries2=3, keys2=3)


def changing(change: Callable[[Tensor], Any]) -> Compile:
    """A compiler whose functions change the eager result."""
    return lambda f: lambda *inputs: change(f(*inputs))


def raising(f: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Tensor) -> Tensor:
        raise ValueError("cannot\nat all")

    return call


def writing(f: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Tensor) -> Any:
        result = f(*inputs)
        inputs[0].data.add_(1)
        return result

    return call


class OtherGradient(torch.autograd.Function):
    """The identity, with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


def only_at_first(f: Callable[..., Any]) -> Callable[..., Any]:
    shapes: list[torch.Size] = []

    def call(*inputs: Tensor) -> Any:
        shapes.append(inputs[0].shape)
        return f(*inputs) + (0 if inputs[0].shape == shapes[0] else 1)

    return call


@pytest.mark.parametrize(
    ("case", "wrong", "kind"),
    [
        (Case(), changing(lambda r: r * (1 + 1e-8)), "result: wrong"),
        (ROWS_HIDDEN, changing(lambda r: r.nan_to_num()), "result: NaN in other places"),
        (Case(), changing(lambda r: r / 0), "result: infinities in other places"),
        (Case(), changing(lambda r: r.float()), "result: another dtype"),
        (Case(), changing(lambda r: r[None]), "result: another shape"),
        (Case(), changing(lambda r: (r, r)), "result: another number"),
        (Case(), changing(lambda r: r.detach()), "result: another requires_grad"),
        (Case(), changing(OtherGradient.apply), "gradient: wrong"),
        (Case(), raising, "compiled raises ValueError"),
        (Case(grad=False), writing, "argument: wrong"),
        (SECOND, only_at_first, "result: wrong"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_compiler_is_found_out(case: Case, wrong: Compile, kind: str, compile_as: CompileAs) -> None:
    compile_as(wrong)
    outcome = check(case)
    assert outcome.failed
    assert outcome.kind == kind
    assert outcome.detail


def test_the_detail_names_the_call_and_the_size_of_the_difference(compile_as: CompileAs) -> None:
    compile_as(only_at_first)
    assert check(SECOND).detail.startswith("call 2: result 0: off by 1,")


def test_the_eager_function_agrees_with_itself(compile_as: CompileAs) -> None:
    compile_as(lambda f: f)
    for case in (Case(), ROWS_HIDDEN, SECOND, Case(change="weights_returned"), Case(numbers="nan_query")):
        assert check(case).kind == ""


def test_where_eager_raises_the_compiled_must_raise_too(compile_as: CompileAs) -> None:
    backward_fails = Case(softmax="stable", change="scores_changed_after")
    compile_as(lambda f: f)
    assert check(backward_fails).kind == "eager raises"
    assert not check(backward_fails).failed
    compile_as(lambda f: lambda q, k, v: (q + k + v, q))
    assert check(backward_fails).kind == "eager raises, compiled does not"


def test_the_outcome_says_what_the_compiler_reported() -> None:
    fused = check(Case(mask="causal"))
    assert (fused.kind, fused.fused, fused.missed, fused.graphs) == ("", 1, (), 1)
    near_miss = check(Case(change="double_softmax"))
    assert (near_miss.kind, near_miss.fused) == ("", 0)
    assert near_miss.missed


def test_a_failure_inside_the_compiler_is_found_out_though_the_answer_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any) -> None:
        raise KeyError("s94")

    for way in ("examine", "examine_pieces"):
        monkeypatch.setattr(f"attngraph.meaning.attention.recogniser.Recogniser.{way}", fails)
    outcome = check(Case())
    assert outcome.failed
    assert (outcome.kind, outcome.fused) == ("the compiler fails inside", 0)
    assert "KeyError: 's94'" in outcome.detail


def test_infinities_of_another_sign_differ() -> None:
    a, b = torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf])
    assert difference(a, b, TOLERANCE)[0] == "infinities in other places"
    assert difference(a, a.clone(), TOLERANCE) == ("", "")


def test_the_tolerance_is_wider_only_where_the_function_itself_rounds() -> None:
    assert tolerance(Case(mask="causal", apply="add")) == TOLERANCE
    assert tolerance(Case(mask="causal", apply="add", fill="-1e9")) == TOLERANCE
    assert tolerance(Case(mask="strict", fill="-1e9")) == TOLERANCE
    assert tolerance(Case(mask="strict", apply="add", fill="-1e9")) > TOLERANCE
    assert tolerance(Case(softmax="to_float32")) > TOLERANCE
