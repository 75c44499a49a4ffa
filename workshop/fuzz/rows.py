"""Random functions of whole sequences without gradients, of which some parts mix rows and most do not: what
is compiled for each row gives what eager gives, at sizes that rows, tokens and widths share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attngraph

WIDTH, HEADS = 8, 2
Step = Callable[[Any, Callable[[int, int], Tensor]], Any]
STEPS: dict[str, Step] = {
    "linear": lambda x, w: F.linear(x, w(WIDTH, WIDTH), w(WIDTH, 1)[:, 0]),
    "addmm": lambda x, w: torch.addmm(w(WIDTH, 1)[:, 0], x.reshape(-1, WIDTH), w(WIDTH, WIDTH)).view(x.shape),
    "feed": lambda x, w: x + F.linear(F.gelu(F.linear(x, w(12, WIDTH))), w(WIDTH, 12)),
    "gated": lambda x, w: F.linear(
        F.silu(F.linear(x, w(12, WIDTH))) * F.linear(x, w(12, WIDTH)), w(WIDTH, 12)
    ),
    "norm": lambda x, w: F.layer_norm(x, (WIDTH,), w(WIDTH, 1)[:, 0]),
    "rms": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "places": lambda x, w: x + w(64, WIDTH)[: x.shape[1]],
    "places from the end": lambda x, w: x + w(64, WIDTH)[-x.shape[1] :],
    "places of rows": lambda x, w: x + w(64, WIDTH)[: x.shape[0], None],
    "angles": lambda x, w: x * (torch.arange(x.shape[1])[:, None] * 0.1).cos(),
    "counted": lambda x, w: x * (1 + torch.arange(x.shape[1]) / 7)[None, :, None],
    "tokens first": lambda x, w: F.linear(x.transpose(0, 1), w(WIDTH, WIDTH)).transpose(0, 1),
    "heads": lambda x, w: F.layer_norm(x.unflatten(-1, (HEADS, -1)).transpose(1, 2), (WIDTH // HEADS,))
    .transpose(1, 2).flatten(2),
    "turned heads": lambda x, w: (
        x.unflatten(-1, (HEADS, -1)).transpose(1, 2) * 2
    ).transpose(1, 2).flatten(2),
    "flat and turned": lambda x, w: F.linear(
        x.transpose(0, 1).reshape(-1, WIDTH), w(WIDTH, WIDTH)
    ).view(x.shape[1], x.shape[0], WIDTH).transpose(0, 1),
    "flat, cut otherwise": lambda x, w: F.linear(x.reshape(-1, WIDTH), w(WIDTH, WIDTH)).view(
        x.shape[1], x.shape[0], WIDTH
    ).reshape(x.shape),
    "mean of tokens": lambda x, w: x - x.mean(1, keepdim=True),
    "largest of rows": lambda x, w: x / (1 + x.abs().amax(0, keepdim=True)),
    "of the first token": lambda x, w: x + F.linear(x[:, :1], w(WIDTH, WIDTH)),
    "of the first row": lambda x, w: x * x[:1].sigmoid(),
    "rolled": lambda x, w: x + x.roll(1, 1), "flipped": lambda x, w: x * x.flip(0).tanh(),
    "running sum": lambda x, w: x.cumsum(1) / 5, "of tokens": lambda x, w: (x.mT.softmax(-1)).mT * x,
    "pairs": lambda x, w: torch.cat([x[..., 1::2], -x[..., ::2]], -1),
    "parts": lambda x, w: torch.stack(x.chunk(2, -1), -1).flatten(-2).tanh(),
    "masked": lambda x, w: x.masked_fill((torch.arange(x.shape[1]) % 3 == 0)[:, None], 0.25),
    "chosen": lambda x, w: torch.where(x > 0, x, x.exp() - 1),
    "product of weights": lambda x, w: F.linear(x, w(WIDTH, 12) @ w(12, WIDTH)),
    "square": lambda x, w: F.linear(F.linear(x, w(16, WIDTH)).relu().square(), w(WIDTH, 16)),
    "attended": lambda x, w: _attended(x, w),
}  # fmt: skip


def _attended(x: Any, weight: Callable[[int, int], Tensor]) -> Any:
    parts: Any = F.linear(x, weight(24, 8)).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
    return ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """`fixed`: the tokens, where the function makes `[rows, tokens]` of one dimension by that number."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chosen = random.Random(seed)
        names = [chosen.choice(list(STEPS)) for _ in range(chosen.randint(2, 6))]
        self.names = [*names, "attended", *(chosen.choice(list(STEPS)) for _ in range(chosen.randint(1, 5)))]
        self.fixed = chosen.choice((None, None, WIDTH, 5))
        self.weights: Any = nn.ParameterList()
        self.again = False
        generator = torch.Generator().manual_seed(seed)
        self._made: Any = lambda n, m: nn.Parameter(torch.randn(n, m, generator=generator) / m**0.5)
        self(torch.zeros(2, self.fixed or 5, WIDTH).flatten(0, 1 if self.fixed else -3))
        self.again = True

    def forward(self, x: Any) -> Any:
        kept = iter(self.weights)

        def weight(n: int, m: int) -> Any:
            if not self.again:
                self.weights.append(self._made(n, m))
                return self.weights[-1]
            return next(kept)

        x = x.unflatten(0, (-1, self.fixed)) if self.fixed else x
        for name in self.names:
            x = STEPS[name](x, weight)
        return x

    def __str__(self) -> str:
        return f"{', '.join(self.names)}; {self.fixed or 'any'} tokens"


def check(seed: int) -> str:
    """What is wrong with one model; "" if nothing is."""
    model: Any = Model(seed).eval()
    chosen = random.Random(seed)
    compiled = attngraph.compile(model, min_scores=0)
    with torch.no_grad():
        for _ in range(4):
            rows, tokens = chosen.choice((1, 2, 3, 5, 8)), model.fixed or chosen.choice((1, 2, 5, 7, WIDTH))
            torch.manual_seed(chosen.randrange(1 << 30))
            x = torch.randn(rows, tokens, WIDTH)
            x = x.flatten(0, 1) if model.fixed else x
            want = model.double()(x.double())
            eager = model.float()(x)
            found = compiled(x)
            off = float((found - want).abs().max())
            bound = 4 * float((eager - want).abs().max()) + 1e-5 * max(1.0, float(want.abs().max()))
            if not off <= bound or found.dtype != eager.dtype:
                return f"off by {off:.1e}, allowed {bound:.1e}, at {rows} x {tokens}"
    return ""
