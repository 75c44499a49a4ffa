"""Attributes that a forward sets anew in every call are results of one graph; others remain side effects."""

import copy
import dataclasses
import functools
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.capture.state import fingerprint as state
from attngraph.capture.state.fingerprint import fingerprint
from attngraph.errors import CaptureError
from attngraph.runtime.look import Unseen
from tests.runtime.small import agree, same, sequence, together


class Attention(nn.Module):
    """Keeps the weights of its latest call, as lecture code does."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.heads = nn.Linear(width, 3 * width), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        self.attention_weights = (q @ k.mT / 2).masked_fill(later, -torch.inf).softmax(-1)
        found: Tensor = (self.attention_weights @ v).transpose(1, 2).flatten(2)
        return found


class Layers(nn.Module):
    """Layers whose weights are gathered in a list of the model's, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, x: Tensor) -> Tensor:
        self.gathered: list[Any] = [None] * 3
        for place, layer in enumerate((*self.layers, self.layers[0])):
            x = x + layer(x)
            self.gathered[place] = layer.attention_weights
        return x


def weights_of(model: Any) -> Any:
    return [layer.attention_weights for layer in model.layers], model.gathered


def test_weights_kept_in_attributes_are_results_of_one_graph_through_which_gradients_flow(
    tmp_path: Path,
) -> None:
    model = Layers()
    reference = copy.deepcopy(model)
    compiled = attngraph.compile(model, dump=tmp_path)
    for count in (5, 7, 5):
        x = sequence(count)
        for each in (compiled, reference):
            each.zero_grad()
            loss = each(x).square().mean()
            for weights in each.gathered:
                loss = loss - (weights * (weights + 1e-9).log()).sum(-1).mean()
            loss.backward()
        same([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
        same(compiled(x), reference(x))
        same(weights_of(compiled), weights_of(reference))
        assert model.gathered[2] is model.layers[0].attention_weights
    assert (compiled.report.graphs, compiled.report.breaks) == (1, ())
    assert (len(compiled.report.attention), compiled.report.missed) == (3, ())
    assert {entry.names for entry in compiled.report.later} == {
        ("gathered[0]",), ("gathered[1]", "layers.1.attention_weights"),
        ("gathered[2]", "layers.0.attention_weights"),
    }  # fmt: skip
    assert "computed when somebody looks at it\n      gathered[0]" in str(compiled.report)
    text = (tmp_path / "graph-0" / "00-capture.txt").read_text()
    assert "attribute $layers.0.attention_weights = " in text


@dataclasses.dataclass
class Maps:
    weights: Tensor
    tokens: int


class Setting(nn.Module):
    """Sets its attribute `kept` as `how` says."""

    kept: Any = None

    def __init__(self, how: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.how: Any
        self.__dict__["how"] = how

    def forward(self, x: Tensor) -> Any:
        p = (x @ x.mT).softmax(-1)
        found = self.how(self, x, p)
        return p @ x if found is None else found


def _deep(m: Any, x: Tensor, p: Tensor) -> None:
    m.kept = {"maps": [p, (p.sum(), None)], "tokens": x.shape[1], "name": "p"}
    m.kept["maps"].append(p.detach())


def _twice(m: Any, x: Tensor, p: Tensor) -> None:
    m.kept = x
    m.kept = m.kept * 2


def _in_both(m: Any, x: Tensor, p: Tensor) -> Any:
    m.kept = p
    return p @ x, p


def _the_result(m: Any, x: Tensor, p: Tensor) -> Any:
    m.kept = [p @ x, p]
    return m.kept


SET: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a tensor": lambda m, x, p: setattr(m, "kept", p),
    "without gradients": lambda m, x, p: setattr(m, "kept", p.detach()),
    "an argument": lambda m, x, p: setattr(m, "kept", x),
    "a view": lambda m, x, p: setattr(m, "kept", x.mT),
    "a tuple": lambda m, x, p: setattr(m, "kept", (p, x + 1)),
    "a size": lambda m, x, p: setattr(m, "kept", x.shape[1] * 2),
    "a constant": lambda m, x, p: setattr(m, "kept", True),
    "an object": lambda m, x, p: setattr(m, "kept", Maps(p, x.shape[1])),
    "nested containers": _deep,
    "twice": _twice,
    "what is returned too": _in_both,
    "the result itself": _the_result,
}


@pytest.mark.parametrize("name", SET)
def test_whatever_an_attribute_is_set_to_is_there_after_each_call(name: str) -> None:
    model, reference = Setting(SET[name]), Setting(SET[name])
    compiled = attngraph.compile(model)
    for count in (5, 7, 5):
        x = sequence(count, requires_grad=True)
        mine, theirs = compiled(x), reference(x)
        same(mine, theirs)
        assert type(model.kept) is type(reference.kept) or type(model.kept) is Unseen
        same(*(vars(m.kept) if isinstance(m.kept, Maps) else m.kept for m in (model, reference)))
        assert (model.kept is x, model.kept is mine) == (reference.kept is x, reference.kept is theirs)
        assert isinstance(mine, Tensor) or mine[1] is model.kept or mine is model.kept
    assert (compiled.report.graphs, compiled.report.breaks) == (1, ())


def _adds_the_last(m: Any, x: Tensor, p: Tensor) -> Any:
    found = p @ x if m.kept is None else p @ x + m.kept
    m.kept = x.sum()
    return found


def _asks_whether_it_is_there(m: Any, x: Tensor, p: Tensor) -> Any:
    found = (p @ x) * (2 if hasattr(m, "late") else 1)
    m.late = x.sum()
    return found


def _grows(m: Any, x: Tensor, p: Tensor) -> None:
    m.kept = [*(m.kept or []), p]


STATE: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "read first": _adds_the_last,
    "asked for first": _asks_whether_it_is_there,
    "a list that grows": _grows,
}


@pytest.mark.parametrize("name", STATE)
def test_an_attribute_that_is_read_first_is_state(name: str) -> None:
    model, reference = Setting(STATE[name]), Setting(STATE[name])
    compiled = attngraph.compile(model)
    for count in (5, 7, 5):
        x = sequence(count)
        same(compiled(x), reference(x))
        same(vars(model).get("kept"), vars(reference).get("kept"))
    assert compiled.report.breaks[0].reason.startswith("forward() changes the attribute")


def test_a_time_is_not_taken_for_a_constant(x: Tensor) -> None:
    model = Setting(lambda m, x, p: setattr(m, "kept", (time.perf_counter(), p)))
    compiled = attngraph.compile(model)
    times = []
    for _ in range(3):
        compiled(x)
        times.append(model.kept[0])
    assert times[0] < times[1] < times[2]
    assert compiled.report.breaks


class Inside(nn.Module):
    """Looks for its attribute without asking for it."""

    def forward(self, x: Tensor) -> Tensor:
        return from_outside(self, x)


def from_outside(model: nn.Module, x: Tensor) -> Tensor:
    x = x * 2 if model.__dict__.get("last") is None else x
    model.last = x.sum()
    return (x @ x.mT).softmax(-1) @ x


@pytest.mark.parametrize(
    "make", [Inside, lambda: Setting(lambda m, x, p: from_outside(m, x))], ids=["method", "function"]
)
def test_code_that_looks_into_a_dictionary_of_attributes_reads_them(make: Any, x: Tensor) -> None:
    model, reference = make(), make()
    with pytest.raises(CaptureError, match="forward\\(\\) changes the attribute last"):
        attngraph.compile(make(), strict=True)(x)
    compiled = attngraph.compile(model)
    for _ in range(3):
        same(compiled(x), reference(x))


class Reusing(nn.Module):
    """One kind of call reads what another kind sets."""

    def forward(self, x: Tensor, reuse: bool = False) -> Tensor:
        if not reuse:
            self.weights = (x @ x.mT).softmax(-1)
        return self.weights @ x


def test_a_call_that_only_reads_an_attribute_depends_on_it() -> None:
    model, reference = Reusing(), Reusing()
    compiled = attngraph.compile(model)
    for reuse in (False, True, False, True, True, False, True):
        x = sequence()
        same(compiled(x, reuse), reference(x, reuse))
    model.weights = reference.weights = torch.eye(5).expand(2, 5, 5)
    same(compiled(x, True), reference(x, True))


def test_an_attribute_that_waits_is_not_known_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that reads it has its value as a constant, not itself: another may lie where it lay."""
    model = Reusing()
    compiled = attngraph.compile(model, min_scores=0)
    keys = []
    for _ in range(2):
        compiled(torch.randn(2, 5, 8))
        assert type(model.weights) is Unseen
        with monkeypatch.context() as patch:
            patch.setattr(state, "id", lambda _: 0, raising=False)
            keys.append(fingerprint([model]))
    assert keys[0] != keys[1]


class Store:
    """Is no module, and is filled by one."""

    def __init__(self) -> None:
        self.maps: dict[str, Tensor] = {}


def _stores(m: Any, x: Tensor, p: Tensor) -> None:
    m.store.maps = {"p": p}


def test_objects_that_the_model_holds_are_set_as_well() -> None:
    model, reference = Setting(_stores), Setting(_stores)
    model.store, reference.store = Store(), Store()
    compiled = attngraph.compile(lambda x: model(x) * 2)
    for count in (5, 6):
        x = sequence(count)
        same(compiled(x), reference(x) * 2)
        same(model.store.maps, reference.store.maps)
    assert (compiled.report.graphs, compiled.report.breaks) == (1, ())


def test_other_objects_of_the_class_are_not_disturbed(x: Tensor) -> None:
    """While one object of a class is watched, others of it are read and set as ever."""
    reader = Setting(lambda m, x, p: x * m.kept)
    reader.kept = torch.ones(8)
    model = nn.Sequential(Setting(SET["a tensor"]), reader)
    compiled = agree(model, x, reason="")
    reader.kept = torch.zeros(8)
    same(compiled(x), model(x))
    assert "kept" not in vars(Setting) or vars(Setting)["kept"] is None


def test_a_list_that_is_also_the_callers_is_not_copied() -> None:
    def shared(m: Any, x: Tensor, p: Tensor) -> Any:
        maps = [p]
        m.kept = maps
        return p @ x, maps

    model = Setting(shared)
    for _ in range(2):
        _, maps = attngraph.compile(model)(torch.randn(2, 5, 8))
        assert model.kept is maps


@pytest.mark.slow
def test_copies_and_pickles_set_their_own_attributes() -> None:
    model = Layers()
    compiled = attngraph.compile(model)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        compiled(x)
    buffer = io.BytesIO()
    torch.save(compiled, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(compiled), torch.load(buffer, weights_only=False)):
        y = torch.randn(2, 5, 8)
        same(other(y), model(y))
        same(weights_of(other), weights_of(model))
        assert other.gathered[2] is other.layers[0].attention_weights
        assert other.gathered is not model.gathered


@pytest.mark.slow
def test_threads_may_share_a_model_that_sets_attributes() -> None:
    model = Layers().eval()
    compiled = attngraph.compile(model)

    def serve(seed: int) -> None:
        x = torch.randn(2, 4 + seed % 3, 8, generator=torch.Generator().manual_seed(seed))
        for _ in range(5):
            assert compiled(x).shape == x.shape and model.gathered[0] is not None

    together([functools.partial(serve, seed) for seed in range(4)])
    assert compiled.report.breaks == ()


class Dropping(nn.Module):
    """Keeps weights after dropout, which depend on the input, a parameter and a buffer themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(9, 9))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        tokens = x.shape[1]
        scores = (x @ x.mT * self.scale + self.bias[:tokens, :tokens]).masked_fill(~seen, -torch.inf)
        self.attn = nn.functional.dropout(scores.softmax(-1), 0.3, self.training)
        return self.attn @ x


