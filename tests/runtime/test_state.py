"""What a model is made of, and what it reads around it, may change between calls: weights, modes, attributes,
hooks, objects among its arguments, classes, globals, what a function closes over. A compiled model sees every
change, and loses no side effect."""

import copy
import dataclasses
import functools
import gc
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import attngraph
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from tests.runtime.small import Of, SelfAttention, agree, attend, gradients, same, sequence

Function = Callable[..., Any]


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


def linear(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *more)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "a number": (lambda: Holder(lambda m: m.n, n=2), _set("n", 3)),
    "a private number": (lambda: Holder(lambda m: m._n, _n=2), _set("_n", 3)),
    "a flag": (lambda: Holder(lambda m: 1 if m.flag else -1, flag=True), _set("flag", False)),
    "an entry of a list": (lambda: Holder(lambda m: m.l[1], l=[1.0, 2.0]), lambda m: m.l.__setitem__(1, 5.0)),
    "a longer list": (lambda: Holder(lambda m: len(m.l), l=[1.0, 2.0]), lambda m: m.l.append(5.0)),
    "an entry of a dictionary": (lambda: Holder(lambda m: m.d["a"], d={"a": 2.0}), lambda m: m.d.update(a=7)),
    "an entry of a nested list": (
        lambda: Holder(lambda m: m.d["a"][0][0], d={"a": [[2.0]]}), lambda m: m.d["a"][0].__setitem__(0, 7.0)
    ),
    "a configuration": (lambda: Holder(lambda m: m.c.n, c=Options(n=2)), _set("c.n", 3)),
    "a nested configuration": (
        lambda: Holder(lambda m: m.c.d.n, c=Options(d=Options(n=2))), _set("c.d.n", 3)
    ),
    "a private configuration": (lambda: Holder(lambda m: m._c.n, _c=Options(n=2)), _set("_c.n", 3)),
    "a plain tensor, replaced": (lambda: Holder(lambda m: m.t, t=torch.ones(8)), _set("t", torch.zeros(8))),
    "a plain tensor, written": (lambda: Holder(lambda m: m.t, t=torch.ones(8)), lambda m: m.t.mul_(3)),
    "a tensor in a list": (
        lambda: Holder(lambda m: m.l[0], l=[torch.ones(8)]), lambda m: m.l.__setitem__(0, torch.ones(8) * 3)
    ),
    "a function": (lambda: Holder(lambda m: m.f(2), f=lambda n: n), _set("f", lambda n: n * n * n)),
    "a module without weights": (lambda: linear(nn.ReLU()), lambda m: m.__setitem__(1, nn.Tanh())),
    "one more module": (linear, lambda m: m.append(nn.Tanh())),
    "one module less": (lambda: linear(nn.Tanh()), lambda m: m.pop(1)),
    "a module's option": (lambda: nn.Sequential(nn.LeakyReLU(0.1)), _set("0.negative_slope", 0.5)),
    "a parameter, replaced": (linear, _set("0.weight", nn.Parameter(torch.ones(8, 8) / 8))),
    "a parameter, removed": (linear, _set("0.bias", None)),
    "a forward hook": (linear, lambda m: m[0].register_forward_hook(lambda *a: a[2] * 2)),
    "a forward hook at the root": (linear, lambda m: m.register_forward_hook(lambda *a: a[2] * 2)),
    "a hook before the forward": (linear, lambda m: m[0].register_forward_pre_hook(lambda _, a: (a[0] * 2,))),
    "another forward": (linear, lambda m: setattr(m[0], "forward", lambda x: x * 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_after_compiling_is_seen(name: str, x: Tensor) -> None:
    make, change = CHANGES[name]
    model = make()
    with torch.no_grad():
        compiled = agree(model, x)
        change(model)
        same(compiled(x), model(x))


# --- what is around the model ---


SCALE, TABLE, GLOBAL_MODULE = 1.0, {"scale": 1.0}, nn.Linear(8, 8)
HERE = sys.modules[__name__]
FILE = types.ModuleType("another_file")
exec("TABLE = [1.0]\nHELD = [1.0]\ndef f(): return HELD[0]\nclass Own:\n    TABLE = [1.0]", vars(FILE))


@dataclasses.dataclass
class Data:
    scale: float = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Fixed:
    scale = 1.0


class Scaled(nn.Module):
    scale: ClassVar[float] = 1.0
    table: ClassVar[list[float]] = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return attend(x) * self.scale * self.table[0]


def uses_global(x: Tensor) -> Tensor:
    return attend(GLOBAL_MODULE(x))


def _first(place: list[float]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: place.__setitem__(0, 3.0)


def _attribute(place: Any, name: str, value: Any = 3.0) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(place, name, value)


PLACES: dict[str, tuple[Function, Callable[[pytest.MonkeyPatch], None]]] = {
    "its class": (Scaled(), _attribute(Scaled, "scale")),
    "a table of its class": (Scaled(), _first(Scaled.table)),
    "its forward": (Scaled(), _attribute(Scaled, "forward", lambda self, x: attend(x) * 3.0)),
    "the class of an object": (Holder(lambda m: m.given.scale, given=Fixed()), _attribute(Fixed, "scale")),
    "a class": (Holder(lambda m: m.given.scale, given=Fixed), _attribute(Fixed, "scale")),
    "a global": (lambda x: attend(x) * SCALE, _attribute(HERE, "SCALE")),
    "a global table": (
        lambda x: attend(x) * TABLE["scale"], lambda patch: patch.setitem(TABLE, "scale", 3.0)
    ),
    "a module": (lambda x: attend(x) * HERE.SCALE, _attribute(HERE, "SCALE")),  # type: ignore[attr-defined]
    "a table of another file": (lambda x: attend(x) * FILE.TABLE[0], _first(FILE.TABLE)),
    "what a helper of another file reads": (lambda x: attend(x) * FILE.f(), _first(FILE.HELD)),
    "a class of another file": (lambda x: attend(x) * FILE.Own.TABLE[0], _first(FILE.Own.TABLE)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_what_a_model_reads_around_it_may_change(
    name: str, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, change = PLACES[name]
    compiled = agree(model, x)
    change(monkeypatch)
    same(compiled(x), attend(x) * 3.0)
    for table in (Scaled.table, FILE.TABLE, FILE.HELD, FILE.Own.TABLE):
        table[0] = 1.0


@pytest.mark.parametrize("make", [Data, lambda: Options(scale=1.0), Slotted, types.SimpleNamespace])
def test_an_object_among_the_arguments_may_change(make: Callable[[], Any], x: Tensor) -> None:
    options, chosen = make(), {1}
    compiled = attngraph.compile(lambda x, options, chosen: attend(x) * options.scale * float(sum(chosen)))
    for options.scale in (1.0, 3.0, 1.0):
        same(compiled(x, options, chosen), attend(x) * options.scale)
    assert compiled.report.graphs == 2
    chosen.add(2)
    same(compiled(x, options, chosen), attend(x) * 3.0)


def test_what_a_function_closes_over_may_change(x: Tensor) -> None:
    scale, table, weight, first, second = 1.0, {"a": [1.0]}, torch.ones(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def f(x: Tensor) -> Tensor:
        return attend(first(x)) * scale * table["a"][0] * weight

    compiled = agree(f, x)
    scale = 2.0
    same(compiled(x), f(x))
    table["a"][0] = 3.0
    same(compiled(x), f(x))
    weight.mul_(2)
    same(compiled(x), f(x))
    weight = torch.full((8,), 5.0, requires_grad=True)
    same(*(torch.autograd.grad(g(x).square().sum(), weight) for g in (compiled, f)))
    first.weight.data.mul_(2)
    same(compiled(x), f(x))
    first = second
    same(compiled(x), f(x))


@pytest.mark.slow
def test_an_object_of_another_class_at_the_same_address_is_another(x: Tensor) -> None:
    kinds = [type(f"Times{n}", (), {"of": lambda self, s, n=n: s * n}) for n in range(2, 7)]
    model: Any = Holder(lambda m: m.given.of(1.0))
    compiled = attngraph.compile(model)
    for n, kind in enumerate(kinds, 2):
        model.given = None
        gc.collect()
        model.given = kind()
        same(compiled(x), attend(x) * float(n))


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


WAYS: dict[str, Callable[[Any], Function]] = {
    "a closure": lambda a: lambda x: attend(a(x)),
    "a list in a closure": lambda a: (lambda inside: lambda x: attend(inside[0](x)))([a]),
    "a partial": lambda a: functools.partial(lambda module, x: attend(module(x)), a),
    "a partial by name": lambda a: functools.partial(lambda x, module: attend(module(x)), module=a),
    "a default": lambda a: lambda x, module=a: attend(module(x)),
    "a decorated function": _wrapped,
    "a callable object": lambda caller: caller,
    "a method of an object": lambda caller: caller.method,
    "a method of a module": lambda bound: bound.encode,
    "a helper's global": lambda _: lambda x: uses_global(x),
}


@pytest.mark.parametrize("name", WAYS)
def test_weights_that_a_function_reaches_are_trained_and_followed(name: str, x: Tensor) -> None:
    holder = Caller() if name in ("a callable object", "a method of an object") else WithMethod(8, 8)
    module = GLOBAL_MODULE if "global" in name else holder.inner if isinstance(holder, Caller) else holder
    function = WAYS[name](holder)
    compiled = agree(function, x)
    with torch.no_grad():
        module.weight.mul_(2)
    same(compiled(x), function(x))
    same(*(gradients(f(x), list(module.parameters())) for f in (compiled, function)))


def test_a_module_may_be_an_argument(x: Tensor) -> None:
    one, two = nn.Linear(8, 8), nn.Linear(8, 8)
    compiled = agree(lambda module, x: attend(module(x)), (one, x), (two, x), (one, x))
    with torch.no_grad():
        one.weight.mul_(2)
    same(compiled(one, x), attend(one(x)))
    compiled(one, x).sum().backward()
    assert one.weight.grad is not None


def test_tracing_leaves_the_models_containers_the_objects_that_they_are(x: Tensor) -> None:
    shared, nested = [2.0], {"a": (1.0, [3.0])}
    model = Holder(lambda m: m.l[0] * m.d["a"][1][0], l=shared, d=nested, other=nested)
    compiled = agree(model, x, x, graphs=1)
    assert model.l is shared and model.d is nested and model.other is nested
    shared[0] = 5.0
    nested["a"][1][0] = 7.0  # type: ignore[index]
    same(compiled(x), model(x))


class Registry:
    """Replaces what it holds in its first use, as libraries do that look for what is installed."""

    held: Any = None

    def look(self) -> None:
        if self.held is None:
            held: dict[str, Any] = {"torch": torch, "found": []}
            held["found"].append(held)
            self.held = types.SimpleNamespace(found=held)


REGISTRY = Registry()


def test_what_a_first_call_keeps_may_contain_itself_and_modules() -> None:
    def forward(x: Tensor) -> Tensor:
        REGISTRY.look()
        return attend(x)

    compiled = attngraph.compile(forward, strict=True)
    for tokens in (5, 7):
        x = sequence(tokens)
        same(compiled(x), attend(x))
    assert REGISTRY.held is not None
    assert len(compiled.report.attention) == 1


# --- gradients ---


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
    "function", [lambda x: _Doubled.apply(x @ x.mT) @ x, lambda x: _DOUBLED(x @ x.mT) @ x, _hooked]
)
def test_gradients_that_the_model_defines_itself_are_kept(function: Any, x: Tensor) -> None:
    assert agree(function, x.double().requires_grad_(), grads=True).report.breaks
    with torch.no_grad():
        agree(function, x, fused=1)


def test_an_argument_that_is_written_after_it_was_used_keeps_its_gradients() -> None:
    def function(q: Tensor, v: Tensor) -> Tensor:
        weights = (q @ q.mT).softmax(-1)
        v.mul_(2)
        return weights @ v

    given = [sequence(requires_grad=True), sequence(requires_grad=True)]
    same(*(gradients(f(given[0], given[1] * 1), given) for f in (attngraph.compile(function), function)))


@pytest.mark.parametrize("late", [False, True], ids=["from the beginning", "after compiling"])
def test_a_buffer_that_wants_a_gradient_gets_one(late: bool, x: Tensor) -> None:
    model: Any = Of(lambda m, x: torch.softmax(x @ x.mT + m.bias, -1) @ x, bias=nn.Buffer(torch.zeros(5, 5)))
    compiled = attngraph.compile(model)
    if late:
        compiled(x)
    model.bias.requires_grad_()
    same(*(gradients(run(x), [model.bias]) for run in (compiled, model)))
    assert len(compiled.report.attention) == 1


# --- modes and weights ---


@pytest.mark.slow
def test_a_model_half_in_training_stays_so_and_is_traced_so(x: Tensor) -> None:
    model: Any = nn.Sequential(SelfAttention(), nn.Dropout(0.5), nn.Dropout(0.5), nn.BatchNorm1d(5))
    compiled = attngraph.compile(model)
    model[3].eval()
    before = copy.deepcopy(model[3].state_dict())
    for one in (True, False):
        for two in (True, False):
            model[1].train(one)
            model[2].train(two)
            found = compiled(x)
            assert (model[1].training, model[2].training, model[3].training) == (one, two, False)
            assert model.training
            zeros = float((found == model[3](torch.zeros(1, 5, 1))).float().mean())
            assert (zeros > 0.2) == (one or two)
            if not (one or two):
                same(found, model(x))
    same(dict(model[3].state_dict()), dict(before))


@pytest.mark.slow
def test_the_mode_of_a_closed_over_module_counts(x: Tensor) -> None:
    dropout = nn.Dropout(0.5)
    compiled = attngraph.compile(lambda x: dropout(attend(x)))
    assert (compiled(x) == 0).any()
    dropout.eval()
    same(compiled(x), attend(x))
    dropout.train()
    assert (compiled(x) == 0).any()


def test_training_steps_are_those_of_eager() -> None:
    model = nn.Sequential(SelfAttention(), nn.LayerNorm(8), SelfAttention())
    other = copy.deepcopy(model)
    compiled = attngraph.compile(other)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, compiled)]
    for tokens in (7, 9, 9, 12):
        x = sequence(tokens, 3)
        for module, optimizer in zip((model, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    same(dict(other.state_dict()), dict(model.state_dict()))
    assert compiled.report.graphs == 1


def test_tied_weights_stay_tied_until_they_are_untied(x: Tensor) -> None:
    model: Any = Of(lambda m, x: attend(m.a(x), m.b(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.b.weight = model.a.weight
    compiled = agree(model, x, grads=True)
    for weight in (nn.Parameter(torch.randn(8, 8)), model.a.weight):
        model.b.weight = weight
        same(compiled(x), model(x))


def test_frozen_parameters_get_no_gradient_until_they_are_thawed(x: Tensor) -> None:
    model = SelfAttention()
    model.qkv.weight.requires_grad_(False)
    compiled = attngraph.compile(model)
    compiled(x).sum().backward()
    assert model.qkv.weight.grad is None and model.qkv.bias.grad is not None
    model.qkv.weight.requires_grad_(True)
    compiled(x).sum().backward()
    assert model.qkv.weight.grad is not None


def test_weights_loaded_after_compiling_are_used_without_a_new_graph(x: Tensor) -> None:
    model = SelfAttention()
    compiled = agree(model, x)
    for target, options in ((model, {}), (compiled, {}), (model, {"assign": True})):
        target.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, **options)
        same(compiled(x), model(x))
    assert compiled.report.graphs == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_model_may_be_cast_after_compiling(dtype: torch.dtype, x: Tensor) -> None:
    model = SelfAttention()
    compiled = agree(model, x)
    compiled.to(dtype)
    same(compiled(x.to(dtype)), model(x.to(dtype)), 2e-2)
    compiled.float()
    same(compiled(x), model(x))


@pytest.mark.slow
def test_a_compiled_model_goes_through_pickle_and_torch_save(x: Tensor) -> None:
    compiled = attngraph.compile(WithMethod(8, 8))
    expected = compiled(x)
    same(copy.copy(compiled)(x), expected)
    file = io.BytesIO()
    torch.save(compiled.state_dict(), file)
    file.seek(0)
    fresh = WithMethod(8, 8)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    same(fresh(x), expected)
    of_torch = attngraph.compile(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval())
    expected = of_torch(x)
    same(pickle.loads(pickle.dumps(of_torch))(x), expected)


def test_a_compiled_model_runs_inside_other_traces(x: Tensor) -> None:
    model = SelfAttention()
    compiled = agree(model, x)
    longer = sequence(9)
    same(torch.jit.trace(compiled, (x,))(longer), model(longer))
    with FakeTensorMode() as mode:
        mode.allow_non_fake_inputs = True
        assert compiled(mode.from_tensor(x)).shape == x.shape
    assert attngraph.compile(model.to("meta"))(x.to("meta")).shape == x.shape


@pytest.mark.parametrize("tokens_on", ["cpu", "meta"])
def test_a_compiled_model_can_be_moved_to_the_device_without_values(tokens_on: str) -> None:
    model = DecoderLM(DecoderLMConfig(vocab_size=50, layers=1, width=32, heads=4)).eval()
    compiled, tokens = attngraph.compile(model), torch.randint(0, 50, (2, 7))
    compiled(tokens)
    result = compiled.to("meta")(tokens.to(tokens_on))
    assert result.shape == (2, 7, 50) and result.is_meta


# --- writes and side effects ---


def _counts(m: Any, x: Tensor) -> Tensor:
    m.seen += 1
    m.average.mul_(0.9).add_(x.detach().mean((0, 1)) * 0.1)
    m.assigned = m.assigned + 2
    return attend(m.norm(x.mT).mT) * m.seen + m.average + m.assigned


def _grows(m: Any, x: Tensor) -> Tensor:
    m.keys = torch.cat([m.keys, x], 1)
    return attend(x, m.keys)


@pytest.mark.slow
def test_buffers_are_written_assigned_and_grown_as_in_eager() -> None:
    model = Of(
        _counts, norm=nn.BatchNorm1d(8), seen=nn.Buffer(torch.tensor(0)), average=nn.Buffer(torch.zeros(8)),
        assigned=nn.Buffer(torch.zeros(())),
    )  # fmt: skip
    other = copy.deepcopy(model)
    compiled = attngraph.compile(other)
    for tokens in (5, 6, 7):
        x = sequence(tokens)
        same(compiled(x), model(x))
    same(dict(other.state_dict()), dict(model.state_dict()))
    growing = Of(_grows, keys=nn.Buffer(torch.zeros(2, 0, 8), persistent=False))
    calls = [sequence(tokens) for tokens in (3, 1, 1, 2)]
    assert agree(growing, *calls, apart=True).keys.shape == (2, 7, 8)


LIE = {
    "plain": lambda: (torch.randn(2, 5, 4), torch.randn(2, 5, 4)),
    "transposed": lambda: (torch.randn(2, 4, 5).mT, torch.randn(2, 4, 5).mT),
    "strided": lambda: (torch.randn(2, 10, 8)[:, ::2, ::2], torch.randn(2, 5, 4)),
    "one tensor": lambda: (torch.randn(2, 5, 4),) * 2,
    "one memory": lambda: (lambda base: (base[:2], base[1:3]))(torch.randn(4, 5, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("first", LIE)
@pytest.mark.parametrize("name", LIE)
def test_arguments_are_written_as_in_eager(name: str, first: str) -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return attend(a, b)

    compiled = attngraph.compile(f)
    for kind in (first, name, name):
        mine = LIE[kind]()
        theirs = copy.deepcopy(mine)  # with the memory that they share
        same(compiled(*mine), f(*theirs))
        same(mine, theirs)


def _count(model: Any, _: Tensor) -> None:
    model.count += 1


def _keeping(m: Any, x: Tensor) -> Tensor:
    y = attend(x)
    m.effect(m, y)
    return y * 2


EFFECTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "appended sizes": lambda m, y: m.log.append(y.shape[1]),
    "appended tensors": lambda m, y: m.log.append(y),
    "an entry of a dictionary": lambda m, y: m.named.update(y=y, n=m.named.get("n", 0) + 1),
    "a counter": _count,
    "a tensor where none was": lambda m, y: setattr(m, "last", y),
    "a tensor where another was": lambda m, y: setattr(m, "kept", y),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_side_effects_on_the_model_happen_at_every_call(name: str) -> None:
    model, other = (
        Of(_keeping, effect=EFFECTS[name], log=[], named={}, count=0, last=None, kept=torch.zeros(1))
        for _ in range(2)
    )
    compiled = attngraph.compile(other)
    for tokens in (5, 6, 5):
        x = sequence(tokens)
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
    assert (len(seen), notes["n"], capsys.readouterr().out.count("called")) == (3, 3, 3)


class Cache:
    """What users write to keep keys in."""

    keys: Tensor | None = None

    def update(self, keys: Tensor) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        return self.keys


def test_an_empty_cache_among_the_arguments_is_filled_at_every_call() -> None:
    def step(x: Tensor, cache: Any) -> Tensor:
        return attend(x, cache.update(x))

    compiled, mine, eagers = attngraph.compile(step), Cache(), Cache()
    nothing = types.SimpleNamespace(update=lambda keys: keys)
    for _ in range(3):
        x = sequence(2)
        same(compiled(x, mine), step(x, eagers))
        same(mine.keys, eagers.keys)
    same(compiled(x, nothing), step(x, nothing))
    assert compiled._graphs, "a call that changes nothing is captured whole"


@pytest.mark.slow
def test_a_table_or_a_shape_that_the_first_call_makes_is_kept() -> None:
    def lazy(m: Any, x: Tensor) -> Tensor:
        if m.table is None or m.table.shape[0] < x.shape[1]:
            m.table = torch.arange(x.shape[1]).cos()[:, None]
        return attend(x * m.table[: x.shape[1]])

    calls = [sequence(tokens) for tokens in (5, 3, 7, 6)]
    assert type(agree(Of(lazy, table=None), *calls, apart=True).table) is Tensor
    model = nn.Sequential(nn.LazyLinear(8), SelfAttention())
    compiled = attngraph.compile(model)
    for _ in range(2):
        x = torch.randn(2, 5, 3)
        same(compiled(x), model(x))
    assert compiled.report.attention
