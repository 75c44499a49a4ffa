"""Operations of torch that run functions: those that only call them are part of the graph, the others are
named, and what is before and after them is compiled."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._higher_order_ops.wrap import wrap
from torch.utils.checkpoint import checkpoint

import attngraph
from attngraph.capture.subgraphs import functions_run
from attngraph.errors import CaptureError, NoDecoderError
from tests.runtime.small import agree, attend, same

X = torch.randn(2, 3, 6, 8)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.compiler.nested_compile_region
def region(x: Tensor) -> Tensor:
    return attend(x)


def scalars(x: Tensor) -> Tensor:
    return attend(torch.vmap(lambda v: v * 2 + 1)(x.flatten()).view_as(x))


INLINED: dict[str, Callable[[Tensor], Any]] = {
    "cond on sizes": lambda x: torch.cond(x.shape[2] > 4, attend, lambda y: y * 2, (x,)),
    "map": lambda x: mapped(lambda row, y: attend(row + y), x, x[0].sin()),
    "nested_compile_region": lambda x: region(region(x)),
    "wrap": lambda x: wrap(attend, x),
    "checkpoint": lambda x: checkpoint(attend, x, use_reentrant=False),
    "vmap over numbers": scalars,
}


@pytest.mark.parametrize("name", INLINED)
def test_what_only_calls_a_function_is_part_of_the_graph(name: str) -> None:
    fused = 2 if name == "nested_compile_region" else 1
    agree(INLINED[name], X.clone().requires_grad_(), grads=True, strict=True, min_scores=0, fused=fused)


class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:  # type: ignore[override]
        return given * 3


def stepped(x: Tensor) -> Any:
    return scan(lambda c, t: (c + t, c * t), torch.zeros_like(x[:, :, 0]), x, dim=2)[1]


LEFT: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "cond": ("cond", lambda x: torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y * 2, (x,))),
    "scan": ("scan", stepped),
    "while_loop": (
        "while_loop",
        lambda x: while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), (torch.tensor(0), x))[1],
    ),
    "a function with gradients of its own": ("autograd_function_apply", Thrice.apply),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_around_a_function_that_is_left_is_compiled(name: str) -> None:
    operation, between = LEFT[name]

    def function(x: Tensor) -> Tensor:
        return attend(between(attend(x)))

    calls = [(X * sign).detach().requires_grad_() for sign in (1, -1)]
    fused = None if operation == "while_loop" else 2  # torch does not divide its graph for training
    compiled = agree(function, *calls, grads=True, tolerance=1e-5, min_scores=0, fused=fused)
    reasons = {b.reason: b.source for b in compiled.report.breaks}
    source = reasons[f"{operation} is a higher-order operation of torch, and a graph has plain ones alone"]
    assert "test_subgraphs.py:" in source
    assert not any("torch.compile cannot capture it" in reason for reason in reasons)


def test_a_function_that_is_left_is_named_where_a_whole_graph_is_wanted() -> None:
    def function(x: Tensor, flag: Tensor) -> Any:
        return attend(torch.cond(flag, lambda y: y.sin(), lambda y: y * 2, (x,)))

    line = function.__code__.co_firstlineno + 1
    message = f"test_subgraphs.py:{line}: cond is a higher-order operation of torch"
    with pytest.raises(CaptureError, match=message):
        attngraph.compile(function, strict=True)(X, torch.tensor(True))


def test_what_torch_cannot_run_in_a_checkpoint_of_its_own_graph_runs_as_it_is() -> None:
    def function(x: Tensor, flag: Tensor) -> Any:
        return checkpoint(lambda y: torch.cond(flag, torch.sin, torch.cos, (y,)), x, use_reentrant=False)

    x = X.clone().requires_grad_()
    agree(function, (x, torch.tensor(True)), (x, torch.tensor(False)), grads=True, min_scores=0)


def test_another_thread_may_use_such_operations_while_one_traces() -> None:
    found: list[Any] = []

    def other() -> None:
        found.append(torch.ops.higher_order.cond(torch.tensor(True), torch.sin, torch.cos, (X,)))

    def function(x: Tensor) -> Tensor:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return attend(x)

    with functions_run():
        function(X)
    torch.testing.assert_close(found, [X.sin()])


def test_an_operation_that_prints_prints_in_every_call(capfd: pytest.CaptureFixture[str]) -> None:
    def function(x: Tensor) -> Tensor:
        torch._higher_order_ops.print("{} rows", x.shape[0])
        return attend(x)

    compiled = attngraph.compile(function, min_scores=0)
    for _ in range(2):
        compiled(X)
    assert capfd.readouterr().out.count("2 rows") == 2


def test_a_sum_by_associative_scan_is_plain_operations() -> None:
    def function(x: Tensor) -> Tensor:
        return attend(associative_scan(torch.add, x, dim=2, combine_mode="generic"))

    compiled = attngraph.compile(function, strict=True, min_scores=0)
    same(compiled(X), attend(X.cumsum(2)))
    assert len(compiled.report.attention) == 1


def test_a_trace_that_fails_leaves_no_level_of_vmap() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: attend(row) if row.sum() > 0 else row)(x)

    for _ in range(2):
        with pytest.raises(RuntimeError):
            attngraph.compile(function, min_scores=0)(X)
    assert torch._C._functorch.maybe_current_level() is None


def test_a_decoder_names_the_operation_that_runs_functions() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 8)

        def forward(self, ids: Tensor) -> Any:
            x = self.embed(ids)
            return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y * 2, (x,))

    with pytest.raises((NoDecoderError, CaptureError), match="cond is a higher-order operation"):
        attngraph.compile(Model().eval(), cache=True).generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)
