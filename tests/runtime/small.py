"""What the tests of the runtime share: small attentions, models that are made of a function, and calls that
are compared with eager's."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import attngraph
from attngraph.runtime.look import Unseen


def attend(q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
    k = q if k is None else k
    return torch.softmax(q @ k.mT, -1) @ (k if v is None else v)


def sequence(count: int = 5, rows: int = 2, width: int = 8, **options: Any) -> Tensor:
    return torch.randn(rows, count, width, **options)


class SelfAttention(nn.Module):
    """One head with a packed projection: x `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        return attend(*self.qkv(x).chunk(3, -1))


class Of(nn.Module):
    """A model that computes what a function of itself and of its arguments gives. Its parts, parameters,
    buffers and plain attributes are named when it is made."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.__dict__["function"] = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.function(self, *args, **named)


def same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Equal structure, dtypes, shapes, NaN patterns, requires_grad, and values up to the tolerance. A tensor
    that is computed when somebody looks at it is as good as a plain one."""
    mine, theirs = pytree.tree_flatten(actual), pytree.tree_flatten(expected)
    assert mine[1] == theirs[1], f"{mine[1]} instead of {theirs[1]}"
    for a, b in zip(mine[0], theirs[0], strict=True):
        assert type(a) is type(b) or type(a) is Unseen, f"{type(a)} instead of {type(b)}"
        if not isinstance(a, Tensor):
            assert repr(a) == repr(b)
            continue
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        largest = float(b.double().nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0
        assert torch.allclose(a, b, atol=tolerance * max(1.0, largest), rtol=tolerance, equal_nan=True), (
            f"off by {float((a.double() - b.double()).abs().nan_to_num(0, 0, 0).max())}"
        )


def gradients(result: Any, wanted: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Of a sum of the results' elements in which no two weigh the same."""
    parts = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    sums = [(t * torch.linspace(0.5, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in parts]
    return torch.autograd.grad(sum(sums[1:], sums[0]), wanted, allow_unused=True)


def together(works: Sequence[Callable[[], object]], problems: list[BaseException] | None = None) -> None:
    """Run all at once, each in a thread; the first thing that went wrong is raised. `problems` gets each."""
    start, problems = threading.Barrier(len(works)), [] if problems is None else problems

    def run(work: Callable[[], object]) -> None:
        try:
            start.wait()
            work()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def agree(
    model: Any, *calls: Any, apart: bool = False, grads: bool = False, tolerance: float = 1e-5,
    graphs: int | None = None, fused: int | None = None, reason: str | None = None, **options: Any,
) -> Any:  # fmt: skip
    """The compiled model, after calls of which each gave what the model gives.

    Args:
        calls: a tensor, or a tuple of arguments.
        apart: eager is a copy of the model, as its calls change it.
        grads: gradients of parameters and of arguments are compared too.
        graphs, fused: how many graphs and attentions the report has then.
        reason: a part of why it is in pieces; it must be whole where this is empty.
    """
    eager = copy.deepcopy(model) if apart else model
    compiled = attngraph.compile(model, **options)
    for call in calls:
        args = call if isinstance(call, tuple) else (call,)
        found, expected = compiled(*args), eager(*args)
        if grads:
            given = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor) and t.requires_grad]
            mine, theirs = (m.parameters() if isinstance(eager, nn.Module) else () for m in (compiled, eager))
            wanted = gradients(expected, [*given, *theirs])
            same(gradients(found, [*given, *mine]), wanted, 10 * tolerance)
        same(found, expected, tolerance)
    report = compiled.report
    assert graphs is None or report.graphs == graphs, report
    assert fused is None or len(report.attention) == fused, report
    if reason is not None:
        told = [stop.reason for stop in report.breaks]
        assert reason in told[0] if reason else not told, told
    return compiled
