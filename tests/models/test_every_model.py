"""What every model has in common, a row for each: a decoder is causal, the loss is the mean cross entropy and
reaches every parameter, padding changes nothing, and what cannot be is an error that says what to change."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.encoder import IGNORED_TARGET, PADDING_ID, Encoder, EncoderConfig, mask_tokens
from attngraph.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from attngraph.models.grouped_attention import GroupedQueryConfig
from attngraph.models.linear_transformer import LinearTransformer, LinearTransformerConfig
from attngraph.models.longformer import Longformer, LongformerConfig
from attngraph.models.masked_attention import CausalAttentionConfig, CausalSelfAttention
from attngraph.models.mla import MLAConfig, MLADecoder
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from attngraph.models.positions import LearnedPositions, SinusoidalEmbedding
from attngraph.models.post_norm_decoder import PostNormDecoder
from attngraph.models.relative_bias import RelativeBiasAttention, RelativeBiasConfig
from attngraph.models.sparse_attention import SparseAttentionConfig
from attngraph.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from attngraph.models.text import byte_batch
from attngraph.models.vit import ViT, ViTConfig
from attngraph.models.windowed_attention import DilatedWindowConfig

SIZES: dict[str, Any] = {"layers": 2, "width": 16, "heads": 4, "max_tokens": 32}
MLA = MLAConfig(layers=2, width=16, heads=3, latent=8, nope=4, rope=2, value=5, query_rank=6, hidden=24)
MODERN = ModernDecoderConfig(layers=2, width=16, heads=4, kv_heads=2, head_width=6, hidden=24)
DECODERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: DecoderLM(DecoderLMConfig(**SIZES)),
    "post-norm": lambda: PostNormDecoder(DecoderLMConfig(**SIZES)),
    "sparse, strided": lambda: SparseTransformer(
        SparseTransformerConfig(**SIZES, pattern="strided", stride=3, summary=1)
    ),
    "sparse, fixed": lambda: SparseTransformer(SparseTransformerConfig(**SIZES, stride=4, summary=2)),
    "linear": lambda: LinearTransformer(LinearTransformerConfig(**SIZES)),
    "linear, no features": lambda: LinearTransformer(
        LinearTransformerConfig(**SIZES, feature_map="identity")
    ),
    "latent": lambda: MLADecoder(replace(MLA, rope=0)),
    "latent, rotary": lambda: MLADecoder(MLA),
    "modern, half": lambda: ModernDecoder(replace(MODERN, rotary="half")),
    "modern, interleaved": lambda: ModernDecoder(replace(MODERN, rotary="interleaved")),
    "encoder-decoder": lambda: EncoderDecoder(EncoderDecoderConfig(**SIZES, hidden=32)),
}
ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: Encoder(EncoderConfig(**SIZES, hidden=32)),
    "longformer": lambda: Longformer(LongformerConfig(**SIZES, hidden=32, window=4)),
}
IMAGES = ViTConfig(image=(12, 12), patch=4, channels=2, classes=5, layers=2, width=16, heads=4, hidden=24)


def call(name: str, model: nn.Module, ids: Tensor, *padding: Tensor, **labels: Tensor) -> Any:
    """What a decoder gives for tokens; one with an encoder reads others as well."""
    if name != "encoder-decoder":
        return model(ids, *labels.values())
    return model(byte_batch(2, 9, seed=1), ids, *padding, **labels)


@pytest.mark.parametrize("name", DECODERS)
def test_logits_at_t_do_not_move_when_a_later_token_changes(name: str) -> None:
    model, ids = DECODERS[name]().double().eval(), byte_batch(2, 12)
    for parameter in model.parameters():  # norms and biases not left at ones and zeros
        nn.init.normal_(parameter, std=0.3)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = call(name, model, ids), call(name, model, changed)
    assert_close(after[:, :7], before[:, :7], rtol=0, atol=0)
    sees = slice(7, 8 if name.startswith("sparse") else None)
    assert (after[:, sees] != before[:, sees]).any(dim=-1).all()


def of_loss(name: str) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A model, its logits, the targets, and its loss."""
    if name in ENCODERS:
        model, (hidden, targets) = ENCODERS[name](), mask_tokens(byte_batch(2, 32))
        return model, *model(hidden, targets=targets), targets
    if name == "images":
        model, targets = ViT(IMAGES), torch.tensor([4, 0, 2])
        return model, *model(torch.randn(3, 2, 12, 12), targets), targets
    model, window = DECODERS[name](), byte_batch(2, 9)
    padding = torch.arange(9) >= torch.tensor([[9], [6]])
    found = call(name, model, window[:, :-1], padding, padding[:, :-1], labels=window[:, 1:])
    return model, *found, window[:, 1:]


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS, "images"])
def test_the_loss_is_the_mean_cross_entropy_and_gradients_are_finite(name: str) -> None:
    model, logits, loss, targets = of_loss(name)
    assert logits.shape == (*targets.shape, {"images": 5}.get(name, 258 if name in ENCODERS else 256))
    assert loss.shape == ()
    chosen = targets != IGNORED_TARGET
    assert_close(loss, -logits.log_softmax(-1)[chosen].gather(1, targets[chosen][:, None]).mean())
    loss.backward()
    for of, parameter in model.named_parameters():
        assert parameter.grad is not None, of
        assert parameter.grad.isfinite().all(), of


