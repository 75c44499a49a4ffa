"""What each token is computed from alone becomes one operation in whole sequences; biases become tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attngraph
from attngraph.api.options import make_options
from attngraph.passes.fuse_token_wise.fuse import FuseTokenWise
from attngraph.pipeline import Disabled

WIDTH, HEADS = 16, 2
Body = Callable[["Layer", Tensor], Tensor]


class Layer(nn.Module):
    """One attention and a feed-forward part, in a spelling of `body`."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.wide, self.back = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.places = nn.Parameter(torch.randn(64, WIDTH))
        self.body = body

    def feed(self, x: Tensor) -> Tensor:
        return x + self.back(F.gelu(self.wide(self.norm(x))))

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(((q @ k.mT / 3).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def flat(m: Layer, x: Tensor) -> Tensor:
    """Products of `[B * T, F]`, as Conv1D of transformers has them."""
    wide = torch.addmm(m.wide.bias, m.norm(x).view(-1, WIDTH), m.wide.weight.T)
    return m.attended(m.back(wide.tanh()).view(x.shape)) + x


def turned(m: Layer, x: Tensor) -> Tensor:
    """Angles of places, which the rows of the batch share, turn the heads of queries and keys."""
    angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))

    def turn(y: Tensor) -> Tensor:
        return y * cos + torch.cat([-y[..., 4:], y[..., :4]], -1) * sin

    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in m.qkv(m.norm(x)).chunk(3, -1))
    found = (turn(q) @ turn(k).mT / 3).softmax(-1) @ v
    return m.feed(m.out(found.transpose(1, 2).flatten(2)))


def tokens_first(m: Layer, x: Tensor) -> Tensor:
    """`[T, B, F]` between the attentions."""
    return m.feed(m.attended(x).transpose(0, 1)).transpose(0, 1)


def of_each_sequence(m: Layer, x: Tensor) -> Tensor:
    """A vector of each sequence is added to all its tokens, and each sequence is pooled and multiplied."""
    x = m.attended(x) + m.feed(x.mean(1))[:, None]
    return m.back(m.wide(m.norm(x[:, 0])).relu())


BODIES: dict[str, Body] = {
    "after attention": lambda m, x: m.feed(m.attended(x)),
    "before and after": lambda m, x: m.feed(m.attended(m.feed(x))),
    "places are added": lambda m, x: m.feed(m.attended(m.feed(x + m.places[: x.shape[1]]))),
    "flat": flat, "turned": turned, "tokens first": tokens_first, "of each sequence": of_each_sequence,
    "a value of all tokens": lambda m, x: m.feed(m.attended(m.feed(x) / (1 + x.abs().amax(1, keepdim=True)))),
}  # fmt: skip


def regions(compiled: Any) -> int:
    """How many operations there are of what each token is computed from alone."""
    graph = compiled._graphs.latest().captured.graph.graph
    return len(graph.find_nodes(op="call_function", target=torch.ops.attngraph.token_program.default))


@pytest.mark.parametrize("name", BODIES)
def test_it_gives_what_the_model_gives(name: str) -> None:
    """For any sizes: a size of one is a graph of its own, and rows may be as many as tokens."""
    model = Layer(BODIES[name]).eval()
    compiled: Any = attngraph.compile(model, min_scores=0)
    with torch.no_grad():
        for shape in ((2, 5), (3, 7), (4, 4), (1, 6), (2, 1), (5, 16), (0, 3)):
            x = torch.randn(*shape, WIDTH)
            want = model.double()(x.double())
            model.float()
            torch.testing.assert_close(compiled(x).double(), want, rtol=2e-5, atol=2e-5)
            if shape == (2, 5):
                assert regions(compiled) >= 1


@pytest.mark.parametrize("tokens", [5, WIDTH, 40])
def test_numbers_count_rows_as_symbols_do(tokens: int) -> None:
    """An image has as many patches as its side says, and a weight may have as many rows."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = Layer(BODIES["after attention"])
            self.places = nn.Parameter(torch.randn(tokens, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.view(-1, tokens, WIDTH) + self.places)

    model = Patches().eval()
    compiled: Any = attngraph.compile(model, min_scores=0)
    with torch.no_grad():
        for rows in (2, 3, 1):
            x = torch.randn(rows, tokens * WIDTH)
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-5, atol=2e-5)
            assert regions(compiled) >= 1


@pytest.mark.parametrize("gradients", [False, True])
def test_rows_may_be_named_by_the_sizes_of_something_else(gradients: bool) -> None:
    """A loss has as many labels as there are tokens, whose sizes are symbols of their own."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(BODIES["after attention"])

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            found = self.layer(x + self.layer.places)
            return F.cross_entropy(found.view(-1, WIDTH), labels.reshape(-1))

    model = Loss()
    compiled: Any = attngraph.compile(model, min_scores=0)
    with torch.set_grad_enabled(gradients):
        x, labels = torch.randn(2, 64, WIDTH), torch.randint(WIDTH, (2, 65))[:, 1:]
        torch.testing.assert_close(compiled(x, labels), model(x, labels))
    assert regions(compiled) >= 1


