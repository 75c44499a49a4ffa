"""convert_heads: fewer key/value heads by mean pooling, against models whose weights were pooled by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from attngraph.models.mla import MLAConfig, MLADecoder
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from tests.cache.small import greedy

H, D, G = 4, 8, 2


def drawn(model: nn.Module) -> Any:
    """With weights large enough for attention to matter."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def modern(kv_heads: int) -> Any:
    config = ModernDecoderConfig(
        layers=2, width=32, heads=H, kv_heads=kv_heads, head_width=D, hidden=32, vocab_size=64
    )  # fmt: skip
    return drawn(ModernDecoder(config))


def means(weight: Tensor, groups: int) -> Tensor:
    """Rows of heads of D, averaged over each group of heads."""
    heads = weight.unflatten(0, (-1, D))
    return torch.stack([part.mean(0) for part in heads.chunk(groups)]).flatten(0, 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_our_modern_decoder_becomes_the_one_with_pooled_weights(groups: int) -> None:
    model, wanted = modern(H), modern(groups)
    state = model.state_dict()
    pooled = {n: means(w, groups) if ".key." in n or ".value." in n else w for n, w in state.items()}
    wanted.load_state_dict(pooled)
    converted = attngraph.convert_heads(model, kv_heads=groups)
    for shape in ((2, 9), (3, 17)):
        ids = torch.randint(0, 64, shape)
        with torch.no_grad():
            torch.testing.assert_close(converted(ids), wanted(ids), rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in converted.parameters()) == sum(p.numel() for p in wanted.parameters())


GROUPS = ([[0, 3], [1, 2]], [[2, 0, 1], [3]], [[1], [0, 2], [3]], [[3, 1, 0, 2]], [[2], [3], [0], [1]])


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
def test_heads_are_grouped_as_the_user_chooses(groups: list[list[int]], cached: bool) -> None:
    model = modern(H)
    wanted = copy.deepcopy(model)
    for name, weight in wanted.named_parameters():
        if ".key." in name or ".value." in name:
            heads = weight.data.unflatten(0, (-1, D))
            for group in groups:
                heads[group] = heads[group].mean(0)
    converted = attngraph.convert_heads(model, groups=groups)
    ids = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids), wanted(ids), rtol=1e-4, atol=1e-5)
    report = converted.report
    assert report.kv_heads == len(groups)
    rows = 2 * 2 * (H - len(groups)) * D  # layers; keys and values
    assert report.parameters[0] - report.parameters[1] == rows * 32
    if cached:
        decoder = attngraph.compile(converted, cache=True)
        _, state = decoder.prefill(ids[:, :8])
        found = decoder.decode(ids[:, 8:], state)
        torch.testing.assert_close(found, wanted(ids)[:, 8:], rtol=1e-4, atol=1e-5)
        assert decoder.report.cache is not None
        assert decoder.report.cache.bytes_per_token == report.cache_bytes[1]


@pytest.mark.parametrize("groups", [[[0, 1], [2]], [[0, 1], [1, 2, 3]], [[0, 1], [2, 4]], [[0, 1, 2, 3, 4]]])
def test_every_head_is_in_one_group(groups: list[list[int]]) -> None:
    with pytest.raises(
        attngraph.ConversionError, match=r"key/value heads 0 to 3, each of which must be in one"
    ):
        attngraph.convert_heads(modern(H), groups=groups)


def test_heads_are_told_by_number_or_by_groups() -> None:
    for wrong in ({}, {"kv_heads": 2, "groups": [[0, 1], [2, 3]]}):
        with pytest.raises(ValueError, match="either kv_heads or groups"):
            attngraph.convert_heads(modern(H), **wrong)
    with pytest.raises(ValueError, match="no empty group"):
        attngraph.convert_heads(modern(H), groups=[[0, 1, 2, 3], []])


