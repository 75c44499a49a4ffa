"""Results for which the weights of a fused attention would be computed wait until somebody looks at them.

What attributes share with them is in test_attributes.py; here are results that a call returns, and what may
be done to a tensor that waits.
"""

import copy
import dataclasses
import functools
import io
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import attngraph
from attngraph.runtime.look import Unseen
from tests.runtime.small import agree, same, sequence


@dataclasses.dataclass
class Maps:
    out: Tensor
    maps: list[Tensor]


Named = namedtuple("Named", ["out", "maps"])


class Model(nn.Module):
    """Two layers of attention; `result` makes the result of a call from the output, the weights of both and
    itself."""

    kept: Any = None

    def __init__(self, result: Callable[[Tensor, list[Tensor], Any], Any], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 24), nn.Linear(8, 24)])
        self.dropout = nn.Dropout(dropout)
        self.__dict__["result"] = result

    def forward(self, x: Tensor) -> Any:
        maps = []
        x = self.dropout(x)
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            maps.append((q @ k.mT / 8**0.5).masked_fill(hidden, -torch.inf).softmax(-1))
            x = x + self.dropout(maps[-1]) @ v
        return self.result(x, maps, self)


def _sets(out: Tensor, maps: list[Tensor], model: Any) -> Any:
    model.kept = maps[0]
    return out, maps[0]


RESULTS: dict[str, tuple[Callable[..., Any], list[tuple[str, ...]]]] = {
    "a tuple": (lambda out, maps, _: (out, *maps), [("result[1]",), ("result[2]",)]),
    "a dict": (lambda out, maps, _: {"y": out, "p": maps}, [("result['p'][0]",), ("result['p'][1]",)]),
    "an ordered dict": (lambda out, maps, _: OrderedDict(y=out, p=maps[0]), [("result['p']",)]),
    "a dataclass": (lambda out, maps, _: Maps(out, maps), [("result.maps[0]",), ("result.maps[1]",)]),
    "a named tuple": (lambda out, maps, _: Named(out, maps[1]), [("result.maps",)]),
    "a loss": (lambda out, maps, _: (out, (maps[0] * maps[0]).sum()), [("result[1]",)]),
    "a loss of all": (lambda out, maps, _: (out, sum(p.square().mean() for p in maps)), [("result[1]",)]),
    "of the same weights": (
        lambda out, maps, _: (out, maps[0], maps[0].mT, maps[0].log(), maps[0].sum(-1)),
        [("result[1]", "result[2]", "result[3]", "result[4]")],
    ),
    "twice": (lambda out, maps, _: (maps[0], out, maps[0]), [("result[0]", "result[2]")]),
    "first": (lambda out, maps, _: (maps[0], maps[1], out), [("result[0]",), ("result[1]",)]),
    "no gradients": (lambda out, maps, _: (out, maps[0].detach()), [("result[1]",)]),
    "numbers": (lambda out, maps, _: (out, maps[0].argmax(-1), maps[0] > 0.5), [("result[1]", "result[2]")]),
    "with the output": (lambda out, maps, _: (out, out.mean() - maps[1].mean()), [("result[1]",)]),
    "an attribute too": (_sets, [("result[1]", "kept")]),
    "another attention": (
        lambda out, maps, m: (out, (maps[0] @ maps[0].mT).softmax(-1) @ maps[0]), [("result[1]",)]
    ),
}  # fmt: skip


def names(compiled: Any) -> list[tuple[str, ...]]:
    return [entry.names for entry in compiled.report.later]


def leaves(result: Any) -> list[Tensor]:
    """The tensors in it."""
    inner = vars(result) if isinstance(result, Maps) else result
    return [t for t in torch.utils._pytree.tree_leaves(inner) if isinstance(t, Tensor)]


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_eagers_with_its_gradients_whenever_they_are_looked_at(name: str) -> None:
    result, waiting = RESULTS[name]
    model = Model(result)
    reference = copy.deepcopy(model)
    compiled = attngraph.compile(model)
    for tokens in (5, 7):
        x = sequence(tokens, requires_grad=True)
        mine, theirs = leaves(compiled(x)), leaves(reference(x))
        assert any(type(t) is Unseen for t in mine)
        losses = [sum(t.square().sum() for t in found if t.requires_grad) for found in (mine, theirs)]
        wanted = [(x, *each.parameters()) for each in (model, reference)]
        same(*(torch.autograd.grad(s, w) for s, w in zip(losses, wanted, strict=True)))
        same(mine, theirs)
        assert all(type(t) is Tensor for t in mine)
        if model.kept is not None:
            same(model.kept, reference.kept)
    assert (len(compiled.report.attention), compiled.report.missed) == (2 + (name == "another attention"), ())
    assert names(compiled) == waiting


