"""Public reports about compilers of PyTorch models that went on with what had changed, or lost what a call
should change, each as a tiny program: what eager answers at every call, a compiled model answers."""

import collections
import contextvars
import importlib
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.reports.reports import (
    PIECES,
    REPORTS,
    Compiler,
    attend,
    cases,
    check,
    report,
    same,
    same_gradients,
    tokens,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reports.md"
CHOSEN = contextvars.ContextVar("CHOSEN", default=1.0)
OF_THREAD = threading.local()
PLACE: Any = None


# --- what the code reads, changed between calls ------------------------------------------------------


@report("pytorch/pytorch#176851")
def _(compile: Compiler) -> None:
    """An attribute of a class is changed after the first call."""

    class Setting:
        factor = 1.0

    def f(x: Tensor) -> Tensor:
        return attend(x) * Setting.factor

    compiled = compile(f)
    for Setting.factor in (1.0, 10.0, 0.5):
        x = tokens()
        same(compiled(x), f(x))


@report("pytorch/pytorch#117496")
def _(compile: Compiler) -> None:
    """A number that is an argument has another value in the next call."""

    def f(x: Tensor, t: float = 1.0) -> Tensor:
        return attend(x) + t

    compiled, x = compile(f), tokens()
    for t in (8.0, 4.0, 2.0):
        same(compiled(x, t), f(x, t))
        same(compiled(x, t=t / 3), f(x, t=t / 3))
    same(compiled(x), f(x))


class Changing(nn.Module):
    """Holds a number, a part and a buffer that may change."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.part = -1, nn.Linear(8, 8)

    def change(self, value: int) -> None:
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return attend(self.part(x)) + self.value


@report("pytorch/pytorch#124357")
def _(compile: Compiler) -> None:
    """A method of the model changes a number that forward reads."""
    compiled, model = compile.two(Changing)
    x = tokens()
    for value in (6, 8, 6):
        compiled.change(value)
        model.change(value)
        same(compiled(x), model(x))


@report("pytorch/pytorch#197859")
def _(compile: Compiler) -> None:
    """An entry of the model's __dict__ hides a submodule of the same name."""
    model = Changing()
    compiled, x = compile(model), tokens()
    same(compiled(x), model(x))
    object.__setattr__(model, "part", nn.Linear(8, 8))
    same(compiled(x), model(x))


class Written(nn.Module):
    """Keeps a result at a place of a plain tensor, which is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(4)

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        self.kept[place] = attend(x).mean()
        return self.kept


@report("pytorch/pytorch#115774", PIECES + "it writes to a tensor that is no buffer")
def _(compile: Compiler) -> None:
    """A tensor that forward writes to by an index is replaced by a fresh one."""
    compiled, model = compile.two(Written)
    for place in (0, 3):
        x = tokens()
        same(compiled(x, torch.tensor([place])), model(x, torch.tensor([place])))
        compiled.kept, model.kept = torch.zeros(4), torch.zeros(4)


@report("pytorch/pytorch#178365")
def _(compile: Compiler) -> None:
    """Mask functions of the same code whose defaults differ."""

    def shifted(by: int) -> Callable[..., Tensor]:
        def mask(q: Tensor, k: Tensor, by: int = by) -> Tensor:
            return q + by >= k

        return mask

    def f(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        keep = current.mask(place[:, None], place)
        return attend(x, torch.zeros(keep.shape).masked_fill(~keep, -torch.inf))

    current = types.SimpleNamespace(mask=shifted(0))
    compiled, x = compile(f), tokens()
    for by in (0, 2, 1):
        current.mask = shifted(by)
        same(compiled(x), f(x))
    current.mask.__defaults__ = (3,)
    same(compiled(x), f(x))


@report("pytorch/pytorch#104066")
def _(compile: Compiler) -> None:
    """A tensor and a number kept in a threading.local."""

    def f(x: Tensor) -> Tensor:
        return attend(x + OF_THREAD.shift) * OF_THREAD.factor

    compiled, x, found = compile(f), tokens(), []
    OF_THREAD.shift, OF_THREAD.factor = torch.ones(8), 1.0
    same(compiled(x), f(x))
    OF_THREAD.factor = 3.0
    same(compiled(x), f(x))

    def elsewhere() -> None:
        OF_THREAD.shift, OF_THREAD.factor = torch.zeros(8), -1.0
        found.append((compiled(x), f(x)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    same(*found[0])
    same(compiled(x), f(x))


@report("pytorch/pytorch#186449")
def _(compile: Compiler) -> None:
    """A context variable is set for some calls."""

    def f(x: Tensor) -> Tensor:
        return attend(x) * CHOSEN.get()

    compiled, x = compile(f), tokens()
    same(compiled(x), f(x))
    token = CHOSEN.set(2.0)
    same(compiled(x), f(x))
    CHOSEN.reset(token)
    same(compiled(x), f(x))


@report("pytorch/pytorch#191821", PIECES + "it sets a global")
def _(compile: Compiler) -> None:
    """Forward replaces a global before each use by a helper."""

    def helper() -> Tensor:
        return attend(PLACE.hidden) + 1  # type: ignore[no-any-return]

    def f(x: Tensor) -> Tensor:
        global PLACE
        for _ in range(2):
            PLACE = types.SimpleNamespace(hidden=x)
            x = helper()
        return x

    compiled, x = compile(f), tokens()
    for _ in range(2):
        found, left = compiled(x), PLACE.hidden
        same((found, left), (f(x), PLACE.hidden))


@report("pytorch/pytorch#93782")
def _(compile: Compiler) -> None:
    """A lambda that a function calls by its name is replaced."""

    choose = lambda parts: sum(parts)  # noqa: E731

    def f(x: Tensor) -> Tensor:
        return attend(choose(x.unbind(0)))

    compiled, x = compile(f), tokens()
    same(compiled(x), f(x))
    choose = lambda parts: parts[0]  # noqa: E731
    same(compiled(x), f(x))


# --- side effects ------------------------------------------------------------------------------------


class Collects(nn.Module):
    """Appends to a list of its class."""

    items: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = attend(x)
        Collects.items.append(y)
        return y * 2


@report("pytorch/pytorch#169253", PIECES + "it changes an attribute of a class")
def _(compile: Compiler) -> None:
    """What forward appends to a list of its class is dropped."""
    compiled, x = compile(Collects()), [tokens() for _ in range(3)]
    Collects.items.clear()
    for item in x:
        compiled(item)
    same(Collects.items, [attend(item) for item in x])


@report("pytorch/pytorch#197896", PIECES + "it changes variables of the function around it")
def _(compile: Compiler) -> None:
    """A method of a class that is defined in the call changes a list and a dictionary."""

    def make() -> Callable[[Tensor], Tensor]:
        seen, count = [], {"calls": 0}

        def f(x: Tensor) -> Tensor:
            class Notes:
                def take(self, x: Tensor) -> Tensor:
                    seen.append(x.shape[1])
                    count["calls"] += 1
                    return attend(x) * count["calls"]

            return Notes().take(x)

        f.kept = seen, count  # type: ignore[attr-defined]
        return f

    one, other = make(), make()
    compiled = compile(one)
    for length in (3, 4, 4):
        x = tokens(length)
        same(compiled(x), other(x))
    assert one.kept == other.kept == ([3, 4, 4], {"calls": 3})  # type: ignore[attr-defined]


@report("pytorch/pytorch#198189", PIECES + "it changes a container of its own; it runs as it is")
def _(compile: Compiler) -> None:
    """The order of an OrderedDict in which forward moves an entry to the end."""

    def f(x: Tensor, key: str) -> Tensor:
        recent.move_to_end(key)
        return attend(x) * recent[next(iter(recent))]

    recent = collections.OrderedDict(a=1.0, b=2.0, c=3.0)
    compiled, x = compile(f), tokens()
    for key, first in (("a", 2.0), ("b", 3.0), ("c", 1.0)) * 2:
        same(compiled(x, key), attend(x) * first)
        assert list(recent)[-1] == key


class Alternates(nn.Module):
    """Which of two objects it holds, asked by `is`, decides the answer and what it holds next."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = [1], [1]
        self.now = self.one

    def forward(self, x: Tensor) -> Tensor:
        first = self.now is self.one
        self.now = self.other if first else self.one
        return attend(x) * (2 if first else -1)


@report("pytorch/pytorch#196173", PIECES + "it puts one object in the place of another")
def _(compile: Compiler) -> None:
    """A branch on which object an attribute is, which each call replaces."""
    compiled, model = compile.two(Alternates)
    for _ in range(4):
        x = tokens()
        same(compiled(x), model(x))


@report("pytorch/pytorch#175855")
def _(compile: Compiler) -> None:
    """A loop over a list that grows meanwhile."""

    def f(x: Tensor) -> Tensor:
        values = [attend(x)]

        def grow() -> Iterator[Tensor]:
            for item in values:
                if len(values) < 3:
                    values.append(item + 1)
                yield item

        return torch.stack(list(grow())).sum(0)

    x = tokens()
    same(compile(f)(x), f(x))


# --- hooks -------------------------------------------------------------------------------------------


@report("pytorch/pytorch#117758", PIECES + "the hook changes a list")
def _(compile: Compiler) -> None:
    """Forward hooks registered after the first call, and removed again."""
    model = Changing()
    compiled, x, seen = compile(model), tokens(), []
    same(compiled(x), model(x))
    handle = model.part.register_forward_hook(lambda module, given, result: seen.append(result.sum().item()))
    same(compiled(x), model(x))
    assert len(seen) == 2 and abs(seen[0] - seen[1]) < 1e-3
    handle.remove()
    same(compiled(x), model(x))
    assert len(seen) == 2


def _backward_hook(compile: Compiler, register: Callable[[nn.Module], Any]) -> None:
    model = Changing()
    compiled = compile(model)
    same_gradients(compiled, model, tokens())
    handle = register(model.part)
    same_gradients(compiled, model, tokens())
    handle.remove()
    same_gradients(compiled, model, tokens())


@report("pytorch/pytorch#115750", PIECES + "a graph would not run the hook")
def _(compile: Compiler) -> None:
    """A backward hook registered after the first call changes gradients."""
    _backward_hook(
        compile, lambda part: part.register_full_backward_hook(lambda m, given, _: (given[0] * 2,))
    )


@report("pytorch/pytorch#117265", PIECES + "a graph would not run the hook")
def _(compile: Compiler) -> None:
    """A hook before a module's backward, registered after the first call."""
    _backward_hook(
        compile, lambda part: part.register_full_backward_pre_hook(lambda m, given: (given[0] * 3,))
    )


# --------------------------------------------------------------------------------------------------


def test_the_page_lists_these_reports(golden: Callable[..., None]) -> None:
    """With `--update-golden` the table is written; what stands before it is not."""
    for file in sorted(PAGE.parents[1].glob("tests/reports/test_public_reports_of_*.py")):
        importlib.import_module(f"tests.reports.{file.stem}")
    rows = ["| report | about | result |", "|---|---|---|"]
    for key, case in sorted(REPORTS.items(), key=lambda entry: entry[1].program.__module__):
        repository, number = key.split("#")
        link = f"[{repository.partition('/')[2]}#{number}](https://github.com/{repository}/issues/{number})"
        rows.append(f"| {link} | {(case.program.__doc__ or '').rstrip('.')} | {case.result} |")
    golden(PAGE, PAGE.read_text(encoding="utf-8").partition("| report |")[0] + "\n".join(rows) + "\n")


@pytest.mark.parametrize("key", cases(__name__))
def test_what_was_reported_elsewhere_is_right_here(key: str) -> None:
    check(REPORTS[key])
