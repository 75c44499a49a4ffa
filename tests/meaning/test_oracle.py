"""The oracle computes in float64 whatever the graph's dtypes and the process's default are."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attngraph.capture.trace import capture
from attngraph.meaning.check.oracle import Exact, Oracle


def of_places(x: Tensor) -> Tensor:
    """Everything that has a floating dtype here has it from torch's default."""
    i = torch.arange(1, x.shape[0] + 1)
    parts = [
        i * 0.1, i / 3, i**0.3, 0.3**i, i.exp() * 0.1, (i > 2) * 0.1, torch.where(i > 2, 0.1, 0.7),
        torch.where(i > 2, i, 0.7), torch.full((5,), 0.1), torch.arange(0.0, 0.5, 0.1), torch.sigmoid(i),
        i.rsqrt(), torch.linspace(0.1, 0.7, 5), torch.tensor(0.1) * i, i.float() * 0.1, torch.atan2(i, i + 1),
        (i % 2 == 0).to(torch.float16) / 3,
    ]  # fmt: skip
    return torch.stack([p + x for p in parts])


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_is_made_of_integers_has_all_digits(
    default: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(5, dtype=torch.float64)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        exact = of_places(x)
        torch.set_default_dtype(default)
        graph = capture(of_places, (x.float(),), {}).graph
        monkeypatch.setattr(torch, "set_default_dtype", lambda _: pytest.fail("it is not ours to change"))
        given = [x if i.kind == "argument" else graph.constants[i.name] for i in graph.inputs]
        (found,) = Exact(graph.module).run(*given)
    finally:
        monkeypatch.undo()
        torch.set_default_dtype(before)
    assert found.dtype == torch.float64
    # A number that is written as a tensor is rounded by the model itself.
    torch.testing.assert_close(found[:13], exact[:13], rtol=1e-14, atol=0)
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=0)


def run(function: Callable[..., Any], *tensors: Tensor) -> Tensor:
    result: Tensor
    (result,) = Exact(capture(function, tensors, {}).graph.module).run(*tensors)
    return result


def test_a_cast_keeps_the_digits_and_loses_what_the_narrower_dtype_does_not_have() -> None:
    x = torch.tensor([1 / 3, 1e30, -1e30, math.nan])
    found = run(lambda x: x.half().float(), x)
    assert found[0] == x[0].double()
    assert found.tolist()[1:3] == [math.inf, -math.inf]
    assert found[3].isnan()


def test_values_are_freed_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(lambda x: ((x.sin() + 1).cos(), x * 2), (torch.ones(3),), {}).graph
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    compute = Oracle.compute

    def watched(self: Oracle, node: Any, args: Any, kwargs: Any) -> Any:
        result = compute(self, node, args, kwargs)
        made.append(weakref.ref(result))
        alive.append(sum(ref() is not None for ref in made))
        return result

    monkeypatch.setattr(Oracle, "compute", watched)
    wanted: Any = graph.graph.output_node().args[0]
    results = Oracle().evaluate(nodes, {graph.placeholders()[0]: torch.ones(3)}, wanted)
    assert len(nodes) == 4
    assert max(alive) == len(results) == 2
