"""The small models whose decoders are tested, by what a token takes from earlier ones: tables of what stands
between an embedding and logits (`Small`), and of what has no decoder, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LONGEST = 24, 8, 2, 64
Mix = Callable[[Any, Tensor], Tensor]
Weights = Callable[[Tensor, Tensor], Tensor]


class Small(nn.Module):
    """An embedding, `mix` of the model and of `[B, T, WIDTH]`, and logits; with layers that a mix may use,
    and others that are given by name."""

    def __init__(self, mix: Mix, **parts: Any) -> None:
        super().__init__()
        self.embed, self.logits, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY), mix
        self.qkv, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gru, self.lstm = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.convolve = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)
        self.dilated = nn.Conv1d(WIDTH, WIDTH, 3, dilation=2, groups=2)
        self.places, self.begin = nn.Embedding(LONGEST, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.pairs = nn.Parameter(torch.randn(LONGEST, LONGEST) / 5)
        self.distances, self.norm = nn.Parameter(torch.randn(LONGEST, 4)), nn.BatchNorm1d(WIDTH)
        self.near = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, HEADS))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.eval()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.logits(self.mix(self, self.embed(ids)))
        return result


class OfIds(Small):
    """With a mix of the token ids, which is added to the embedding."""

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.logits(self.embed(ids) + self.mix(self, ids))
        return result


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def apart(tokens: int) -> Tensor:
    """How far each key is behind each query, `[T, T]`."""
    at = torch.arange(tokens)
    return at[:, None] - at


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
    keep = causal(q.shape[-2]) if keep is None else keep
    return (q @ k.mT / 3).masked_fill(~keep, -math.inf).softmax(-1) @ v


def of_heads(mixed: Callable[..., Tensor]) -> Mix:
    """A mix by a function of the model, and of queries, keys and values of two heads."""

    def mix(m: Any, x: Tensor) -> Tensor:
        q, k, v = (heads(t) for t in m.qkv(x).chunk(3, -1))
        return x + joined(mixed(m, q, k, v))

    return mix


def weighing(weights: Weights) -> Mix:
    """Attention with the weights that a function makes of scores and of a causal mask."""
    attention = of_heads(lambda m, q, k, v: weights(q @ k.mT / 2, causal(q.shape[2])) @ v)
    return lambda m, x: attention(m, x + m.places(torch.arange(x.shape[1])))


# --- loops over tokens ---


def one_by_one(x: Tensor) -> list[Tensor]:
    return [x[:, t] for t in range(x.shape[1])]


def zeros(m: Any, x: Tensor) -> Tensor:
    return torch.zeros_like(x[:, 0])


def looped(
    step: Callable[..., Any], begin: Mix | Any = zeros, result: Callable[[Any], Tensor] = lambda state: state,
    tokens: Callable[[Tensor], Iterable[Any]] = one_by_one,
) -> Mix:  # fmt: skip
    """A mix that hands a state from token to token: `step` makes the next one of the model, the state and the
    token, and `result` of a state is what the token gets."""

    def mix(m: Any, x: Tensor) -> Tensor:
        state, found = begin(m, x), []
        for token in tokens(x):
            state = step(m, state, token)
            found.append(result(state))
        return torch.stack(found, 1)

    return mix


def _first_token_begins(m: Any, x: Tensor) -> Tensor:
    gate, found = m.gate(x), [x[:, 0]]
    for t in range(1, x.shape[1]):
        found.append(torch.tanh(found[-1] * gate[:, t] + x[:, t]))
    return torch.stack(found, 1)


def _written_in_place(m: Any, x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), torch.empty_like(x)
    for t in range(x.shape[1]):
        state = m.gru(x[:, t], state)
        found[:, t] = state
    return found


def _tokens_first(m: Any, x: Tensor) -> Tensor:
    state, found = torch.zeros(1, x.shape[0], WIDTH), []
    for part in x.transpose(0, 1).split(1):
        state = torch.tanh(m.gate(state) + part)
        found.append(state)
    return torch.cat(found).transpose(0, 1)


def _joins_heads_and_rows(m: Any, state: Tensor, token: Tensor) -> Tensor:
    both = state.flatten(0, 1) + token.view(-1, 2, WIDTH // 2).flatten(0, 1)
    return torch.tanh(both).view(token.shape[0], 2, WIDTH // 2)


def _counts(m: Any, state: tuple[Tensor, Tensor], token: Tensor) -> tuple[Tensor, Tensor]:
    count, kept = state
    count = torch.where(token[:, :1] > 0, count + 1, 0)
    return count, torch.where(count > 1, kept, token)


def _zeros_twice(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return (torch.zeros_like(x[:, 0]),) * 2


def lstm_of(begin: Mix | Any) -> Mix:
    return looped(lambda m, s, x: m.lstm(x, s), begin, lambda s: s[0], lambda x: x.unbind(1))


def _mixed_by_a_matrix(m: Any, x: Tensor) -> Tensor:
    mixing = torch.softmax(x.unsqueeze(-1) + x.unsqueeze(-2) ** 3, -1)
    both = list(zip(mixing.unbind(1), x.unbind(1), strict=True))
    return looped(
        lambda m, s, token: (token[0] @ s.unsqueeze(-1)).squeeze(-1) + token[1], tokens=lambda x: both
    )(m, x)


LOOPS: dict[str, Mix] = {
    "a full matrix of the token": _mixed_by_a_matrix,
    "written in place": _written_in_place,
    "counted tokens": looped(
        _counts, lambda m, x: (torch.zeros(x.shape[0], 1, dtype=torch.int64), torch.zeros_like(x[:, 0])),
        lambda s: s[0] * s[1],
    ),
    "a running maximum": looped(
        lambda m, s, x: torch.maximum(s, x), lambda m, x: torch.full_like(x[:, 0], -torch.inf)
    ),
    "LSTM cells": lstm_of(lambda m, x: None),
    "two steps back": looped(
        lambda m, s, x: (torch.sin(s[0] + s[1] + x), s[0]), _zeros_twice, lambda s: s[0]
    ),
    "tokens in the first dimension": _tokens_first,
    "cells that begin with new zeros": lstm_of(lambda m, x: (x.new_zeros(x.shape[0], WIDTH),) * 2),
    "the first token begins": _first_token_begins,
    "a state that is learned": looped(
        lambda m, s, x: torch.sin(s + x), lambda m, x: m.begin.expand(x.shape[0], -1)
    ),
    "without the own token": looped(
        lambda m, s, x: (torch.tanh(s[0] + x), s[0]), _zeros_twice, lambda s: s[1]
    ),
    "heads joined with rows": looped(
        _joins_heads_and_rows, lambda m, x: torch.zeros(x.shape[0], 2, WIDTH // 2), lambda s: s.flatten(1)
    ),
}  # fmt: skip


def _makes_logits(m: Any, x: Tensor) -> Tensor:
    state, found = x.new_zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        state = m.gru(x[:, t], state)
        found.append(m.head(state))
    return torch.stack(found, 1)


def of_torch(layer: nn.Module) -> Small:
    """A recurrent network of PyTorch; the tokens come first, unless it says so."""
    if layer.batch_first:
        return Small(lambda m, x: m.layer(x)[0], layer=layer)
    return Small(lambda m, x: m.layer(x.transpose(0, 1))[0].transpose(0, 1), layer=layer)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: of_torch(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "two layers of LSTM, tokens first": lambda: of_torch(nn.LSTM(WIDTH, WIDTH, 2)),
    "LSTM with a projection": lambda: of_torch(nn.LSTM(WIDTH, 12, batch_first=True, proj_size=WIDTH)),
    "RNN without biases": lambda: of_torch(nn.RNN(WIDTH, WIDTH, batch_first=True, bias=False)),
    "RNN with relu": lambda: of_torch(nn.RNN(WIDTH, WIDTH, batch_first=True, nonlinearity="relu")),
    "a loop that makes the logits": lambda: Small(
        _makes_logits, head=nn.Linear(WIDTH, VOCABULARY), logits=nn.Identity()
    ),
}


def _another_last_step(m: Any, x: Tensor) -> Tensor:
    found = _first_token_begins(m, x)
    return torch.cat([found[:, :-1], torch.tanh(found[:, -1:] * found[:, -2:-1])], 1)


def _all_so_far(m: Any, x: Tensor) -> Tensor:
    found = [x[:, 0]]
    for t in range(1, x.shape[1]):
        found.append(torch.tanh(x[:, t] + torch.stack(found).amax(0)))
    return torch.stack(found, 1)


def _frozen(m: Any, x: Tensor) -> Tensor:
    """From the fourth token on, a part of the step is what it was there."""
    state, part, found = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        part = torch.sin(state + x[:, t]) if t < 4 else part
        state = torch.tanh(state + x[:, t])
        found.append(state + part)
    return torch.stack(found, 1)


def _counting_scan(m: Any, x: Tensor) -> Tensor:
    decays = enumerate(zip(m.gate(x).sigmoid().unbind(1), x.unbind(1), strict=True), 1)
    return looped(lambda m, s, token: s * token[1][0] + token[0] * token[1][1], tokens=lambda x: decays)(m, x)


UNEQUAL_STEPS: dict[str, tuple[Mix, str]] = {
    "a step that mixes rows": (
        looped(lambda m, s, x: torch.tanh(s.mean(0, keepdim=True) + x)),
        "a batch of 2 sequences gives something else than each of them"),
    "a step that depends on the token's place": (
        looped(lambda m, s, x: torch.tanh(s + x[0] * x[1]), tokens=lambda x: enumerate(x.unbind(1))),
        r"models\.py.*tanh of several tokens.*no loop of equal steps: the step of token"),
    "a linear step that depends on the place": (_counting_scan, "three tokens look like one"),
    "a step that looks ahead": (
        looped(lambda m, s, x: torch.tanh(s + x),
               tokens=lambda x: [x[:, min(t + 1, x.shape[1] - 1)] for t in range(x.shape[1])]),
        "Token 0 sees token 1.*does not read its token as the others do"),
    "a loop from the end": (
        lambda m, x: _first_token_begins(m, x.flip(1)).flip(1),
        "token t reads token n - 1 - t. Token 0 sees token 1"),
    "a step that is frozen": (_frozen, "does not read its token as the others do"),
    "another last step": (_another_last_step, "has not as many places as there are tokens"),
    "two kinds of steps": (
        looped(lambda m, s, x: torch.tanh(s + x[1]) if x[0] % 2 else torch.sin(s + x[1]),
               tokens=lambda x: enumerate(x.unbind(1))),
        "does not compute what the others do"),
    "a step that needs all that came before": (_all_so_far, "does not compute what the others do"),
}  # fmt: skip


# --- sums and folds of all tokens so far ---


def _masked_products(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q.softmax(-1) @ k.exp().mT).tril()
    return (weights @ v) / weights.sum(-1, keepdim=True)


def _summed_products(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = q.softmax(-1), k.softmax(-1)
    return torch.einsum("bhtd,bhtde->bhte", q, torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2))


def _beside_a_summed_normaliser(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = q.softmax(-1), k.exp()
    weights = torch.einsum("bhid,bhjd->bhij", q, k).masked_fill(~causal(q.shape[2]), 0)
    return weights @ v / torch.einsum("bhid,bhid->bhi", q, k.cumsum(2))[..., None]


def _products_in_a_loop(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = q.softmax(-1), k.softmax(-1)
    state, found = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[2]):
        state = state + k[:, :, t, :, None] * v[:, :, t, None]
        found.append((q[:, :, t, None] @ state).squeeze(2))
    return torch.stack(found, 2)


def _random_features(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Performers (Choromanski et al. 2021, arXiv 2009.14794): positive features, and their sums."""

    def features(x: Tensor) -> Tensor:
        return torch.exp(x @ m.pairs[:4, :12] * 2 - x.pow(2).sum(-1, keepdim=True) * 0.08)

    q, k = features(q), features(k)
    found = torch.einsum("bhnm,bhnmd->bhnd", q, torch.einsum("bhnm,bhnd->bhnmd", k, v).cumsum(2))
    return found / torch.einsum("bhnm,bhnm->bhn", q, k.cumsum(2))[..., None]


