"""How a compiled model may be called: any layout, size, structure, mode and thread; always eager's answer."""

import functools
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.ir.budgets import GRAPHS_KEPT
from tests.runtime.small import Of, SelfAttention, agree, attend, same, sequence, together

Function = Callable[..., Any]
Point = namedtuple("Point", "a b")


@dataclass
class Result:
    """What a model in the manner of transformers returns."""

    value: Tensor
    tokens: int
    rest: Any = None


# --- layouts, sizes, names: one compiled function for all ---


@pytest.fixture(scope="module")
def compiled() -> attngraph.CompiledModule:
    return attngraph.compile(attend, min_scores=0)


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
    "scores of ten digits": lambda: torch.randn(2, 5, 4) * 1e5,
    "scores beyond float32": lambda: torch.randn(2, 5, 4) * 1e25,
    "scores of nothing": lambda: torch.randn(2, 5, 4) * 1e-30,
    "a parameter": lambda: nn.Parameter(torch.randn(2, 5, 4)),
}


def test_one_compiled_function_serves_every_layout_and_size(compiled: attngraph.CompiledModule) -> None:
    for _ in range(2):
        for make in LAYOUTS.values():
            x = make()
            same(compiled(x), attend(x))
    assert compiled.report.graphs <= GRAPHS_KEPT