def test_grouped_heads_can_be_grouped_further() -> None:
    model, wanted = modern(2), modern(1)
    state = model.state_dict()
    wanted.load_state_dict(
        {n: means(w, 1) if ".key." in n or ".value." in n else w for n, w in state.items()}
    )
    converted, ids = attngraph.convert_heads(model, kv_heads=1), torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids), wanted(ids), rtol=1e-4, atol=1e-5)


def packed_by_hand(model: nn.Module, width: int, names: tuple[str, ...], dim: int) -> nn.Module:
    """A copy in which the heads of a group hold the same, in a packed projection [Q | K | V]."""
    made = copy.deepcopy(model)
    for name, parameter in made.named_parameters():
        if any(name.endswith(n) for n in names):
            rows = parameter.data.movedim(dim if parameter.ndim > 1 else 0, 0)
            for part in (1, 2):
                own = rows[part * width : (part + 1) * width]
                own.copy_(
                    means(own, G).unflatten(0, (G, 1, D)).expand(G, H // G, D, *own.shape[1:]).flatten(0, 2)
                )
    return made


@pytest.mark.slow
def test_stock_llama() -> None:
    transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")

    def config(kv_heads: int) -> Any:
        return transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=32, num_attention_heads=H, num_key_value_heads=kv_heads,
            intermediate_size=48, vocab_size=64, attn_implementation="eager",
        )  # fmt: skip

    model = drawn(transformers.LlamaForCausalLM(config(H)))
    wanted = drawn(transformers.LlamaForCausalLM(config(G)))
    state = model.state_dict()
    pooled = {n: means(w, G) if "k_proj" in n or "v_proj" in n else w for n, w in state.items()}
    wanted.load_state_dict(pooled)
    converted, ids = attngraph.convert_heads(model, kv_heads=G), torch.randint(0, 64, (3, 11))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, wanted(ids).logits, rtol=1e-4, atol=1e-5)
    report = converted.report
    assert (report.heads, report.kv_heads) == ((H, H), G)
    assert report.cache_bytes == (2 * H * 2 * D * 4, 2 * G * 2 * D * 4)


@pytest.mark.slow
def test_stock_gpt2_whose_projections_are_one() -> None:
    transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=H, vocab_size=64, attn_implementation="eager"
    )  # fmt: skip
    model = drawn(transformers.GPT2LMHeadModel(config))
    for block in model.transformer.h:
        nn.init.normal_(block.attn.c_attn.bias)
    wanted = packed_by_hand(model, 32, ("c_attn.weight", "c_attn.bias"), 1)
    converted, ids = attngraph.convert_heads(model, kv_heads=G), torch.randint(0, 64, (3, 11))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, wanted(ids).logits, rtol=1e-4, atol=1e-5)
    rows = 2 * (H - G) * D
    assert converted.report.parameters[0] - converted.report.parameters[1] == 2 * rows * (32 + 1)


def test_the_drift_is_measured_on_the_sample() -> None:
    model, ids = modern(H), torch.randint(0, 64, (2, 9))
    converted = attngraph.convert_heads(model, ids, kv_heads=G)
    with torch.no_grad():
        p, q = model(ids).double().softmax(-1), converted(ids).double().softmax(-1)
    kl = (p * (p / q).log()).sum(-1).mean()
    report = converted.report
    assert report.kl == pytest.approx(float(kl), rel=1e-6)
    assert report.top1 == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert report.kl > 0
    assert json.loads(report.to_json())["kv_heads"] == G
    for shown in ("from 4 to 2", "2.0 times less", "KL", "%"):
        assert shown in str(report)


def test_as_many_heads_as_there_are_change_nothing() -> None:
    model, ids = modern(H), torch.randint(0, 64, (2, 9))
    converted = attngraph.convert_heads(model, ids, kv_heads=H)
    with torch.no_grad():
        torch.testing.assert_close(converted(ids), model(ids))
    assert converted.report.kl == pytest.approx(0, abs=1e-6)
    assert converted.report.cache_bytes[0] == converted.report.cache_bytes[1]


