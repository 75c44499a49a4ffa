"""absorb-mla: latents are found by meaning, both orders of multiplication give what eager gives, and what
must not be absorbed is left alone with a reason."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import attngraph
from attngraph.models.mla import LatentAttention, MLAConfig, MLADecoder, RotaryLatentAttention
from attngraph.report.entries import AttentionEntry, LatentEntry
from tests.cache.small import greedy

H, P, R, V, L, C = 4, 6, 4, 5, 16, 24
SMALL = MLAConfig(layers=2, width=C, heads=H, latent=L, nope=P, rope=R, value=V, query_rank=8, hidden=32)


def causal(scores: Tensor) -> Tensor:
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf)


class Attention(nn.Module):
    """Latent attention in parts that a case may spell in its own way."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(C, H * P)
        self.down = nn.Linear(C, L)
        self.key_up = nn.Linear(L, H * P, bias=bias)
        self.value_up = nn.Linear(L, H * V, bias=bias)
        self.norm = nn.LayerNorm(L)
        self.project = nn.Linear(H * V, C)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (H, -1)).transpose(1, 2)

    def latent(self, x: Tensor) -> Tensor:
        return self.down(x)

    def keys(self, latent: Tensor) -> Tensor:
        return self.heads(self.key_up(latent))

    def values(self, latent: Tensor) -> Tensor:
        return self.heads(self.value_up(latent))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return causal(q @ k.mT / math.sqrt(P))

    def forward(self, x: Tensor) -> Tensor:
        latent = self.latent(x)
        q, k, v = self.heads(self.query(x)), self.keys(latent), self.values(latent)
        mixed = torch.softmax(self.scores(q, k), -1) @ v
        return self.project(mixed.transpose(1, 2).flatten(2))


class Normed(Attention):
    def latent(self, x: Tensor) -> Tensor:
        return self.norm(self.down(x))


class Activated(Attention):
    """Whatever stands before the latent does not matter."""

    def latent(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.down(x))) * torch.sigmoid(x[..., :1])


class Einsum(Attention):
    def keys(self, latent: Tensor) -> Tensor:
        return torch.einsum("btl,hpl->bhtp", latent, self.key_up.weight.view(H, P, L))

    def values(self, latent: Tensor) -> Tensor:
        return torch.einsum("blt,hvl->bhtv", latent.mT, self.value_up.weight.view(H, V, L))


class HeadsInTheMinorPlace(Attention):
    """Places of a head lie H apart."""

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, H)).permute(0, 3, 1, 2)


class ByMatmul(Attention):
    def keys(self, latent: Tensor) -> Tensor:
        return latent.unsqueeze(1) @ self.key_up.weight.view(H, P, L).mT

    def values(self, latent: Tensor) -> Tensor:
        return torch.matmul(latent[:, None], self.value_up.weight.view(H, V, L).transpose(1, 2))