def _retained(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Decays by distance that are made numbers, and rows divided by what they sum to (Sun et al. 2023, arXiv
    2307.08621)."""
    distance, decays = apart(q.shape[2]), 1 - 2.0 ** (-5 - torch.arange(HEADS).float())
    kept = torch.nan_to_num(torch.where(distance >= 0, decays[:, None, None] ** distance, 0.0))
    scores = (q @ k.mT) * kept
    return scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1) @ v


def _attention_free(m: Any, x: Tensor) -> Tensor:
    """Zhai et al. 2021, arXiv 2105.14103: weights of places and keys, and a gate of the query."""
    tokens, k = x.shape[1], m.gate(x).exp()
    weights = m.pairs[:tokens, :tokens].masked_fill(~causal(tokens), -math.inf).exp()
    return torch.sigmoid(x) * (weights @ (k * x)) / (weights @ k)


def _scan(m: Any, x: Tensor) -> Tensor:
    """A linear recurrence, as a loop over tokens."""
    decay, state, found = m.gate(x).sigmoid(), torch.zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t]
        found.append(state)
    return torch.stack(found, 1)


def _reflections(decays: bool) -> Mix:
    """A state that each token reflects along several of its vectors, then adds to, as a loop over tokens."""

    def mix(m: Any, x: Tensor) -> Tensor:
        keys, values, gate = m.qkv(x).split([8, 8, 8], -1)
        keys, gate, found = F.normalize(keys.unflatten(-1, (2, 4)), dim=-1), gate[..., :4].sigmoid(), []
        state = torch.zeros(x.shape[0], 4, WIDTH)
        for t in range(x.shape[1]):
            if decays:
                state = state * gate[:, t, :, None]
            for n in range(2):
                k = keys[:, t, n, :, None]
                state = state - 0.7 * k * (k * state).sum(-2, keepdim=True)
            state = state + keys[:, t, 0, :, None] * values[:, t, None]
            found.append((state * gate[:, t, :, None]).sum(1))
        return torch.stack(found, 1)

    return mix


class Blocks(Small):
    """A sum over earlier tokens in blocks of four, whose decays stand in tables of float32."""

    def __init__(self, off: float = 0.0) -> None:
        place, far = torch.arange(4), apart(4)
        inside = torch.where(far >= 0, (-0.3 * far).exp(), 0.0)
        inside[3, 1] += off
        before, after = ((-0.3 * n).exp()[:, None] for n in (place + 1, 3 - place))
        tables = {"inside": inside, "before": before, "after": after}
        super().__init__(Blocks._mixed, **{name: nn.Buffer(table) for name, table in tables.items()})

    def _mixed(self, x: Tensor) -> Tensor:
        state, found = torch.zeros(x.shape[0], WIDTH, WIDTH), []
        for start in range(0, x.shape[1], 4):
            part = x[:, start : start + 4]
            size = part.shape[1]
            own = (part @ part.mT * self.inside[:size, :size]) @ part
            found.append(own + (part * self.before[:size]) @ state)
            state = state * self.before[size - 1] + (part * self.after[4 - size :]).mT @ part
        return torch.cat(found, 1)


SUMS: dict[str, Mix] = {
    "of vectors": lambda m, x: x.cumsum(1),
    "of numbers": lambda m, x: x * x.sum(-1).cumsum(1).tanh()[..., None],
    "of counts": lambda m, x: x + (x > 0).cumsum(1) % 7,
    "of heads": lambda m, x: joined(heads(x).cumsum(2)),
    "of a running sum": lambda m, x: x.cumsum(1).tanh().cumsum(1),
    "a running mean": lambda m, x: x.cumsum(1) / (1 + torch.arange(x.shape[1])[:, None]),
    "a running log-sum-exp": lambda m, x: x.exp().cumsum(1).log(),
}
PRODUCTS: dict[str, Mix] = {
    "features that are a softmax": of_heads(_masked_products),
    "a normaliser that is summed": of_heads(_beside_a_summed_normaliser),
    "products that are summed": of_heads(_summed_products),
    "random features": of_heads(_random_features),
    "without the own token": lambda m, x: x + F.tanh((x @ x.mT).tril(-1) @ x),
}
LINEAR_LOOPS: dict[str, Mix] = {
    "products": of_heads(_products_in_a_loop),
    "reflections": _reflections(False),
    "a linear loop": _scan,
    "reflections and decays": _reflections(True),
}
FOLDS: dict[str, Mix] = {
    "cumprod": lambda m, x: m.gate(x).cumprod(1),
    "cummax": lambda m, x: x.cummax(1).values,
    "logcumsumexp": lambda m, x: (100 * x).logcumsumexp(-2) / 100,
    "cumprod of whole numbers": lambda m, x: x * (x[..., :1] > -1).cumprod(1),
    "cummin of a width beside heads": lambda m, x: joined(heads(x).cummin(-2)[0]),
    "logcumsumexp with nothing at the beginning": lambda m, x: x.masked_fill(x > -1, -torch.inf)
    .logcumsumexp(1).exp(),
}  # fmt: skip


# --- windows of the last tokens ---


def convolved(m: Any, x: Tensor) -> Tensor:
    return m.convolve(x.mT)[..., : x.shape[1]].mT  # type: ignore[no-any-return]


def before(x: Tensor, count: int, value: float = 0.0) -> Tensor:
    """`[B, width, T + count]`: so many equal values before the first token."""
    return F.pad(x.mT, (count, 0), value=value)


WINDOWS: dict[str, Mix] = {
    "convolutions one after the other, of zeros before the first": lambda m, x: m.dilated(
        F.silu(m.dilated(F.pad(x.mT, (8, 0)))) * 0.5 + 0.25).mT,
    "a convolution, cut": convolved,
    "a shift by padding": lambda m, x: F.pad(x, (0, 0, 1, -1)),
    "the largest of three": lambda m, x: F.max_pool1d(before(x, 2, -torch.inf), 3, 1).mT,
    "a mean of what there is": lambda m, x: F.avg_pool1d(
        before(x, 1), 3, 1, 1, count_include_pad=False)[..., : x.shape[1]].mT,
    "a dilated convolution in groups": lambda m, x: F.silu(m.dilated(F.pad(x.mT, (4, 0)))).mT,
    "windows, weighed": lambda m, x: before(x, 2).unfold(-1, 3, 1).transpose(1, 2) @ m.begin[:3],
    "a convolution of a convolution": lambda m, x: convolved(m, convolved(m, x).tanh()),
    "a convolution after zeros": lambda m, x: m.dilated(
        torch.cat([x.new_zeros(x.shape[0], WIDTH, 4), x.mT], 2)).mT,
    "a shift by cat": lambda m, x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "a shift by two": lambda m, x: F.pad(x.mT, (2, 0))[..., :-2].mT,
    "a shift that keeps the first token": lambda m, x: torch.cat([x[:, :1], x[:, :-1]], 1),
    "a roll, masked": lambda m, x: x.roll(1, 1).masked_fill((torch.arange(x.shape[1]) == 0)[:, None], 2.0),
    "a shift of tokens and features": lambda m, x: F.pad(x, (-1, 1, 1, -1)),
    "the largest of three and nought": lambda m, x: F.max_pool1d(before(x, 2), 3, 1).mT,
    "the largest of every other token": lambda m, x: F.max_pool1d(before(x, 4), 3, 1, dilation=2).mT,
    "the largest, padded twice": lambda m, x: F.max_pool1d(before(x, 1), 3, 1, 1)[..., : x.shape[1]].mT,
    "the largest of tokens and features": lambda m, x: F.max_pool2d(
        F.pad(x[:, None], (0, 1, 2, 0)), (3, 2), 1)[:, 0],
    "the smallest of many": lambda m, x: -F.max_pool1d(-before(x, 29), 30, 1).mT,
    "a mean": lambda m, x: F.avg_pool1d(before(x, 2), 3, 1).mT,
    "a mean before a convolution": lambda m, x: convolved(m, F.avg_pool1d(before(x, 2), 3, 1).mT),
    "the largest after a convolution": lambda m, x: F.max_pool1d(before(convolved(m, x), 2), 3, 1).mT,
    "a difference": lambda m, x: x + F.pad(x[:, 1:] - x[:, :-1], (0, 0, 1, 0)),
}  # fmt: skip


def trigram(m: Any, ids: Tensor) -> Tensor:
    number = F.pad(ids, (2, -2), value=3) * 7 + F.pad(ids, (1, -1), value=1) * 3 + ids
    return m.embed(number % VOCABULARY)  # type: ignore[no-any-return]


AHEAD = r"Token \d+ sees token \d+"
NO_WINDOWS: dict[str, tuple[Mix, str]] = {
    "convolved biases before the first token": (
        lambda m, x: m.convolve(m.convolve(x.mT))[..., : x.shape[1]].mT, "conv1d|pad"),
    "a shift ahead": (lambda m, x: F.pad(x, (0, 0, -1, 1)), AHEAD),
    "a convolution of both sides": (
        lambda m, x: F.conv1d(x.mT, m.dilated.weight, padding=2, dilation=2, groups=2).mT, AHEAD),
    "a convolution, cut too late": (lambda m, x: m.convolve(x.mT)[..., 1 : x.shape[1] + 1].mT, AHEAD),
    "a mean, cut too late": (
        lambda m, x: F.avg_pool1d(before(x, 1), 3, 1, 1)[..., 1 : x.shape[1] + 1].mT, AHEAD),
    "windows of later tokens": (lambda m, x: F.pad(x.mT, (0, 2)).unfold(-1, 3, 1).amax(-1).mT, AHEAD),
    "the largest of both sides": (
        lambda m, x: F.max_pool1d(x.mT, 5, 1, 2).mT,
        r"reads token t - 2 to token t \+ 2\. Token 0 sees token 1"),
    "ones before the first token": (lambda m, x: m.dilated(F.pad(x.mT, (4, 0), value=1.0)).mT, "conv1d|pad"),
    "biases that are padded": (
        lambda m, x: m.dilated(F.pad(m.dilated(F.pad(x.mT, (5, 0))), (3, 0))).mT, "conv1d|pad"),
    "biases that are shifted": (lambda m, x: F.pad(m.dilated(F.pad(x.mT, (5, 0))), (1, -2)).mT, "conv1d|pad"),
    "features that are summed": (
        lambda m, x: F.pad((x[:, 1:] - x[:, :-1]) @ m.gate.weight, (0, 0, 1, 0)), "slice at"),
}  # fmt: skip


# --- attention, whose keys and values are kept ---


def _of_other_heads(x: Tensor, a: Tensor) -> Tensor:
    shared = joined(attend(*[heads(a)] * 3))
    return joined(attend(heads(x, 4), *[heads(shared, 4)] * 2))


def window(x: Tensor, count: int = 3) -> Tensor:
    return causal(x.shape[-2]) & (apart(x.shape[-2]) < count)


def _over_two_windows(x: Tensor, a: Tensor) -> Tensor:
    b = attend(x, x, x, window(x))
    return attend(x, b, b) + attend(x, x, b, window(x))


def reading(reads: Callable[[Tensor, Tensor], Tensor]) -> Mix:
    """Of the tokens, and of what an attention gave."""
    return lambda m, x: reads(x, attend(*m.qkv(x).chunk(3, -1)))


def _mlstm(m: Any, x: Tensor) -> Tensor:
    """The mLSTM in parallel form (Beck et al. 2024, arXiv 2405.04517), with exponential gates."""
    q, k, v = (heads(t) for t in m.qkv(x).chunk(3, -1))
    forget, admit = m.gate(x)[..., :HEADS], m.gate(x)[..., HEADS : 2 * HEADS].transpose(1, 2)
    forgotten = F.logsigmoid(forget).cumsum(1).transpose(1, 2)
    gates = forgotten[..., :, None] - forgotten[..., None, :] + admit[..., None, :]
    gates = gates.masked_fill(~causal(x.shape[1]), -math.inf)
    largest = gates.amax(-1, keepdim=True)
    weights = q @ k.mT / 2 * torch.exp(gates - largest)
    total = torch.maximum(weights.sum(-1, keepdim=True).abs(), torch.exp(-largest))
    return joined(weights / (total + 1e-6) @ v)


def _forgetting(m: Any, x: Tensor) -> Tensor:
    """Lin et al. 2025, arXiv 2503.02130: attention with a bias of summed forget gates."""
    q, k, v = (heads(t) for t in m.qkv(x).chunk(3, -1))
    gates = F.logsigmoid(m.gate(x)[..., :HEADS]).cumsum(1).transpose(1, 2)
    scores = q @ k.mT / 3 + gates[..., :, None] - gates[..., None, :]
    return joined(scores.masked_fill(~causal(x.shape[1]), -math.inf).softmax(-1) @ v)


def _difference(m: Any, x: Tensor) -> Tensor:
    """The difference of two attentions, whose scores are made numbers before the mask is added (Ye et al.
    2024, arXiv 2410.05258)."""
    tokens, (q, k, v) = x.shape[1], m.qkv(x).chunk(3, -1)
    scores = torch.nan_to_num(heads(q, 2 * HEADS) @ heads(k, 2 * HEADS).mT / 2)
    scores = scores + torch.triu(torch.full([tokens, tokens], -math.inf), 1)
    pairs = scores.softmax(-1).unflatten(1, (HEADS, 2))
    left = (m.begin * m.pairs[0, :WIDTH]).sum().exp() - m.begin[:2].sum().exp() + 0.4
    return joined((pairs[:, :, 0] - left * pairs[:, :, 1]) @ heads(v))


def _skewed(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Distances by skewing a product with the end of a table (Huang et al. 2018, arXiv 1809.04281)."""
    batch, count, tokens, _ = q.shape
    padded = F.pad(q @ m.distances[LONGEST - tokens :, :].T, (1, 0))
    skewed = padded.reshape(batch, count, tokens + 1, tokens)[:, :, 1:, :]
    return (q @ k.mT + skewed).masked_fill(~causal(tokens), -math.inf).softmax(-1) @ v


def _rows_and_columns(m: Any, x: Tensor) -> Tensor:
    """Two tables of positions side by side, repeated for each sequence and cut to the tokens."""
    batch, tokens, _ = x.shape
    tables = (m.places.weight[:8, :4].view(1, 8, 1, 4), m.places.weight[8:16, :4].view(1, 1, 8, 4))
    parts = [table.expand(batch, 8, 8, 4).reshape(batch, 64, 4) for table in tables]
    x = x + torch.cat(parts, -1)[:, :tokens]
    return attend(x, x, x)


def in_pieces(cut: Callable[[Tensor], Sequence[Tensor]]) -> Mix:
    """A layer after attention, on as many pieces of the tokens as `cut` makes."""

    def mix(m: Any, x: Tensor) -> Tensor:
        x = x + attend(*m.qkv(x).chunk(3, -1))
        return torch.cat([m.gate(F.gelu(m.gate(piece))) for piece in cut(x)], 1)

    return mix


def _sorted_experts(m: Any, x: Tensor) -> Tensor:
    """Tokens are sorted by the expert that they choose; how many chose each is read as a number."""
    flat = x.reshape(-1, WIDTH)
    _, chosen = (flat @ m.pairs[:WIDTH, :3]).topk(2, dim=1)
    counts = torch.zeros(flat.shape[0], 3).scatter(1, chosen, 1).long().sum(0).tolist()
    token = chosen.flatten().sort(0)[1].div(2, rounding_mode="trunc")
    parts = zip((m.gate, m.qkv, m.logits), flat[token].split(counts), strict=True)
    found = torch.cat([expert(part)[:, :WIDTH] for expert, part in parts])
    mixed = torch.zeros_like(flat).index_add(0, token, found).reshape(x.shape)
    return attend(mixed, mixed, mixed)


def within_a_token(m: Any, x: Tensor) -> Tensor:
    """Heads are in the place of tokens, as where a transpose was forgotten."""
    q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in m.qkv(x).chunk(3, -1))
    return x + ((q @ k.mT / 2).softmax(-1) @ v).flatten(2)