@pytest.mark.slow
def test_what_is_looked_at_later_is_what_the_call_computed() -> None:
    """Inputs, parameters and buffers may have changed since, and dropped weights are the call's own."""
    model = Dropping()
    compiled = attngraph.compile(model)
    reference = copy.deepcopy(model).eval()
    for tokens in (6, 9):
        x, seen = torch.randn(2, tokens, 8), torch.ones(tokens, tokens, dtype=torch.bool).tril()
        given = x.clone().requires_grad_(), seen.clone()
        found, undropped = compiled(*given), reference(x, seen) @ torch.zeros(8, 8) + reference.attn @ x
        with torch.no_grad():
            for tensor in (*given, model.bias, model.scale):
                tensor.fill_(1)
        assert model.attn.shape == (2, tokens, tokens)
        kept = model.attn != 0
        assert 0.5 < kept.sum() / (2 * seen.sum()) < 0.9
        same(model.attn, torch.where(kept, reference.attn / 0.7, 0.0))
        same(found, model.attn @ x)
        assert not torch.allclose(found, undropped) and model.attn.requires_grad
        model.load_state_dict(reference.state_dict())
    assert len(compiled.report.attention) == 1 and [entry.names for entry in compiled.report.later] == [
        ("attn",)
    ]
    model.eval()(*given)
    same(compiled.eval()(x, seen), reference(x, seen))
    assert model.attn.mT.is_contiguous() == reference.attn.mT.is_contiguous()