@pytest.mark.parametrize("name", ENCODERS)
def test_logits_of_real_tokens_do_not_depend_on_padding(name: str) -> None:
    model, ids = ENCODERS[name]().double().eval(), byte_batch(2, 10)
    padded = torch.cat([ids, torch.full((2, 4), PADDING_ID)], dim=1)
    output = model(padded, keep=torch.arange(14).expand(2, 14) < 10)
    assert output.isfinite().all()
    assert_close(output[:, :10], model(ids))


BEYOND = "33 tokens.*larger max_tokens"
ERRORS: list[tuple[str, Callable[[], object]]] = [
    ("width must be a multiple of heads", lambda: DecoderLMConfig(width=10, heads=4)),
    ("width must be a multiple of heads", lambda: EncoderConfig(width=10, heads=4)),
    ("width must be a multiple of heads", lambda: LongformerConfig(width=10, heads=4)),
    ("width must be a multiple of heads", lambda: ViTConfig(width=10, heads=4)),
    ("multiple of heads", lambda: EncoderDecoderConfig(width=10, heads=4)),
    ("must be even", lambda: EncoderDecoderConfig(width=9, heads=3)),
    ("must be even", lambda: MLAConfig(rope=3)),
    ("must be even", lambda: ModernDecoderConfig(head_width=5)),
    ("heads must be a multiple of kv_heads", lambda: ModernDecoderConfig(heads=6, kv_heads=4)),
    ("6 query heads cannot share 4", lambda: GroupedQueryConfig(heads=6, kv_heads=4)),
    (r"summary 5 must be from 1 to stride \(4\)", lambda: SparseAttentionConfig(6, 3, stride=4, summary=5)),
    ("summary 0", lambda: SparseAttentionConfig(6, 3, stride=4, summary=0)),
    *(
        (
            "one number, at least 1, for each of the 3 heads",
            lambda of=of: DilatedWindowConfig(6, 3, dilations=of),
        )
        for of in ((1, 2), (1, 2, 0), ())
    ),
    ("both sides must be multiples of patch", lambda: ViTConfig(image=(224, 230))),
    (r"the images are 12 x 16.*image=\(12, 12\)", lambda: ViT(IMAGES)(torch.zeros(1, 2, 12, 16))),
    *((BEYOND, lambda of=of: DECODERS[of]()(byte_batch(1, 33))) for of in list(DECODERS)[:6]),
    *((BEYOND, lambda of=of: ENCODERS[of]()(byte_batch(1, 33))) for of in ENCODERS),
    (BEYOND, lambda: DECODERS["encoder-decoder"]()(byte_batch(1, 8), byte_batch(1, 33))),
    (
        r"17 tokens.*max_tokens=16",
        lambda: CausalSelfAttention(CausalAttentionConfig(6, 3, max_tokens=16))(torch.zeros(1, 17, 6)),
    ),
    (r"10 tokens.*max_tokens=9.*larger max_tokens", lambda: LearnedPositions(9, 4)(torch.zeros(1, 10, 4))),
    (
        r"10 tokens.*max_tokens=9.*larger max_tokens",
        lambda: SinusoidalEmbedding(256, 16, max_tokens=9)(byte_batch(1, 10)),
    ),
    (
        "the input has 8 tokens, but a window has 9",
        lambda: RelativeBiasAttention(RelativeBiasConfig(6, 3, bias_kind="swin", side=3))(
            torch.zeros(1, 8, 6)
        ),
    ),
]


@pytest.mark.parametrize(("words", "make"), ERRORS)
def test_what_cannot_be_is_an_error_that_says_what_to_change(words: str, make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=words):
        make()
