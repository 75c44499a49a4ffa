"""The latest token that an element follows from, against brute force: later tokens are changed, and nothing
may."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attngraph.meaning.tokens.latest_rules import tracking

TOKENS, WIDTH = 11, 6
WEIGHT = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
PLACES, BLOCKS = torch.arange(TOKENS), torch.arange(TOKENS // 4)


def _scores(x: Tensor) -> Tensor:
    return x @ WEIGHT @ x.mT


def _blocks(x: Tensor) -> Tensor:
    return x[: TOKENS // 4 * 4].view(-1, 4, WIDTH)


def _largest(x: Tensor, places: bool) -> tuple[Tensor, Tensor]:
    found, order = _scores(x).masked_fill(~CAUSAL, -torch.inf).sort(dim=-1, descending=True, stable=True)
    return (found[:, :3], order[:, :3]) if places else (found[:, :3], order[:, :3] // 2)


def _chosen(x: Tensor) -> Tensor:
    _, places = _largest(x, True)
    kept = torch.zeros(TOKENS, TOKENS, dtype=torch.bool).scatter(-1, places, True) & CAUSAL
    return _scores(x).masked_fill(~kept, -torch.inf).softmax(-1) @ x


def _gathered(x: Tensor) -> Tensor:
    found, places = _largest(x, True)
    keys = torch.gather(x.expand(TOKENS, -1, -1), 1, places[..., None].expand(-1, -1, WIDTH))
    scores = (x[:, None] * keys).sum(-1).masked_fill(found == -torch.inf, -torch.inf)
    return (scores.softmax(-1)[..., None] * keys).sum(1)


def _places(x: Tensor) -> Tensor:
    """Three keys; where there are fewer earlier ones, later ones, too."""
    scores = _scores(x) + torch.where(CAUSAL, 0.0, -1e9)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :3]


def _left_out(x: Tensor) -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).scatter(-1, _places(x), False)


def _written(x: Tensor, hidden: Tensor) -> Tensor:
    """A finite mask in which the places of three keys are written."""
    mask = torch.full((TOKENS, TOKENS), -1e9, dtype=torch.float64).scatter(-1, _places(x), 0.0)
    return (_scores(x) + mask.masked_fill(hidden, -1e9)).softmax(-1) @ x


def _kept(x: Tensor, kept: Tensor) -> Tensor:
    scores = _scores(x)
    return torch.where(kept, scores, scores - 1e9).softmax(-1) @ x


def _by_hand(x: Tensor) -> Tensor:
    scores = _scores(x) + torch.where(CAUSAL, 0.0, -1e9)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ x


LOOKING_BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax of hidden scores": lambda x: _scores(x).masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ x,
    "scores plus a mask": lambda x: (_scores(x) + torch.where(CAUSAL, 0.0, -1e9)).softmax(-1) @ x,
    "weights by hand": _by_hand,
    "products with zeros": lambda x: (_scores(x) * CAUSAL) @ x,
    "running sums": lambda x: x.cumsum(0).relu(),
    "means of full blocks": lambda x: (
        (x @ _blocks(x).mean(1).mT).masked_fill(((PLACES + 1) // 4)[:, None] <= BLOCKS, 0.0)
        @ _blocks(x).mean(1)
    ),
    "a pool of windows": lambda x: (
        torch.nn.functional.avg_pool1d(torch.nn.functional.pad(x.mT[None], (2, 0)), 3, 1)[0].mT
    ),
    "a convolution": lambda x: (
        torch.nn.functional.conv1d(
            torch.nn.functional.pad(x.mT[None], (2, 0)), WEIGHT.view(6, 2, 3).repeat(1, 3, 1)
        )[0].mT
    ),
    "chosen keys": _chosen,
    "gathered keys": _gathered,
    "chosen keys, written to a finite mask": lambda x: _written(x, ~CAUSAL),
    "chosen keys, others lowered": lambda x: _kept(x, ~_left_out(x) & CAUSAL),
    "chosen keys, others lowered by a mask": lambda x: (
        (_scores(x) + torch.where(CAUSAL, 0.0, -1e9).masked_fill(_left_out(x), -1e9)).softmax(-1) @ x
    ),
    "a padded block, upsampled": lambda x: (
        torch.nn.functional.pad(x, (0, 0, 3, 1))[:12].view(3, 4, WIDTH).mean(1).repeat_interleave(4, 0)[:11]
    ),
}
LOOKING_AHEAD: dict[str, Callable[[Tensor], Tensor]] = {
    "a row of which all is hidden by a finite number": lambda x: (
        (_scores(x) + torch.where(CAUSAL & (PLACES > 2)[:, None], 0.0, -1e9)).softmax(-1) @ x
    ),
    "a row that data hide by a finite number": lambda x: (
        _scores(x).masked_fill((x[:, :1] > 0) | ~CAUSAL, -1e9).softmax(-1) @ x
    ),
    "a row that data seldom hide by a finite number": lambda x: (
        _scores(x).masked_fill((x[:, :1] > 2.9) | ~CAUSAL, -1e9).softmax(-1) @ x
    ),
    "a row that data seldom hide by a product": lambda x: (
        (_scores(x) + torch.where(CAUSAL, (x[:, :1] > 2.9) * -1e9, -1e9)).softmax(-1) @ x
    ),
    "a row that data seldom hide, beside a finite number": lambda x: (
        (_scores(x).masked_fill(x[:, :1] > 2.9, -torch.inf) + torch.where(CAUSAL, 0.0, -1e9)).softmax(-1) @ x
    ),
    "a row that data seldom lower": lambda x: _kept(x, (x[:, :1] < 2.9) & CAUSAL),
    "chosen keys, later ones not hidden": lambda x: _kept(x, ~_left_out(x)),
    "chosen keys that may all be too far": lambda x: _kept(
        x, ~_left_out(x) & CAUSAL & (PLACES[:, None] - TOKENS + 1 < PLACES)
    ),
    "chosen keys of which a later mask may hide all": lambda x: (
        (
            torch.where(~_left_out(x), _scores(x), _scores(x) - 1e9)
            + torch.where(CAUSAL & (PLACES > 0), 0.0, -1e9)
        ).softmax(-1)
        @ x
    ),
    "keys by a table of finite masks": lambda x: (
        (_scores(x) + torch.where(CAUSAL, torch.tensor([0.0, -1e9])[(x[:, :1] > 2.9).long()], -1e9)).softmax(
            -1
        )
        @ x
    ),
    "chosen keys, written to a mask of which later ones are not hidden": lambda x: _written(
        x, CAUSAL & ~CAUSAL
    ),
    "chosen queries": lambda x: _kept(x, ~_left_out(x).mT & CAUSAL),
    "an order of hidden numbers": lambda x: (
        (_scores(x) + torch.where(CAUSAL, 0.0, torch.where(x[:, 0] > 0, -torch.inf, -1e9)))
        .sort(dim=-1, descending=True, stable=True)
        .indices
    ),
    "a moderate number": lambda x: (_scores(x) + torch.where(CAUSAL, 0.0, -20.0)).softmax(-1) @ x,
    "what a large number hid, shown again": lambda x: (
        (_scores(x) + torch.where(CAUSAL, 0.0, -1e9)) + torch.where(CAUSAL, 0.0, 1e9)
    ),
    "means of open blocks": lambda x: (x @ _blocks(x).mean(1).mT).masked_fill(
        (PLACES // 4)[:, None] < BLOCKS, 0.0
    ),
    "chosen among all": lambda x: torch.zeros(TOKENS, TOKENS).scatter(-1, _scores(x).topk(3).indices, 1.0),
    "the largest of all": lambda x: x - x.amax(0),
    "a sort of tokens": lambda x: x.sort(0).values,
}


def _latest(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    mode = tracking()
    mode.tell(x, torch.arange(float(TOKENS))[:, None])
    with torch.no_grad(), mode:  # type: ignore[attr-defined]
        found = function(x)
    return mode.of(found)


def _drawn(seed: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [*LOOKING_BACK, *LOOKING_AHEAD])
def test_what_follows_from_no_later_token_does_not_change_with_one(name: str) -> None:
    function, x = {**LOOKING_BACK, **LOOKING_AHEAD}[name], _drawn(0)
    latest, before = _latest(function, x), function(x)
    for token in range(TOKENS):
        for seed in range(1, 4):
            other = torch.where((token < PLACES)[:, None], 3 * _drawn(seed), x)
            same = latest <= token
            torch.testing.assert_close(function(other)[same], before[same], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LOOKING_BACK)
def test_looking_back_is_seen(name: str) -> None:
    assert (_latest(LOOKING_BACK[name], _drawn(0)) <= PLACES[:, None]).all()


@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_looking_ahead_is_not_taken_for_looking_back(name: str) -> None:
    assert (_latest(LOOKING_AHEAD[name], _drawn(0)) > PLACES[:, None]).any()