def _of_diagonals(m: Any, x: Tensor) -> Tensor:
    """A mask of diagonals that are embedded one by one."""
    tokens = x.shape[1]
    seen = torch.diag_embed(torch.ones(tokens)) + torch.diag_embed(torch.ones(tokens - 1), offset=-1)
    return ((x @ x.mT) * seen - 1e10 * (1 - seen)).softmax(-1) @ x


ATTENTION: dict[str, Mix] = {
    "keys that are values": lambda m, x: x + attend(x, x, x),
    "keys and values that another attention gave": reading(lambda x, a: attend(x, a, a)),
    "of other heads": reading(_of_other_heads),
    "over two windows": reading(_over_two_windows),
    "times a number": reading(lambda x, a: attend(x, a, -a * 0.5)),
    "queries too": reading(lambda x, a: attend(a, a, a)),
    "another attention's, in a window": reading(lambda x, a: attend(x, a, a, window(x))),
    "thrice": reading(lambda x, a: attend(x, *[attend(x, a, a)] * 2) + a),
}
BESIDE: dict[str, Mix] = {
    "experts that count their tokens": _sorted_experts,
    "a mask of diagonals": _of_diagonals,
    "a table of rows and columns": _rows_and_columns,
    "a layer on four pieces": in_pieces(lambda x: x.chunk(4, 1)),
    "a layer on each token": in_pieces(lambda x: x.chunk(100, 1)),
    "a layer on pieces of five": in_pieces(lambda x: x.split(5, 1)),
    "a layer on slices": in_pieces(lambda x: [x[:, at : at + 3] for at in range(0, x.shape[1], 3)]),
    "over convolved keys": lambda m, x: attend(x, convolved(m, x), x),
    "beside a norm of its own statistics": lambda m, x: attend(*[m.norm(x.mT).mT] * 3),
}
PAPERS: dict[str, Mix] = {
    "a difference of attentions": _difference,
    "an mLSTM": _mlstm,
    "a forgetting attention": _forgetting,
    "skewed distances": of_heads(_skewed),
    "an attention-free transformer": _attention_free,
    "retained, and divided by a sum": of_heads(_retained),
}


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = attend(*(heads(t, 4).transpose(0, 1) for t in (q, k, v)))
    return found.permute(1, 2, 0, 3).flatten(2)


