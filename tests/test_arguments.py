"""What users give by mistake: each call says at once what is wrong, in words of the call."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.api.options import CompileOptions, Options


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


MODEL, X = Attention(), torch.randn(2, 5, 8)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "compile a number": (lambda: attngraph.compile(3), "takes an nn.Module or a function, found int"),
    "compile with an unknown option": (
        lambda: attngraph.compile(MODEL, strickt=True),
        "unexpected keyword argument 'strickt'; did you mean 'strict'?",
    ),
    "compile a class": (lambda: attngraph.compile(Attention), "an instance of Attention, found the class"),
    "explain a number": (lambda: attngraph.explain(3), "takes an nn.Module or a function, found int"),
    "explain without arguments": (lambda: attngraph.explain(MODEL), "missing a required argument: 'x'"),
    "bisect a number": (lambda: attngraph.bisect(3, X), "takes an nn.Module or a function, found int"),
    "bisect without arguments": (lambda: attngraph.bisect(MODEL), "missing a required argument: 'x'"),
    "plan a number": (lambda: attngraph.plan(3, (X,), 2), "takes an nn.Module or a function, found int"),
    "plan a tensor": (lambda: attngraph.plan(MODEL, X, 2), "as in (ids,), found Tensor"),
    "plan a machine": (lambda: attngraph.plan(MODEL, (X,), 2, 8e9), "an attngraph.Machine, found float"),
    "passes": (lambda: attngraph.compile(MODEL, passes=3), "passes takes a sequence of passes"),
    "disable": (lambda: attngraph.compile(MODEL, disable=[3]), "disable takes names of passes"),
    "kv_heads": (lambda: attngraph.convert_heads(MODEL, X, kv_heads="2"), "kv_heads is a number of heads"),
    "parse": (lambda: attngraph.parse(3), "parsed from text, found int"),
    "export": (lambda: attngraph.export(attngraph.compile(MODEL), "x.pt2", X), "as in (ids,), found Tensor"),
    "times": (lambda: attngraph.compile(MODEL).times(), "missing a required argument: 'x'"),
    "weights": (lambda: attngraph.compile(MODEL).weights(X, at=3), "at takes the name of an attention"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_a_wrong_type_is_told(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(TypeError) as problem:
        call()
    assert message in str(problem.value) and "\n" not in str(problem.value)


@pytest.mark.parametrize("scores", ["many", 1.5, -1])
def test_min_scores_is_a_whole_number(scores: Any) -> None:
    with pytest.raises(ValueError, match="a whole number from 0 on; found"):
        attngraph.compile(MODEL, min_scores=scores)


def test_every_option_of_compile_is_one_of_what_it_is_checked_as() -> None:
    kept = {f.name for f in dataclasses.fields(Options)} - {"progress", "devices", "later"}
    assert {*CompileOptions.__annotations__} == kept | {"mesh", "shard"}


def test_a_decoder_is_not_compiled_again() -> None:
    from attngraph.models.targets import tiny_decoder_lm

    decoder = attngraph.compile(tiny_decoder_lm(tokens=8)[0], cache=True)
    with pytest.raises(TypeError, match="this decoder is compiled already"):
        attngraph.compile(decoder)


def test_a_backend_that_cannot_serve_is_the_users_choice_and_no_bug() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(attngraph.BackendError, match=r"no kernel of triton.*What to do: leave backend"):
        attngraph.compile(MODEL, backend="triton")(X)


def test_whole_numbers_raise_what_eager_raises_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ones = torch.ones(2, 5, 8, dtype=torch.long)
    with pytest.raises(NotImplementedError) as eager:
        MODEL(ones)
    with caplog.at_level(logging.WARNING, "attngraph"), pytest.raises(NotImplementedError) as compiled:
        attngraph.compile(MODEL, min_scores=0)(ones)
    assert str(compiled.value) == str(eager.value)
    assert not caplog.records


@pytest.mark.parametrize("given", ["hello", None, torch.randn(4)], ids=["text", "None", "vector"])
def test_a_call_that_eager_cannot_run_raises_what_eager_raises(given: Any) -> None:
    with pytest.raises(Exception) as eager:
        MODEL(given)
    with pytest.raises(type(eager.value)) as compiled:
        attngraph.compile(MODEL, min_scores=0)(given)
    assert str(compiled.value) == str(eager.value)