def test_what_is_of_the_same_weights_is_one_tensor_and_each_layers_weights_are_apart(x: Tensor) -> None:
    model = Model(lambda out, maps, m: (maps[0], _sets(out, maps, m), maps[0], maps[1]))
    first, (_, kept), again, second = attngraph.compile(model)(x)
    assert first is again is kept is model.kept and type(first) is Unseen
    first += 1
    assert float(again.detach().min()) == 1
    assert type(first) is Tensor and type(second) is Unseen


def test_a_look_may_need_a_part_of_a_split_that_the_call_does_not() -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v, w = x.split(8, -1)
        p = (q @ k.mT).softmax(-1)
        return p @ v, q.sort(-1).values, p * w.sum(-1, keepdim=True)

    assert names(agree(forward, torch.randn(2, 5, 32))) == [("result[2]",)]


def largest_result(seen: Any) -> int:
    """How many elements the most memory has that one operation took."""
    return max(event.self_cpu_memory_usage for event in seen.events()) // 4


@pytest.mark.parametrize("grad", [True, False])
def test_weights_are_never_in_memory_where_the_caller_drops_them(grad: bool) -> None:
    compiled, x = attngraph.compile(Model(RESULTS["a tuple"][0])), torch.randn(1, 300, 8)
    profile = functools.partial(torch.profiler.profile, profile_memory=True)
    with torch.set_grad_enabled(grad):
        compiled(x)
        with profile() as seen:
            out, *_ = compiled(x)
            if grad:
                out.sum().backward()
    assert largest_result(seen) < 300 * 300
    with profile() as eager:
        compiled._model(x)
    assert largest_result(eager) >= 300 * 300