def test_nothing_is_computed_before_somebody_looks() -> None:
    model = Attention().eval()
    compiled = attngraph.compile(model, strict=True)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        compiled(x)
    with torch.profiler.profile() as seen, torch.no_grad():
        compiled(x)
        weights = model.attention_weights
        assert (weights.shape, weights.dtype, weights.numel()) == ((2, 2, 5, 5), torch.float32, 100)
    ops = {event.name for event in seen.events()}
    assert "attngraph::attention" in ops and "aten::softmax" not in ops
    weights += 1
    assert model.attention_weights is weights
    torch.testing.assert_close(weights.sum(-1), torch.full((2, 2, 5), 6.0))
    assert copy.deepcopy(weights).equal(weights) and (weights.numpy() >= 1).all()


def test_other_random_numbers_are_drawn_in_the_call(x: Tensor) -> None:
    model = Setting(lambda m, x, p: setattr(m, "noisy", p + torch.rand_like(p)))
    compiled = attngraph.compile(model)
    compiled(x)
    (missed,) = compiled.report.missed
    assert missed.reason.startswith("its weights are also used in what forward() sets noisy to (")
    assert type(model.noisy) is Tensor


class Head(nn.Module):
    """A small language model that keeps its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(11, 8), Layers(), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.embed(ids)))
        return found


class Returning(Head):
    """Returns the weights of a layer besides."""

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids), self.layers.gathered[0]


def test_a_decoder_does_not_set_attributes_and_fuses_what_they_kept_whole() -> None:
    model = Returning().eval()  # a decoder leaves out weights that are returned, too
    decoder = attngraph.compile(model, cache=True)
    ids = torch.randint(0, 11, (2, 6))
    for _ in range(2):
        logits, state = decoder.prefill(ids)
        same(logits, model(ids)[0].detach())
    assert len(decoder._derived.all()) == 1
    more = torch.randint(0, 11, (2,))
    same(decoder.decode(more, state)[:, 0], model(torch.cat([ids, more[:, None]], 1))[0][:, -1].detach())
    report = decoder.report
    assert (len(report.attention), report.missed) == (3, ())
    assert report.cache is not None
    assert set(report.cache.unset) == {
        "layers.gathered", "layers.layers.0.attention_weights", "layers.layers.1.attention_weights"
    }  # fmt: skip
    assert "not set, unlike by the model's own forward(): layers.gathered" in str(report)
