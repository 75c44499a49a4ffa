"""Attention by its names: each as a paper has it, in a few lines of plain PyTorch, in a model of one layer.

A variant is a function of a layer's queries, keys and values, `[B, H, T, D]`, and what else the layer has;
or a module of `models/`, from `[B, T, C]` to the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attngraph.models.attention import merge_heads, split_heads
from attngraph.models.linear_attention import LinearAttention, LinearAttentionConfig
from attngraph.models.mla import LatentAttention, MLAConfig
from attngraph.models.positions import rotary_angles, rotate_half
from attngraph.models.recurrent_mixers import (
    DeltaRule,
    GatedLinearAttention,
    MixerConfig,
    Retention,
    StateSpaceDuality,
    TimeMixing,
)
from attngraph.models.relative_bias import t5_buckets

HEADS, WIDTH, WORDS = 4, 128, 64
D = WIDTH // HEADS
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Variant:
    """What a variant computes, where it is from, and at how many tokens it is measured; `parts` makes what
    its layer has besides projections; `made`: a module in the place of all of it."""

    about: str
    attend: Attend | None = None
    parts: Callable[[], dict[str, Any]] = dict
    made: Callable[[], nn.Module] | None = None
    kv_heads: int = HEADS
    tokens: int = 1024


VARIANTS: dict[str, Variant] = {}


def variant(name: str, about: str, **more: Any) -> Callable[[Attend], Attend]:
    def entered(attend: Attend) -> Attend:
        VARIANTS[name] = Variant(about, attend, **more)
        return attend

    return entered


class Layer(nn.Module):
    """Projections, and a variant between them."""

    def __init__(self, of: Variant) -> None:
        super().__init__()
        self.attend = of.attend
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * D * of.kv_heads, bias=False)
        for name, part in of.parts().items():
            if isinstance(part, nn.Parameter | nn.Module):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q = split_heads(self.q(x), HEADS)
        k, v = (split_heads(t, t.shape[-1] // D) for t in self.kv(x).chunk(2, -1))
        assert self.attend is not None
        mixed: Tensor = self.out(merge_heads(self.attend(self, q, k, v, x, ids)))
        return mixed


class Model(nn.Module):
    """Ids `[B, T]` to logits `[B, T, WORDS]` by one layer."""

    def __init__(self, of: Variant) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layer = Layer(of) if of.made is None else of.made()
        self.takes_ids = of.made is None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        logits: Tensor = self.head(x + (self.layer(x, ids) if self.takes_ids else self.layer(x)))
        return logits


def model_of(name: str) -> nn.Module:
    """The model of a variant, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(VARIANTS[name]).eval()


