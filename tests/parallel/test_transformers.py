"""Stock classes of transformers, unmodified, on simulated ranks: answers and gradients of one device, and two
sums over ranks in a layer (one where attention and MLP stand side by side); tokens divided, and both."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.models import CLASSES, stock

Compared = Callable[..., Any]
FAST = ("GPT2LMHeadModel", "LlamaForCausalLM", "GPTNeoXForCausalLM", "FalconForCausalLM")
WITHOUT_GRADIENTS = ("BloomForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""They define a gradient themselves in training, or their absorbed form has none."""


def _ids(tokens: int = 16) -> Tensor:
    return torch.randint(3, 60, (2, tokens))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(n, r, marks=[] if n in FAST and r == 4 else pytest.mark.slow)
        for n in CLASSES
        for r in (4, 2)
    ],
)
def test_a_stock_class_on_ranks_is_the_class(same_on_ranks: Compared, name: str, ranks: int) -> None:
    model, ids = stock(name), _ids(7)
    config = model.config
    kwargs: dict[str, Any] = {"use_cache": False} if hasattr(config, "use_cache") else {}
    if getattr(config, "is_encoder_decoder", False) and "Encoder" not in name:
        kwargs["decoder_input_ids"] = ids
    entry = same_on_ranks(model, ranks, ids, gradients=name not in WITHOUT_GRADIENTS, wide=False, **kwargs)
    assert len([s for s in entry.sent if s.what == "all-reduce"]) == CLASSES[name][1]
    told = {n: size for n, size, _ in entry.whole}
    everything, held = entry.parameters
    small = 2000  # norms, biases, tables of a few rows
    assert held <= (everything - sum(told.values())) / ranks + sum(told.values()) + small


def _padded(model: Any) -> tuple[Tensor, dict[str, Any]]:
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, 12:] = 0
    more = {} if "Bert" in type(model).__name__ else {"use_cache": False}
    return _ids(), {"attention_mask": mask, **more}


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("GPT2LMHeadModel", 2), ("BertForMaskedLM", 1), ("LlamaForCausalLM", 2), ("MistralForCausalLM", 1),
     ("OPTForCausalLM", 2), ("GPTNeoXForCausalLM", 2)],
)  # fmt: skip
def test_padded_tokens_are_divided(same_by_tokens: Compared, name: str, chunks: int) -> None:
    model = stock(name)
    ids, options = _padded(model)
    entry = same_by_tokens(model, 4 if chunks == 2 else 2, ids, **options)
    assert [(a.attentions, a.chunks) for a in entry.axes] == [(1, chunks)] and entry.whole == ()


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "GPT2LMHeadModel", "MistralForCausalLM", "BertForMaskedLM"]
)
def test_heads_and_padded_tokens_are_divided(same_on_mesh: Compared, name: str) -> None:
    model = stock(name, **({"num_key_value_heads": 1} if name == "LlamaForCausalLM" else {}))
    ids, options = _padded(model)
    report = same_on_mesh(model, ids, **options)
    assert {"heads", "hidden units"} <= {e.what for e in report.ranks.divided}
    whole, held = report.ranks.parameters
    assert held < 0.7 * whole
    assert [a.attentions for a in report.context.axes] == [1] and report.context.whole == ()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [False, True])
def test_an_encoder_and_a_decoder(same_by_tokens: Compared, same_on_mesh: Compared, mesh: bool) -> None:
    """Two sizes that count tokens, one after the other, with biases by distance, which each rank computes for
    its own queries; also on a graph whose heads are divided already."""
    model, options = stock("T5ForConditionalGeneration"), {"decoder_input_ids": _ids(8), "use_cache": False}
    entry = (
        same_on_mesh(model, _ids(), **options).context
        if mesh
        else same_by_tokens(model, 2, _ids(), **options)
    )
    assert [(a.tokens, a.attentions) for a in entry.axes] == [(16, 1), (8, 2)]


@pytest.mark.slow
def test_training_with_dropout(same_by_tokens: Compared) -> None:
    """The loss is that of one device: tokens' losses are gathered, and random numbers are the same."""
    model, ids = stock("GPT2LMHeadModel", attn_pdrop=0.0).train(), _ids()
    entry = same_by_tokens(model, 2, ids, labels=ids.clone(), use_cache=False, wide=False)
    assert [a.attentions for a in entry.axes] == [1]
    assert min(f.bytes for f in entry.fetched if f.what == "all tokens of a value") == (64, 64)