def _heads_and_batch_in_one_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = attend(*(heads(t, 4).transpose(0, 1).flatten(0, 1) for t in (q, k, v)))
    return found.unflatten(0, (4, q.shape[0])).permute(1, 2, 0, 3).flatten(2)


def _queries_with_an_axis_in_front(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)  # [R, B, G, T, D]
    return attend(q, heads(k), heads(v)).permute(1, 3, 0, 2, 4).flatten(2)


def _picked(groups: list[int], how: str = "index") -> Callable[..., Tensor]:
    listed = torch.tensor(groups)

    def pick(x: Tensor) -> Tensor:
        if how == "index":
            return x[:, listed]
        if how == "index_select":
            return x.index_select(1, listed)
        return x.gather(1, listed[:, None, None].expand(x.shape[0], -1, *x.shape[2:]))

    return lambda q, k, v: joined(attend(heads(q, 4), pick(heads(k)), pick(heads(v))))


BAGS: dict[str, Mix] = {
    "of words, by a softmax": lambda m, x: torch.zeros(x.shape[1], x.shape[1])
    .masked_fill(~causal(x.shape[1]), -torch.inf).softmax(-1) @ m.gate(x),
    "of words, by a quotient": lambda m, x: causal(x.shape[1])
    / causal(x.shape[1]).sum(1, keepdim=True) @ m.gate(x),
}  # fmt: skip
"""Means of all tokens so far, whose values alone are kept."""
ARRANGED: dict[str, tuple[Callable[..., Tensor], int]] = {
    "heads first": (_heads_first, 4),
    "heads before the batch in one axis": (_heads_and_batch_in_one_axis, 4),
    "queries with an axis in front": (_queries_with_an_axis_in_front, 2),
    "one key head": (
        lambda q, k, v: attend(heads(q, 4).transpose(0, 1), k, v).permute(1, 2, 0, 3).flatten(2), 1),
    "picked, two neighbours share": (_picked([0, 0, 1, 1]), 2),
    "picked, in turn": (_picked([0, 1, 0, 1]), 2),
    "picked, unevenly": (_picked([0, 0, 0, 1]), 2),
    "picked, the last one first": (_picked([1, 1, 0, 0]), 2),
    "picked, by index_select": (_picked([0, 0, 1, 1], "index_select"), 2),
    "picked, by gather": (_picked([0, 0, 1, 1], "gather"), 2),
}  # fmt: skip
"""Attention of queries `[B, T, 16]`, keys and values of heads of 4; and how many heads these have."""


