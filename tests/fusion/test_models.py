"""Every model of attngraph.models, small: all softmax attentions fused, masks as expected, equal to eager
with gradients in float64, in eval and in training mode, and one graph for many sizes.

Where there is no softmax (linear attention), or where the loop over keys is Python's, the answers must be
equal and nothing is said of what became of the graph.
"""

import copy
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
    linear_attention,
    linear_transformer,
    longformer,
    masked_attention,
    modern_decoder,
    online_softmax,
    post_norm_decoder,
    relative_bias,
    sparse_attention,
    sparse_transformer,
    vit,
    windowed_attention,
)

B, T, S, C, H, D = 2, 7, 9, 32, 4, 8
SMALL = {"width": C, "heads": H, "key_width": D, "value_width": D + 2}
Inputs = tuple[Tensor | None, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """`masks` has the mask in words of each attention, ANY where there are several ways to put it; it is
    None where the number of fused attentions is left open. `inputs` gives those of (batch, tokens). Where
    `counted`, Python counts the tokens in a loop, so each number of them has a graph of its own."""

    model: Callable[[float], nn.Module]
    inputs: Callable[[int, int], Inputs]
    masks: tuple[str, ...] | None
    counted: bool = False


ANY = "any"


def assert_fused(report: attngraph.CompileReport, masks: tuple[str, ...], graphs: int = 1) -> None:
    """One fused attention for each mask, no softmax left alone, nothing in pieces, and so many graphs."""
    assert len(report.attention) == len(masks)
    for entry, mask in zip(report.attention, masks, strict=True):
        assert mask in (ANY, entry.mask)
    assert not report.missed
    assert not report.breaks
    assert report.graphs == graphs
    assert all(what.startswith("dimension ") for what, _ in report.retraces)
    assert all("models/" in a.source for a in report.attention)


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


def made(
    model: Callable[..., nn.Module], config: Callable[..., Any], dropout: bool = True, **sizes: Any
) -> Any:
    """Gives, for options, what makes a model for a rate of dropout."""

    def with_options(**options: Any) -> Callable[[float], nn.Module]:
        return lambda rate: model(config(**sizes, **options, **({"dropout": rate} if dropout else {})))

    return with_options


STACK = {"vocab_size": 50, "layers": 2, "width": C, "heads": H, "max_tokens": 32}
_attention = made(plain.MultiHeadAttention, plain.AttentionConfig, **SMALL)
_packed = made(plain.PackedMultiHeadAttention, plain.AttentionConfig, **SMALL)
_by_head = made(plain.HeadByHeadAttention, plain.AttentionConfig, **SMALL)
_cross = made(plain.CrossAttention, plain.CrossAttentionConfig, **SMALL, memory_width=24)
_causal = made(
    masked_attention.CausalSelfAttention, masked_attention.CausalAttentionConfig, **SMALL, max_tokens=32
)
_any_mask = made(masked_attention.MaskedSelfAttention, masked_attention.MaskedAttentionConfig, **SMALL)
_masked = made(masked_attention.PaddedSelfAttention, masked_attention.MaskedAttentionConfig, **SMALL)
_window = made(masked_attention.SlidingWindowAttention, masked_attention.SlidingWindowConfig, **SMALL)
_global_window = made(
    windowed_attention.GlobalWindowAttention, windowed_attention.GlobalWindowConfig, **SMALL, window=4
)()
_dilated = made(
    windowed_attention.DilatedWindowAttention, windowed_attention.DilatedWindowConfig, **SMALL, window=4,
    dilations=(1, 1, 2, 3),
)  # fmt: skip
_sparse = made(sparse_attention.SparseAttention, sparse_attention.SparseAttentionConfig, **SMALL)
_linear = made(
    linear_attention.LinearAttention, linear_attention.LinearAttentionConfig, dropout=False, **SMALL
)
_biased = made(
    relative_bias.RelativeBiasAttention,
    relative_bias.RelativeBiasConfig,
    **SMALL,
    buckets=8,
    max_distance=8,
    side=3,
)
_multi_query = made(grouped_attention.MultiQueryAttention, grouped_attention.MultiQueryConfig, **SMALL)
_grouped = made(
    grouped_attention.GroupedQueryAttention, grouped_attention.GroupedQueryConfig, **SMALL, kv_heads=2
)
_modern = made(
    modern_decoder.ModernDecoder, modern_decoder.ModernDecoderConfig, vocab_size=50, layers=2, width=C,
    heads=H, kv_heads=2, head_width=D, hidden=48,
)  # fmt: skip
_longformer = made(longformer.Longformer, longformer.LongformerConfig, **STACK, hidden=48, window=4)()
_sparse_transformer = made(
    sparse_transformer.SparseTransformer,
    sparse_transformer.SparseTransformerConfig,
    **STACK,
    stride=4,
    summary=2,
)()
_linear_transformer = made(
    linear_transformer.LinearTransformer, linear_transformer.LinearTransformerConfig, **STACK
)()
_post_norm = made(post_norm_decoder.PostNormDecoder, decoder_lm.DecoderLMConfig, **STACK)()
_vit = made(
    vit.ViT, vit.ViTConfig, image=(8, 12), patch=4, classes=5, layers=2, width=C, heads=H, hidden=48
)()
_decoder = made(decoder_lm.DecoderLM, decoder_lm.DecoderLMConfig, **{**STACK, "layers": 3})()
_encoder = made(encoder.Encoder, encoder.EncoderConfig, **STACK, hidden=48)()
_encoder_decoder = made(
    encoder_decoder.EncoderDecoder, encoder_decoder.EncoderDecoderConfig, source_vocab_size=50,
    target_vocab_size=50, layers=2, width=C, heads=H, hidden=48, max_tokens=32,
)()  # fmt: skip


def global_tokens(batch: int, tokens: int) -> Tensor:
    return (torch.arange(tokens) + torch.arange(batch)[:, None]) % 5 == 0


def _sharing(spelling: str) -> Case:
    return Case(_grouped(spelling=spelling), states, ("causal",))


CASES = {
    "dot product": Case(lambda rate: plain.DotProductAttention(), lambda b, t: (normal(D), normal(t, D),
        normal(t, D)), ("none",)),
    "sequence to sequence": Case(lambda rate: plain.Seq2SeqAttention(), lambda b, t: (normal(b, D), normal(b,
        t, D)), ("none",)),
    "scaled dot product": Case(lambda rate: plain.ScaledDotProductAttention(), lambda b, t: (normal(b, t, D),
        normal(b, t + 2, D), normal(b, t + 2, D + 1)), ("none",)),
    "multi-head": Case(_attention(), states, ("none",)),
    "packed multi-head": Case(_packed(), states, ("none",)),
    "head by head": Case(_by_head(), states, None),
    "cross": Case(_cross(), lambda b, t: (normal(b, t, C), normal(b, t + 3, 24), padding(b, t + 3)),
        ("padding(not r0)",)),
    "causal, no projections": Case(lambda rate: masked_attention.CausalAttention(), lambda b, t: (normal(b, H,
        t, D), normal(b, H, t, D), normal(b, H, t, D)), ("causal",)),
    "causal": Case(_causal(), states, ("causal",)),
    "masked": Case(_any_mask(), lambda b, t: (normal(b, t, C), torch.rand(t, t) > 0.8), ("not r0[q, k]",)),
    "padded, true means drop": Case(_masked(), padded_states, ("padding(not r0)",)),
    "padded, true means keep": Case(_masked(true_means="keep"), lambda b, t: (normal(b, t, C), ~padding(b,
        t)), ("padding(r0)",)),
    "padded and causal": Case(_masked(causal=True), padded_states, ("causal & padding(not r0)",)),
    "window, both sides": Case(_window(window=4), states, ("window(+-2)",)),
    "window, causal": Case(_window(window=4, causal=True), states, ("causal & window(5)",)),
    "window with global tokens": Case(_global_window, lambda b, t: (normal(b, t, C), global_tokens(b, t)),
        (ANY, "none")),
    "window with global tokens, padded": Case(_global_window, lambda b, t: (normal(b, t, C), global_tokens(b,
        t), ~padding(b, t)), (ANY, "padding(r0)")),
    "dilated window": Case(_dilated(), states, (ANY,)),
    "dilated window, causal": Case(_dilated(causal=True), states, (ANY,)),
    "sparse, strided": Case(_sparse(stride=3, summary=1), states, (ANY,)),
    "sparse, fixed": Case(_sparse(pattern="fixed", stride=4, summary=2), states, (ANY,)),
    "linear, both sides": Case(_linear(causal=False, feature_map="identity"), states, None),
    "linear, causal": Case(_linear(feature_map="identity"), states, None),
    "linear with features, both sides": Case(_linear(causal=False), states, None),
    "linear with features, causal": Case(_linear(), states, None),
    "T5 bias": Case(_biased(), states, ("none",)),
    "T5 bias, causal": Case(_biased(causal=True), states, ("causal",)),
    "ALiBi": Case(_biased(bias_kind="alibi", causal=True), states, ("causal",)),
    "ALiBi, both sides": Case(_biased(bias_kind="alibi"), states, ("none",)),
    "Swin table": Case(_biased(bias_kind="swin"), lambda b, t: (normal(b, 9, C),), ("none",)),
    "online softmax, key by key": Case(lambda rate: online_softmax.OnlineSoftmaxAttention(), lambda b,
        t: (normal(b, t, 5), normal(b, 5, D)), None),
    "flash loop": Case(lambda rate: online_softmax.FlashAttention(4), lambda b, t: (normal(b, H, t, D),
        normal(b, H, 9, D), normal(b, H, 9, D + 1)), ("none",)),
    "flash loop, causal": Case(lambda rate: online_softmax.FlashAttention(4, causal=True), lambda b,
        t: (normal(b, H, t, D), normal(b, H, t, D), normal(b, H, t, D + 1)), ("causal",), counted=True),
    "multi-query": Case(_multi_query(), states, ("causal",)),
    "grouped, repeated": _sharing("repeat_interleave"),
    "grouped, expanded": _sharing("expand"),
    "grouped, broadcast": _sharing("grouped"),
    "grouped, not causal": Case(_grouped(causal=False), states, ("none",)),
    "decoder": Case(_decoder, lambda b, t: (ids(b, t),), ("causal",) * 3),
    "decoder with loss": Case(_decoder, lambda b, t: (ids(b, t), ids(b, t)), ("causal",) * 3),
    "modern decoder": Case(_modern(), lambda b, t: (ids(b, t),), ("causal",) * 2),
    "modern decoder, other spellings": Case(_modern(rotary="interleaved", sharing="grouped"), lambda b,
        t: (ids(b, t), ids(b, t)), ("causal",) * 2),
    "post-norm decoder": Case(_post_norm, lambda b, t: (ids(b, t), ids(b, t)), ("causal",) * 2),
    "sparse transformer": Case(_sparse_transformer, lambda b, t: (ids(b, t), ids(b, t)), (ANY,) * 2),
    "linear transformer": Case(_linear_transformer, lambda b, t: (ids(b, t), ids(b, t)), None),
    "longformer": Case(_longformer, lambda b, t: (ids(b, t), global_tokens(b, t), ~padding(b, t)), (ANY,
        "padding(r0)") * 2),
    "longformer with loss": Case(_longformer, lambda b, t: (ids(b, t), None, None, ids(b, t)), (ANY,
        "none") * 2),
    "ViT": Case(_vit, lambda b, t: (normal(b, 3, 8, 12),), ("none",) * 2),
    "ViT with loss": Case(_vit, lambda b, t: (normal(b, 3, 8, 12), torch.randint(0, 5, (b,))), ("none",) * 2),
    "encoder": Case(_encoder, lambda b, t: (ids(b, t), ~padding(b, t)), ("padding(r0)",) * 2),
    "encoder with loss": Case(_encoder, lambda b, t: (ids(b, t), None, None, ids(b, t)), ("none",) * 2),
    "encoder-decoder": Case(_encoder_decoder, lambda b, t: (ids(b, t + 2), ids(b, t), padding(b, t + 2),
        padding(b, t), ids(b, t)), ("padding(not r0)",) * 2 + ("causal & padding(not r0)",
        "padding(not r0)") * 2),
    "encoder-decoder without padding": Case(_encoder_decoder, lambda b, t: (ids(b, t + 2), ids(b, t)),
        ("none",) * 2 + ("causal", "none") * 2),
}  # fmt: skip
WITH_DROPOUT = {
    *(n for n, c in CASES.items() if c.inputs in (states, padded_states) and not n.startswith("linear")),
    *("decoder", "encoder", "window with global tokens", "longformer", "ViT"),
}


SLOWER = {
    "multi-head", "packed multi-head", "scaled dot product", "causal, no projections", "grouped, not causal",
    "grouped, repeated", "decoder", "encoder with loss", "encoder-decoder without padding",
    "padded, true means drop", "modern decoder", "window with global tokens", "dilated window, causal",
    "sparse, strided", "T5 bias, causal", "linear, both sides", "linear with features, both sides",
    "ALiBi, both sides", "online softmax, key by key", "flash loop, causal", "post-norm decoder",
    "sparse transformer", "longformer with loss", "ViT",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOWER else n for n in CASES]
)
def test_every_attention_of_a_model_fuses_and_one_graph_serves_all_sizes(
    name: str, compare: Callable[..., Any]
) -> None:
    case = CASES[name]
    model = case.model(0.0).double()  # in training mode, with gradients
    compiled = attngraph.compile(model, strict=case.masks is not None)
    for batch, tokens in ((B, T), (3, 12), (4, 5)):
        agreement = compare(model, compiled, case.inputs(batch, tokens))
        assert agreement, agreement.differences
    if case.masks is not None:
        assert_fused(compiled.report, case.masks, 3 if case.counted else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_eval_mode_without_gradients_fuses_the_same(name: str, compare: Callable[..., Any]) -> None:
    case = CASES[name]
    model = case.model(0.3).double().eval()
    compiled = attngraph.compile(model, strict=case.masks is not None)
    with torch.no_grad():
        for batch, tokens in ((B, T), (3, 12)):
            agreement = compare(model, compiled, case.inputs(batch, tokens))
            assert agreement, agreement.differences
    if case.masks is not None:
        assert_fused(compiled.report, case.masks, 2 if case.counted else 1)


FAST_DROPOUT = {"causal", "grouped, broadcast", "padded and causal", "decoder", "sparse, fixed"}


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
    if case.masks is not None:
        assert_fused(compiled.report, case.masks)
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


WHOLE = ["decoder", "modern decoder", "encoder", "encoder-decoder", "sparse transformer", "longformer", "ViT"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WHOLE, "post-norm decoder", "linear transformer"])
def test_whole_models_agree_in_float32_by_the_rule_of_twice_the_eager_error(name: str) -> None:
    from attngraph.runtime.verify import compare as compare_to_exact

    case = CASES[name]
    model = case.model(0.0).eval()
    compiled = attngraph.compile(model)
    inputs = tuple(
        x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in case.inputs(B, T)
    )
    agreement = compare_to_exact(compiled, model, inputs)
    assert agreement.holds, str(agreement)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("decoder with loss", "modern decoder, other spellings", "encoder with loss", "encoder-decoder"),
        *("post-norm decoder", "sparse transformer", "linear transformer", "longformer with loss"),
        "ViT with loss",
    ],
)
def test_a_few_steps_of_training_go_the_same_way(name: str) -> None:
    case = CASES[name]
    start, inputs = case.model(0.0).double(), case.inputs(B, T)
    curves = []
    for wrap in (lambda model: model, attngraph.compile):
        model = copy.deepcopy(start)
        callable_model = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for _ in range(6):
            _, loss = callable_model(*inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=1e-9)
    assert curves[0][-1] < curves[0][0]


@pytest.mark.parametrize(
    ("dtype", "buckets", "max_distance", "causal"),
    [
        (torch.float64, 16, 64, False),  # edges at 8, 16, 32, powers that float32 logarithms hit exactly
        (torch.float64, 32, 128, True),
        (torch.float32, 64, 81, False),  # an edge at 36 that a reassociated logarithm falls short of
        (torch.float32, 32, 81, True),
    ],
)
def test_keys_at_the_edge_of_a_t5_bucket_stay_in_it(
    dtype: torch.dtype, buckets: int, max_distance: int, causal: bool
) -> None:
    sizes = relative_bias.RelativeBiasConfig(
        **SMALL, buckets=buckets, max_distance=max_distance, causal=causal
    )
    model = relative_bias.RelativeBiasAttention(sizes).to(dtype).eval()
    compiled = attngraph.compile(model)
    x = normal(1, max_distance + 8, C).to(dtype)
    with torch.no_grad():
        assert (compiled(x) - model(x)).abs().max().item() < (1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.slow
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
