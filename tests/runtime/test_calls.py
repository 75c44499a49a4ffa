"""How a compiled model may be called: any layout, size, structure, mode and thread; always eager's answer."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attngraph
from attngraph.ir.budgets import GRAPHS_KEPT

Same = Callable[..., None]
Function = Callable[..., Any]
Point = namedtuple("Point", "a b")


@dataclass
class Result:
    """What a model in the manner of transformers returns."""

    value: Tensor
    tokens: int
    rest: Any = None


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(2, 5, 4),
    "expanded, stride 0": lambda: torch.randn(1, 1, 4).expand(2, 5, 4),
    "transposed": lambda: torch.randn(2, 4, 5).mT,
    "batch second": lambda: torch.randn(5, 2, 4).transpose(0, 1),
    "strided": lambda: torch.randn(2, 10, 8)[:, ::2, ::2],
    "no tokens": lambda: torch.zeros(2, 0, 4),
    "no batch": lambda: torch.zeros(0, 5, 4),
    "batch of one": lambda: torch.randn(1, 5, 4),
    "one token": lambda: torch.randn(2, 1, 4),
    "width one": lambda: torch.randn(2, 5, 1),
    "one number": lambda: torch.randn(1, 1, 1),
}


def test_one_compiled_function_serves_every_layout_and_size(attention: Function, same: Same) -> None:
    compiled = attngraph.compile(attention)
    for _ in range(2):
        for make in LAYOUTS.values():
            x = make()
            same(compiled(x), attention(x))
    assert compiled.report.graphs <= GRAPHS_KEPT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no tokens", "no batch", "batch of one", "one token", "one number"])
def test_a_graph_of_a_degenerate_size_serves_only_that(name: str, attention: Function, same: Same) -> None:
    compiled = attngraph.compile(attention)
    for x in (LAYOUTS[name](), torch.randn(2, 5, 4), torch.randn(3, 6, 4), LAYOUTS[name]()):
        same(compiled(x), attention(x))


def test_ordinary_sizes_share_one_graph(attention: Function, same: Same) -> None:
    compiled = attngraph.compile(attention)
    for shape in ((2, 5, 4), (3, 6, 4), (7, 2, 8), (2, 64, 16)):
        x = torch.randn(shape)
        same(compiled(x), attention(x))
    assert compiled.report.graphs == 1


def test_the_same_tensor_in_several_places_is_no_promise_for_later_calls(
    attention: Function, same: Same
) -> None:
    compiled = attngraph.compile(attention)
    x, y, z = torch.randn(3, 2, 5, 4).unbind()
    for args in ((x, x, x), (x, y, x), (y, x, x), (x, y, y), (x, y, z), (z, z, y)):
        same(compiled(*args), attention(*args))


@pytest.mark.slow
def test_different_tensors_are_no_promise_either(attention: Function, same: Same) -> None:
    compiled = attngraph.compile(attention)
    x, y, z = torch.randn(3, 2, 5, 4).unbind()
    for args in ((x, y, z), (x, x, x), (x, y, y)):
        same(compiled(*args), attention(*args))


@pytest.mark.slow
def test_gradients_add_up_where_one_tensor_is_given_twice(attention: Function, same: Same) -> None:
    compiled = attngraph.compile(attention)
    x = torch.randn(2, 5, 4, requires_grad=True)
    for args in ((x, x, x), (x, torch.randn(2, 5, 4), x)):
        mine, theirs = (torch.autograd.grad(f(*args).square().sum(), x)[0] for f in (compiled, attention))
        same(mine, theirs)


@pytest.mark.slow
def test_arguments_may_be_named_in_any_order(attention: Function, same: Same) -> None:
    compiled = attngraph.compile(attention)
    q, k, v = torch.randn(3, 2, 5, 4).unbind()
    expected = attention(q, k, v)
    for named in ({"q": q, "k": k, "v": v}, {"v": v, "k": k, "q": q}, {"k": k, "v": v, "q": q}):
        same(compiled(**named), expected)
    same(compiled(q, v=v, k=k), expected)
    same(compiled(q, k, v), expected)


def masked(x: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = x @ x.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ x


def test_an_optional_mask_may_come_and_go(same: Same) -> None:
    compiled = attngraph.compile(masked)
    x, mask = torch.randn(2, 5, 4), torch.rand(2, 1, 5) > 0.3
    for _ in range(2):
        same(compiled(x), masked(x))
        same(compiled(x, mask), masked(x, mask))
        same(compiled(x, None), masked(x))
        same(compiled(x, mask=mask), masked(x, mask))
        same(compiled(x, mask.expand(2, 5, 5)), masked(x, mask))
        same(compiled(x, mask[:1]), masked(x, mask[:1]))
    assert compiled.report.graphs <= GRAPHS_KEPT


NUMBERS = [(1, 1.0, True, "a"), (-0.0, 0.0, True, "a"), (math.inf, 1.0, 0, "a")]
MORE_NUMBERS = [
    *((1.0, 1, 1, "a"), (True, 1.0, 1, "b"), (2, 0.5, False, "a"), (0.0, -0.0, True, "a")),
    *((math.nan, 1.0, True, ""), (2**40, 1e-300, None, "a")),
]


@pytest.mark.parametrize("numbers", [*NUMBERS, *MORE_NUMBERS], ids=str)
def test_numbers_flags_and_texts_are_taken_and_given_back_as_they_are(
    numbers: tuple[Any, ...], same: Same
) -> None:
    def f(x: Tensor, n: Any, s: Any, flag: Any, name: str) -> Any:
        y = torch.softmax(x @ x.mT * s, -1) @ x
        return (y + n if flag else y - n), n, s, flag, name

    compiled = attngraph.compile(f)
    x = torch.randn(2, 5, 4)
    compiled(x, 1, 1, True, "a")
    compiled(x, 0.0, 0.0, True, "a")
    same(compiled(x, *numbers), f(x, *numbers))


@pytest.mark.slow
def test_one_and_true_and_minus_zero_are_told_apart(attention: Function, same: Same) -> None:
    def f(x: Tensor, s: Any) -> Tensor:
        kind = 1 if s is True else 2
        return attention(x) * kind * math.copysign(1, s)

    compiled = attngraph.compile(f)
    x = torch.randn(2, 5, 4)
    for s in (1, True, 1.0, 0.0, -0.0, False, 0):
        same(compiled(x, s), f(x, s))


@pytest.mark.slow
def test_a_number_that_is_not_equal_to_itself_takes_one_graph(attention: Function) -> None:
    compiled = attngraph.compile(lambda x, s: attention(x) * s)
    for _ in range(3):
        assert compiled(torch.randn(2, 5, 4), math.nan).isnan().all()
    assert compiled.report.graphs == 1


@pytest.mark.slow
def test_a_bounded_number_of_graphs_is_kept_and_all_answers_are_right(
    attention: Function, same: Same
) -> None:
    compiled = attngraph.compile(lambda x, s: attention(x) * s)
    x = torch.randn(2, 5, 4)
    for s in [*range(GRAPHS_KEPT + 3), 0, 1]:
        same(compiled(x, s), attention(x) * s)
        assert compiled.report.graphs <= GRAPHS_KEPT
    assert compiled.report.graphs == GRAPHS_KEPT


def test_containers_keep_their_kinds_and_orders(attention: Function, same: Same) -> None:
    def f(point: Point, items: list[Any], named: dict[str, Any]) -> Any:
        inner = [attention(items[0]), {"z": attention(named["x"]["y"]), "a": ()}]
        return Point(attention(point.a), inner), OrderedDict(b=point.b, a=items[1])

    compiled = attngraph.compile(f)
    x = torch.randn(2, 5, 4)
    args = (Point(x, None), [x + 1, (1, 2)], {"x": {"y": x - 1}})
    for _ in range(2):
        same(compiled(*args), f(*args))
    assert list(compiled(*args)[0].b[1]) == ["z", "a"]


@pytest.mark.slow
def test_the_order_of_a_dictionary_matters_if_it_does_in_eager(attention: Function, same: Same) -> None:
    def f(tensors: dict[str, Tensor]) -> Tensor:
        return torch.stack([attention(t) * i for i, t in enumerate(tensors.values())]).sum(0)

    compiled = attngraph.compile(f)
    a, b = torch.randn(2, 2, 5, 4).unbind()
    for given in ({"a": a, "b": b}, {"b": b, "a": a}, {"b": a, "a": b}):
        same(compiled(given), f(given))


def test_dataclasses_sizes_and_fixed_values_come_back(attention: Function) -> None:
    def f(tensors: dict[str, Tensor], *, flag: bool = True, n: int = 2) -> Result:
        y = attention(tensors["q"])
        return Result(y * n, y.shape[1], {"x": [y, None, 3.5, "hi", (1,)], "flag": flag})

    compiled = attngraph.compile(f)
    for shape in ((2, 5, 4), (2, 6, 4), (1, 5, 4), (3, 1, 4), (0, 4, 4), (2, 0, 4)):
        q = torch.randn(shape)
        mine, theirs = (g({"q": q}, flag=False) for g in (compiled, f))
        assert type(mine) is Result
        assert type(mine.tokens) is int and mine.tokens == shape[1]
        assert mine.rest["flag"] is False and mine.rest["x"][1:] == [None, 3.5, "hi", (1,)]
        assert torch.allclose(mine.value, theirs.value, equal_nan=True)


@pytest.mark.xfail(strict=True, reason="a torch.Size among the results comes back as a tuple")
def test_sizes_shapes_dtypes_and_devices_among_the_results_are_eagers(attention: Function) -> None:
    def f(x: Tensor) -> Any:
        attention(x)
        return (
            x.shape,
            x.dtype,
            x.device,
            x.shape[1] * 2,
            len(x),
            x.numel(),
            x.shape[1] > 3,
            x.shape[1] / 2,
            "s",
        )

    compiled = attngraph.compile(f)
    for tokens in (5, 6, 3):
        x = torch.randn(2, tokens, 4)
        mine, theirs = compiled(x), f(x)
        assert mine == theirs
        assert [type(m) for m in mine] == [type(t) for t in theirs]


def test_a_model_may_return_nothing(attention: Function) -> None:
    def f(x: Tensor) -> None:
        attention(x)

    assert attngraph.compile(f)(torch.randn(2, 5, 4)) is None


def test_a_generator_of_results_holds_real_tensors(attention: Function, same: Same) -> None:
    compiled = attngraph.compile(lambda x: (attention(x) * i for i in range(2)))
    x = torch.randn(2, 5, 4)
    for _ in range(2):
        found = list(compiled(x))
        assert all(type(t) is Tensor for t in found)
        same(found, [attention(x) * i for i in range(2)])


def test_a_model_without_tensor_arguments_runs(attention: Function, same: Same) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, 4))

        def forward(self, n: int = 2) -> Tensor:
            return attention(self.w) * n

    model = Constant()
    compiled = attngraph.compile(model)
    same(compiled(), model())
    same(compiled(n=3), model(n=3))
    compiled().sum().backward()
    assert model.w.grad is not None


@pytest.mark.slow
def test_nested_lists_of_numbers_are_read_anew(attention: Function, same: Same) -> None:
    def f(numbers: list[list[float]]) -> Tensor:
        return attention(torch.tensor(numbers))

    compiled = attngraph.compile(f)
    for numbers in ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 5.0]]):
        same(compiled(numbers), f(numbers))


@pytest.mark.parametrize("long", [False, True], ids=["one tile", "several tiles"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_and_infinity_spread_as_in_eager(bad: float, long: bool, attention: Function, same: Same) -> None:
    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.shape[1]
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        return (q @ k.mT).masked_fill(future, -torch.inf).softmax(-1) @ v

    for function, tokens in ((causal, 150),) if long else ((attention, 5), (causal, 5)):
        compiled = attngraph.compile(function)
        q, k, v = torch.randn(3, 2, tokens, 4).unbind()
        for tensor in (q, k, v):
            for place in (0, tokens // 2, tokens - 1):
                kept = tensor.clone()
                tensor[0, place, 1] = bad
                same(compiled(q, k, v), function(q, k, v))
                tensor.copy_(kept)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e5, 1e25, 1e-30])
def test_huge_and_tiny_scores_are_as_in_eager(scale: float, attention: Function, same: Same) -> None:
    compiled = attngraph.compile(attention)
    x = torch.randn(2, 5, 4) * scale
    same(compiled(x), attention(x))


@pytest.mark.parametrize(
    "first",
    [
        torch.no_grad,
        pytest.param(torch.enable_grad, marks=pytest.mark.slow),
        pytest.param(torch.inference_mode, marks=pytest.mark.slow),
    ],
)
def test_grad_modes_and_requires_grad_may_alternate(
    first: Any, layer: type[nn.Module], x: Tensor, same: Same
) -> None:
    model = layer()
    compiled = attngraph.compile(model)
    for mode in (first, torch.enable_grad, torch.inference_mode, torch.no_grad):
        for wanted in (False, True):
            given = x.clone().requires_grad_(wanted)
            with mode():
                mine, theirs = compiled(given), model(given)
            same(mine, theirs)
            assert mine.is_inference() == theirs.is_inference()


@pytest.mark.slow
def test_a_frozen_model_gives_no_gradient_unless_its_input_wants_one(
    layer: type[nn.Module], x: Tensor
) -> None:
    model = layer().requires_grad_(False)
    compiled = attngraph.compile(model)
    assert not compiled(x).requires_grad
    x.requires_grad_()
    compiled(x).sum().backward()
    assert x.grad is not None and model.qkv.weight.grad is None


@pytest.mark.slow
def test_tensors_of_inference_mode_are_taken_outside_of_it(layer: type[nn.Module], same: Same) -> None:
    model = layer().requires_grad_(False)
    compiled = attngraph.compile(model)
    with torch.inference_mode():
        x = torch.randn(2, 5, 8)
    same(compiled(x), model(x))


def test_autocast_is_part_of_a_graph(layer: type[nn.Module], x: Tensor, same: Same) -> None:
    model = layer()
    compiled = attngraph.compile(model)
    for _ in range(2):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            same(compiled(x), model(x), 3e-2)
        same(compiled(x), model(x))
    with torch.autocast("cpu", torch.bfloat16):
        compiled(x).sum().backward()
    assert model.qkv.weight.grad is not None and model.qkv.weight.grad.dtype == torch.float32


@pytest.mark.slow
def test_autocast_inside_the_model_is_kept(layer: type[nn.Module], x: Tensor, same: Same) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y: Tensor = self.inner(x)
            return y.float()

    model = Inside()
    compiled = attngraph.compile(model)
    same(compiled(x), model(x), 3e-2)
    assert len(compiled.report.attention) == 1


@pytest.mark.slow
def test_the_default_dtype_is_part_of_a_graph(attention: Function, same: Same) -> None:
    def f(x: Tensor) -> Tensor:
        return attention(x) + torch.ones(4) * 0.1

    compiled = attngraph.compile(f)
    x = torch.randn(2, 5, 4)
    same(compiled(x), f(x))
    torch.set_default_dtype(torch.float64)
    try:
        same(compiled(x), f(x))
    finally:
        torch.set_default_dtype(torch.float32)


def test_tokens_that_data_select_are_attended_by_one_graph(attention: Function, same: Same) -> None:
    def f(x: Tensor, keep: Tensor) -> Tensor:
        return attention(x[keep])

    compiled, x = attngraph.compile(f), torch.randn(9, 4)
    for keep in (x[:, 0] > 0, torch.ones(9) > 0, torch.zeros(9) > 0, torch.arange(9) == 4):
        same(compiled(x, keep), f(x, keep))
    assert compiled.report.graphs == 1
    assert len(compiled.report.attention) == 1


@pytest.mark.slow
def test_index_tensors_of_any_integer_dtype_are_taken(attention: Function, same: Same) -> None:
    def f(index: Tensor, table: Tensor) -> Tensor:
        return attention(table[index])

    compiled = attngraph.compile(f)
    table, index = torch.randn(10, 4), torch.randint(0, 10, (2, 5))
    for given in (index, index.int(), index.to(torch.int32)):
        same(compiled(given, table), f(given, table))
    with pytest.raises(IndexError):
        compiled(index + 10, table)


def test_a_parameter_may_be_an_argument(attention: Function, same: Same) -> None:
    compiled = attngraph.compile(attention)
    weight = nn.Parameter(torch.randn(2, 5, 4))
    same(compiled(weight), attention(weight))
    compiled(weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.slow
def test_tensor_subclasses_stay_what_they_are(attention: Function) -> None:
    class Marked(Tensor):
        pass

    x = torch.randn(2, 5, 4).as_subclass(Marked)
    assert type(attngraph.compile(attention)(x)) is type(attention(x))


def test_the_models_own_errors_reach_the_user_before_and_after_a_good_call(
    attention: Function, same: Same
) -> None:
    def f(x: Tensor) -> Tensor:
        if x.shape[1] > 8:
            raise ValueError("too long")
        return attention(x)  # type: ignore[no-any-return]

    compiled = attngraph.compile(f)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^too long$"):
            compiled(torch.randn(2, 9, 4))
        x = torch.randn(2, 5, 4)
        same(compiled(x), f(x))
    assert not compiled.report.breaks


def test_shapes_that_do_not_fit_raise_what_eager_raises(attention: Function) -> None:
    compiled = attngraph.compile(attention)
    args = (torch.randn(2, 5, 4), torch.randn(2, 5, 3))
    with pytest.raises(RuntimeError) as theirs:
        attention(*args)
    with pytest.raises(RuntimeError) as mine:
        compiled(*args)
    assert str(theirs.value).split("\n")[0] in str(mine.value)


def test_wrong_arguments_raise_what_python_raises(attention: Function) -> None:
    compiled = attngraph.compile(attention)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'q'"):
        compiled()
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nope'"):
        compiled(torch.randn(2, 5, 4), nope=1)


def test_threads_may_share_a_compiled_model(layer: type[nn.Module], same: Same) -> None:
    model = layer()
    compiled = attngraph.compile(model)
    inputs = [torch.randn(2, 5 + i % 3, 8) for i in range(4)]
    expected = [model(x) for x in inputs]
    problems: list[BaseException] = []

    def work(x: Tensor, result: Tensor, grads: bool) -> None:
        try:
            with torch.set_grad_enabled(grads):
                for _ in range(4):
                    same(compiled(x), result if grads else result.detach())
        except BaseException as problem:
            problems.append(problem)

    threads = [
        threading.Thread(target=work, args=(x, y, i % 2 == 0))
        for i, (x, y) in enumerate(zip(inputs, expected, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


# --- random numbers ------------------------------------------------------------------------------


def test_dropout_goes_by_the_seed_from_the_first_call_on() -> None:
    compiled = attngraph.compile(lambda x: functional.dropout(torch.softmax(x @ x.mT, -1), 0.3) @ x)
    x = torch.randn(2, 5, 4)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(compiled(x))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(compiled(x), compiled(x))
    assert len(compiled.report.attention) == 1


def test_random_numbers_beside_the_attention_are_eagers(attention: Function, same: Same) -> None:
    def f(x: Tensor) -> Tensor:
        return attention(x) + torch.randn_like(x) * torch.rand(4)

    compiled = attngraph.compile(f)
    for tokens in (5, 6, 5):
        x = torch.randn(2, tokens, 4)
        torch.manual_seed(3)
        mine = compiled(x)
        torch.manual_seed(3)
        same(mine, f(x))


def test_compiling_takes_no_random_numbers(attention: Function) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    attngraph.compile(attention)(torch.ones(2, 5, 4))
    assert torch.equal(torch.get_rng_state(), state)