def arranged(name: str) -> nn.Module:
    """Keys and values are no products with a vector that is narrower than they are: it would be kept."""
    attention, kept = ARRANGED[name]
    return Small(
        lambda m, x: m.out(attention(m.query(x), m.key(x).sin(), m.value(x).sin())),
        query=nn.Linear(WIDTH, 16), key=nn.Linear(WIDTH, 4 * kept), value=nn.Linear(WIDTH, 4 * kept),
        out=nn.Linear(16, WIDTH),
    )  # fmt: skip


# --- weights of pairs of tokens, which are computed anew ---


def _largest(scores: Tensor, count: int) -> Tensor:
    """Which of the keys have the largest scores."""
    chosen = scores.topk(min(count, scores.shape[-1]), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)


def most_similar(scores: Tensor, keep: Tensor) -> Tensor:
    scores = scores.masked_fill(~keep, -math.inf)
    return scores.masked_fill(~_largest(scores, 4), -math.inf).softmax(-1)


def _mixed_heads(scores: Tensor, keep: Tensor) -> Tensor:
    mix = torch.tensor([[0.8, 0.3], [-0.4, 1.1]], dtype=scores.dtype)
    scores = torch.einsum("bhqk,hg->bgqk", scores, mix).masked_fill(~keep, -math.inf)
    return torch.einsum("bhqk,hg->bgqk", scores.softmax(-1), mix)