def test_the_model_stays_as_it_is_and_the_copy_learns() -> None:
    model, ids = modern(H), torch.randint(0, 64, (2, 9))
    before = copy.deepcopy(model.state_dict())
    converted = attngraph.convert_heads(model, ids, kv_heads=G)
    optimiser = torch.optim.SGD(converted.parameters(), 0.5)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(converted(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    twin = copy.deepcopy(converted)
    with torch.no_grad():
        torch.testing.assert_close(twin(ids), converted(ids))
        next(twin.parameters()).add_(1.0)
        assert not torch.allclose(twin(ids), converted(ids))


@pytest.mark.slow
def test_a_converted_model_decodes_with_a_smaller_cache() -> None:
    model, ids = modern(H), torch.randint(0, 64, (2, 9))
    converted = attngraph.convert_heads(model, ids, kv_heads=G)
    decoder = attngraph.compile(converted, cache=True)
    assert torch.equal(decoder.generate(ids, 8), greedy(converted, ids, 8))
    assert decoder.report.cache is not None
    assert decoder.report.cache.bytes_per_token == converted.report.cache_bytes[1]


class UnlikeHeads(nn.Module):
    """Every head's keys are scaled by a number of their own, after the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.qkv = nn.Linear(32, 3 * H * D)
        self.gain = nn.Parameter(torch.arange(1.0, H + 1))

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embedding(ids)).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        scores = q @ (k * self.gain[:, None, None]).mT
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class TiedProjections(nn.Module):
    """Keys and values are one product."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.query, self.both = nn.Linear(32, H * D), nn.Linear(32, H * D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = (
            layer(x).unflatten(-1, (H, D)).transpose(1, 2) for layer in (self.query, self.both, self.both)
        )
        return (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)


class NotAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).softmax(-1)


REFUSED: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "unlike heads": (UnlikeHeads, 2, "treated unlike each other"),
    "one product": (TiedProjections, 2, "used in several places"),
    "no divisor": (lambda: modern(H), 3, "no multiple of 3"),
    "more heads": (lambda: modern(2), 4, "no multiple of 4"),
    "no attention": (NotAttention, 2, "not recognised"),
    "latents": (
        lambda: drawn(MLADecoder(MLAConfig(
            layers=1, width=16, heads=4, latent=8, nope=4, rope=2, value=4, query_rank=6, hidden=16))),
        2, "one product with a parameter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused_with_a_reason(name: str) -> None:
    make, kv_heads, reason = REFUSED[name]
    with pytest.raises(attngraph.ConversionError, match=reason):
        attngraph.convert_heads(make().eval(), kv_heads=kv_heads)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        attngraph.convert_heads(modern(H), kv_heads=0)
    with pytest.raises(TypeError, match=r"nn\.Module"):
        attngraph.convert_heads(len, kv_heads=2)  # type: ignore[arg-type]
    with pytest.raises(attngraph.ConversionError, match="no embedding"):
        attngraph.convert_heads(nn.Linear(2, 2), kv_heads=2)
    converted = attngraph.convert_heads(modern(H), kv_heads=G)
    with pytest.raises(attngraph.ConversionError, match="converted for calls with targets=None"):
        converted(torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64))


@pytest.mark.slow
def test_models_of_ours_with_positions_of_their_own_and_two_sequences() -> None:
    lm = drawn(DecoderLM(DecoderLMConfig(layers=2, width=32, heads=4, max_tokens=64, vocab_size=64)))
    assert attngraph.convert_heads(lm, kv_heads=1).report.kv_heads == 1
    both = drawn(EncoderDecoder(EncoderDecoderConfig(layers=1, width=32, heads=4, hidden=32)))
    source, target = torch.randint(1, 64, (2, 9)), torch.randint(1, 64, (2, 7))
    converted = attngraph.convert_heads(both, source, target, kv_heads=2)
    assert len(converted.report.heads) == 3
    with torch.no_grad():
        assert converted(source, target).shape == both(source, target).shape
    padding = torch.arange(9) >= torch.tensor([[9], [6]])
    masked = attngraph.convert_heads(both, source, target, padding, kv_heads=2)
    assert len(masked.report.heads) == 3