# --- masks ---


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of queries, `[T, 1]`, and of keys, `[T]`."""
    j = torch.arange(x.shape[1])
    return j[:, None], j


def dots(q: Tensor, k: Tensor) -> Any:
    return q @ k.mT * q.shape[-1] ** -0.5


def soft(scores: Any, v: Tensor, seen: Tensor) -> Any:
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


@variant("full", "Vaswani et al. 2017, an encoder's: every token sees every token")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    return dots(q, k).softmax(-1) @ v


@variant("causal", "Vaswani et al. 2017, a decoder's: a token sees itself and what came before")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    return soft(dots(q, k), v, j <= i)


@variant("window", "Mistral 2023: the last tokens alone")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    return soft(dots(q, k), v, (j <= i) & (i - j < 8))


@variant("streaming", "Xiao et al. 2023: a window, and the first tokens")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    return soft(dots(q, k), v, (j <= i) & ((i - j < 8) | (j < 3)))


@variant("prefix-LM", "Raffel et al. 2020: the first tokens see each other, the others what came before")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    return soft(dots(q, k), v, (j <= i) | (j < 8))


@variant("documents", "packed training: what came before within the same document, which word 0 ends")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    document = (ids == 0).cumsum(1)
    same = document[:, None, :, None] == document[:, None, None]
    return soft(dots(q, k), v, (j <= i) & same)


@variant("chunks", "Llama 4 2025: what came before within a chunk")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    return soft(dots(q, k), v, (j <= i) & (j // 8 == i // 8))


@variant("dilated", "Ding et al. 2023 (LongNet): every third of the last tokens")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    return soft(dots(q, k), v, (j <= i) & (i - j < 16) & ((i - j) % 3 == 0))


@variant("strided", "Child et al. 2019 (Sparse Transformer): the last tokens, and every sixth before them")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    return soft(dots(q, k), v, (j <= i) & ((i - j < 6) | ((i - j) % 6 == 0)))


@variant(
    "block-sparse", "Zaheer et al. 2020 (BigBird): blocks that a table names",
    parts=lambda: {"blocks": torch.rand(256, 256, generator=torch.Generator().manual_seed(3)) < 0.4},
)  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    return soft(dots(q, k), v, (j <= i) & (m.blocks[i // 4, j // 4] | (i // 4 == j // 4)))


# --- scores ---


@variant("ALiBi", "Press et al. 2022: a slope for each head times the distance")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    return soft(dots(q, k) + slopes[:, None, None] * (j - i), v, j <= i)


@variant("T5 bias", "Raffel et al. 2020: a learned bias for each head and bucket of distances",
         parts=lambda: {"bias": nn.Embedding(32, HEADS)})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    bias = m.bias(t5_buckets(j - i, buckets=32, max_distance=128, causal=True)).permute(2, 0, 1)
    return soft(q @ k.mT + bias, v, j <= i)


@variant("rotary", "Su et al. 2021: queries and keys turned by their positions")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    q, k = (rotate_half(t, rotary_angles(j, D)) for t in (q, k))
    return soft(dots(q, k), v, j <= i)


@variant("softcap", "Gemma 2 2024: scores bent to within a bound")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    return soft(50 * (dots(q, k) / 50).tanh(), v, j <= i)


@variant("normed queries and keys", "Henry et al. 2020: queries and keys of length one, and a learned scale",
         parts=lambda: {"scale": nn.Parameter(torch.full((HEADS, 1, 1), 10.0))})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    return soft(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * m.scale, v, j <= i)


@variant("forgetting", "Lin et al. 2025 (FoX): a gate of each token lowers what came before it",
         parts=lambda: {"gate": nn.Linear(WIDTH, HEADS)})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    kept = F.logsigmoid(m.gate(x)).mT.cumsum(-1)
    return soft(dots(q, k) + kept[..., None] - kept[..., None, :], v, j <= i)


@variant("CoPE", "Golovneva et al. 2024: positions count what a query's own gates let through",
         parts=lambda: {"table": nn.Parameter(torch.randn(16, D))})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    scores = dots(q, k)
    gates = scores.sigmoid().masked_fill(j > i, 0.0)
    place = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=15)
    low, high = place.floor().long(), place.ceil().long()
    of_table = q @ m.table.mT
    part = place - low
    bias = of_table.gather(-1, low) * (1 - part) + of_table.gather(-1, high) * part
    return soft(scores + bias, v, j <= i)


@variant("selective", "Leviathan et al. 2024: what one head says is no longer needed is lowered for all")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    scores = dots(q, k)
    chosen = scores[:, :1].relu().masked_fill((j >= i) | (j == 0), 0.0)
    lowered = F.pad(chosen.cumsum(2), (0, 0, 1, -1))
    return soft(scores - lowered, v, j <= i)


@variant("convolved scores", "Golovneva et al. 2025 (multi-token attention): scores and their neighbours",
         parts=lambda: {"kernel": nn.Parameter(torch.randn(HEADS, 1, 3, 3) / 3)})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    scores = dots(q, k).masked_fill(j > i, 0.0)
    return soft(F.conv2d(F.pad(scores, (1, 1, 2, 0)), m.kernel, groups=HEADS), v, j <= i)


# --- weights ---


@variant("sinks", "gpt-oss 2025: a learned share of the weight goes nowhere",
         parts=lambda: {"sink": nn.Parameter(torch.zeros(HEADS))})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    scores = dots(q, k).masked_fill(j > i, -torch.inf)
    sink = m.sink[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v


@variant("softmax plus one", "Miller 2023: one more in the denominator")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    weights = dots(q, k).masked_fill(j > i, -torch.inf).exp()
    return weights / (1 + weights.sum(-1, keepdim=True)) @ v


@variant("gated", "Qiu et al. 2025 (Qwen3-Next): results are gated",
         parts=lambda: {"gate": nn.Linear(WIDTH, WIDTH)})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    return soft(dots(q, k), v, j <= i) * split_heads(m.gate(x).sigmoid(), HEADS)


@variant("differential", "Ye et al. 2024: one softmax minus a part of another",
         parts=lambda: {"part": nn.Parameter(torch.full((HEADS, 1, 1), 0.3))})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    (p, q), (n, k) = q.chunk(2, -1), k.chunk(2, -1)
    first, second = (dots(a, b).masked_fill(j > i, -torch.inf).softmax(-1) for a, b in ((p, n), (q, k)))
    return (first - m.part * second) @ v


@variant("talking heads", "Shazeer et al. 2020: heads are mixed before and after the softmax",
         parts=lambda: {"before": nn.Parameter(torch.randn(HEADS, HEADS)),
                        "after": nn.Parameter(torch.randn(HEADS, HEADS))})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    scores = torch.einsum("bhij,hg->bgij", dots(q, k), m.before).masked_fill(j > i, -torch.inf)
    return torch.einsum("bhij,hg->bgij", scores.softmax(-1), m.after) @ v


@variant("sigmoid", "Ramapuram et al. 2024: a sigmoid of each score, and no sum to one")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    return (dots(q, k) - math.log(256)).sigmoid().masked_fill(j > i, 0.0) @ v


@variant("sparsemax", "Martins & Astudillo 2016 (entmax of 2): the nearest point of the simplex")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    scores = dots(q, k).masked_fill(j > i, -1e4)
    ordered = scores.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    count = (ordered * (j + 1) > sums).sum(-1, keepdim=True)
    return (scores - sums.gather(-1, count - 1) / count).clamp(min=0) @ v


@variant("stick-breaking", "Tan et al. 2024: each key takes a part of what later keys have left")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    scores = dots(q, k)
    left = F.logsigmoid(-scores).masked_fill(j >= i, 0.0)
    after = left.flip(-1).cumsum(-1).flip(-1) - left
    return (F.logsigmoid(scores) + after).exp().masked_fill(j >= i, 0.0) @ v


def in_blocks(t: Tensor, size: int) -> Tensor:
    """The means of full blocks of tokens."""
    count = t.shape[2] // size
    return t[:, :, : count * size].reshape(*t.shape[:2], count, size, t.shape[3]).mean(3)


# --- operands ---


@variant("grouped queries", "Ainslie et al. 2023 (GQA): two query heads share a key/value head", kv_heads=2)
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    return soft(dots(q, k), v, j <= i)


VARIANTS["latent"] = Variant(
    "DeepSeek-AI 2024 (MLA): keys and values of all heads from one narrow vector",
    made=lambda: LatentAttention(
        MLAConfig(width=WIDTH, heads=HEADS, latent=32, nope=D, rope=0, value=D, query_rank=None)
    ),
)  # fmt: skip


@variant("tensor products", "Zhang et al. 2025 (TPA): keys and values are sums of two products of factors",
         parts=lambda: {"factors": nn.Linear(WIDTH, 4 * (HEADS + D))})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    factors: Any = m.factors(x)
    of_heads, of_digits = factors.unflatten(-1, (4, HEADS + D)).split([HEADS, D], -1)
    k, v = (
        torch.einsum("btrh,btrd->bhtd", of_heads[:, :, part], of_digits[:, :, part]) / 2
        for part in (slice(2), slice(2, 4))
    )
    return soft(dots(q, k), v, j <= i)


@variant("two-simplicial", "Clift et al. 2019: a query scores pairs of keys", tokens=64,
         parts=lambda: {"more": nn.Linear(WIDTH, 2 * WIDTH)})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    n, w = (split_heads(t, HEADS) for t in m.more(x).chunk(2, -1))
    scores = torch.einsum("bhid,bhjd,bhkd->bhijk", q, k, n) * D**-0.5
    seen = (j <= i)[:, :, None] & (j <= i)[:, None]
    weights = scores.masked_fill(~seen, -torch.inf).flatten(-2).softmax(-1).view_as(scores)
    return torch.einsum("bhijk,bhjd,bhkd->bhid", weights, v, w)


@variant("native sparse", "Yuan et al. 2025 (NSA): means of blocks, the best of these blocks, and a window",
         parts=lambda: {"gates": nn.Linear(WIDTH, 3)})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    count = x.shape[1] // 8
    of_k, of_v = in_blocks(k, 8), in_blocks(v, 8)
    ended = torch.arange(count) * 8 + 7 <= i
    of_blocks = dots(q, of_k).masked_fill(~ended, -1e9)
    coarse = torch.where(ended.any(-1, keepdim=True), of_blocks.softmax(-1) @ of_v, 0.0)
    best = torch.zeros_like(of_blocks).scatter(-1, of_blocks.topk(min(2, count), -1).indices, 1.0)
    best = F.pad(best.repeat_interleave(8, -1), (0, x.shape[1] - count * 8))
    chosen = (best > 0) | (j // 8 == i // 8)
    fine, near = (soft(dots(q, k), v, (j <= i) & seen) for seen in (chosen, i - j < 8))
    a, b, c = m.gates(x).sigmoid()[:, None].chunk(3, -1)
    return a * coarse + b * fine + c * near


@variant("indexer", "DeepSeek-AI 2025 (DSA): the keys that a narrow attention of its own scores highest",
         parts=lambda: {"narrow": nn.Linear(WIDTH, 16, bias=False)})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    a, b = m.narrow(x).chunk(2, -1)
    scores = (a @ b.mT).masked_fill(j > i, -torch.inf)
    best = scores.topk(min(8, x.shape[1]), -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, value=True)
    return soft(dots(q, k), v, chosen[:, None] & (j <= i))


@variant("mixture of blocks", "Lu et al. 2025 (MoBA): the own block, and the two with the best mean key")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    count = -(-x.shape[1] // 8)
    padded = F.pad(k, (0, 0, 0, count * 8 - x.shape[1]))
    gates = dots(q, in_blocks(padded, 8)).masked_fill(torch.arange(count) >= i // 8, -torch.inf)
    best = torch.zeros_like(gates).scatter(-1, gates.topk(min(2, count), -1).indices, 1.0)
    chosen = best.repeat_interleave(8, -1)[..., : x.shape[1]] > 0
    return soft(dots(q, k), v, (j // 8 == i // 8) & (j <= i) | chosen & (j // 8 < i // 8))


@variant("compressed", "DeepSeek-AI 2026 (V4): a window, and the means of full blocks, in one softmax")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    every = (torch.cat([t, in_blocks(t, 8)], 2) for t in (k, v))
    ended = torch.arange(x.shape[1] // 8) * 8 + 7 <= i
    keys, values = every
    return soft(dots(q, keys), values, torch.cat([(j <= i) & (i - j < 16), ended], -1))


@variant("patches", "Yu et al. 2023 (MegaByte): patches of tokens see earlier patches")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    more = -x.shape[1] % 8
    q, k, v = (F.pad(in_blocks(F.pad(t, (0, 0, 0, more)), 8), (0, 0, 1, -1)) for t in (q, k, v))
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
    return soft(dots(q, k), v, j <= i).repeat_interleave(8, 2)[:, :, : x.shape[1]]


@variant("hierarchy", "Zhu & Soricut 2021 (H-Transformer): means of ever larger blocks, further away")
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    keys, values, seen = [k], [v], [(j <= i) & (j // 4 == i // 4)]
    for size in (4, 16):
        keys.append(in_blocks(keys[-1], 4))
        values.append(in_blocks(values[-1], 4))
        w = torch.arange(keys[-1].shape[2])
        seen.append((w < i // size) & ((w // 4 == i // size // 4) | (size > 4)))
    return soft(dots(q, torch.cat(keys, 2)), torch.cat(values, 2), torch.cat(seen, -1))


@variant("routing", "Roy et al. 2021: tokens of one cluster see each other",
         parts=lambda: {"clusters": nn.Linear(WIDTH, 4, bias=False)})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    cluster = m.clusters(x).argmax(-1)
    return soft(dots(q, k), v, (cluster[:, None, :, None] == cluster[:, None, None]) & (j <= i))


# --- without a softmax ---


def mixer(kind: Callable[..., nn.Module], **more: Any) -> Callable[[], nn.Module]:
    return lambda: kind(MixerConfig(WIDTH, HEADS), **more)


VARIANTS["linear"] = Variant(
    "Katharopoulos et al. 2020: products of features, over their sum",
    made=lambda: LinearAttention(LinearAttentionConfig(WIDTH, HEADS, D, D)),
)


@variant("Performer", "Choromanski et al. 2021: random features of the exponential, over their sum",
         parts=lambda: {"features": torch.randn(D, D)})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    q, k = ((t * D**-0.25 @ m.features - (t * t).sum(-1, keepdim=True) * D**-0.5 / 2).exp() for t in (q, k))
    weights = (q @ k.mT).masked_fill(j > i, 0.0)
    return weights @ v / weights.sum(-1, keepdim=True)


VARIANTS["retention"] = Variant("Sun et al. 2023 (RetNet): a decay for each head", made=mixer(Retention))
VARIANTS["gated linear"] = Variant(
    "Yang et al. 2024 (GLA): a decay for each digit of a key",
    made=mixer(GatedLinearAttention),
    tokens=256,
)
VARIANTS["Mamba-2"] = Variant("Dao & Gu 2024: a decay for each head and token", made=mixer(StateSpaceDuality))
VARIANTS["time mixing"] = Variant("Peng et al. 2024 (RWKV-5)", made=mixer(TimeMixing), tokens=256)
VARIANTS["delta rule"] = Variant(
    "Yang et al. 2024 (DeltaNet): what a key reads is taken away before its value is added",
    made=mixer(DeltaRule),
)
VARIANTS["gated delta rule"] = Variant(
    "Yang et al. 2025: the same, with a decay", made=mixer(DeltaRule, gated=True)
)


@variant("log-linear", "Guo et al. 2025: linear, with a factor for each level of a tree over the past",
         parts=lambda: {"levels": nn.Linear(WIDTH, 12 * HEADS)})  # fmt: skip
def _(m: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, ids: Tensor) -> Any:
    i, j = places(x)
    level: Any = sum(((i >> n) != (j >> n)).long() for n in range(11))
    factor = m.levels(x).sigmoid().unflatten(-1, (HEADS, 12)).transpose(1, 2)
    factor = factor.gather(-1, level.expand(len(x), HEADS, -1, -1))
    return (q @ k.mT * factor).masked_fill(j > i, 0.0) @ v