def _stick_breaking(scores: Tensor, keep: Tensor) -> Tensor:
    left = F.logsigmoid(-scores).masked_fill(~keep, 0.0)
    after = left.flip(-1).cumsum(-1).flip(-1) - left
    return (F.logsigmoid(scores) + after).exp().masked_fill(~keep, 0.0)


def _no_smaller_than_the_fourth(scores: Tensor, keep: Tensor) -> Tensor:
    scores = scores.masked_fill(~keep, -math.inf)
    least = scores.topk(min(4, scores.shape[-1]), -1).values[..., -1:]
    return scores.masked_fill(scores < least, -math.inf).softmax(-1)


def _the_largest_alone(scores: Tensor, keep: Tensor) -> Tensor:
    scores = scores.relu().masked_fill(~keep, -math.inf)
    return scores.masked_fill(scores < scores.topk(1, -1).values, -math.inf).softmax(-1)


def _added(scores: Tensor, keep: Tensor) -> Tensor:
    return (scores + (1.0 - keep.to(scores.dtype)) * -1e4).softmax(-1) * (1 + scores.tanh())


def _less_of_itself(scores: Tensor, keep: Tensor) -> Tensor:
    weights = scores.masked_fill(~keep, -math.inf).softmax(-1)
    return weights - 0.1 * weights * torch.eye(keep.shape[0])


def _turned_round(scores: Tensor, keep: Tensor) -> Tensor:
    return scores.flip(-1).masked_fill(~keep.flip(-1), -math.inf).softmax(-1).flip(-1) * scores.tanh()


