"""Mixers of tokens whose memory does not grow, each written for whole sequences, as in its paper.

    RetNet           Sun et al. 2023, equation 5       sum_{s <= t} gamma^(t - s) (q_t . k_s) v_s
    gated linear     Yang et al. 2024, equation 3      a decay of its own for each key digit, from the token
    SSD (Mamba-2)    Dao & Gu 2024, section 3          a decay for each head, from the token
    convolution      H3, Hyena's short filters         the last w tokens, each channel by itself
    time mixing      RWKV-5, Peng et al. 2024          a shift by one token, and a decay for each key digit
    weighted values  RWKV-4, Peng et al. 2023, app. D  a loop over tokens that keeps a running maximum
    delta rule       DeltaNet, Yang et al. 2024        what a key reads is taken away; gated: decays

None has code for a state: a decoder derives it. `x` is `[B, T, C]`, and so is the result.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from attngraph.models.attention import merge_heads, split_heads


@dataclass(frozen=True)
class MixerConfig:
    """Sizes of one mixer. `taps`: the tokens that a convolution sees."""

    width: int = 64
    heads: int = 4
    taps: int = 4


class _Projected(nn.Module):
    """Queries, keys and values `[B, H, T, D]`, and a projection of what was mixed."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (split_heads(f(x), self.config.heads) for f in (self.query, self.key, self.value))
        return q, k, v

    def joined(self, mixed: Tensor) -> Tensor:
        output: Tensor = self.project(merge_heads(mixed))
        return output


def pairs(x: Tensor) -> Tensor:
    """Which token t (rows) sees which token s: `[T, T]`."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


class Retention(_Projected):
    """A matrix of powers of a head's own decay in the place of a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        decay = 1 - 2.0 ** (-2 - torch.arange(self.config.heads, device=x.device, dtype=x.dtype))
        place = torch.arange(x.shape[1], device=x.device)
        apart = place[:, None] - place
        weights = torch.where(apart >= 0, decay[:, None, None] ** apart.clamp(min=0), 0.0)
        return self.joined((q @ k.mT * weights) @ v)


class GatedLinearAttention(_Projected):
    """Every digit of a key decays by what the tokens since then say."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        self.gate = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        total = split_heads(functional.logsigmoid(self.gate(x)), self.config.heads).cumsum(2)
        apart = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(~pairs(x)[..., None], -torch.inf)
        weights = (q.unsqueeze(3) * k.unsqueeze(2) * apart.exp()).sum(-1)
        return self.joined(weights @ v)


class StateSpaceDuality(_Projected):
    """The quadratic form of Mamba-2: one decay for each head and token, and a skip."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        self.step = nn.Linear(config.width, config.heads)
        self.rate = nn.Parameter(torch.arange(1.0, config.heads + 1).log())
        self.skip = nn.Parameter(torch.ones(config.heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        step = functional.softplus(self.step(x)).mT  # [B, H, T]
        total = (-self.rate.exp()[:, None] * step).cumsum(-1)
        apart = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(~pairs(x), -torch.inf)
        mixed = (q @ k.mT * apart.exp()) @ (v * step.unsqueeze(-1))
        return self.joined(mixed + self.skip[:, None, None] * v)


class CausalConvolution(nn.Module):
    """The last few tokens of each channel, gated."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.convolve = nn.Conv1d(
            config.width, config.width, config.taps, padding=config.taps - 1, groups=config.width
        )
        self.gate = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.convolve(x.mT)[..., : x.shape[1]].mT
        output: Tensor = functional.silu(self.gate(x)) * mixed
        return output


class TimeMixing(_Projected):
    """A token mixed with the one before it; every digit of a key fades at a rate of its own, and a token's
    own key counts differently."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        self.keep = nn.Parameter(torch.full((config.width,), 0.5))
        self.rate = nn.Parameter(torch.linspace(-3.0, 0.0, config.width // config.heads))
        self.own = nn.Parameter(torch.linspace(0.5, 1.5, config.width // config.heads))
        self.receive = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before = functional.pad(x, (0, 0, 1, -1))
        x = x * self.keep + before * (1 - self.keep)
        q, k, v = self.heads(x)
        place = torch.arange(x.shape[1], device=x.device)
        apart = (place[:, None] - place - 1).unsqueeze(-1)  # [T, T, 1]
        faded = torch.where(apart >= 0, (-self.rate.exp() * apart.clamp(min=0)).exp(), 0.0)
        faded = torch.where(apart == -1, self.own, faded)  # [T, T, D]
        weights = torch.einsum("bhtd,bhsd,tsd->bhts", q, k, faded)
        output: Tensor = self.receive(x).sigmoid() * self.joined(weights @ v)
        return output


class WeightedKeyValue(nn.Module):
    """Values weighted by exponentials of keys, which fade at a rate of each channel; a token's own key gets a
    bonus. Sums are kept relative to the largest exponent so far, so no exponential overflows."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        width = config.width
        self.keep = nn.Parameter(torch.linspace(0.2, 0.8, 3 * width).view(3, width))
        self.rate = nn.Parameter(torch.linspace(-3.0, 1.0, width))
        self.bonus = nn.Parameter(torch.linspace(-0.5, 0.5, width))
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.receive = nn.Linear(width, width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before = functional.pad(x, (0, 0, 1, -1))
        k, v, r = (f(x * mix + before * (1 - mix)) for f, mix in
                   zip((self.key, self.value, self.receive), self.keep, strict=True))  # fmt: skip
        output: Tensor = self.project(r.sigmoid() * self.weighted(k, v))
        return output

    def weighted(self, k: Tensor, v: Tensor) -> Tensor:
        top, above = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        largest, mixed = torch.full_like(k[:, 0], -1e38), []
        for t in range(k.shape[1]):
            most = torch.maximum(largest, k[:, t] + self.bonus)
            old, own = (largest - most).exp(), (k[:, t] + self.bonus - most).exp()
            mixed.append((old * top + own * v[:, t]) / (old * above + own))
            faded = largest - self.rate.exp()
            most = torch.maximum(faded, k[:, t])
            old, own = (faded - most).exp(), (k[:, t] - most).exp()
            top, above, largest = old * top + own * v[:, t], old * above + own, most
        return torch.stack(mixed, 1)


class DeltaRule(_Projected):
    """A token first takes away what its key has in memory, then adds its value, as far as its rate says. All
    tokens at once: a triangular system gives what each one really writes."""

    def __init__(self, config: MixerConfig, gated: bool = False) -> None:
        super().__init__(config)
        self.rate = nn.Linear(config.width, config.heads)
        self.gate = nn.Linear(config.width, config.heads) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k = functional.normalize(k, dim=-1)
        rate = self.rate(x).sigmoid().mT.unsqueeze(-1)  # [B, H, T, 1]
        kept = pairs(x).to(x.dtype)
        if self.gate is not None:
            total = functional.logsigmoid(self.gate(x)).mT.cumsum(-1)
            apart = total.unsqueeze(3) - total.unsqueeze(2)
            kept = apart.masked_fill(~pairs(x), -torch.inf).exp()
        system = (rate * k @ k.mT * kept).tril(-1)
        written = torch.linalg.solve_triangular(system, rate * v, upper=False, unitriangular=True)
        return self.joined((q @ k.mT * kept) @ written)
