"""A graph depends on what the code of a model read and leaves what it changes as it was. What later calls
cannot compare is no constant of a graph: the reason says what it is, and calls answer as eager. What only a
library notes for itself is nothing to fear."""

import builtins
import collections
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import random as drawn
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attngraph
from attngraph.api import arguments
from attngraph.capture.graph_breaks import GraphBreaks
from attngraph.errors import CaptureError
from tests.runtime.small import Of, agree, attend, same

X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
COUNTED = itertools.count(1)
DRAWS, NUMPYS = random.Random(0), numpy.random.default_rng(0)
BACKENDS: dict[Any, str] = {}
SEEN: list[int] = []
NESTED: list[Any] = [1.0]
UNREAD = 1.0
for _ in range(200):
    NESTED = [NESTED]


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def _in_slots(state: Slots) -> float:
    state.count += 1
    return state.count


def _in_place(state: Any) -> Any:
    state += 1
    return state if isinstance(state, Tensor) else float(state[0])


def _by_appending(state: Any) -> float:
    state.append(1)
    return len(state)


def counting(make: Callable[[], Any], count: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """Multiplies its result by how often it was called."""
    return lambda: Of(lambda m, x: attend(x) * m.count(m.state), state=make(), count=count)


def _deep(x: Tensor) -> Tensor:
    found: Any = NESTED
    while isinstance(found, list):
        found = found[0]
    return attend(x) * float(found)


def _with_pythons(x: Tensor) -> Tensor:
    return attend(x * random.uniform(1, 2), x)


def _with_numpys(x: Tensor) -> Tensor:
    return attend(x * float(numpy.random.uniform(1, 2)), x)


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return attend(x + torch.randn_like(x), x)


def _with_gradients_inside(x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(attend(y).square().sum(), y)
    return attend(x - 0.1 * slope, x)


def _dropping(draw: Callable[[], float]) -> Callable[[], nn.Module]:
    """Leaves out layers by chance, as LayerDrop does."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            if draw() < 0.5:
                x = x + attend(m.layer(x), x)
        return x

    return lambda: Of(forward, layer=nn.Linear(8, 8))


def _notes() -> float:
    SEEN.append(1)
    return float(len(SEEN))


def _namespace() -> nn.Module:
    """Calls a function of code that was run, which has Python's own names beside its own."""
    names: dict[str, Any] = {"calls": 0}
    exec("def weights(x):\n    return x.softmax(-1)\n", names)

    def forward(m: Any, x: Tensor) -> Tensor:
        m.names["calls"] += 1
        found: Tensor = m.names["weights"](x @ x.mT) @ x * m.names["calls"]
        return found

    return Of(forward, names=names)


STATE = r"(the tensor|the attribute|an iterator,.*) state"
PYTHONS, NUMPY = "draws random numbers from Python's random", "draws random numbers from numpy"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a tensor that is no buffer": (counting(lambda: torch.zeros(()), _in_place), STATE),
    "an iterator": (counting(lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0]), next), STATE),
    "Python's random numbers": (lambda: _with_pythons, PYTHONS),
    "a clock": (lambda: lambda x: attend(x) * time.time(), r"the clock \(time\)"),
    "slots": (counting(Slots, _in_slots), "the attribute count of a Slots"),
    "a numpy array": (counting(lambda: numpy.zeros(2), _in_place), STATE),
    "a deque": (counting(collections.deque, _by_appending), STATE),
    "a bounded deque": (counting(lambda: collections.deque(maxlen=9), _by_appending), STATE),
    "a bytearray": (counting(bytearray, _by_appending), STATE),
    "itertools.count": (counting(lambda: itertools.count(1), next), STATE),
    "a generator": (counting(lambda: (float(n) for n in range(1, 9)), next), STATE),
    "code that was run": (_namespace, "changes the attribute names"),
    "a global iterator": (lambda: lambda x: attend(x) * float(next(COUNTED)), "COUNTED"),
    "what is nested deeply": (lambda: _deep, "NESTED, a list: it is nested too deeply"),
    "a file": (
        lambda: lambda x: attend(x) * float(Path(os.devnull).read_text() == ""), f"the file {os.devnull}"
    ),
    "a helper's list": (
        lambda: Of(lambda m, x: attend(x) * m.factor(), factor=lambda: _notes()),
        "changes the global variable SEEN",
    ),
    "a generator of random numbers": (
        lambda: lambda x: attend(x) * DRAWS.random(), "changes the global variable DRAWS"
    ),
    "a generator of numpy": (lambda: lambda x: attend(x) * NUMPYS.random(), "the global variable NUMPYS"),
    "numpy's random numbers": (lambda: _with_numpys, NUMPY),
    "random numbers by a name of one's own": (lambda: lambda x: attend(x * drawn(), x), PYTHONS),
    "a random length": (lambda: lambda x: attend(x[:, : random.randint(1, 6)], x), PYTHONS),
    "one of two numbers": (lambda: lambda x: attend(x * (1 + random.randrange(2)), x), PYTHONS),
    "layers that are left out": (_dropping(random.random), PYTHONS),
    "layers that numpy leaves out": (_dropping(numpy.random.rand), NUMPY),
    "a seed": (lambda: _seeded, "calls torch.manual_seed"),
    "gradients inside": (lambda: _with_gradients_inside, "computes gradients"),
}  # fmt: skip
OTHERS = {"a clock", "a global iterator", "numpy's random numbers"}
"""Which answer otherwise in each call: torch.compile draws numpy's numbers from torch's stream."""
LINES = {"Python's random numbers", "numpy's random numbers", "a seed", "gradients inside"}
"""Whose reason names the line."""


