"""Random models of which some see tokens far ahead, far back, or from some place on: a decoder gives what the
model gives, at lengths beyond all of its numbers, or there is none, for a reason that is true."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import attngraph
from attngraph.errors import NoDecoderError

LENGTH = 420
"""Tokens that are compared: more than the numbers in a model reach."""
Mask = Callable[[Tensor, Tensor], Tensor]


def _places(chosen: random.Random) -> tuple[str, Mask]:
    """A predicate of a query's place and a key's."""
    n = chosen.choice((1, 2, 5, 17, 60, 150))
    found: dict[str, Mask] = {
        f"i - j < {n}": lambda i, j: i - j < n,
        f"i - j == -{n}": lambda i, j: i - j == -n,
        f"j - i == {n}.": lambda i, j: (j - i).float() == float(n),
        f"(i - j) % {n + 1} == 0": lambda i, j: (i - j) % (n + 1) == 0,
        f"i // {n} == j // {n}": lambda i, j: i // n == j // n,
        f"j < {n}": lambda i, j: j + 0 * i < n,
        f"i >= {n}": lambda i, j: i + 0 * j >= n,
        f"(i - j) * 2 > {n}": lambda i, j: (i - j) * 2 > n,
        f"j + {n} <= i": lambda i, j: j + n <= i,
        f"i + {n} == j + buffer": lambda i, j: i + n == j + torch.tensor(0),
    }
    return chosen.choice(list(found.items()))


def _mask(chosen: random.Random) -> tuple[str, Mask]:
    """Mostly causal: what it adds to "no later key", or takes from it."""
    (a, one), (b, two) = _places(chosen), _places(chosen)
    return chosen.choice((
        ("i >= j", lambda i, j: i >= j),
        (f"i >= j and {a}", lambda i, j: (i >= j) & one(i, j)),
        (f"i >= j or {a}", lambda i, j: (i >= j) | one(i, j)),
        (f"i >= j and ({a} or {b})", lambda i, j: (i >= j) & (one(i, j) | two(i, j) | (i == j))),
        (f"i >= j or {a} and {b}", lambda i, j: (i >= j) | (one(i, j) & two(i, j))),
    ))  # fmt: skip


WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda s, keep: s.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(),
    "softmax of -1e9": lambda s, keep: s.masked_fill(~keep, -1e9).softmax(-1),
    "softmax, added": lambda s, keep: (s + torch.where(keep, 0.0, -1e5)).softmax(-1) * (1 + s.tanh()),
    "linear": lambda s, keep: s * keep / 50,
    "sigmoid": lambda s, keep: s.sigmoid() * keep,
    "relu, divided": lambda s, keep: s.relu() * keep / (1 + keep.sum(-1, keepdim=True)),
    "largest": lambda s, keep: _largest(s.masked_fill(~keep, -torch.inf)),
    "less of itself": lambda s, keep: _less(s.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num()),
}


def _largest(s: Tensor) -> Tensor:
    return s.masked_fill(s < s.topk(min(3, s.shape[-1]), -1).values[..., -1:], -torch.inf).softmax(-1)


def _less(p: Tensor) -> Tensor:
    return p - 0.1 * p * torch.eye(p.shape[-1])


BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda k: k,
    "a running mean": lambda k: k.cumsum(1) / torch.arange(1, k.shape[1] + 1)[:, None],
    "the token before": lambda k: torch.cat([torch.zeros_like(k[:, :1]), k[:, :-1]], 1),
    "a sort of features": lambda k: k.sort(-1).values,
    "a norm": lambda k: nn.functional.layer_norm(k, (k.shape[-1],)),
}


class Model(nn.Module):
    """One or two layers of attention of a kind, with a mask of a kind."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chosen = random.Random(seed)
        torch.manual_seed(seed)
        self.turned = chosen.random() < 0.2
        self.embed, self.out = nn.Embedding(LENGTH, 8), nn.Linear(8, 13)
        self.keys = nn.ModuleList(nn.Linear(8, 8) for _ in range(chosen.choice((1, 1, 2))))
        (self.text, self.mask), self.before = _mask(chosen), chosen.choice(list(BEFORE))
        self.weights = chosen.choice(list(WEIGHTS))

    def __str__(self) -> str:
        turned = ", keys turned round" if self.turned else ""
        return f"{self.weights}, {self.text}, of {self.before}, {len(self.keys)} layer(s){turned}"

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        i = torch.arange(ids.shape[1])
        for layer in self.keys:
            j, k = i, layer(BEFORE[self.before](x))
            if self.turned:
                j, k = j.flip(0), k.flip(1)
            keep = self.mask(i[:, None], j[None])
            x = x + WEIGHTS[self.weights](x @ k.mT / 3, keep) @ k.tanh() / 3
        logits: Tensor = self.out(x)
        return logits


def check(seed: int) -> tuple[str, bool]:
    """What is wrong with one model, "" if nothing is; and whether it has a decoder."""
    model: Any = Model(seed).eval().double()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 13, (1, LENGTH), generator=generator)
    decoder: Any = attngraph.compile(model, cache=True)
    with torch.no_grad():
        try:
            decoder.prefill(ids[:, :9])
            if "equal scores" in str(decoder.report):  # their rounding decides: tokens that differ have none
                ids = torch.randperm(LENGTH, generator=generator)[None]
            logits, state = decoder.prefill(ids[:, :9])
        except NoDecoderError as problem:
            pair = re.search(r"Token (\d+) sees token (\d+)", problem.reason)
            wrong = pair is not None and not _sees(model, *map(int, pair.groups()))
            return (f"{model}: untrue: {problem.reason}" if wrong else ""), False
        whole = model(ids)
        found = [logits, decoder.decode(ids[:, 9:200], state)]
        found += [decoder.decode(ids[:, t : t + 1], state) for t in range(200, 206)]
        found.append(decoder.decode(ids[:, 206:], state))
    error = (torch.cat(found, 1) - whole).abs().amax((0, 2)) / whole.abs().max()
    place = int(error.argmax())
    return (f"{model}: token {place} is off by {error[place]:.2g}" if error[place] > 1e-7 else ""), True


def _sees(model: nn.Module, token: int, later: int) -> bool:
    """Whether a token's result changes with a later token, for some ids and weights of some size: in a short
    sequence, or in a long one, where it may do so through a token that lies far ahead."""
    generator = torch.Generator().manual_seed(0)
    for size in (1.0, 4.0, 15.0):
        with torch.no_grad():
            changed = {n: p * size for n, p in model.named_parameters()}
            for length in (later + 3, max(LENGTH, later + 3)) * 6:
                ids = torch.randint(0, 13, (1, length), generator=generator)
                other = ids.clone()
                other[:, later] = (ids[:, later] + 5) % 13
                a, b = (torch.func.functional_call(model, changed, (x,))[:, token] for x in (ids, other))
                if not torch.equal(a, b):
                    return True
    return False
