"""Models that are compiled on a GPU give what they give uncompiled there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import attngraph
from attngraph.codegen.triton.launch import Forward
from attngraph.ir.language.parser import parse
from attngraph.models import targets


def _gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_attention_heads": 2}


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(**_WIDTHS, num_hidden_layers=1, num_key_value_heads=1, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def _bert() -> nn.Module:
    return transformers.BertModel(
        transformers.BertConfig(**_WIDTHS, num_hidden_layers=1), add_pooling_layer=False
    )


def _first(result: Any) -> Tensor:
    found: Tensor = result if isinstance(result, Tensor) else result[0]
    return found


@pytest.mark.parametrize("build", [_gpt2, _llama, _bert])
def test_a_stock_model_is_what_it_is_uncompiled(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, ids = build().eval(), torch.randint(0, 64, (2, 9))
    compiled = attngraph.compile(model, min_scores=0)
    found, wanted = _first(compiled(ids)), _first(model(ids))
    assert found.is_cuda and compiled.report.attention and not compiled.report.missed
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(r.square().mean(), list(model.parameters())) for r in (found, wanted)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_a_model_of_ours_is_what_it_is_uncompiled() -> None:
    model, inputs = targets.tiny_decoder_lm(tokens=9)
    compiled = attngraph.compile(model.cuda(), min_scores=0)
    inputs = [x.cuda() for x in inputs]
    torch.testing.assert_close(compiled(*inputs), model(*inputs), atol=1e-5, rtol=1e-5)


class _Dropout(nn.Module):
    """Attention whose weights are dropped, by hand or by PyTorch's own function."""

    def __init__(self, is_own: bool) -> None:
        super().__init__()
        self.is_own = is_own

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.is_own:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0.0)
        return F.dropout((q @ k.mT / 4).softmax(-1), 0.5, self.training) @ v


@pytest.mark.parametrize("is_own", [False, True])
def test_attention_with_dropout_is_fused_and_draws_on_the_gpu(is_own: bool) -> None:
    q = torch.randn(1, 2, 16, 16, requires_grad=True)
    compiled = attngraph.compile(_Dropout(is_own), min_scores=0)
    torch.manual_seed(3)
    first = compiled(q, q, q)
    assert compiled.report.attention and not compiled.report.missed
    first.sum().backward()
    assert q.grad is not None and q.grad.abs().sum() > 0
    assert not torch.equal(first, compiled(q, q, q))
    torch.manual_seed(3)
    assert torch.equal(first, compiled(q, q, q))
    mean = torch.stack([compiled(q, q, q) for _ in range(40)]).mean(0).detach()
    assert (mean - _Dropout(is_own).eval()(q, q, q)).abs().mean() < 0.2


def test_autocast_and_checkpoints_are_what_they_are_uncompiled() -> None:
    torch.manual_seed(0)
    model, ids = _llama(), torch.randint(0, 64, (2, 9))
    compiled = attngraph.compile(model, min_scores=0)
    with torch.autocast("cuda", torch.bfloat16):
        found, wanted = _first(compiled(ids)), _first(model(ids))
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, atol=3e-2, rtol=3e-2)
    x = torch.randn(1, 2, 16, 16, requires_grad=True)
    attention = attngraph.compile(_Dropout(is_own=False), min_scores=0)
    torch.manual_seed(5)
    plain = torch.autograd.grad(attention(x, x, x).square().sum(), x)
    torch.manual_seed(5)
    again = torch.utils.checkpoint.checkpoint(attention, x, x, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.square().sum(), x), plain)


def test_products_of_float32_are_of_tf32_where_the_user_allows_it() -> None:
    q = torch.randn(1, 2, 16, 16)
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "highest"):
            torch.set_float32_matmul_precision(precision)
            is_exact = precision == "highest"
            for dtype in (torch.float32, torch.float16):
                source = Forward().source(parse("keep k <= q"), (q.to(dtype),) * 3, ())
                assert ("ieee" in source) == (is_exact and dtype is torch.float32)
            out = attngraph.attention(q, q, q, "keep k <= q")
            torch.testing.assert_close(
                out, F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=1.0)
            )
    finally:
        torch.set_float32_matmul_precision(before)