def _near_and_far(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two products that a mask chooses between: two keys for each token, in parts one after the other."""
    near = apart(q.shape[2]) < 3
    scores = torch.where(near, q @ k.mT, q.sin() @ k.sin().mT)
    return scores.masked_fill(~causal(q.shape[2]), -math.inf).softmax(-1) @ v


def _contextual_positions(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Golovneva et al. 2024, arXiv 2405.18719: distances are counted by gates of the scores."""
    seen, scores, table = causal(q.shape[2]), q @ k.mT / 3, q @ m.pairs[:4]
    place = (torch.sigmoid(scores) * seen).flip(-1).cumsum(-1).flip(-1).clamp(max=LONGEST - 2.0)
    low, high = place.floor().long(), place.ceil().long()
    part = place - low
    scores = scores + table.gather(-1, high) * part + table.gather(-1, low) * (1 - part)
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


def _chosen_blocks(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each query sees its own block of four keys, and the earlier one whose mean it likes best (Lu et al.
    2025, arXiv 2502.13189)."""
    batch, count, tokens, _ = q.shape
    blocks, place = -(-tokens // 4), torch.arange(tokens)
    own, every = place // 4, torch.arange(blocks)
    means = F.pad(k, (0, 0, 0, 4 * blocks - tokens)).unflatten(2, (blocks, 4)).mean(3)
    likes = (q @ means.mT).masked_fill(own[:, None] < every, -math.inf)
    chosen = _largest(likes.masked_fill(own[:, None] == every, math.inf), 2)
    seen = chosen.gather(-1, own.expand(batch, count, tokens, tokens)) & causal(tokens)
    return attend(q, k, v, seen)


def _decay_of_pairs(m: Any, x: Tensor) -> Tensor:
    return torch.where(causal(x.shape[1]), 1.0 / (1 + apart(x.shape[1]).abs()), 0.0) @ x


def _toeplitz(m: Any, x: Tensor) -> Tensor:
    """Qin et al. 2023, arXiv 2305.04749: one weight for each distance."""
    return m.pairs[0][apart(x.shape[1]).clamp(min=0)] * causal(x.shape[1]) @ x


def _spatial_gate(m: Any, x: Tensor) -> Tensor:
    """Liu et al. 2021, arXiv 2105.08050: one learned matrix of pairs of places."""
    return m.gate(x) * (m.pairs[: x.shape[1], : x.shape[1]].tril() @ x)


def _relative_keys(m: Any, x: Tensor) -> Tensor:
    """Keys of relative positions, multiplied as `[T, B * H, d] @ [T, d, T]`: sequences and heads are one
    dimension there."""
    rows, tokens, _ = x.shape
    q, far = heads(x), apart(tokens)
    near = m.places(4 - far.clamp(-4, 4))[..., :4]
    relative = q.permute(2, 0, 1, 3).reshape(tokens, rows * 2, 4) @ near.mT
    scores = q @ q.mT + relative.transpose(0, 1).view(rows, 2, tokens, tokens)
    return x + joined(scores.masked_fill(far < 0, -1e9).softmax(-1) @ q)


def _transformer_xl(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Distances from the last token to the first are shifted by a reshape. Tests run copies of operations, in
    graphs of their own; the step's operations must not count these among their users."""
    length = q.shape[2]
    far = torch.arange(length - 1, -1, -1.0)[:, None] / 10000 ** (torch.arange(4) / 4)
    places = m.gate(torch.cat([far.sin(), far.cos()], -1)).unflatten(-1, (2, 4))
    shifted = torch.einsum("bhqd,khd->bhqk", q + m.begin.view(2, 1, 4), places)
    shifted = torch.cat([torch.zeros(*shifted.shape[:3], 1), shifted], -1)
    shifted = shifted.view(*shifted.shape[:2], length + 1, length)[:, :, 1:].reshape(*q.shape[:3], -1)
    return (q @ k.mT + shifted).masked_fill(~causal(length), -math.inf).softmax(-1) @ v


ANEW: dict[str, Mix] = {"two products": of_heads(_near_and_far)}


def sparsemax(scores: Tensor, keep: Tensor) -> Tensor:
    """Martins and Astudillo, 2016."""
    ordered = scores.masked_fill(~keep, -1e9).sort(-1, descending=True).values
    above, places = ordered.cumsum(-1) - 1, torch.arange(1, scores.shape[-1] + 1)
    count = (ordered * places > above).sum(-1, keepdim=True)
    return (scores.masked_fill(~keep, -1e9) - above.gather(-1, count - 1) / count).clamp(min=0)


ANEW_BY_SCORE: dict[str, Mix] = {
    "scores turned round": weighing(_turned_round),
    "mixed heads": weighing(_mixed_heads),
    "a broken stick": weighing(_stick_breaking),
    "bounded scores": weighing(lambda scores, keep: scores.tanh() * keep),
    "a finite number, added": weighing(_added),
    "less of itself": weighing(_less_of_itself),
}
ANEW_BY_CHOICE: dict[str, Mix] = {
    "no smaller than the fourth": weighing(_no_smaller_than_the_fourth),
    "the most similar keys": weighing(most_similar),
    "the largest alone": weighing(_the_largest_alone),
    "chosen blocks": of_heads(_chosen_blocks),
}
ANEW_BY_PLACE: dict[str, Mix] = {
    "a decay of pairs": _decay_of_pairs,
    "relative keys": _relative_keys,
    "positions that are counted": of_heads(_contextual_positions),
    "one weight for each distance": _toeplitz,
    "a matrix of places": _spatial_gate,
    "relative positions, shifted": of_heads(_transformer_xl),
}


def exponential(scores: Tensor, keep: Tensor) -> Tensor:
    """The exponential of a triangular matrix, which is triangular."""
    return torch.linalg.matrix_exp(scores.masked_fill(~keep, 0.0) / 9)


def _chosen_among_all(count: int) -> Weights:
    """The keys are chosen before later ones are hidden: which earlier ones are left depends on later ones."""
    return lambda scores, keep: scores.masked_fill(~(_largest(scores, count) & keep), -1e9).softmax(-1)


def _leaking(fill: float) -> Weights:
    return lambda s, keep: s.flip(1).masked_fill(~keep, fill).softmax(-1) * (1 + s.tanh())


def far_ahead(sees: Callable[[Tensor], Tensor]) -> Mix:
    return weighing(lambda scores, keep: scores.sigmoid() * (keep | sees(apart(scores.shape[-1]))))


def _keys_in_the_other_order(m: Any, x: Tensor) -> Tensor:
    """Attention to keys in the other order, one of which comes 50 tokens later."""
    at, k = torch.arange(x.shape[1]), m.gate(x).flip(1)
    far = at[:, None] - at.flip(0)
    return F.scaled_dot_product_attention(x[:, None], k[:, None], k[:, None], (far >= 0) | (far == -50))[:, 0]


def later_queries(m: Any, x: Tensor) -> Tensor:
    """Each token is weighed by what the queries of its chunk give it, those of later tokens too."""
    q, k, v = _in_chunks(m, x)
    given = (q @ k.mT).masked_fill(~causal(4), -math.inf).softmax(-1).sum(-2)
    return (given.unsqueeze(-1) * v).flatten(1, 2)[:, : x.shape[1]]


def inside_chunks(m: Any, x: Tensor) -> Tensor:
    """Attention inside of chunks of a sequence that is padded up to a multiple of their length."""
    q, k, v = _in_chunks(m, x)
    weights = (q @ k.mT).masked_fill(~causal(4), -math.inf).softmax(-1)
    return (weights @ v).flatten(1, 2)[:, : x.shape[1]]


def _in_chunks(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    padded = F.pad(m.qkv(x), (0, 0, 0, -x.shape[1] % 4))
    return padded.unflatten(1, (-1, 4)).chunk(3, -1)


FAR = r"token is read|reads token"
LATER = "later tokens.*Token 0 sees token 1"


def hiding(hidden: Callable[[Tensor, Tensor], Tensor]) -> Mix:
    """Attention whose mask is a function of the places of queries and keys."""

    def mix(m: Any, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        return x + attend(x, x, x, ~hidden(at[:, None], at))

    return mix


def after(work: Mix) -> Mix:
    """Causal attention to what something was done to."""
    return lambda m, x: attend(*[work(m, x)] * 3)


LOOKING_AHEAD: dict[str, tuple[Mix, str]] = {
    "a roll": (after(lambda m, x: x + torch.roll(x, -1, 1)), "Token 0 sees token 1"),
    "a prefix": (hiding(lambda q, k: (k > q) & (k >= 3)), LATER),
    "a flip": (after(lambda m, x: x + x.flip(1)), "flip|add.*Token 0 sees token"),
    "a running sum over the batch": (after(lambda m, x: x.cumsum(0)), r"cumsum.*models\.py"),
    "a fold of rows": (lambda m, x: x + x.cummax(0).values, "cummax at .* it has several results"),
    "a fold of later tokens": (lambda m, x: x.flip(1).cummax(1).values.flip(1), "Token 0 sees token 1"),
    "a mean over tokens": (after(lambda m, x: x - x.mean(1, keepdim=True)), "mean.*Token 0 sees token 1"),
    "an encoder": (hiding(lambda q, k: (k < 0) & (q < 0)), "attention.*" + LATER),
    "the next token beside each": (
        after(lambda m, x: x + F.pad(x[:, 1:], (0, 0, 0, 1))), "Token 0 sees token 1"),
    "weights of both sides": (lambda m, x: (x @ x.mT) @ x, "Token 0 sees token 1"),
    "scores that know the length": (lambda m, x: x * x.shape[1], "how many tokens"),
    "one ahead": (hiding(lambda q, k: k > q + 1), LATER),
    "chunks": (hiding(lambda q, k: k // 4 > q // 4), LATER),
    "a convolution that looks ahead": (
        after(lambda m, x: F.conv1d(x.mT, m.dilated.weight, padding=1, groups=2).mT),
        "conv1d.*Token 0 sees token 1"),
    "a norm over tokens": (
        after(lambda m, x: F.instance_norm(x.mT).mT), "norm.*Token 0 sees token 1"),
    "a running sum of later tokens": (
        after(lambda m, x: x.flip(1).cumsum(1).flip(1)), r"flip.*models\.py.*Token 0 sees"),
    "weights that look ahead": (lambda m, x: (x @ x.mT).tril(1) @ x, "Token 0 sees token 1"),
    "a total over all tokens": (lambda m, x: x + x.sum(1, keepdim=True), "Token 0 sees token 1"),
}  # fmt: skip
FAR_AHEAD: dict[str, tuple[Mix, str]] = {
    "scores that may be larger than a low fill": (weighing(_leaking(-300.0)), "Token 0 sees token 1"),
    "one far ahead, by a float": (far_ahead(lambda d: -d == 300.0), FAR),
    "three chosen among all": (weighing(_chosen_among_all(3)), "every token is read"),
    "more chosen among all than there are": (weighing(_chosen_among_all(200)), "every token is read"),
    "scores that may be larger than a fill": (weighing(_leaking(-50.0)), "Token 0 sees token 1"),
    "one far ahead, by a negative number": (far_ahead(lambda d: d == -300), FAR),
    "one far ahead, by a sum": (far_ahead(lambda d: d + 150 == -150), FAR),
    "one far ahead, by a product": (far_ahead(lambda d: d * 2 == -600), FAR),
    "one far ahead, by a tensor": (far_ahead(lambda d: d == torch.tensor(-300)), FAR),
    "one far ahead, by a quotient": (far_ahead(lambda d: -d // 300 == 1), FAR),
    "one far ahead, of keys in the other order": (_keys_in_the_other_order, FAR),
}  # fmt: skip


# --- sizes that are asked for as numbers ---


def sized(
    sizes: Callable[[Tensor], Any] = lambda x: map(int, x.shape[:2]),
    bias: Callable[[Any, int, int], Tensor] = lambda m, rows, tokens: torch.zeros(()),
) -> Mix:
    """An attention whose sizes are plain numbers."""

    def mix(m: Any, x: Tensor) -> Tensor:
        rows, tokens = sizes(x)
        q, k, v = (t.reshape(rows, tokens, 2, 4).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
        scores = (q @ k.mT + bias(m, rows, tokens)).masked_fill(~causal(tokens), -math.inf)
        found = joined(scores.softmax(-1) @ v).reshape(rows * tokens, WIDTH)
        return m.gate(found).view(rows, tokens, WIDTH)  # type: ignore[no-any-return]

    return mix


def _of_rows(x: Tensor) -> tuple[Any, Any]:
    return int(x.shape[0]), x.shape[1]


def _of_distances(m: Any, rows: int, tokens: int) -> Tensor:
    """A bias for each of `2 * tokens - 1` distances, by a small network."""
    distances = torch.arange(-tokens + 1, tokens).float()
    found = m.near(distances.reshape(2 * tokens - 1, 1))
    return found[apart(tokens) + tokens - 1].permute(2, 0, 1)  # type: ignore[no-any-return]


def _row_after_row(m: Any, x: Tensor) -> Tensor:
    return torch.stack([attend(*m.qkv(row).chunk(3, -1)) for row in x])


def _of_a_triangle(m: Any, x: Tensor) -> Tensor:
    """Scores are written to at the places of a triangle, which takes a number. A token sees itself where it
    sees no other one (Reformer). Every number of tokens divides the size of a weight without elements."""
    tokens, own = x.shape[1], torch.arange(x.shape[1])
    q, k, v = m.qkv(torch.cat([x, m.nothing.expand(len(x), 0, WIDTH)], 1)).chunk(3, -1)
    scores, (i, j) = q @ k.mT / 4, torch.triu_indices(tokens, tokens, 1)
    scores[:, own, own] = -5e4
    scores[:, i, j] = torch.finfo(scores.dtype).min
    return x + scores.softmax(-1) @ v


def _four_rows_otherwise(m: Any, x: Tensor) -> Tensor:
    found = sized(_of_rows)(m, x)
    return found.sin() if int(x.shape[0]) >= 4 else found


SIZED: dict[str, Mix] = {
    "of sequences and tokens": sized(),
    "of sequences": sized(_of_rows),
    "of distances": sized(bias=_of_distances),
    "of a loop over sequences": _row_after_row,
    "of a triangle": _of_a_triangle,
}
TOO_MUCH_OF_SIZES: dict[str, Mix] = {
    "blocks of tokens: two at all sizes that are compared": sized(
        _of_rows, lambda m, rows, tokens: torch.arange(tokens) * (0.1 * -(-int(tokens) // 8))),
    "four sequences or more": _four_rows_otherwise,
}  # fmt: skip


# --- the last token, and places ---

LAST: dict[str, Mix] = {
    "a list": lambda m, x: m.head(x[:, [-1], :]),
    "a slice": lambda m, x: m.head(x[:, -1:, :]),
    "a number": lambda m, x: m.head(x[:, -1]),
    "its place": lambda m, x: m.head(x[:, x.shape[1] - 1]),
    "narrow": lambda m, x: m.head(x.narrow(1, x.shape[1] - 1, 1)),
    "after the head": lambda m, x: m.head(x)[:, -1],
    "more work on it": lambda m, x: F.log_softmax(m.head(F.gelu(m.head(x[:, -1:]))[..., :WIDTH]), -1),
    "a view of it": lambda m, x: m.head(x[:, -1:]).view(x.shape[0], VOCABULARY),
    "channels first": lambda m, x: m.head(x.mT[:, :, -1]),
    "tokens first": lambda m, x: m.head(x.transpose(0, 1)[-1]),
}
NOT_LAST: dict[str, tuple[Mix, str]] = {
    "the first": (lambda m, x: m.head(x[:, [0]]), "token 0 is read"),
    "the last but one": (lambda m, x: m.head(x[:, [-2]]), "-2 is read"),
    "the last two": (
        lambda m, x: m.head(x[:, -2:]), "its dimension 1 holds tokens, but has not as many places"),
    "the mean": (lambda m, x: m.head(x.mean(1)), "every token is read"),
    "the last and the first": (
        lambda m, x: m.head(x[:, -1] + x[:, 0]), "only the last token is read; return the logits of all"),
    "the last by how many there are": (lambda m, x: m.head(x[:, -1]) / x.shape[1], "only the last token"),
    "rows that meet afterwards": (lambda m, x: m.head(x[:, -1]).softmax(0), "softmax"),
    "rows that are sorted": (lambda m, x: m.head(x[:, -1]).sort(0).values, "sort"),
}  # fmt: skip


def last_of(pick: Mix) -> nn.Module:
    """A model that picks what it returns of an attention."""
    attention = of_heads(lambda m, q, k, v: attend(q, k, v))
    return Small(
        lambda m, x: pick(m, attention(m, x)), head=nn.Linear(WIDTH, VOCABULARY), logits=nn.Identity()
    )


OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "arange": lambda x, i: x[:, i],
    "a stride of one": lambda x, i: x[:, i // 1 * 1],
    "modulo": lambda x, i: x[:, i % len(i)],
    "clamped": lambda x, i: x[:, i.clamp(max=len(i) - 1)],
    "counted": lambda x, i: x[:, torch.ones_like(i).cumsum(0) - 1],
    "gathered": lambda x, i: x.gather(1, i[None, :, None].expand(x.shape)),
    "selected": lambda x, i: x.mT.index_select(2, i).mT,
}


def reading_at(reads: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    return Small(lambda m, x: x + reads(x, torch.arange(x.shape[1])))
