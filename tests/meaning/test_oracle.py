"""The oracle computes in float64 whatever the graph's dtypes and the process's default are. Comparing two
tensors sees every difference, says where it is, and judges by the rule it is given.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attngraph.capture.trace import capture
from attngraph.meaning.check.comparison import EXACT, FLASH, Rule, compare, elementwise
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


X = torch.tensor([[1.0, -2.0], [math.nan, math.inf]], dtype=torch.float64)


def changed(place: tuple[int, int], value: float) -> Tensor:
    found = X.clone()
    found[place] = value
    return found


def test_equal_tensors_hold_by_every_rule() -> None:
    for x in (X, X.float(), X.nan_to_num().long(), X > 0, X[:0], X[0, 0], torch.complex(X, X)):
        for rule in (EXACT, FLASH, elementwise(1e-9), Rule(1e-9, floor=1.0)):
            result = compare(x.clone(), x, rule)
            assert result.holds
            assert (result.error, result.relative, str(result)) == (0.0, 0.0, "")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (X.float(), "another dtype: torch.float32 instead of torch.float64"),
        (X[None], "another shape: [1, 2, 2] instead of [2, 2]"),
        (changed((0, 1), math.nan), "NaN in other places: 2 instead of 1, first at [0, 1]"),
        (changed((1, 0), math.inf), "NaN in other places: 0 instead of 1, first at [1, 0]"),
        (changed((1, 1), -math.inf), "infinities in other places: 1 instead of 1, first at [1, 1]"),
        (changed((1, 1), 1e300), "infinities in other places: 0 instead of 1, first at [1, 1]"),
        (changed((0, 1), -2.5), "-2.5 instead of -2 at [0, 1]"),
    ],
)
def test_what_differs_is_said_with_its_place(found: Tensor, said: str) -> None:
    result = compare(found, X, elementwise(1e-3))
    assert not result.holds
    assert str(result) == said


def test_integers_are_equal_or_not() -> None:
    a, b = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    assert str(compare(a, b, Rule(1.0))) == "another value: 3 instead of 4 at [2]"
    assert not compare(a > 2, b > 1, Rule(1.0)).holds


def test_an_error_too_large_for_float64_is_no_agreement() -> None:
    most = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert not compare(-most, most, elementwise(1e-3)).holds


def test_a_rule_says_what_an_error_is_held_against() -> None:
    wanted = torch.tensor([100.0, 0.0], dtype=torch.float64)
    found = wanted + torch.tensor([0.0, 0.5], dtype=torch.float64)
    assert compare(found, wanted, Rule(0.005)).holds  # of the largest, 100
    assert not compare(found, wanted, Rule(0.004)).holds
    assert compare(found, wanted, elementwise(0.5)).holds  # of 1 + 0
    assert not compare(found, wanted, elementwise(0.4)).holds
    assert compare(found, wanted, elementwise(0.4, added=1.0)).holds
    assert compare(found * 1e-3, wanted * 1e-3, Rule(5e-4, floor=1.0)).holds
    assert not compare(found, wanted).holds


def test_by_the_flash_rule_the_error_is_at_most_twice_that_of_eager() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    eager = (exact + 1e-3).float()
    assert compare((exact - 1.9e-3).float(), exact, FLASH, eager).holds
    assert not compare((exact - 2.1e-3).float(), exact, FLASH, eager).holds


def test_where_the_exact_answer_has_no_number_eager_is_what_counts() -> None:
    exact, eager = torch.tensor([1.0, math.nan], dtype=torch.float64), torch.tensor([1.0, 5.0])
    assert compare(eager.clone(), exact, FLASH, eager).holds
    result = compare(torch.tensor([1.0, 5.1]), exact, FLASH, eager)
    assert "where the float64 model gives NaN" in result.problem
    assert result.detail == "5.1 instead of 5 at [1]"


def test_what_only_another_device_has_for_integers_is_computed_from_floats() -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.histc.default, (graph.placeholder("x"), 4, 0, 3))
    node.meta["val"] = torch.empty(4, dtype=torch.int32)
    found = Oracle().compute(node, [torch.tensor([0, 3, 3, 1], dtype=torch.int32), 4, 0, 3], {})
    assert found.dtype == torch.int32 and found.tolist() == [1, 1, 0, 2]