def test_ordinary_sizes_share_one_graph() -> None:
    agree(attend, *(torch.randn(s) for s in ((2, 5, 4), (3, 6, 4), (7, 2, 8), (2, 64, 16))), graphs=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no tokens", "no batch", "batch of one", "one token", "one number"])
def test_a_graph_of_a_degenerate_size_serves_only_that(name: str) -> None:
    agree(attend, LAYOUTS[name](), sequence(5), sequence(6, 3), LAYOUTS[name]())


def test_the_same_tensor_in_several_places_is_no_promise_for_later_calls(
    compiled: attngraph.CompiledModule,
) -> None:
    x, y, z = torch.randn(3, 2, 5, 4).requires_grad_().unbind()
    for args in ((x, x, x), (x, y, x), (y, x, x), (x, y, y), (x, y, z), (z, z, y), (x, x, x)):
        found, expected = compiled(*args), attend(*args)
        same(found, expected)
        same(*(torch.autograd.grad(t.square().sum(), args, retain_graph=True) for t in (found, expected)))


def test_arguments_may_be_named_in_any_order(compiled: attngraph.CompiledModule) -> None:
    q, k, v = torch.randn(3, 2, 5, 4).unbind()
    expected = attend(q, k, v)
    for named in ({"q": q, "k": k, "v": v}, {"v": v, "k": k, "q": q}, {"k": k, "v": v, "q": q}):
        same(compiled(**named), expected)
    same(compiled(q, v=v, k=k), expected)


def test_what_eager_refuses_is_refused_in_the_same_words(compiled: attngraph.CompiledModule) -> None:
    args = (torch.randn(2, 5, 4), torch.randn(2, 5, 3))
    with pytest.raises(RuntimeError) as theirs:
        attend(*args)
    with pytest.raises(RuntimeError) as mine:
        compiled(*args)
    assert str(theirs.value).split("\n")[0] in str(mine.value)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'q'"):
        compiled()
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nope'"):
        compiled(torch.randn(2, 5, 4), nope=1)


@pytest.mark.parametrize("long", [False, True], ids=["one tile", "several tiles"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_and_infinity_spread_as_in_eager(bad: float, long: bool) -> None:
    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        return (q @ k.mT).masked_fill(future, -torch.inf).softmax(-1) @ v

    for function, count in ((causal, 150),) if long else ((attend, 5), (causal, 5)):
        operands, calls = torch.randn(3, 2, count, 4).unbind(), []
        for number in range(3):
            for place in (0, count // 2, count - 1):
                calls.append(tuple(t.clone() for t in operands))
                calls[-1][number][0, place, 1] = bad
        agree(function, *calls)


# --- structures of arguments and results ---


def masked(x: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = x @ x.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ x


def test_an_optional_mask_may_come_and_go() -> None:
    x, mask = torch.randn(2, 5, 4), torch.rand(2, 1, 5) > 0.3
    compiled = agree(masked, *((x,), (x, mask), (x, None), (x, mask.expand(2, 5, 5)), (x, mask[:1])) * 2)
    same(compiled(x, mask=mask), masked(x, mask))
    assert compiled.report.graphs <= GRAPHS_KEPT


NUMBERS = [
    *((1, 1.0, True, "a"), (-0.0, 0.0, True, "a"), (math.inf, 1.0, 0, "a")),
    *((1.0, 1, 1, "a"), (True, 1.0, 1, "b"), (2, 0.5, False, "a"), (0.0, -0.0, True, "a")),
    *((math.nan, 1.0, True, ""), (2**40, 1e-300, None, "a")),
]


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_numbers_flags_and_texts_are_taken_and_given_back_as_they_are(numbers: tuple[Any, ...]) -> None:
    def f(x: Tensor, n: Any, s: Any, flag: Any, name: str) -> Any:
        y = torch.softmax(x @ x.mT * s, -1) @ x
        return (y + n if flag else y - n), n, s, flag, name

    x = torch.randn(2, 5, 4)
    agree(f, (x, 1, 1, True, "a"), (x, 0.0, 0.0, True, "a"), (x, *numbers))


@pytest.mark.slow
def test_one_and_true_and_minus_zero_are_told_apart() -> None:
    def f(x: Tensor, s: Any) -> Tensor:
        kind = 1 if s is True else 2
        return attend(x) * kind * math.copysign(1, s)

    x = torch.randn(2, 5, 4)
    agree(f, *((x, s) for s in (1, True, 1.0, 0.0, -0.0, False, 0)))


@pytest.mark.slow
def test_a_bounded_number_of_graphs_is_kept_and_all_answers_are_right() -> None:
    def f(x: Tensor, s: float) -> Tensor:
        return attend(x) * s

    x = torch.randn(2, 5, 4)
    agree(f, *((x, s) for s in [*range(GRAPHS_KEPT + 3), 0, 1]), graphs=GRAPHS_KEPT)
    agree(f, *((x, math.nan) for _ in range(3)), graphs=1)  # a number that is not equal to itself


def test_containers_keep_their_kinds_and_orders() -> None:
    def f(point: Point, items: list[Any], named: dict[str, Any]) -> Any:
        inner = [attend(items[0]), {"z": attend(named["x"]["y"]), "a": ()}]
        return Point(attend(point.a), inner), OrderedDict(b=point.b, a=items[1])

    x = torch.randn(2, 5, 4)
    args = (Point(x, None), [x + 1, (1, 2)], {"x": {"y": x - 1}})
    assert list(agree(f, args, args)(*args)[0].b[1]) == ["z", "a"]


def test_dataclasses_sizes_and_fixed_values_come_back() -> None:
    def f(tensors: dict[str, Tensor], *, flag: bool = True, n: int = 2) -> Result:
        y = attend(tensors["q"])
        return Result(y * n, y.shape[1], {"x": [y, None, 3.5, "hi", (1,)], "flag": flag})

    compiled = attngraph.compile(f)
    for shape in ((2, 5, 4), (2, 6, 4), (1, 5, 4), (3, 1, 4), (0, 4, 4), (2, 0, 4)):
        q = torch.randn(shape)
        mine, theirs = (g({"q": q}, flag=False) for g in (compiled, f))
        assert type(mine) is Result and type(mine.tokens) is int
        same(vars(mine), vars(theirs))


@pytest.mark.xfail(strict=True, reason="a torch.Size among the results comes back as a tuple")
def test_sizes_shapes_dtypes_and_devices_among_the_results_are_eagers() -> None:
    def f(x: Tensor) -> Any:
        attend(x)
        n = x.shape[1]
        return x.shape, x.dtype, x.device, n * 2, len(x), x.numel(), n > 3, n / 2, "s"

    compiled = attngraph.compile(f)
    for count in (5, 6, 3):
        x = torch.randn(2, count, 4)
        mine, theirs = compiled(x), f(x)
        assert mine == theirs
        assert [type(m) for m in mine] == [type(t) for t in theirs]


def of_nothing(x: Tensor) -> None:
    attend(x)


def by_order(tensors: dict[str, Tensor]) -> Tensor:
    return torch.stack([attend(t) * i for i, t in enumerate(tensors.values())]).sum(0)


A, B = torch.randn(2, 2, 5, 4).unbind()
INDEX, ROWS = torch.randint(0, 10, (2, 5)), torch.randn(10, 4)
STRUCTURES: dict[str, tuple[Function, list[Any]]] = {
    "it may return nothing": (of_nothing, [A]),
    "tokens that data select": (
        lambda x, keep: attend(x[keep]),
        [(ROWS, w > 0) for w in (ROWS[:, 0], torch.ones(10), torch.zeros(10), torch.arange(10) == 4)],
    ),
    "without tensor arguments": (
        Of(lambda m, n=2: attend(m.w) * n, w=nn.Parameter(torch.randn(5, 4))), [(), (3,), ()]
    ),
    "a dictionary's order": (by_order, [({"a": A, "b": B},), ({"b": B, "a": A},), ({"b": A, "a": B},)]),
    "nested lists of numbers": (
        lambda numbers: attend(torch.tensor(numbers)),
        [([[1.0, 2.0], [3.0, 4.0]],), ([[1.0, 2.0], [3.0, 5.0]],)],
    ),
    "integers of any dtype": (
        lambda index, table: attend(table[index]), [(i, ROWS) for i in (INDEX, INDEX.int())]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_is_given_and_returned_may_be_anything(name: str) -> None:
    function, calls = STRUCTURES[name]
    grads = name == "without tensor arguments"
    selected = {"graphs": 1, "fused": 1} if name == "tokens that data select" else {}
    compiled = agree(function, *calls, grads=grads, **selected)
    if name == "integers of any dtype":
        with pytest.raises(IndexError):
            compiled(INDEX + 10, ROWS)


def test_a_generator_of_results_holds_real_tensors() -> None:
    compiled = attngraph.compile(lambda x: (attend(x) * i for i in range(2)))
    for _ in range(2):
        found = list(compiled(A))
        assert all(type(t) is Tensor for t in found)
        same(found, [attend(A) * i for i in range(2)])


@pytest.mark.slow
def test_tensor_subclasses_stay_what_they_are() -> None:
    class Marked(Tensor):
        pass

    x = torch.randn(2, 5, 4).as_subclass(Marked)
    assert type(attngraph.compile(attend)(x)) is type(attend(x))


# --- modes, dtypes, errors, threads ---


@pytest.mark.parametrize("first", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_grad_modes_and_requires_grad_may_alternate(first: Any, x: Tensor) -> None:
    model = SelfAttention()
    compiled = attngraph.compile(model)
    for mode in (first, torch.enable_grad, torch.inference_mode, torch.no_grad):
        for wanted in (False, True):
            given = x.clone().requires_grad_(wanted)
            with mode():
                mine, theirs = compiled(given), model(given)
            same(mine, theirs)
            assert mine.is_inference() == theirs.is_inference()


@pytest.mark.slow
def test_a_frozen_model_gives_no_gradient_unless_its_input_wants_one(x: Tensor) -> None:
    model = SelfAttention().requires_grad_(False)
    compiled = attngraph.compile(model)
    with torch.inference_mode():
        of_inference = torch.randn(2, 5, 8)
    same(compiled(of_inference), model(of_inference))
    assert not compiled(x).requires_grad
    x.requires_grad_()
    compiled(x).sum().backward()
    assert x.grad is not None and model.qkv.weight.grad is None


def test_autocast_is_part_of_a_graph(x: Tensor) -> None:
    model = SelfAttention()
    compiled = attngraph.compile(model)
    for _ in range(2):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            same(compiled(x), model(x), 3e-2)
        same(compiled(x), model(x))
    with torch.autocast("cpu", torch.bfloat16):
        compiled(x).sum().backward()
    assert model.qkv.weight.grad is not None and model.qkv.weight.grad.dtype == torch.float32


@pytest.mark.slow
def test_autocast_inside_the_model_is_kept(x: Tensor) -> None:
    def inside(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = m.inner(x)
        return y.float()

    agree(Of(inside, inner=SelfAttention()), x, tolerance=3e-2, fused=1)


def test_the_models_own_errors_reach_the_user_before_and_after_a_good_call() -> None:
    def f(x: Tensor) -> Tensor:
        if x.shape[1] > 8:
            raise ValueError("too long")
        return attend(x)

    compiled = attngraph.compile(f)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^too long$"):
            compiled(torch.randn(2, 9, 4))
        same(compiled(A), f(A))
    assert not compiled.report.breaks


def test_threads_may_share_a_compiled_model() -> None:
    model = SelfAttention()
    compiled = attngraph.compile(model)
    inputs = [sequence(5 + i % 3) for i in range(4)]
    expected = [model(x) for x in inputs]

    def work(x: Tensor, result: Tensor, grads: bool) -> None:
        with torch.set_grad_enabled(grads):
            for _ in range(4):
                same(compiled(x), result if grads else result.detach())

    calls = enumerate(zip(inputs, expected, strict=True))
    together([functools.partial(work, x, y, i % 2 == 0) for i, (x, y) in calls])


# --- random numbers ---


def test_dropout_goes_by_the_seed_from_the_first_call_on() -> None:
    compiled = attngraph.compile(lambda x: F.dropout(torch.softmax(x @ x.mT, -1), 0.3) @ x)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(compiled(A))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(compiled(A), compiled(A))
    assert len(compiled.report.attention) == 1


def test_compiling_takes_no_random_numbers_and_those_beside_the_attention_are_eagers() -> None:
    def f(x: Tensor) -> Tensor:
        return attend(x) + torch.randn_like(x) * torch.rand(4)

    compiled = attngraph.compile(f)
    for count in (5, 6, 5):
        x, found = torch.randn(2, count, 4), []
        for one in (compiled, f):
            torch.manual_seed(3)
            found.append((one(x), torch.get_rng_state()))
        same(*found)


# --- tensors of no elements (a filter that kept nothing, say) ---


def heads(x: Tensor, z: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return (q @ q.mT).softmax(-1) @ q


def by_heads_of_the_batch(x: Tensor, z: Tensor) -> Tensor:
    t, y = x[:, None], x.clone()
    y[..., 0] = 5.0
    return (t @ x[..., :2, :].mT).softmax(-1) @ y[..., :2, :]


def weighted_without_a_softmax(x: Tensor, z: Tensor) -> Tensor:
    t = (x @ x[..., :2, :].mT).softmax(-1) @ x[..., :2, :]
    u = (t.softmax(0) @ z.mT).flip(-1).softmax(-1) @ z.flip(-2)
    return torch.einsum("bij,bij->bi", x, u)


def part_of_the_batch(x: Tensor, z: Tensor) -> Tensor:
    return attend(x.chunk(2, 0)[0])


def part_of_the_tokens(x: Tensor, z: Tensor) -> Tensor:
    """Its graph's conditions divide by a number of tokens."""
    first = x.chunk(2, 1)[0]
    first = x.chunk(2, 1)[0]
    return F.scaled_dot_product_attention(first, first, first, is_causal=True)


def with_a_past(x: Tensor, z: Tensor) -> Tensor:
    return attend(x, torch.cat([z, x], 1))


MODELS = (
    heads, by_heads_of_the_batch, weighted_without_a_softmax, part_of_the_batch, part_of_the_tokens,
    with_a_past,
)  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda f: f.__name__)
def test_calls_without_elements_answer_as_eager(model: Callable[[Tensor, Tensor], Tensor]) -> None:
    sizes = (2, 5, 3), (0, 5, 3), (2, 5, 0), (2, 0, 3)
    calls = [(torch.randn(rows, tokens, 8), torch.randn(rows, others, 8)) for rows, tokens, others in sizes]
    compiled = agree(model, *calls)
    assert not [m.reason for m in compiled.report.missed if "report it" in m.reason]


def test_chunks_of_no_keys_answer_as_eager() -> None:
    """One chunk of queries meets as many chunks of keys as there are, which are none at any size."""

    def model(x: Tensor) -> Tensor:
        q, k = x.roll(1, 1), x.roll(1, 1)[:, :0]
        q, k = (F.pad(t, (0, 0, 0, -q.shape[-2] % 4)).unflatten(-2, (-1, 4)) for t in (q, k))
        return attend(q, k)

    (missed,) = agree(model, torch.randn(2, 4, 8), torch.randn(3, 4, 8), min_scores=0).report.missed
    assert "it has no elements" in missed.reason