@pytest.mark.parametrize("name", [*BODIES, "activations"])
def test_gradients_are_those_of_the_model(name: str) -> None:
    """Also of sums that a norm follows, and where products, maxima and other places are left to PyTorch."""

    def activations(m: Layer, x: Tensor) -> Tensor:
        y = m.wide(m.attended(x))
        y = y * torch.sigmoid(1.702 * y) + F.softplus(y).tanh() * F.relu(y) + y.clamp(-0.5, 0.5) ** 2
        y = y * (y * y).mean(-1, keepdim=True).add(1e-6).rsqrt() - y.detach() * y.exp()
        return m.back(y) + x

    model = Layer(activations if name == "activations" else BODIES[name])
    compiled: Any = attngraph.compile(model, min_scores=0)
    for shape in ((2, 5), (3, 7), (1, 6), (2, 1)):
        x, grads = torch.randn(*shape, WIDTH), list[Any]()
        for candidate, dtype in ((compiled, torch.float32), (model, torch.float64)):
            model.to(dtype)
            given = x.to(dtype).requires_grad_()
            out = candidate(given)
            grad = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
            grads.append(torch.autograd.grad(out, [given, *model.parameters()], grad, allow_unused=True))
        model.float()
        for found, want in zip(*grads, strict=True):
            assert (found is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)
        if name in ("activations", "flat"):
            assert regions(compiled) >= 1


def test_inductor_computes_it_instead() -> None:
    assert Disabled(FuseTokenWise()) in make_options(inductor=True).pipeline()


BIASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "of distance": lambda q, k, w: torch.exp(-(k - q).abs() / 3.0).sin().cos() * w[0, 0],
    "of distances and heads": lambda q, k, w: (
        torch.log((k - q).abs() + 1.0).sin().cos() * w[:, 0, None, None]
    ),
    "of key": lambda q, k, w: torch.sin(k * 0.3).exp().cos().tanh() * w[0, 0],
    "of the last keys": lambda q, k, w: w[
        :, torch.log(k.shape[0] - k.clamp(min=k.shape[0] - 3) + 0.5).long()
    ][:, None],
    "of query": lambda q, k, w: torch.sin(q * 0.3).exp().cos().tanh() * k,
    "of both": lambda q, k, w: torch.sin(q * k * 0.3).exp().cos().tanh(),
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", BIASES)
def test_what_scores_have_of_fewer_indices_is_a_table(name: str, gradients: bool) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(HEADS, 8))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            q, k = torch.arange(x.shape[2])[:, None], torch.arange(y.shape[2])
            return (x @ y.mT / 3 + BIASES[name](q, k, self.w)).softmax(-1) @ y

    words = {"of distances and heads": "distance", "of the last keys": "key", "of both": ""}
    word = words.get(name, name.removeprefix("of "))
    model = Biased().eval()
    compiled: Any = attngraph.compile(model, min_scores=0, strict=True)
    with torch.set_grad_enabled(gradients):
        for queries, keys in ((5, 7), (8, 3), (6, 6), (1, 4)):
            x, y = torch.randn(2, HEADS, queries, 8), torch.randn(2, HEADS, keys, 8)
            found, want = compiled(x, y), model(x, y)
            torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)
            notes = {n.split(" at ")[0] for r in compiled.report.passes for n in r.notes}
            assert queries == 1 or (f"computed once for each {word}" in notes) == bool(word)
            if gradients and want.requires_grad:
                g = torch.randn_like(want)
                pair = (torch.autograd.grad(out, model.w, g, allow_unused=True)[0] for out in (found, want))
                torch.testing.assert_close(*pair, rtol=2e-4, atol=2e-5)


def test_equal_tables_are_one() -> None:
    """Two layers with the bias of the first, as in T5."""

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            place = torch.arange(x.shape[1])
            bias = torch.log((place[:, None] - place).abs() + 1.0).sin().cos()
            for _ in range(2):
                x = (x @ x.mT + bias).softmax(-1) @ x
            return x

    model = Twice()
    compiled: Any = attngraph.compile(model, min_scores=0)
    x = torch.randn(2, 6, 8)
    torch.testing.assert_close(compiled(x), model(x))
    nodes = compiled._graphs.latest().captured.graph.attentions()
    assert len(nodes) == 2 and len({read for node in nodes for read in node.args[3]}) == 1