class TwoLatents(Attention):
    """Keys from one half, values from the other."""

    def keys(self, latent: Tensor) -> Tensor:
        return self.heads(F.linear(latent[..., : L // 2], self.key_up.weight[:, : L // 2]))

    def values(self, latent: Tensor) -> Tensor:
        return self.heads(F.linear(latent[..., L // 2 :], self.value_up.weight[:, L // 2 :]))


class TiedProjections(Attention):
    """One matrix makes keys and values."""

    def values(self, latent: Tensor) -> Tensor:
        return self.heads(self.key_up(latent))[..., :V]


class ScaledProjection(Attention):
    def keys(self, latent: Tensor) -> Tensor:
        return 0.5 * super().keys(latent)


class MergedAdapter(Attention):
    """A weight and what was learned beside it, added before they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, L)), nn.Parameter(torch.randn(H * P, 2))

    def keys(self, latent: Tensor) -> Tensor:
        return self.heads(F.linear(latent, self.key_up.weight + self.b @ self.a))


class StoredInEightBits(Attention):
    """Weights that are written out again where they are used."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.key_up.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("bits", torch.round(weight / self.scale).to(torch.int8))

    def keys(self, latent: Tensor) -> Tensor:
        return self.heads(F.linear(latent, self.bits.to(latent.dtype) * self.scale))


class KeysReturned(Attention):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.keys(self.latent(x))


class Sharpened(Attention):
    """Without a bias any score program goes: a cap on the scores, here."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return causal(5 * torch.tanh(q @ k.mT / math.sqrt(P) / 5))


ABSORBED: dict[str, Callable[[], nn.Module]] = {
    "plain": Attention,
    "biases": lambda: Attention(bias=True),
    "norm": Normed,
    "anything before": Activated,
    "einsum": Einsum,
    "minor heads": HeadsInTheMinorPlace,
    "matmul": ByMatmul,
    "two latents": TwoLatents,
    "tied": TiedProjections,
    "scaled": ScaledProjection,
    "merged adapter": MergedAdapter,
    "eight bits": StoredInEightBits,
    "keys returned": KeysReturned,
    "capped": Sharpened,
}


def tokens(count: int = 9, rows: int = 2) -> Tensor:
    return torch.randn(rows, count, C, dtype=torch.float64)


def told(model: nn.Module, absorb: str, *calls: Any, rtol: float = 1e-10) -> AttentionEntry:
    """What the report says of the model's attention, compiled, after calls that gave what the model gives in
    float64."""
    compiled = attngraph.compile(model.double().eval(), absorb=absorb)
    with torch.no_grad():
        for call in calls:
            given = call if isinstance(call, tuple) else (call,)
            torch.testing.assert_close(compiled(*given), model(*given), rtol=rtol, atol=rtol / 100)
    (entry,) = compiled.report.attention
    assert entry.latent is None or all(line in str(compiled.report) for line in entry.latent.lines())
    return entry


def folded(model: nn.Module, *calls: Any) -> LatentEntry:
    """What it says of the latent, where projections are folded."""
    latent = told(model, "fold", *calls).latent
    assert latent is not None and latent.absorb == "fold"
    return latent


@pytest.mark.parametrize("name", ABSORBED)
@pytest.mark.parametrize("absorb", ["always", "never"])
def test_a_latent_is_found_by_its_meaning(name: str, absorb: str) -> None:
    latent = told(ABSORBED[name](), absorb, tokens(), tokens(17, rows=3)).latent
    assert (latent is None) == (absorb == "never")
    if latent is not None:
        assert (latent.absorb, latent.reason, latent.width) == ("always", "", L)


# --- what must be left alone ---


class RotaryAfterwards(Attention):
    def keys(self, latent: Tensor) -> Tensor:
        k = super().keys(latent)
        angle = torch.arange(k.shape[2], device=k.device, dtype=k.dtype)[:, None] * 0.1
        a, b = k[..., : P // 2], k[..., P // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class NormAfterwards(Attention):
    def keys(self, latent: Tensor) -> Tensor:
        return F.normalize(super().keys(latent), dim=-1)


class ActivationAfterwards(Attention):
    def values(self, latent: Tensor) -> Tensor:
        return F.relu(super().values(latent))


class Adapter(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, L)), nn.Parameter(torch.randn(H * P, 2))

    def keys(self, latent: Tensor) -> Tensor:
        return self.heads(self.key_up(latent) + F.linear(F.linear(latent, self.a), self.b))


class CappedWithABias(Attention):
    def __init__(self) -> None:
        super().__init__(bias=True)
        self.value_up.bias = None

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return causal(2 * torch.tanh(q @ k.mT / 2))


class SmallFillWithABias(CappedWithABias):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return (q @ k.mT).masked_fill(later, -3.0)


class WeighedWithABias(Attention):
    """The weights do not add up to one, so a bias of the values is not simply added."""

    def forward(self, x: Tensor) -> Tensor:
        latent = self.latent(x)
        q, k, v = self.heads(self.query(x)), self.keys(latent), self.values(latent)
        weights = torch.softmax(self.scores(q, k), -1) * 0.5
        return self.project((weights @ v).transpose(1, 2).flatten(2))


class KeysInEightBits(Attention):
    """Keys are rounded after they are projected."""

    def keys(self, latent: Tensor) -> Tensor:
        return torch.round(super().keys(latent) * 16) / 16


class ScaleOfThePlace(Attention):
    """A factor of the token's place between the projection and the dot."""

    def keys(self, latent: Tensor) -> Tensor:
        k = super().keys(latent)
        return k * (1 + torch.arange(k.shape[2], device=k.device, dtype=k.dtype))[:, None]


class LatentOfEachHead(Attention):
    """Every head has a latent of its own: nothing is shared."""

    def keys(self, latent: Tensor) -> Tensor:
        own = latent.unflatten(-1, (H, L // H)).transpose(1, 2)
        return own @ self.key_up.weight.view(H, P, L)[..., : L // H].mT


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rotary": (RotaryAfterwards, "follows the token's place"),
    "norm": (NormAfterwards, "changed after they are projected up"),
    "activation": (ActivationAfterwards, "values are changed after they are projected up, by relu"),
    "adapter": (Adapter, "a sum of several products"),
    "cap and bias": (CappedWithABias, "bias of its keys does not cancel"),
    "leaking fill and bias": (SmallFillWithABias, "bias of its keys does not cancel"),
    "weights and bias": (lambda: WeighedWithABias(bias=True), "do not add up to one"),
    "rounded keys": (KeysInEightBits, "changed after they are projected up"),
    "scale of the place": (ScaleOfThePlace, "changed after they are projected up"),
    "latent of each head": (LatentOfEachHead, ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_in_the_way_is_named(name: str) -> None:
    make, reason = REFUSED[name]
    latent = told(make(), "always", tokens()).latent
    if not reason:
        assert latent is None or latent.reason
        return
    assert latent is not None
    assert not latent.absorb and reason in latent.reason


def test_where_gradients_may_flow_nothing_is_absorbed() -> None:
    model, x = Attention(), torch.randn(2, 9, C)
    compiled = attngraph.compile(model, absorb="always")
    compiled(x).square().sum().backward()
    assert model.key_up.weight.grad is not None
    assert compiled.report.attention[0].latent is None
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert compiled.report.attention[0].latent is not None


def test_as_many_queries_as_keys_are_left_expanded_by_cost() -> None:
    latent = told(Attention(), "auto", tokens()).latent
    assert latent is not None and "as many queries as keys" in latent.reason


class StepOfAnother(nn.Module):
    """A decoding step as somebody wrote it: the latents of earlier tokens are an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        own = self.inner
        q, k, v = own.heads(own.query(x)), own.keys(latents), own.values(latents)
        mixed = torch.softmax(q @ k.mT / math.sqrt(P), -1) @ v
        return own.project(mixed.transpose(1, 2).flatten(2))


def test_few_queries_over_many_latents_are_absorbed_by_cost() -> None:
    calls = [(tokens(queries), torch.randn(2, 300, L, dtype=torch.float64)) for queries in (2, 40)]
    latent = told(StepOfAnother(), "auto", *calls).latent
    assert latent is not None and (latent.absorb, latent.width) == ("auto", L)
    assert latent.crossover is not None and f"{latent.crossover}" in latent.describe()


def test_a_word_that_absorb_does_not_know() -> None:
    with pytest.raises(ValueError, match="auto, always, never"):
        attngraph.compile(Attention(), absorb="sometimes")


# --- sizes that nobody tuned for ---


SIZES = {
    "heads": st.integers(2, 5),
    "nope": st.integers(2, 7),
    "half": st.integers(0, 3),
    "value": st.integers(2, 7),
    "latent": st.integers(2, 14),
    "rank": st.sampled_from([None, 2, 5]),
    "norm": st.booleans(),
    "bias": st.booleans(),
    "count": st.integers(2, 13),
    "scores": st.sampled_from(["concatenated", "summed"]),
    "rotary": st.sampled_from(["half", "interleaved"]),
    "seed": st.integers(0, 99),
}


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(**SIZES)
def test_absorbed_and_expanded_agree_for_many_sizes(
    heads: int, nope: int, half: int, value: int, latent: int, rank: int | None, norm: bool, bias: bool,
    count: int, scores: str, rotary: str, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    config = MLAConfig(
        layers=1, width=10, heads=heads, latent=latent, nope=nope, rope=2 * half, value=value,
        query_rank=rank, norm=norm, bias=bias, hidden=8, scores=scores, rotary=rotary,  # type: ignore[arg-type]
    )  # fmt: skip
    layer = (RotaryLatentAttention if half else LatentAttention)(config)
    entry = told(layer, "always", torch.randn(2, count, 10, dtype=torch.float64), rtol=1e-9)
    saves = latent + 2 * half < heads * (nope + 2 * half + value)
    assert (entry.latent is not None and entry.latent.absorb == "always") == saves
    assert entry.head_dim == nope + 2 * half


# --- decoders ---


@pytest.mark.parametrize(
    ("scores", "absorb"),
    [
        *itertools.product(["concatenated", "summed", "absorbed"], ["auto", "always"]),
        pytest.param("concatenated", "fold", marks=pytest.mark.slow),
    ],
)
def test_a_decoder_keeps_the_latent_and_the_rotary_key(scores: Any, absorb: str) -> None:
    model = MLADecoder(dataclasses.replace(SMALL, scores=scores)).eval()
    ids = torch.randint(0, 256, (2, 9))
    decoder = attngraph.compile(model, cache=True, absorb=absorb)
    assert torch.equal(decoder.generate(ids, 6), greedy(model, ids, 6))
    cache = decoder.report.cache
    assert cache is not None
    assert cache.bytes_per_token == 2 * (L + R) * 4
    assert len(cache.stores) == 2


@pytest.mark.slow
def test_keys_of_plain_heads_are_kept_as_they_are() -> None:
    transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, attn_implementation="eager"
    )  # fmt: skip
    decoder = attngraph.compile(transformers.GPT2LMHeadModel(config).eval(), cache=True)
    decoder.generate(torch.randint(0, 64, (2, 9)), 2)
    assert decoder.report.cache is not None
    assert decoder.report.cache.bytes_per_token == 2 * 2 * 32 * 4


# --- fold ---


def test_folded_weights_are_multiplied_once_and_follow_the_weights() -> None:
    model = RotaryLatentAttention(SMALL).double().eval()
    x = torch.randn(2, 9, C, dtype=torch.float64)
    with torch.no_grad():
        compiled = attngraph.compile(model, absorb="fold")
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-10, atol=1e-12)
        model.project.weight.mul_(2.0)
        model.query.up.weight.add_(0.1)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-10, atol=1e-12)
    (entry,) = compiled.report.attention
    assert entry.latent is not None
    assert entry.latent.absorb == "fold"
    queries = (H * P * 8 + H * P * L, H * L * 8)
    results = (H * V * C + H * V * L, H * L * C)
    before, after = queries[0] + results[0], queries[1] + results[1]
    assert entry.latent.parameters == (before, after)
    assert entry.latent.operations == (2 * before, 2 * after + 2 * H * P * 8)  # the rotary part's projection
    assert f"{after:,} parameters" in str(compiled.report)


@pytest.mark.parametrize("name", ABSORBED)
def test_folding_gives_what_eager_gives_and_says_what_stays_apart(name: str) -> None:
    latent = folded(ABSORBED[name](), tokens())
    if name == "biases":
        assert "bias of its values" in latent.apart
    elif name in ("plain", "norm", "einsum", "matmul"):
        assert latent.apart == ""


def test_one_sequence_is_folded_as_several_are() -> None:
    assert folded(RotaryLatentAttention(SMALL), tokens(rows=1)).apart == ""


class NormedQueries(Attention):
    """Queries that are more than a projection stay apart from the keys' matrix."""

    def forward(self, x: Tensor) -> Tensor:
        latent = self.latent(x)
        q = F.normalize(self.heads(self.query(x)), dim=-1)
        mixed = torch.softmax(self.scores(q, self.keys(latent)), -1) @ self.values(latent)
        return F.gelu(mixed).transpose(1, 2).flatten(2)


class ProjectionsFromAnInput(Attention):
    """The matrix of the keys follows an argument."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        latent, weight = self.latent(x), self.key_up.weight * gate
        q, k, v = self.heads(self.query(x)), self.heads(F.linear(latent, weight)), self.values(latent)
        mixed = torch.softmax(self.scores(q, k), -1) @ v
        return self.project(mixed.transpose(1, 2).flatten(2))


def test_projections_that_are_an_input_are_not_multiplied_ahead() -> None:
    calls = [(tokens(), torch.randn((), dtype=torch.float64)) for _ in range(2)]
    assert "follow an input" in folded(ProjectionsFromAnInput(), *calls).apart


def test_what_is_no_product_of_two_matrices_is_not_folded() -> None:
    apart = folded(NormedQueries(), tokens()).apart
    assert "queries" in apart and "not projected at once" in apart
