"""A fingerprint that is known already serves again exactly while a new walk through the model's state would
find the same."""

import dataclasses
import enum
import gc
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from attngraph.capture.state.fingerprint import Fingerprint, fingerprint
from attngraph.capture.state.scope import Ran, Scope
from attngraph.runtime.graphs import Fingerprints
from tests.runtime.test_state import CHANGES, Holder, Options

NOTHING = Scope()


def scope_of(model: Any) -> Scope:
    """That of a trace in which the forward ran, and the functions that the model holds."""
    ran = Ran()
    held = [value for part in model.modules() for value in vars(part).values()]
    for value in [type(model).forward, *held, *(getattr(v, "func", None) for v in held)]:
        if isinstance(value, types.FunctionType):
            ran.add(value.__code__, value.__globals__)
    return dataclasses.replace(ran.scope(), names=frozenset({*ran.scope().names, "l", "vars"}))


class Slots:
    __slots__ = ("n",)

    def __init__(self, n: int) -> None:
        self.n = n


class Kind(enum.IntEnum):
    ONE = 1


class Table(nn.Module):
    sizes: dict[str, int] = {"a": 1}  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.sizes["a"]


def holder(**attributes: Any) -> Holder:
    return Holder(lambda m: 1, **attributes)


def scaled(x: torch.Tensor, *, by: list[float]) -> torch.Tensor:
    return x * by[0]


def _moved_to_buffers(model: Any) -> None:
    weight = model.bias
    del model.bias
    model.register_buffer("bias", weight)


def _moved_hook(model: Any) -> None:
    model._forward_pre_hooks.update(model._forward_hooks)
    model._forward_hooks.clear()


def _hooked() -> nn.Module:
    model = nn.Linear(8, 8)
    model.register_forward_hook(lambda *_: None)
    return model


SUBTLE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the class": (lambda: holder(n=1), lambda m: setattr(m, "__class__", Table)),
    "an object's dictionary": (
        lambda: holder(c=Options(n=1)), lambda m: setattr(m.c, "__dict__", {"n": 2})
    ),
    "a slot": (lambda: holder(c=Slots(1)), lambda m: setattr(m.c, "n", 2)),
    "a class's table": (Table, lambda m: m.sizes.update(a=m.sizes["a"] + 1)),
    "0.5 as text": (lambda: holder(n=0.5), lambda m: setattr(m, "n", "0.5")),
    "an entry of an enumeration for a number": (lambda: holder(n=1), lambda m: setattr(m, "n", Kind.ONE)),
    "1.0 for 1 in a set": (lambda: holder(s={1}), lambda m: setattr(m, "s", {1.0})),
    "True for 1": (lambda: holder(n=1), lambda m: setattr(m, "n", True)),
    "0.0 for -0.0": (lambda: holder(n=-0.0), lambda m: setattr(m, "n", 0.0)),
    "True for 1 as a key": (
        lambda: holder(d={1: 2}), lambda m: (m.d.clear(), m.d.update({True: 2}))
    ),
    "the order of attributes": (
        lambda: holder(a=1, b=2), lambda m: (delattr(m, "a"), setattr(m, "a", 1))
    ),
    "the name of a value": (lambda: holder(a=1000), lambda m: (delattr(m, "a"), setattr(m, "b", 1000))),
    "a weight's dtype": (
        lambda: nn.Linear(8, 8), lambda m: setattr(m.weight, "data", m.weight.data.double())
    ),
    "a weight's shape": (lambda: nn.Linear(8, 8), lambda m: setattr(m.bias, "data", torch.ones(1))),
    "requires_grad of a plain tensor": (lambda: holder(t=torch.ones(8)), lambda m: m.t.requires_grad_()),
    "a parameter becomes a buffer": (lambda: nn.Linear(8, 8), _moved_to_buffers),
    "a hook becomes a pre-hook": (_hooked, _moved_hook),
    "weights are tied": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        lambda m: setattr(m[0], "weight", m[1].weight),
    ),
    "a default": (
        lambda: holder(f=lambda n=1: n), lambda m: setattr(m.f, "__defaults__", (2,))
    ),
    "a keyword's default": (
        lambda: holder(f=partial(scaled, by=[1.0])), lambda m: m.f.keywords["by"].append(2.0)
    ),
    "a function's code": (
        lambda: holder(f=lambda n: n), lambda m: setattr(m.f, "__code__", (lambda n: n + 1).__code__)
    ),
    "an attribute of a function": (lambda: holder(f=lambda n: n), lambda m: setattr(m.f, "scale", 2)),
    "a long list": (lambda: holder(l=[0] * 1000), lambda m: m.l.append(0)),
    "a set": (lambda: holder(s={1, 2}), lambda m: m.s.add(3)),
    "what a weak reference is to": (
        lambda: holder(w=[Options(n=1)], r=[]),
        lambda m: m.r.append(weakref.ref(m.w[0])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CHANGES, *SUBTLE])
