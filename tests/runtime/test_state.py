"""What a model is made of may change between calls: weights, modes, attributes, hooks, what a function
closes over. A compiled model sees every change, and loses no side effect."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import attngraph

Same = Callable[..., None]
Function = Callable[..., Any]


def attend(q: Tensor, k: Tensor | None = None) -> Tensor:
    k = q if k is None else k
    return torch.softmax(q @ k.mT, -1) @ k


class Holder(nn.Module):
    """Attention times whatever `read` finds in the module."""

    def __init__(self, read: Callable[[Any], Any], **attributes: Any) -> None:
        super().__init__()
        self.__dict__["read"] = read
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = attend(x) * self.read(self)
        return result


class Options:
    """A plain object, as configurations are."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    *way, last = path.split(".")
    return lambda model: setattr(functools.reduce(getattr, way, model), last, value)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None]]] = {
    "a number": (lambda: Holder(lambda m: m.n, n=2), _set("n", 3)),
    "a private number": (lambda: Holder(lambda m: m._n, _n=2), _set("_n", 3)),
    "a flag": (lambda: Holder(lambda m: 1 if m.flag else -1, flag=True), _set("flag", False)),
    "an entry of a list": (lambda: Holder(lambda m: m.l[1], l=[1.0, 2.0]), lambda m: m.l.__setitem__(1, 5.0)),
    "a longer list": (lambda: Holder(lambda m: len(m.l), l=[1.0, 2.0]), lambda m: m.l.append(5.0)),
    "an entry of a dictionary": (
        lambda: Holder(lambda m: m.d["a"], d={"a": 2.0}),
        lambda m: m.d.update(a=7.0),
    ),
    "an entry of a nested list": (
        lambda: Holder(lambda m: m.d["a"][0][0], d={"a": [[2.0]]}),
        lambda m: m.d["a"][0].__setitem__(0, 7.0),
    ),
    "a configuration": (lambda: Holder(lambda m: m.c.n, c=Options(n=2)), _set("c.n", 3)),
    "a nested configuration": (
        lambda: Holder(lambda m: m.c.d.n, c=Options(d=Options(n=2))),
        _set("c.d.n", 3),
    ),
    "a private configuration": (lambda: Holder(lambda m: m._c.n, _c=Options(n=2)), _set("_c.n", 3)),
    "a plain tensor, replaced": (
        lambda: Holder(lambda m: m.t, t=torch.ones(8)),
        _set("t", torch.ones(8) * 3),
    ),
    "a plain tensor, written": (lambda: Holder(lambda m: m.t, t=torch.ones(8)), lambda m: m.t.mul_(3)),
    "a tensor in a list": (
        lambda: Holder(lambda m: m.l[0], l=[torch.ones(8)]),
        lambda m: m.l.__setitem__(0, torch.ones(8) * 3),
    ),
    "a function": (lambda: Holder(lambda m: m.f(2), f=lambda n: n), _set("f", lambda n: n * n * n)),
    "a module without weights": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        lambda m: m.__setitem__(1, nn.Tanh()),
    ),
    "one more module": (lambda: nn.Sequential(nn.Linear(8, 8)), lambda m: m.append(nn.Tanh())),
    "one module less": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), lambda m: m.pop(1)),
    "a module's option": (lambda: nn.Sequential(nn.LeakyReLU(0.1)), _set("0.negative_slope", 0.5)),
    "a parameter, replaced": (
        lambda: nn.Sequential(nn.Linear(8, 8)),
        _set("0.weight", nn.Parameter(torch.ones(8, 8) / 8)),
    ),
    "a parameter, removed": (lambda: nn.Sequential(nn.Linear(8, 8)), _set("0.bias", None)),
    "a forward hook": (
        lambda: nn.Sequential(nn.Linear(8, 8)),
        lambda m: m[0].register_forward_hook(lambda *a: a[2] * 2),
    ),
    "a forward hook at the root": (
        lambda: nn.Sequential(nn.Linear(8, 8)),
        lambda m: m.register_forward_hook(lambda *a: a[2] * 2),
    ),
    "a hook before the forward": (
        lambda: nn.Sequential(nn.Linear(8, 8)),
        lambda m: m[0].register_forward_pre_hook(lambda _, a: (a[0] * 2,)),
    ),
    "another forward": (
        lambda: nn.Sequential(nn.Linear(8, 8)),
        lambda m: setattr(m[0], "forward", lambda x: x * 3),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_after_compiling_is_seen(name: str, x: Tensor, same: Same) -> None:
    make, change = CHANGES[name]
    model = make()
    compiled = attngraph.compile(model)
    with torch.no_grad():
        same(compiled(x), model(x))
        change(model)
        same(compiled(x), model(x))


def test_what_a_function_closes_over_may_change(x: Tensor, same: Same) -> None:
    scale, table, weight, first, second = 1.0, {"a": [1.0]}, torch.ones(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def f(x: Tensor) -> Tensor:
        return attend(first(x)) * scale * table["a"][0] * weight

    compiled = attngraph.compile(f)
    same(compiled(x), f(x))
    scale = 2.0
    same(compiled(x), f(x))
    table["a"][0] = 3.0
    same(compiled(x), f(x))
    weight.mul_(2)
    same(compiled(x), f(x))
    weight = torch.full((8,), 5.0)
    same(compiled(x), f(x))
    first.weight.data.mul_(2)
    same(compiled(x), f(x))
    first = second
    same(compiled(x), f(x))


GLOBAL_SCALE = 1.0
GLOBAL_MODULE = nn.Linear(8, 8)


def helper(x: Tensor) -> Tensor:
    return GLOBAL_MODULE(x) * GLOBAL_SCALE  # type: ignore[no-any-return]


def uses_helper(x: Tensor) -> Tensor:
    return attend(helper(x))


def test_globals_may_change_also_those_of_helpers(
    x: Tensor, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = attngraph.compile(uses_helper)
    same(compiled(x), uses_helper(x))
    monkeypatch.setitem(globals(), "GLOBAL_SCALE", 3.0)
    same(compiled(x), uses_helper(x))


FILE = types.ModuleType("another_file")
exec("TABLE = [1.0]\nHELD = [1.0]\ndef f(): return HELD[0]\nclass Own:\n    TABLE = [1.0]", vars(FILE))


class Scaled(nn.Module):
    TABLE: ClassVar[list[float]] = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return attend(x) * FILE.TABLE[0] * FILE.f() * FILE.Own.TABLE[0] * self.TABLE[0]


@pytest.mark.parametrize("table", [FILE.TABLE, FILE.HELD, FILE.Own.TABLE, Scaled.TABLE])
def test_tables_of_other_files_and_of_classes_may_change(table: list[float], x: Tensor, same: Same) -> None:
    model = Scaled()
    compiled = attngraph.compile(model)
    for table[0] in (1.0, 3.0, 1.0):
        same(compiled(x), model(x))


class Caller:
    """A callable object that is no module, but holds one."""

    def __init__(self) -> None:
        self.inner = nn.Linear(8, 8)

    def __call__(self, x: Tensor) -> Tensor:
        return attend(self.inner(x))

    def method(self, x: Tensor) -> Tensor:
        return attend(self.inner(x)) * 2


class WithMethod(nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return attend(self(x))


def _wrapped(module: nn.Module) -> Function:
    @functools.wraps(attend)
    def inner(x: Tensor) -> Tensor:
        return attend(module(x))

    return inner


def _ways_to_hold_a_module() -> dict[str, tuple[nn.Module, Function]]:
    a, b, c, d, e, f = (nn.Linear(8, 8) for _ in range(6))
    caller, method, bound, inside = Caller(), Caller(), WithMethod(8, 8), [b]
    return {
        "a closure": (a, lambda x: attend(a(x))),
        "a list in a closure": (b, lambda x: attend(inside[0](x))),
        "a partial": (c, functools.partial(lambda module, x: attend(module(x)), c)),
        "a partial by name": (d, functools.partial(lambda x, module: attend(module(x)), module=d)),
        "a default": (e, lambda x, module=e: attend(module(x))),
        "a decorated function": (f, _wrapped(f)),
        "a callable object": (caller.inner, caller),
        "a method of an object": (method.inner, method.method),
        "a method of a module": (bound, bound.encode),
        "a helper's global": (GLOBAL_MODULE, uses_helper),
    }


@pytest.mark.parametrize("name", sorted(_ways_to_hold_a_module()))
def test_weights_that_a_function_reaches_are_trained_and_followed(name: str, x: Tensor, same: Same) -> None:
    module, function = _ways_to_hold_a_module()[name]
    compiled = attngraph.compile(function)
    same(compiled(x), function(x))
    with torch.no_grad():
        module.weight.mul_(2)
    same(compiled(x), function(x))
    mine, theirs = (
        torch.autograd.grad(f(x).square().sum(), list(module.parameters())) for f in (compiled, function)
    )
    same(mine, theirs)


def test_a_module_may_be_an_argument(x: Tensor, same: Same) -> None:
    def f(module: nn.Module, x: Tensor) -> Tensor:
        return attend(module(x))

    compiled = attngraph.compile(f)
    one, two = nn.Linear(8, 8), nn.Linear(8, 8)
    for module in (one, two, one):
        same(compiled(module, x), f(module, x))
    with torch.no_grad():
        one.weight.mul_(2)
    same(compiled(one, x), f(one, x))
    compiled(one, x).sum().backward()
    assert one.weight.grad is not None


def test_a_closed_over_tensor_gets_its_gradient(x: Tensor, same: Same) -> None:
    weight = torch.ones(8, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return attend(x * weight)

    compiled = attngraph.compile(f)
    mine, theirs = (torch.autograd.grad(g(x).square().sum(), weight) for g in (compiled, f))
    same(mine, theirs)


def test_tracing_leaves_the_models_containers_the_objects_that_they_are(x: Tensor, same: Same) -> None:
    shared, nested = [2.0], {"a": (1.0, [3.0])}
    model = Holder(lambda m: m.l[0] * m.d["a"][1][0], l=shared, d=nested, other=nested)
    compiled = attngraph.compile(model)
    same(compiled(x), model(x))
    assert model.l is shared and model.d is nested and model.other is nested
    same(compiled(x), model(x))
    assert compiled.report.graphs == 1
    shared[0] = 5.0
    nested["a"][1][0] = 7.0  # type: ignore[index]
    same(compiled(x), model(x))


class _Doubled(torch.autograd.Function):
    """A softmax that says that its gradient is twice what it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 2 * y * (grad - (grad * y).sum(-1, keepdim=True))


_DOUBLED: Function = functools.partial(_Doubled.apply)


def _hooked(x: Tensor) -> Tensor:
    scores = x @ x.mT
    if scores.requires_grad:
        scores.register_hook(lambda grad: 3 * grad)
    return scores.softmax(-1) @ x


@pytest.mark.parametrize(
    "function",
    [lambda x: _Doubled.apply(x @ x.mT) @ x, lambda x: _DOUBLED(x @ x.mT) @ x, _hooked],
    ids=["function", "function in a variable", "hook"],
)
def test_gradients_that_the_model_defines_itself_are_kept(function: Any) -> None:
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    compiled = attngraph.compile(function)
    found = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, function)]
    assert torch.allclose(*found)
    assert compiled.report.breaks
    with torch.no_grad():
        again = attngraph.compile(function)
        assert torch.allclose(again(x), function(x))
    assert len(again.report.attention) == 1


def test_an_argument_that_is_written_after_it_was_used_keeps_its_gradients() -> None:
    def function(q: Tensor, v: Tensor) -> Tensor:
        weights = (q @ q.mT).softmax(-1)
        v.mul_(2)
        return weights @ v

    compiled = attngraph.compile(function)
    found = []
    for f in (compiled, function):
        q, v = (
            torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(s)).requires_grad_() for s in (0, 1)
        )
        found.append(torch.autograd.grad(f(q, v * 1).square().sum(), (q, v)))
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


# --- modes and weights ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_half_in_training_stays_so_and_is_traced_so(
    layer: type[nn.Module], x: Tensor, same: Same
) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.one, self.two = layer(), nn.Dropout(0.5), nn.Dropout(0.5)
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.two(self.one(self.inner(x))))  # type: ignore[no-any-return]

    model = Two()
    compiled = attngraph.compile(model)
    model.norm.eval()
    before = copy.deepcopy(model.norm.state_dict())
    for one in (True, False):
        for two in (True, False):
            model.one.train(one)
            model.two.train(two)
            found = compiled(x)
            assert (model.one.training, model.two.training, model.norm.training) == (one, two, False)
            assert model.training
            zeros = float((found == model.norm(torch.zeros(1, 5, 1))).float().mean())
            assert (zeros > 0.2) == (one or two)
            if not (one or two):
                same(found, model(x))
    same(dict(model.norm.state_dict()), dict(before))


@pytest.mark.slow
def test_the_mode_of_a_closed_over_module_counts(x: Tensor, same: Same) -> None:
    dropout = nn.Dropout(0.5)
    compiled = attngraph.compile(lambda x: dropout(attend(x)))
    assert (compiled(x) == 0).any()
    dropout.eval()
    same(compiled(x), attend(x))
    dropout.train()
    assert (compiled(x) == 0).any()


def test_train_and_eval_of_the_compiled_model_are_those_of_the_model(layer: type[nn.Module]) -> None:
    model = nn.Sequential(layer(), nn.Dropout(0.5))
    compiled = attngraph.compile(model)
    assert compiled.training
    assert compiled.eval() is compiled
    assert not model.training and not model[1].training and not compiled.training
    whole = nn.Sequential(compiled)
    whole.train()
    assert model[1].training


def test_training_steps_are_those_of_eager(layer: type[nn.Module], same: Same) -> None:
    model = nn.Sequential(layer(), nn.LayerNorm(8), layer())
    other = copy.deepcopy(model)
    compiled = attngraph.compile(other)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, compiled)]
    for tokens in (7, 9, 9, 12):
        x = torch.randn(3, tokens, 8)
        for module, optimizer in zip((model, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    same(dict(other.state_dict()), dict(model.state_dict()))
    assert compiled.report.graphs == 1


def test_tied_weights_stay_tied_until_they_are_untied(x: Tensor, same: Same) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return attend(self.a(x), self.b(x))

    model = Tied()
    compiled = attngraph.compile(model)
    same(compiled(x), model(x))
    mine, theirs = (torch.autograd.grad(m(x).square().sum(), model.a.weight) for m in (compiled, model))
    same(mine, theirs)
    model.b.weight = nn.Parameter(torch.randn(8, 8))
    same(compiled(x), model(x))
    model.b.weight = model.a.weight
    same(compiled(x), model(x))


def test_frozen_parameters_get_no_gradient_until_they_are_thawed(layer: type[nn.Module], x: Tensor) -> None:
    model = layer()
    model.qkv.weight.requires_grad_(False)
    compiled = attngraph.compile(model)
    compiled(x).sum().backward()
    assert model.qkv.weight.grad is None and model.qkv.bias.grad is not None
    model.qkv.weight.requires_grad_(True)
    compiled(x).sum().backward()
    assert model.qkv.weight.grad is not None


def test_weights_loaded_after_compiling_are_used_without_a_new_graph(
    layer: type[nn.Module], x: Tensor, same: Same
) -> None:
    model = layer()
    compiled = attngraph.compile(model)
    compiled(x)
    for target, options in ((model, {}), (compiled, {}), (model, {"assign": True})):
        target.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, **options)
        same(compiled(x), model(x))
    assert compiled.report.graphs == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_model_may_be_cast_after_compiling(
    dtype: torch.dtype, layer: type[nn.Module], x: Tensor, same: Same
) -> None:
    model = layer()
    compiled = attngraph.compile(model)
    compiled(x)
    assert compiled.to(dtype) is compiled
    assert model.qkv.weight.dtype == dtype
    same(compiled(x.to(dtype)), model(x.to(dtype)), 2e-2)
    compiled.float()
    same(compiled(x), model(x), 1e-5)


def test_state_dicts_have_the_models_own_names(layer: type[nn.Module], same: Same) -> None:
    model = layer()
    compiled = attngraph.compile(model)
    names = ["qkv.weight", "qkv.bias"]
    assert list(compiled.state_dict()) == names
    compiled.load_state_dict(model.state_dict())
    compiled.load_state_dict({f"_orig_mod.{k}": v for k, v in model.state_dict().items()})
    whole = nn.Sequential(compiled, attngraph.compile(attngraph.compile(layer())))
    assert list(whole.state_dict()) == [f"{i}.{n}" for i in (0, 1) for n in names]
    whole.load_state_dict(whole.state_dict())
    assert {id(p) for p in compiled.parameters()} == {id(p) for p in model.parameters()}
    with pytest.raises(RuntimeError, match="Missing key"):
        compiled.load_state_dict({})


def test_attributes_and_methods_of_the_model_are_reached(layer: type[nn.Module]) -> None:
    model = layer()
    model.config = Options(n=1)
    compiled = attngraph.compile(model)
    assert compiled.config is model.config
    assert compiled.qkv is model.qkv
    with pytest.raises(AttributeError, match="nonsense"):
        _ = compiled.nonsense


@pytest.mark.slow
def test_copies_and_pickles_stand_on_their_own(layer: type[nn.Module], x: Tensor, same: Same) -> None:
    model = layer()
    compiled = attngraph.compile(model)
    expected = compiled(x)
    deep = copy.deepcopy(compiled)
    with torch.no_grad():
        deep.qkv.weight.zero_()
    same(compiled(x), expected)
    assert not torch.allclose(deep(x), expected)
    same(pickle.loads(pickle.dumps(compiled._orig_mod.qkv)).weight, model.qkv.weight)
    same(copy.copy(compiled)(x), expected)


@pytest.mark.slow
def test_a_compiled_model_goes_through_pickle_and_torch_save(x: Tensor, same: Same) -> None:
    compiled = attngraph.compile(WithMethod(8, 8))
    expected = compiled(x)
    same(copy.deepcopy(compiled)(x), expected)
    file = io.BytesIO()
    torch.save(compiled.state_dict(), file)
    file.seek(0)
    fresh = WithMethod(8, 8)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    same(fresh(x), expected)


@pytest.mark.slow
def test_a_compiled_torch_layer_goes_through_pickle(x: Tensor, same: Same) -> None:
    compiled = attngraph.compile(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval())
    expected = compiled(x)
    same(pickle.loads(pickle.dumps(compiled))(x), expected)


# --- writes and side effects -----------------------------------------------------------------------


class Counting(nn.Module):
    """Buffers written in a forward, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("assigned", torch.zeros(()))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.average.mul_(0.9).add_(x.detach().mean((0, 1)) * 0.1)
        self.assigned = self.assigned + 2
        x = self.norm(x.mT).mT
        return attend(x) * self.seen + self.average + self.assigned


@pytest.mark.slow
def test_buffers_are_written_as_in_eager(same: Same) -> None:
    model = Counting()
    other = copy.deepcopy(model)
    compiled = attngraph.compile(other)
    for tokens in (5, 6, 7):
        x = torch.randn(2, tokens, 8)
        same(compiled(x), model(x))
    same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.slow
def test_a_buffer_that_grows_is_followed(same: Same) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(2, 0, 8), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.keys = torch.cat([self.keys, x], 1)
            return attend(x, self.keys)

    model = Growing()
    compiled = attngraph.compile(copy.deepcopy(model))
    for tokens in (3, 1, 1, 2):
        x = torch.randn(2, tokens, 8)
        same(compiled(x), model(x))
    assert compiled.keys.shape == (2, 7, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 5, 4),
        lambda: torch.randn(2, 4, 5).mT,
        lambda: torch.randn(2, 10, 8)[:, ::2, ::2],
    ],
    ids=["plain", "transposed", "strided"],
)
def test_arguments_are_written_as_in_eager(make: Callable[[], Tensor], same: Same) -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return attend(a, b)

    compiled = attngraph.compile(f)
    for _ in range(2):
        a, b = make(), make()
        kept = a.clone(), b.clone()
        same(compiled(a, b), f(*kept))
        same((a, b), kept)


@pytest.mark.slow
def test_arguments_that_share_memory_are_written_as_in_eager(same: Same) -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return attend(a, b)

    for separate_first in (True, False):
        compiled = attngraph.compile(f)
        if separate_first:
            compiled(torch.randn(2, 5, 4), torch.randn(2, 5, 4))
        x = torch.randn(2, 5, 4)
        kept = x.clone()
        same(compiled(x, x), f(kept, kept))
        same(x, kept)
        base = torch.randn(4, 5, 4)
        kept = base.clone()
        same(compiled(base[:2], base[1:3]), f(kept[:2], kept[1:3]))
        same(base, kept)


class Keeping(nn.Module):
    """Side effects of every kind that Python allows."""

    def __init__(self, effect: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.__dict__["effect"] = effect
        self.log: list[Any] = []
        self.named: dict[str, Any] = {}
        self.count = 0
        self.last: Any = None
        self.kept = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        y = attend(x)
        self.effect(self, y)
        return y * 2


def _count(model: Any, _: Tensor) -> None:
    model.count += 1


EFFECTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "appended sizes": lambda m, y: m.log.append(y.shape[1]),
    "appended tensors": lambda m, y: m.log.append(y),
    "an entry of a dictionary": lambda m, y: m.named.update(y=y, n=m.named.get("n", 0) + 1),
    "a counter": _count,
    "a tensor where none was": lambda m, y: setattr(m, "last", y),
    "a tensor where another was": lambda m, y: setattr(m, "kept", y),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_side_effects_on_the_model_happen_at_every_call(name: str, same: Same) -> None:
    model = Keeping(EFFECTS[name])
    other = Keeping(EFFECTS[name])
    compiled = attngraph.compile(other)
    for tokens in (5, 6, 5):
        x = torch.randn(2, tokens, 8)
        same(compiled(x), model(x))
        for attribute in ("log", "named", "count", "last", "kept"):
            same(getattr(other, attribute), getattr(model, attribute))


def test_side_effects_outside_the_model_happen_at_every_call(
    x: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def f(x: Tensor, notes: dict[str, Any]) -> Tensor:
        seen.append(x.shape[1])
        notes["n"] = notes.get("n", 0) + 1
        print("called")
        return attend(x)

    compiled = attngraph.compile(f)
    notes: dict[str, Any] = {}
    for _ in range(3):
        compiled(x, notes)
    assert len(seen) == 3
    assert notes["n"] == 3
    assert capsys.readouterr().out.count("called") == 3


@pytest.mark.slow
def test_a_table_computed_on_first_use_is_kept(same: Same) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None or self.table.shape[0] < x.shape[1]:
                self.table = torch.arange(x.shape[1]).cos()[:, None]
            return attend(x * self.table[: x.shape[1]])

    model = Lazy()
    other = copy.deepcopy(model)
    compiled = attngraph.compile(other)
    for tokens in (5, 3, 7, 6):
        x = torch.randn(2, tokens, 8)
        same(compiled(x), model(x))
    assert other.table is not None and type(other.table) is Tensor


@pytest.mark.slow
def test_modules_that_take_their_shape_from_the_first_input_do(layer: type[nn.Module], same: Same) -> None:
    model = nn.Sequential(nn.LazyLinear(8), layer())
    compiled = attngraph.compile(model)
    for _ in range(2):
        x = torch.randn(2, 5, 3)
        same(compiled(x), model(x))
    assert compiled.report.attention


class Registry:
    """Replaces what it holds in its first use, as libraries do that look for what is installed."""

    def __init__(self) -> None:
        self.held: Any = None

    def look(self) -> None:
        if self.held is None:
            held: dict[str, Any] = {"torch": torch, "found": []}
            held["found"].append(held)
            self.held = types.SimpleNamespace(found=held)


REGISTRY = Registry()


def test_what_a_first_call_keeps_may_contain_itself_and_modules(same: Same) -> None:
    def forward(x: Tensor) -> Tensor:
        REGISTRY.look()
        return attend(x)

    compiled = attngraph.compile(forward, strict=True)
    for tokens in (5, 7):
        x = torch.randn(2, tokens, 8)
        same(compiled(x), attend(x))
    assert REGISTRY.held is not None
    assert len(compiled.report.attention) == 1
