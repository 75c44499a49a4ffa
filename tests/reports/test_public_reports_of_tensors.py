"""Public reports about modes, random numbers and memory, each as a tiny program: what eager answers, a
compiled model answers."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reports.reports import (
    PIECES,
    REPORTS,
    WRONG,
    Compiler,
    attend,
    cases,
    check,
    report,
    same,
    same_gradients,
    tokens,
)

# --- modes -------------------------------------------------------------------------------------------


@report("pytorch/pytorch#184405")
def _(compile: Compiler) -> None:
    """The default dtype is changed after the first call."""

    def f(x: Tensor) -> list[Tensor]:
        return [attend(x), torch.ones(2), torch.tensor([1.0]), torch.arange(2.0)]

    compiled, x = compile(f), tokens()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            same(compiled(x), f(x))
    finally:
        torch.set_default_dtype(torch.float32)


def _autocast(model: Callable[[Tensor], Tensor], compiled: Callable[[Tensor], Tensor], x: Tensor) -> None:
    found, expected = compiled(x), model(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@report("pytorch/pytorch#112260")
def _(compile: Compiler) -> None:
    """Autocast around some calls and not around others."""

    def f(x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x

    compiled, x = compile(f), tokens()
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            _autocast(f, compiled, x)


@report("pytorch/pytorch#194754")
def _(compile: Compiler) -> None:
    """An autocast object that the model keeps is changed in place."""
    mode = torch.autocast("cpu", torch.bfloat16, enabled=False)

    def f(x: Tensor) -> Tensor:
        with mode:
            return torch.softmax(x @ x.mT, -1) @ x

    compiled, x = compile(f), tokens()
    for enabled in (False, True, False):
        mode._enabled = enabled
        _autocast(f, compiled, x)


@report("pytorch/pytorch#114338", PIECES + "forward switches on gradients that its caller has switched off")
def _(compile: Compiler) -> None:
    """Forward enables gradients, and is called under no_grad."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            y = attend(x)
        return y, y + 1

    compiled, x = compile(f), tokens(grad=True)
    with torch.no_grad():
        found, expected = compiled(x), f(x)
        same(found, expected)
    same(torch.autograd.grad(found[0].sum(), x), torch.autograd.grad(expected[0].sum(), x))


@report("pytorch/pytorch#123713", PIECES + "it asks for gradients of a tensor")
def _(compile: Compiler) -> None:
    """Forward calls requires_grad_ on a value that was computed without gradients."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            y = attend(first(x))
        y.requires_grad_()
        return second(y), y

    compiled, x = compile(f), tokens()
    for out, y in (compiled(x), f(x)):
        assert y.requires_grad and y.is_leaf
        same(torch.autograd.grad(out.sum(), y)[0], second.weight.detach().sum(0).expand(2, 5, 8))


@report("pytorch/pytorch#122414")
def _(compile: Compiler) -> None:
    """The compiled model's training flag is the model's, and follows it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(1.0)).eval()
    compiled, x = compile(model), tokens()
    for training in (False, True, False):
        (model if training else compiled).train(training)
        assert compiled.training == model.training == model[1].training == training
        same(compiled(x), model(x))