def test_after_any_change_it_is_that_of_a_new_walk(name: str) -> None:
    make, change = {**CHANGES, **SUBTLE}[name]
    model = make()
    known, scope = Fingerprints(model), scope_of(model)
    before = fingerprint([model], scope)
    assert known((), scope) == known((), scope) == known((), scope) == before
    change(model)
    for _ in range(3):
        assert known((), scope) == fingerprint([model], scope)
    if name in SUBTLE:
        # A weight's place in memory and the identity of what replaces it are no part of a fingerprint.
        assert fingerprint([model], scope) != before


def test_globals_are_read_again_after_a_change() -> None:
    space = types.ModuleType("theirs")
    exec("scale = 1\nhelper = [1.0]\ndef forward(x): return x * scale * helper[0]", vars(space))
    known, ran = Fingerprints(space.forward), Ran()
    ran.add(space.forward.__code__, vars(space))
    scope = ran.scope()
    for change in ("pass", "scale = 2", "helper[0] = 3.0", "helper = (1.0,)", "del scale", "scale = 2"):
        exec(change, vars(space))
        for _ in range(4):
            assert known((), scope) == fingerprint([space.forward], scope), change


def test_a_model_that_has_not_changed_is_not_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.TransformerEncoderLayer(8, 2)
    known = Fingerprints(model)
    first = [known((), NOTHING) for _ in range(2)][-1]
    monkeypatch.setattr(Fingerprint, "visit", lambda *_: pytest.fail("walked again"))
    assert known((), NOTHING) is first
    with pytest.raises(pytest.fail.Exception):
        known([Options(n=1)], NOTHING)  # an argument of the call has state as well


def test_attributes_that_are_left_out_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = holder(calls=1000, c=Options(last=None))
    model.register_buffer("seen", torch.zeros(3))
    left_out = Scope(frozenset({(id(model), "calls"), (id(model.c), "last"), (id(model), "seen")}))
    known = Fingerprints(model)
    first = [known((), left_out) for _ in range(2)][-1]
    model.calls, model.c.last, model.seen = 2000, object(), torch.zeros(5)
    monkeypatch.setattr(Fingerprint, "visit", lambda *_: pytest.fail("walked again"))
    assert known((), left_out) is first


@pytest.mark.slow
def test_what_is_replaced_is_not_kept_alive() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    known = Fingerprints(model)
    for _ in range(3):
        known((), NOTHING)
    gone = weakref.ref(model[0].weight)
    model[0] = nn.Linear(8, 8)
    gc.collect()
    assert gone() is None
    assert known((), NOTHING) == fingerprint([model])


def test_a_model_that_always_changes_is_recorded_ever_less() -> None:
    model: Any = holder(last=[0])
    known = Fingerprints(model)
    recorded = 0
    for number in range(100):
        model.last = [0]  # another list, of the same contents: the fingerprint stays the same
        assert known((), NOTHING) == fingerprint([model]), number
        recorded += known._known[NOTHING][1] is not None
    assert 1 <= recorded <= 10


def test_a_lazy_module_is_walked_through_until_it_has_shapes() -> None:
    model = nn.LazyLinear(4)
    known = Fingerprints(model)
    for _ in range(3):
        assert known((), NOTHING) == fingerprint([model])
    model(torch.ones(2, 3))
    for _ in range(3):
        assert known((), NOTHING) == fingerprint([model])
