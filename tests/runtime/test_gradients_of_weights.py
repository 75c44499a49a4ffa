"""Gradients with respect to weights that a call hands out are eager's: the output follows from them.

The attention is fused all the same, and without anybody who asks nothing of the size of the weights is made.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attngraph
from attngraph.runtime.look import Unseen


class Model(nn.Module):
    """Two layers; `pick` makes what is returned beside the output from what the layers compute."""

    kept: Any = None

    def __init__(self, pick: Callable[..., Sequence[Tensor]], inside: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 24), nn.Linear(8, 24)])
        self.__dict__["pick"] = pick
        self.inside = inside

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        found = []
        for layer in self.layers:
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            s = q @ k.mT / 2
            p = s.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -9.0).softmax(-1)
            x = x + (p @ v).transpose(1, 2).flatten(2)
            found.append((s, p))
            if self.inside:
                p.retain_grad()
        self.kept = found[1][1]
        return x, list(self.pick(*found))


PICKS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "the weights of both": lambda a, b: (a[1], b[1]),
    "scores and weights": lambda a, b: a,
    "weights and what follows from them": lambda a, b: (b[1], b[1].mT, (b[1] * b[1]).sum(), b[1].detach()),
    "what follows alone": lambda a, b: (a[1].mean(1), b[1][:, 0]),
}
Asked = Callable[[Tensor, list[Tensor], Any], Sequence[Tensor | None]]


def _hooked(out: Tensor, maps: list[Tensor], model: Any) -> Sequence[Tensor | None]:
    seen: dict[int, Tensor] = {}
    for number, p in enumerate(maps):
        p.register_hook(lambda grad, number=number: seen.update({number: grad}))  # type: ignore[misc]
    out.square().sum().backward()
    return [seen.get(number) for number in range(len(maps))]


def _changed(out: Tensor, maps: list[Tensor], model: Any) -> Sequence[Tensor | None]:
    for p in maps:
        p.register_hook(lambda grad: 3 * grad)
    maps.clear()
    out.square().sum().backward()
    return []


def _twice(out: Tensor, maps: list[Tensor], model: Any) -> Sequence[Tensor | None]:
    """After a backward pass gradients are retained; in the second the weights themselves count too."""
    loss = out.square().sum() + sum(p.square().sum() for p in maps)
    out.square().sum().backward(retain_graph=True)
    for p in maps:
        p.retain_grad()
    loss.backward()
    return [p.grad for p in maps]


def _double(out: Tensor, maps: list[Tensor], model: Any) -> Sequence[Tensor | None]:
    first = torch.autograd.grad(out.square().sum(), maps, create_graph=True, allow_unused=True)
    sum(t.square().sum() for t in first if t is not None and t.requires_grad).backward()  # type: ignore[union-attr]
    return first


def _among(out: Tensor, maps: list[Tensor], model: Any) -> Sequence[Tensor | None]:
    return [
        torch.autograd.grad(a.square().sum(), b, allow_unused=True, retain_graph=True)[0]
        for a in maps for b in maps if a is not b
    ]  # fmt: skip


ASKED: dict[str, Asked] = {
    "grad": lambda out, maps, _: torch.autograd.grad(out.square().sum(), maps, allow_unused=True),
    "grad of what is kept": lambda out, _, m: torch.autograd.grad(out.square().sum(), m.kept),
    "hooks": _hooked,
    "hooks that change": _changed,
    "retain_grad after a backward pass": _twice,
    "gradients of gradients": _double,
    "of one in another": _among,
    "nothing, after a look": lambda out, maps, _: [p.sum() for p in maps] + [out.square().sum().backward()],
}


@pytest.mark.parametrize(
    ("pick", "asked"),
    [
        ("scores and weights", "grad of what is kept"),  # not looked at
        *((pick, asked) for asked in ASKED for pick in PICKS
          if (pick, asked) != ("what follows alone", "gradients of gradients")),  # there are none
    ],
)  # fmt: skip
def test_gradients_of_what_is_handed_out_are_eagers(pick: str, asked: str) -> None:
    model = Model(PICKS[pick]).double()
    compiled = attngraph.compile(copy.deepcopy(model))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    found = []
    for each in (model, compiled):
        out, maps = each(x)
        assert each is model or any(type(p) is Unseen for p in maps)
        got = [*ASKED[asked](out, [p for p in maps if p.requires_grad], each)]
        found.append([*got, *(w.grad for w in each.parameters())])
    assert len(compiled.report.attention) == 2 and not compiled.report.missed
    assert [t is None for t in found[0]] == [t is None for t in found[1]]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("after", [True, False])
def test_dropped_weights_have_the_gradients_of_what_was_kept_of_them(after: bool) -> None:
    def attend(x: Tensor) -> tuple[Tensor, ...]:
        p = (x @ x.mT).softmax(-1)
        dropped = nn.functional.dropout(p, 0.4)
        return dropped @ x, p if not after else dropped, (dropped != 0).detach()

    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    compiled = attngraph.compile(attend)
    out, p, kept = compiled(x)
    assert len(compiled.report.attention) == 1 and type(p) is Unseen
    cotangent = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, p, cotangent)
    of_dropped = cotangent @ x.detach().mT
    expected = of_dropped if after else torch.where(kept, of_dropped / 0.6, 0.0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_model_that_hands_out_weights_has_eagers_gradients(reentrant: bool) -> None:
    model = Model(PICKS["the weights of both"]).double()
    compiled = attngraph.compile(copy.deepcopy(model))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for _ in range(2):
        found = []
        for each in (model, compiled):
            y = x.clone().requires_grad_()
            out, maps = checkpoint(each, y, use_reentrant=reentrant)
            (out.sum() + sum(p.square().sum() for p in maps if p.requires_grad)).backward()
            found.append(y.grad)
        torch.testing.assert_close(*found)


def test_a_forward_that_retains_gradients_is_told_and_has_them() -> None:
    torch._dynamo.reset()
    model = Model(lambda a, b: (a[1], b[1]), inside=True)
    compiled = attngraph.compile(model)
    out, maps = compiled(torch.randn(2, 5, 8))
    out.sum().backward()
    assert all(p.grad is not None for p in maps)
    assert "asks for the gradient of a tensor (retain_grad)" in compiled.report.breaks[0].reason
