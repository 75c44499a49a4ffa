"""PyTorch's own attention layers, as users build them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.runtime.small import agree, same, sequence


@pytest.mark.parametrize("batch_first", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["plain", "each head", "no weights", "padding", "causal"])
def test_multihead_attention_answers_as_eager_and_fuses(case: str, batch_first: bool) -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=batch_first).eval()
    compiled = attngraph.compile(layer)
    x = torch.randn(2, 7, 32) if batch_first else torch.randn(7, 2, 32)
    named: dict[str, dict[str, Any]] = {
        "plain": {},
        "each head": {"average_attn_weights": False},
        "no weights": {"need_weights": False},
        "padding": {
            "need_weights": False,
            "key_padding_mask": torch.tensor([[False] * 7, [False] * 5 + [True] * 2]),
        },
        "causal": {"need_weights": False, "attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(1)},
    }
    same(compiled(x, x, x, **named[case]), layer(x, x, x, **named[case]))
    assert (len(compiled.report.attention), compiled.report.missed) == (1, ())
    wanted = [] if case in ("no weights", "padding", "causal") else [("result[1]",)]
    assert [entry.names for entry in compiled.report.later] == wanted


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_encoder_fuses(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, norm_first=norm_first, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    compiled, x = attngraph.compile(model), sequence(7, width=16)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    for training in (True, False):
        model.train(training)
        same(compiled(x, mask=mask), model(x, mask=mask))
        assert len(compiled.report.attention) >= 2
    with torch.no_grad():
        same(compiled(x), model(x))


@pytest.mark.slow
def test_a_whole_transformer_fuses() -> None:
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    agree(model, (sequence(9, width=16), sequence(7, width=16), None, mask), fused=3)


def test_the_op_itself_may_be_called_by_a_model() -> None:
    def f(q: Tensor) -> Tensor:
        return attngraph.attention(q, q, q, "s = 0.5 * dot\nkeep k <= q")

    agree(f, torch.randn(2, 4, 7, 8))