def test_dropped_weights_are_those_of_the_call_whose_dropouts_are_drawn_in_it(x: Tensor) -> None:
    def attend(x: Tensor) -> tuple[Tensor, Tensor]:
        p = nn.functional.dropout((x @ x.mT).softmax(-1), 0.4)
        return p @ x, p

    model = Model(RESULTS["a tuple"][0], dropout=0.3).train()
    compiled = attngraph.compile(model)
    out, *maps = compiled(x)
    assert (len(compiled.report.attention), names(compiled)) == (2, [("result[1]",), ("result[2]",)])
    (q, k, _), seen = model.layers[0](x).chunk(3, -1), torch.ones(5, 5, dtype=torch.bool).tril()
    whole = (q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    assert not torch.allclose(maps[0], whole)
    torch.testing.assert_close(maps[0].sum(-1), torch.ones(2, 5))
    before = torch.autograd.grad(out.sum(), model.layers[0].weight, retain_graph=True)
    assert float(before[0].abs().sum()) > 0
    out, p = attngraph.compile(attend)(x)
    y = x.clone()
    x.zero_()
    same(out, p @ y)
    assert 0 < int((p == 0).sum()) < p.numel()


def test_what_draws_random_numbers_from_weights_keeps_them_in_the_call(x: Tensor) -> None:
    def noisy(x: Tensor) -> tuple[Tensor, Tensor]:
        p = (x @ x.mT).softmax(-1)
        return p @ x, p + torch.rand_like(p)

    compiled = attngraph.compile(noisy)
    assert type(compiled(x)[1]) is Tensor and names(compiled) == []
    assert "its weights are also used in the model's results (" in compiled.report.missed[0].reason


# --- what may be done to a tensor that waits ------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(lambda out, maps, _: (out, maps[1]))


@pytest.fixture(scope="module")
def compiled(model: Model) -> Any:
    return attngraph.compile(model, min_scores=0)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return grad * y, grad * x


def _hooked(out: Tensor, p: Tensor) -> Any:
    seen: list[Tensor] = []
    p.register_hook(lambda g: seen.append(g))
    p.retain_grad()
    (p * p).sum().backward()
    return seen[0], p.grad


def _saved(out: Tensor, p: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save({"p": p.detach()}, buffer)
    buffer.seek(0)
    return torch.load(buffer)["p"]


def _backward(out: Tensor, p: Tensor) -> Any:
    torch.autograd.backward([p], [torch.ones_like(p.detach()) * torch.arange(5.0)])


def _double(out: Tensor, p: Tensor) -> Any:
    seed = torch.ones(2, 5, 5, requires_grad=True)
    (first,) = torch.autograd.grad(Scaled.apply(p, seed).square().sum(), seed, create_graph=True)
    first.square().sum().backward()


def _vmapped(out: Tensor, p: Tensor) -> Any:
    return torch.func.vmap(lambda row, one: row.sum() * p.sum() + one)(out, p)


USES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "deepcopy": lambda out, p: copy.deepcopy(p.detach()),
    "torch.save": _saved,
    "pickle": lambda out, p: pickle.loads(pickle.dumps(p.detach())),
    "numpy": lambda out, p: torch.from_numpy(p.detach().numpy()),
    "torch.tensor": lambda out, p: torch.tensor(p.detach().tolist()),
    "backward": lambda out, p: p.square().sum().backward(),
    "torch.autograd.backward": _backward,
    "stack": lambda out, p: torch.stack(list(p)),
    "print": lambda out, p: repr(p.detach()),
    "==": lambda out, p: p == p,
    "indexing": lambda out, p: p[0, 1:],
    "to": lambda out, p: p.to(torch.float64),
    "detach": lambda out, p: p.detach(),
    "equal": lambda out, p: torch.equal(p, p.clone()),
    "float": lambda out, p: float(p.detach()[0, 0, 0]),
    "len": lambda out, p: len(p),
    "requires_grad": lambda out, p: (p.requires_grad, p.is_leaf, p.dtype, p.ndim),
    "grad_fn": lambda out, p: p.grad_fn is not None,
    "is_contiguous": lambda out, p: (p.is_contiguous(), p.stride(), p.storage_offset()),
    "gradients of it": lambda out, p: torch.autograd.grad((p * p).sum(), p),
    "hooks": _hooked,
    "isinstance": lambda out, p: isinstance(p, Tensor),
    "operators": lambda out, p: torch.ops.aten.mul.Tensor(p, 2.0),
    "written to": lambda out, p: p.mul_(2).add_(1),
    "written to in part": lambda out, p: p[0].zero_() + p.sum(),
    "a function of one's own": lambda out, p: Scaled.apply(p, p).sum().backward(),
    "a function of one's own twice": _double,
    "checkpoint": lambda out, p: checkpoint(torch.exp, p, use_reentrant=True).sum().backward(),
    "checkpoint anew": lambda out, p: checkpoint(torch.exp, p, use_reentrant=False).sum().backward(),
    "a parameter": lambda out, p: nn.Parameter(p).detach(),
    "vmap": _vmapped,
    "func.grad": lambda out, p: torch.func.grad(lambda y: (y * p).sum())(p.detach()),
    "both": lambda out, p: (out.sum() + p.square().sum()).backward(),
    "another compiled model": lambda out, p: attngraph.compile(lambda y: (y @ y.mT).softmax(-1) @ y)(p),
    "torch.compile": lambda out, p: torch.compile(lambda y: y * 2, backend="aot_eager")(p),
}  # fmt: skip


NO_LOOK = "requires_grad", "isinstance"
HELD = "checkpoint", "checkpoint anew", "vmap", "a function of one's own", "a function of one's own twice"
"""Where code in C holds the tensor when it is first looked at, in some versions of torch."""


@pytest.mark.parametrize("name", USES)
def test_a_tensor_that_waits_can_be_used_as_any(name: str, compiled: Any, model: Model, x: Tensor) -> None:
    found, both = [], (compiled(x), model(x))
    for out, p in both:
        model.zero_grad()
        value = USES[name](out, p)
        gradients = [w.grad.clone() for w in model.parameters() if w.grad is not None]
        found.append((value, gradients, p))
    assert name in HELD or (type(both[0][1]) is Unseen) == (name in NO_LOOK)
    same(*found)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_mode_of_the_call_counts_not_that_of_the_look(
    mode: Any, compiled: Any, model: Model, x: Tensor
) -> None:
    with mode():
        _, p = compiled(x)
        _, expected = model(x)
    assert type(p) is Unseen
    assert (p.requires_grad, p.is_inference()) == (False, expected.is_inference())
    torch.testing.assert_close(p, expected)
    _, p = compiled(x)
    with mode():
        assert p.sum().requires_grad is False
    assert p.requires_grad and p.grad_fn is not None


def test_requires_grad_is_known_before_a_look(x: Tensor) -> None:
    model = Model(lambda out, maps, _: (out, maps[1], maps[1].detach(), maps[1].argmax()))
    out, p, fixed, number = attngraph.compile(model)(x)
    assert [t.requires_grad for t in (out, p, fixed, number)] == [True, True, False, False]
    assert {type(t) for t in (p, fixed, number)} == {Unseen}


class Kept(torch.autograd.Function):
    """Keeps its argument for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.saved_tensors[0]


def test_what_c_holds_stays_one_operation(compiled: Any, model: Model, x: Tensor) -> None:
    """The object that is held cannot become another tensor."""
    found = []
    for each in (compiled, model):
        model.zero_grad()
        _, p = each(x)
        held = Kept.apply(p)
        (held + (p * p).sum()).backward()
        found.append(([w.grad.clone() for w in model.parameters() if w.grad is not None], p.detach()))
    same(*found)


# --- where nothing may wait -----------------------------------------------------------------------


def test_a_traced_call_computes_its_results(compiled: Any, model: Model, x: Tensor) -> None:
    compiled(x)
    traced, y = make_fx(lambda y: compiled(y)[1] * 2)(x), sequence()
    torch.testing.assert_close(traced(y), model(y)[1] * 2)


def test_torchs_compiler_gets_computed_results(model: Model, x: Tensor) -> None:
    torch._dynamo.reset()
    found = torch.compile(model, backend="attngraph")(x)
    assert type(found[1]) is Tensor
    same(found, model(x))


@pytest.mark.slow
def test_pieces_hand_on_computed_results(x: Tensor) -> None:
    """Of a model in two pieces the second needs the weights of the first."""
    torch._dynamo.reset()
    first = Model(lambda out, maps, _: (out, maps[1]))

    def broken(x: Tensor) -> Any:
        out, p = first(x)
        if float(out.detach().sum()) > 1e9:
            return out, p
        return out + p.sum(), p

    compiled = attngraph.compile(broken)
    found = compiled(x)
    assert compiled.report.breaks and type(found[1]) is Tensor
    same(found, broken(x))
    for passes in (("canonicalize", "fuse-attention"), None):
        assert agree(broken, x, passes=passes).report.later == ()


def test_a_file_has_all_results_and_a_saved_model_those_that_wait(
    compiled: Any, model: Model, tmp_path: Path, x: Tensor
) -> None:
    compiled(x)
    compiled.save(tmp_path / "saved")
    loaded = attngraph.load(tmp_path / "saved", model)
    found = loaded(x)
    assert type(found[1]) is Unseen and loaded.report.later == compiled.report.later
    same(found, model(x))
    report = attngraph.export(compiled, tmp_path / "model.pt2", (x,))
    assert len(report.outputs) == 2
    found = torch.export.load(tmp_path / "model.pt2").module()(x)
    same(tuple(t.detach() for t in found), tuple(t.detach() for t in model(x)))


@pytest.mark.slow
def test_inductor_computes_no_weights_either(model: Model, x: Tensor) -> None:
    compiled = attngraph.compile(model, inductor=True)
    with torch.no_grad():
        found, expected = compiled(x), model(x)
    assert type(found[1]) is Unseen
    given = x.clone()
    x.zero_()
    same(found, expected)
    out, p = compiled(given)  # a result of the same operation as the output
    assert type(p) is Tensor
    same((out, p), model(given))


@pytest.mark.slow
def test_comparers_compare_what_waits(model: Model, x: Tensor) -> None:
    attngraph.testing.compile(model.eval(), x).assert_close_to_eager()
    assert attngraph.bisect(model, x).culprit == ""


def test_a_dump_names_no_weights_in_the_graph_of_the_call(model: Model, tmp_path: Path, x: Tensor) -> None:
    attngraph.compile(model, dump=tmp_path)(x)
    (path,) = (tmp_path / "graph-0").glob("*fuse-attention.txt")
    text = path.read_text()
    assert text.count("softmax") == 1 and "look(" in text
