"""Every model of attngraph.models, small: all attentions fused, masks as expected, equal to eager with
gradients in float64, in eval and in training mode, and one graph for many sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.models import attention as plain
from attngraph.models import (
    decoder_lm,
    encoder,
    encoder_decoder,
    grouped_attention,
    masked_attention,
    modern_decoder,
)

B, T, S, C, H, D = 2, 7, 9, 32, 4, 8
SMALL = {"width": C, "heads": H, "key_width": D, "value_width": D + 2}
Inputs = tuple[Tensor | None, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """`masks` has the mask in words of each attention; `inputs` gives those of (batch, tokens)."""

    model: Callable[[float], nn.Module]
    inputs: Callable[[int, int], Inputs]
    masks: tuple[str, ...]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(0, 50, (batch, tokens))


def padding(batch: int, tokens: int) -> Tensor:
    return torch.arange(tokens) >= tokens - 2 * (torch.arange(batch)[:, None] % 2)


def states(batch: int, tokens: int) -> Inputs:
    return (normal(batch, tokens, C),)


def padded_states(batch: int, tokens: int) -> Inputs:
    return normal(batch, tokens, C), padding(batch, tokens)


def _masked(**options: Any) -> Callable[[float], nn.Module]:
    return lambda rate: masked_attention.PaddedSelfAttention(
        masked_attention.MaskedAttentionConfig(**SMALL, dropout=rate, **options)
    )


def _window(**options: Any) -> Callable[[float], nn.Module]:
    return lambda rate: masked_attention.SlidingWindowAttention(
        masked_attention.SlidingWindowConfig(**SMALL, dropout=rate, **options)
    )


def _grouped(**options: Any) -> Callable[[float], nn.Module]:
    return lambda rate: grouped_attention.GroupedQueryAttention(
        grouped_attention.GroupedQueryConfig(**SMALL, kv_heads=2, dropout=rate, **options)
    )


def _modern(**options: Any) -> Callable[[float], nn.Module]:
    return lambda rate: modern_decoder.ModernDecoder(
        modern_decoder.ModernDecoderConfig(
            vocab_size=50,
            layers=2,
            width=C,
            heads=H,
            kv_heads=2,
            head_width=D,
            hidden=48,
            dropout=rate,
            **options,
        )
    )


def _decoder(rate: float) -> nn.Module:
    return decoder_lm.DecoderLM(
        decoder_lm.DecoderLMConfig(vocab_size=50, layers=3, width=C, heads=H, max_tokens=32, dropout=rate)
    )


def _encoder(rate: float) -> nn.Module:
    return encoder.Encoder(
        encoder.EncoderConfig(
            vocab_size=50, layers=2, width=C, heads=H, hidden=48, max_tokens=32, dropout=rate
        )
    )


def _encoder_decoder(rate: float) -> nn.Module:
    config = encoder_decoder.EncoderDecoderConfig(
        source_vocab_size=50,
        target_vocab_size=50,
        layers=2,
        width=C,
        heads=H,
        hidden=48,
        max_tokens=32,
        dropout=rate,
    )
    return encoder_decoder.EncoderDecoder(config)


def _sharing(spelling: str) -> Case:
    return Case(_grouped(spelling=spelling), states, ("causal",))


CASES = {
    "dot product": Case(
        lambda rate: plain.DotProductAttention(),
        lambda b, t: (normal(D), normal(t, D), normal(t, D)),
        ("none",),
    ),
    "sequence to sequence": Case(
        lambda rate: plain.Seq2SeqAttention(), lambda b, t: (normal(b, D), normal(b, t, D)), ("none",)
    ),
    "scaled dot product": Case(
        lambda rate: plain.ScaledDotProductAttention(),
        lambda b, t: (normal(b, t, D), normal(b, t + 2, D), normal(b, t + 2, D + 1)),
        ("none",),
    ),
    "multi-head": Case(
        lambda rate: plain.MultiHeadAttention(plain.AttentionConfig(**SMALL, dropout=rate)), states, ("none",)
    ),
    "packed multi-head": Case(
        lambda rate: plain.PackedMultiHeadAttention(plain.AttentionConfig(**SMALL, dropout=rate)),
        states,
        ("none",),
    ),
    "head by head": Case(
        lambda rate: plain.HeadByHeadAttention(plain.AttentionConfig(**SMALL, dropout=rate)),
        states,
        ("none",) * H,
    ),
    "cross": Case(
        lambda rate: plain.CrossAttention(plain.CrossAttentionConfig(**SMALL, dropout=rate, memory_width=24)),
        lambda b, t: (normal(b, t, C), normal(b, t + 3, 24), padding(b, t + 3)),
        ("padding(not r0)",),
    ),
    "causal, no projections": Case(
        lambda rate: masked_attention.CausalAttention(),
        lambda b, t: (normal(b, H, t, D), normal(b, H, t, D), normal(b, H, t, D)),
        ("causal",),
    ),
    "causal": Case(
        lambda rate: masked_attention.CausalSelfAttention(
            masked_attention.CausalAttentionConfig(**SMALL, dropout=rate, max_tokens=32)
        ),
        states,
        ("causal",),
    ),
    "masked": Case(
        lambda rate: masked_attention.MaskedSelfAttention(
            masked_attention.MaskedAttentionConfig(**SMALL, dropout=rate)
        ),
        lambda b, t: (normal(b, t, C), torch.rand(t, t) > 0.8),
        ("not r0[q, k]",),
    ),
    "padded, true means drop": Case(_masked(), padded_states, ("padding(not r0)",)),
    "padded, true means keep": Case(
        _masked(true_means="keep"), lambda b, t: (normal(b, t, C), ~padding(b, t)), ("padding(r0)",)
    ),
    "padded and causal": Case(_masked(causal=True), padded_states, ("causal & padding(not r0)",)),
    "window, both sides": Case(_window(window=4), states, ("window(+-2)",)),
    "window, causal": Case(_window(window=4, causal=True), states, ("causal & window(5)",)),
    "multi-query": Case(
        lambda rate: grouped_attention.MultiQueryAttention(
            grouped_attention.MultiQueryConfig(**SMALL, dropout=rate)
        ),
        states,
        ("causal",),
    ),
    "grouped, repeated": _sharing("repeat_interleave"),
    "grouped, expanded": _sharing("expand"),
    "grouped, broadcast": _sharing("grouped"),
    "grouped, not causal": Case(_grouped(causal=False), states, ("none",)),
    "decoder": Case(_decoder, lambda b, t: (ids(b, t),), ("causal",) * 3),
    "decoder with loss": Case(_decoder, lambda b, t: (ids(b, t), ids(b, t)), ("causal",) * 3),
    "modern decoder": Case(_modern(), lambda b, t: (ids(b, t),), ("causal",) * 2),
    "modern decoder, other spellings": Case(
        _modern(rotary="interleaved", sharing="grouped"), lambda b, t: (ids(b, t), ids(b, t)), ("causal",) * 2
    ),
    "encoder": Case(_encoder, lambda b, t: (ids(b, t), ~padding(b, t)), ("padding(r0)",) * 2),
    "encoder with loss": Case(_encoder, lambda b, t: (ids(b, t), None, None, ids(b, t)), ("none",) * 2),
    "encoder-decoder": Case(
        _encoder_decoder,
        lambda b, t: (ids(b, t + 2), ids(b, t), padding(b, t + 2), padding(b, t), ids(b, t)),
        ("padding(not r0)",) * 2 + ("causal & padding(not r0)", "padding(not r0)") * 2,
    ),
    "encoder-decoder without padding": Case(
        _encoder_decoder, lambda b, t: (ids(b, t + 2), ids(b, t)), ("none",) * 2 + ("causal", "none") * 2
    ),
}
WITH_DROPOUT = {n for n, c in CASES.items() if c.inputs in (states, padded_states)} | {"decoder", "encoder"}


SLOWER = {
    *(
        "multi-head",
        "packed multi-head",
        "scaled dot product",
        "causal, no projections",
        "grouped, not causal",
    ),
    *("grouped, repeated", "decoder", "encoder with loss", "encoder-decoder without padding"),
    *("padded, true means drop", "modern decoder"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOWER else n for n in CASES]
)
def test_every_attention_of_a_model_fuses_and_one_graph_serves_all_sizes(
    name: str, compare: Callable[..., Any]
) -> None:
    case = CASES[name]
    model = case.model(0.0).double()  # in training mode, with gradients
    compiled = attngraph.compile(model, strict=True)
    for batch, tokens in ((B, T), (3, 12), (4, 5)):
        agreement = compare(model, compiled, case.inputs(batch, tokens))
        assert agreement, agreement.differences
    report = compiled.report
    assert tuple(a.mask for a in report.attention) == case.masks
    assert not report.missed
    assert not report.breaks
    assert report.graphs == 1
    assert all("models/" in a.source for a in report.attention)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_eval_mode_without_gradients_fuses_the_same(name: str, compare: Callable[..., Any]) -> None:
    case = CASES[name]
    model = case.model(0.3).double().eval()
    compiled = attngraph.compile(model, strict=True)
    with torch.no_grad():
        for batch, tokens in ((B, T), (3, 12)):
            agreement = compare(model, compiled, case.inputs(batch, tokens))
            assert agreement, agreement.differences
    assert tuple(a.mask for a in compiled.report.attention) == case.masks
    assert compiled.report.graphs == 1


FAST_DROPOUT = {"causal", "grouped, broadcast", "padded and causal", "decoder"}


@pytest.mark.parametrize(
    "name",
    [n if n in FAST_DROPOUT else pytest.param(n, marks=pytest.mark.slow) for n in sorted(WITH_DROPOUT)],
)
def test_training_with_dropout_fuses_and_goes_by_the_seed(name: str) -> None:
    case = CASES[name]
    model = case.model(0.3).double()
    compiled = attngraph.compile(model, strict=True)
    inputs = case.inputs(B, T)

    def run(seed: int) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(seed)
        result: Tensor = compiled(*inputs)
        return result, list(torch.autograd.grad(result.sum(), list(model.parameters()), allow_unused=True))

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[0], again[0])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
    assert not torch.equal(first[0], other[0])
    assert len(compiled.report.attention) == len(case.masks)
    assert "random" in compiled.report.attention[0].program


def test_dropout_of_the_weights_keeps_their_mean() -> None:
    config = plain.AttentionConfig(width=8, heads=1, key_width=8, value_width=8, dropout=0.25)
    model = plain.MultiHeadAttention(config).double()
    x = normal(64, 16, 8)
    compiled = attngraph.compile(model)
    with torch.no_grad():
        mean = torch.stack([compiled(x) for _ in range(200)]).mean(0)
        exact = model.eval()(x)
        spread = torch.stack([model.train()(x) for _ in range(50)]).std(0).mean()
    assert (mean - exact).abs().mean() < spread / 200**0.5 * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "modern decoder", "encoder", "encoder-decoder"])
def test_whole_models_agree_in_float32_by_the_rule_of_twice_the_eager_error(name: str) -> None:
    from attngraph.runtime.verify import compare as compare_to_exact

    case = CASES[name]
    model = case.model(0.0).eval()
    compiled = attngraph.compile(model)
    agreement = compare_to_exact(compiled, model, case.inputs(B, T))
    assert agreement.holds, str(agreement)


def test_the_models_own_error_for_too_many_tokens_reaches_the_user() -> None:
    compiled = attngraph.compile(_decoder(0.0))
    compiled(ids(1, 8))
    for _ in range(2):
        with pytest.raises(ValueError, match="the input has 33 tokens"):
            compiled(ids(1, 33))
    assert compiled(ids(1, 32)).shape == (1, 32, 50)


def test_equal_layers_are_checked_once() -> None:
    compiled = attngraph.compile(_decoder(0.0))
    compiled(ids(2, 9))
    fuse = next(p for p in compiled.report.passes if p.name == "fuse-attention")
    assert "fused 3, 1 distinct one(s) checked in float64" in fuse.notes