@report("pytorch/pytorch#100977")
def _(compile: Compiler) -> None:
    """A call under no_grad, then one that records gradients."""

    model = nn.Linear(8, 8)
    compiled, x, gradients = compile(model), tokens(), []
    with torch.no_grad():
        same(compiled(x), model(x))
    for one in (compiled, model):
        model.zero_grad()
        one(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
    same(*gradients)


@report("Lightning-AI/lightning-thunder#1486")
def _(compile: Compiler) -> None:
    """A function under torch.no_grad's decorator asks whether gradients are on."""

    @torch.no_grad()
    def f(x: Tensor) -> Tensor:
        return attend(x) * (2 if torch.is_grad_enabled() else 3)

    compiled, x = compile(f), tokens(grad=True)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            same(compiled(x), f(x))


# --- random numbers ----------------------------------------------------------------------------------


def _seeded(compile: Compiler, f: Callable[[Tensor], Tensor]) -> None:
    """Three calls after one seed, of eager and compiled; the second call's random numbers are others."""
    x, found = tokens(), []
    for one in (f, compile(f)):
        random.seed(3)
        torch.manual_seed(3)
        found.append([one(x) for _ in range(3)] + [torch.tensor(random.random()), torch.rand(1)])
    same(found[1], found[0])


@report("pytorch/pytorch#197085", PIECES + "it draws from Python's random numbers; it runs as it is")
def _(compile: Compiler) -> None:
    """Python's random.shuffle and random.sample in forward."""

    def f(x: Tensor) -> Tensor:
        order = list(range(5))
        random.shuffle(order)
        return attend(x[:, order]) * random.sample([1, 2, 3], 1)[0]

    _seeded(compile, f)


@report("pytorch/pytorch#197101", PIECES + "it seeds Python's random numbers; it runs as it is")
def _(compile: Compiler) -> None:
    """Forward seeds Python's random numbers."""

    def f(x: Tensor) -> Tensor:
        random.seed(5)
        return attend(x) * random.random()

    _seeded(compile, f)


@report("pytorch/pytorch#95425", PIECES + "it draws from Python's random numbers")
def _(compile: Compiler) -> None:
    """Layers left out at random, by Python's random numbers."""

    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            if random.random() < 0.5:
                x = x + attend(x)
        return x

    _seeded(compile, f)


@report("pytorch/pytorch#192635")
def _(compile: Compiler) -> None:
    """Two dropouts that need not wait for each other draw in the order of the program."""

    def f(x: Tensor) -> Tensor:
        first = F.dropout(attend(x), 0.5)
        return first.sum(1, keepdim=True) + F.dropout(x[:, :1] * 2, 0.3)

    _seeded(compile, f)


# --- memory: views, writes, layouts ------------------------------------------------------------------


@report("pytorch/pytorch#198095", PIECES + "two arguments share memory and one is written to")
def _(compile: Compiler) -> None:
    """A view of an argument is returned after a write to the argument it is a view of."""

    def f(whole: Tensor, part: Tensor) -> Tensor:
        whole.add_(1.0)
        return attend(part)[0] + part[0]

    compiled = compile(f)
    for _ in range(2):
        one, other = (base := tokens(rows=3)).clone(), base.clone()
        same(compiled(one, one[1:]), f(other, other[1:]))
        same(one, other)


@report("pytorch/pytorch#191449")
def _(compile: Compiler) -> None:
    """The use of resize_ on a view of an intermediate result also changed the result itself."""

    def f(x: Tensor) -> Tensor:
        base = attend(x)
        base.view(-1).resize_(2)
        return base + 1

    with torch.no_grad():
        x = tokens()
        same(compile(f)(x), f(x))


@report("pytorch/pytorch#94773", PIECES + "it returns a view of an argument that it writes to")
def _(compile: Compiler) -> None:
    """The slice x[:] shares memory with x: a later write to x shows in it."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        alias = x[:]
        x.mul_(2.0)
        return attend(alias), alias

    compiled, one = compile(f), tokens()
    other = one.clone()
    (found, alias), (expected, _) = compiled(one), f(other)
    same(found, expected)
    same(alias, one)
    alias.zero_()
    assert not one.any()


@report("pytorch/pytorch#136662")
def _(compile: Compiler) -> None:
    """Writes to a view of a clone appeared, under torch.func.grad, in the original."""

    def f(x: Tensor) -> Tensor:
        first = attend(x).clone()
        second = first.clone()
        second[:, 0].copy_(torch.zeros(8))
        return first + 2 * second

    same_gradients(compile(f), f, tokens())
    x = tokens()
    compiled = compile(f)
    same(
        torch.func.grad(lambda x: compiled(x).pow(2).sum())(x),
        torch.func.grad(lambda x: f(x).pow(2).sum())(x),
    )


@report("pytorch/pytorch#174963")
def _(compile: Compiler) -> None:
    """The operation as_strided of an intermediate result reads eager's memory order, also channels_last."""

    def f(x: Tensor) -> Tensor:
        y = torch.roll(x, -1, 0) * 2
        return torch.softmax(y.flatten(2) @ y.flatten(2).mT, -1) + torch.as_strided(y, (3, 3), (4, 1), 2)

    compiled = compile(f)
    for layout in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        x = torch.randn(2, 3, 4, 5).to(memory_format=layout)
        same(compiled(x), f(x))


@report("pytorch/pytorch#179442", WRONG + "a later call with another layout has the layout of the first")
def _(compile: Compiler) -> None:
    """Padding gives a channels_last result for a channels_last input."""

    def f(x: Tensor) -> Tensor:
        y = F.pad(x, (1, 2, 2, 1), mode="reflect")
        flat = y.flatten(2).mT
        return y + attend(flat).mean()

    compiled = compile(f)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 3, 4, 5).to(memory_format=layout)
        same(compiled(x), f(x), layout=True)


@report("pytorch/pytorch#198364", WRONG + "the strides are those that torch tells a trace")
def _(compile: Compiler) -> None:
    """The results of copysign, floor division and put keep the strides of a transposed input."""

    def f(a: Tensor, b: Tensor) -> list[Tensor]:
        put = a.put(torch.tensor([0, 7]), torch.tensor([1.0, 2.0]))
        return [attend(a), torch.copysign(a, b - 1.5), torch.div(a, b, rounding_mode="floor"), put]

    a, b = torch.rand(6, 5).mT, torch.rand(5, 6) + 1
    same(compile(f)(a, b), f(a, b), layout=True)


@report("pytorch/pytorch#183771")
def _(compile: Compiler) -> None:
    """Nearest interpolation of a permuted input keeps its order of dimensions."""

    def f(x: Tensor) -> Tensor:
        return F.interpolate(x, size=(5, 6, 7), mode="nearest") * attend(x.flatten(2)).mean()

    x = torch.randn(2, 5, 2, 3, 2).permute(0, 4, 1, 2, 3)
    same(compile(f)(x), f(x), layout=True)


@report("pytorch/pytorch#122457")
def _(compile: Compiler) -> None:
    """Memory seen through several views was used again while one of them was still read."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.view_as_complex((attend(x) + 1).unflatten(-1, (4, 2)))
        return torch.view_as_real(z) + 1, torch.view_as_real(z + 1)

    x = tokens()
    same(compile(f)(x), f(x))


@report("pytorch/pytorch#113793")
def _(compile: Compiler) -> None:
    """Views into one flat buffer that are written in place one after the other."""

    def f(x: Tensor, flat: Tensor) -> Tensor:
        left, right = flat[:8].view(8), flat[8:].view(8)
        left.mul_(0.5).add_(x.mean((0, 1)))
        right.copy_(left * 2)
        return attend(x + right)

    compiled = compile(f)
    one, other = torch.ones(16), torch.ones(16)
    for count in (3, 5, 5):
        x = tokens(count)
        same(compiled(x, one), f(x, other))
        same(one, other)


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", cases(__name__))
def test_what_was_reported_elsewhere_is_right_here(key: str) -> None:
    check(REPORTS[key])