def calls(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The results of four calls, for each of which random numbers begin anew."""
    found = []
    SEEN.clear()
    for seed in range(4):
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        DRAWS.seed(seed)
        NUMPYS.bit_generator.state = numpy.random.default_rng(seed).bit_generator.state
        found.append(function(X).detach())
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_says_what_and_takes_no_numbers_from_a_stream(name: str) -> None:
    make, reason = REFUSED[name]
    before = _streams()
    with pytest.raises(CaptureError, match=reason) as raised:
        attngraph.compile(make(), strict=True)(X)
    assert name not in LINES or "test_what_is_read.py:" in str(raised.value)
    assert before == _streams()


def _streams() -> tuple[Any, ...]:
    """The states of the generators that the functions of this file draw from."""
    own = DRAWS.getstate(), NUMPYS.bit_generator.state
    return random.getstate(), numpy.random.get_state()[1].tolist(), *own  # type: ignore[index]


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", [n for n in REFUSED if n not in OTHERS])
def test_each_call_counts_draws_and_seeds_as_eager_does(name: str, gradients: bool) -> None:
    torch.manual_seed(0)
    model = REFUSED[name][0]()
    torch.manual_seed(0)
    other, before = REFUSED[name][0](), list(vars(builtins).values())
    with torch.set_grad_enabled(gradients):
        same(calls(attngraph.compile(model, min_scores=0)), calls(other), 1e-4)
    assert all(a is b for a, b in zip(before, vars(builtins).values(), strict=True))


def test_numpys_numbers_are_drawn_in_each_call() -> None:
    first, second, *_ = calls(attngraph.compile(REFUSED["numpy's random numbers"][0](), min_scores=0))
    assert not torch.equal(first, second)


def test_an_iterator_that_is_not_advanced_stands_in_no_ones_way() -> None:
    model: Any = Of(lambda m, x: attend(x), numbers=itertools.count())
    agree(model, X, strict=True, min_scores=0)
    assert next(model.numbers) == 0


OF_ONE_VALUE: dict[str, Callable[[], float]] = {
    "randrange": lambda: random.randrange(1),
    "randint": lambda: random.randint(3, 3),
    "uniform": lambda: random.uniform(2.0, 2.0),
    "choice": lambda: random.choice([5]),
}


@pytest.mark.parametrize("name", OF_ONE_VALUE)
def test_a_draw_of_one_possible_value_is_no_draw(name: str) -> None:
    agree(lambda x: attend(x * (1 + OF_ONE_VALUE[name]()), x), X, strict=True, min_scores=0, graphs=1)


@pytest.fixture
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype")
def test_a_default_dtype_is_followed_where_it_is_put_back() -> None:
    def in_float64(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return attend(x) * torch.ones(8)
        finally:
            torch.set_default_dtype(torch.float32)

    def for_good(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        return attend(x)

    agree(in_float64, X, X, strict=True, min_scores=0)
    with pytest.raises(CaptureError, match=r"changes torch's default dtype at .*what_is_read.py:\d+"):
        attngraph.compile(for_good, strict=True)(X)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_fused_and_have_eagers_gradients(reentrant: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return x + nn.functional.dropout(attend(m.layer(x), x), 0.3)

        return checkpoint(block, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    model = Of(forward, layer=nn.Linear(8, 8))
    # torch 2.11 fails when it traces what checkpoint does without reentering: such a model runs in pieces
    whole = reentrant or torch.__version__ >= "2.14"
    compiled = attngraph.compile(model, strict=whole, min_scores=0)
    found = []
    for run in (compiled, model):
        model.zero_grad()
        torch.manual_seed(0)
        x = X.clone().requires_grad_()
        out = run(x)
        (out * torch.arange(8.0)).sum().backward()
        found.append(
            (out.detach(), x.grad, *(w.grad.clone() for w in model.parameters() if w.grad is not None))
        )
    same(*found, 1e-4)
    assert not whole or len(compiled.report.attention) == 1


AVERAGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda mean, new: mean.mul_(0.9).add_(new, alpha=0.1),
    "lerp_": lambda mean, new: mean.lerp_(new, 0.1),
    "copy_": lambda mean, new: mean.copy_(0.9 * mean + 0.1 * new),
    "a part": lambda mean, new: mean[2:].add_(new[2:]),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_a_running_mean_takes_no_gradients_along(name: str) -> None:
    """A running mean of what is projected, as codebooks and batch norms keep it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q = m.layer(x)
        with torch.no_grad():
            AVERAGES[name](m.mean, q.mean((0, 1)))
        return torch.softmax((q - m.mean) @ x.mT, -1) @ x

    model: Any = Of(forward, layer=nn.Linear(8, 8), mean=nn.Buffer(torch.zeros(8)))
    compiled = agree(model, X, X, X, apart=True, grads=True, tolerance=1e-4, strict=True, min_scores=0)
    assert not compiled.mean.requires_grad


# --- torch.compile's pieces ---


def test_a_failure_inside_of_torch_compile_runs_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def printing(x: Tensor) -> Tensor:
        print(end="")
        return attend(x)

    def fails(*args: object) -> Tensor:
        torch._dynamo.guards.GuardBuilder.ID_MATCH(None, None)  # type: ignore[arg-type]
        raise AssertionError("unreachable")

    pieces = GraphBreaks(printing, lambda module: module, CaptureError("it prints", "it prints"))  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(pieces, "run", fails)
    assert torch.equal(pieces(X), printing(X))
    assert "torch.compile cannot capture it either" in pieces.breaks[-1].reason


def test_an_error_of_the_model_in_pieces_is_the_models() -> None:
    def failing(x: Tensor) -> Tensor:
        print(end="")
        if x.shape[0] > 1:
            raise ZeroDivisionError("mine")
        return attend(x)

    with pytest.raises(ZeroDivisionError, match="mine"):
        attngraph.compile(failing)(X)


# --- what is nothing to fear ---


def test_what_a_library_notes_by_the_class_of_a_traces_tensors_is_no_change() -> None:
    def backend_of(x: Tensor) -> str:
        return BACKENDS.setdefault(type(x), "torch")

    agree(lambda x: attend(x) if backend_of(x) else x, X, strict=True, min_scores=0, fused=1)


def test_what_the_code_does_not_read_may_change_without_another_graph() -> None:
    class Model(nn.Module):
        unread = 1.0

        def other(self) -> float:
            return UNREAD

        def forward(self, x: Tensor) -> Tensor:
            return attend(x)

    compiled = attngraph.compile(Model(), min_scores=0)
    compiled(X)
    Model.unread, globals()["UNREAD"] = 2.0, 3.0
    compiled(X)
    assert compiled.report.graphs == 1


def test_under_hooks_of_all_modules_the_model_itself_runs(caplog: pytest.LogCaptureFixture) -> None:
    arguments._told.cache_clear()
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    compiled = agree(model, X, min_scores=0)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        torch.testing.assert_close(compiled(X), model(X))
    finally:
        handle.remove()
    assert caplog.text.count("under a hook of all modules the model itself runs") == 1
    torch.testing.assert_close(compiled(X), model(X))


def test_the_default_device_is_part_of_a_call() -> None:
    compiled = agree(lambda x: attend(x) + torch.ones(8), X, min_scores=0)
    with torch.device("meta"), pytest.raises(RuntimeError, match="device"):
        compiled(X)
    same(compiled(X), attend(X) + 1)


def test_passes_run_without_the_callers_autocast() -> None:
    def scores_by_einsum(x: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.einsum("bqd,bkd->bqk", x, x).softmax(-1)
        return weights @ x, weights

    with torch.autocast("cpu", torch.bfloat16):
        agree(scores_by_einsum, X, tolerance=2e-2, strict=True, min_scores=0, fused=1)


@pytest.mark.parametrize("bound", [False, True])
def test_code_for_files_does_not_run_in_a_graph_that_serves_calls(bound: bool) -> None:
    from torch.compiler import is_exporting

    def model(x: Tensor) -> Tensor:
        return attend(x) * (2.0 if (is_exporting() if bound else torch.compiler.is_exporting()) else 3.0)

    agree(model, X, min_scores=0)


def test_a_module_that_forward_imports_first_keeps_what_it_defines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_in_forward.py").write_text("SCALE = 3.0\ndef scaled(x): return x * SCALE\n")
    monkeypatch.syspath_prepend(tmp_path)

    def forward(x: Tensor) -> Tensor:
        import imported_in_forward as module

        return attend(module.scaled(x))

    compiled = attngraph.compile(forward, strict=True, min_scores=0)
    torch.testing.assert_close(compiled(X), attend(X * 3))
    import imported_in_forward

    assert imported_in_forward.SCALE == 3
    imported_in_forward.SCALE = 2.0
    torch.testing.assert_close(compiled(X), attend(X * 2))
