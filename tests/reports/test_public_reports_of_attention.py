"""Public reports about sizes, gradients, masks and decoders, each as a tiny program: what eager
answers, a compiled model or a decoder answers."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from tests.reports.reports import (
    DECODER,
    PIECES,
    REPORTS,
    Compiler,
    attend,
    cases,
    check,
    report,
    same,
    same_gradients,
    tokens,
)

# --- gradients ---------------------------------------------------------------------------------------


class Uneven(torch.autograd.Function):
    """a + b, with the gradient of a three times too large and none for b."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * 3, None


@report("pytorch/pytorch#181146", PIECES + "the function has a backward of its own")
def _(compile: Compiler) -> None:
    """An autograd.Function gets one tensor twice, and has a gradient for one place alone."""

    def f(x: Tensor) -> Tensor:
        y = attend(x)
        return Uneven.apply(y, y)  # type: ignore[no-any-return]

    same_gradients(compile(f), f, tokens())


@report("pytorch/pytorch#190938")
def _(compile: Compiler) -> None:
    """Two shifted slices of one batch, inputs and targets, must not be confused."""
    table = nn.Embedding(8, 8)

    def f(ids: Tensor, x: Tensor) -> Tensor:
        given, wanted = ids[:, :-1], ids[:, 1:]
        return F.cross_entropy(attend(table(given) + x).flatten(0, 1), wanted.flatten(), reduction="none")

    compiled = compile(f)
    for _ in range(2):
        same_gradients(compiled, f, torch.randint(8, (2, 6)), tokens())


@report("pytorch/pytorch#193061")
def _(compile: Compiler) -> None:
    """Scale and shift that several modulated layer norms share get the sum of all gradients."""

    def f(x: Tensor, table: Tensor) -> Tensor:
        for _ in range(2):
            scale, shift = table.chunk(2, -1)
            x = x + attend(F.layer_norm(x, (8,)) * (1 + scale) + shift)
        return x

    same_gradients(compile(f), f, tokens(), torch.randn(16))


# --- masks and softmax -------------------------------------------------------------------------------


@report("pytorch/pytorch#41508")
def _(compile: Compiler) -> None:
    """MultiheadAttention with weights: a row that sees no key, and its gradients."""
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    hidden = torch.tensor([[False] * 4, [False, False, True, True]])

    def f(x: Tensor) -> Tensor:
        band = torch.ones(4, 4).tril().triu(-1) == 0
        out, weights = layer(x, x, x, key_padding_mask=hidden, attn_mask=band)
        return torch.cat([out, weights], -1)

    x = tokens(4)
    compiled = compile(f)
    same(compiled(x), f(x))
    seen = torch.tensor([[True] * 4, [True, True, True, False]])
    same_gradients(lambda x: compiled(x)[seen], lambda x: f(x)[seen], x)


@report("pytorch/pytorch#103963")
def _(compile: Compiler) -> None:
    """A boolean mask that hides every key of a row from scaled_dot_product_attention, which gives zeros."""

    def f(x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], mask)

    mask = torch.ones(5, 5, dtype=torch.bool)
    compiled = compile(f)
    for hidden in (0, 2, 5):
        mask[5 - hidden :] = False
        same_gradients(lambda x: compiled(x, mask), lambda x: f(x, mask), tokens())


@report("pytorch/pytorch#190486")
def _(compile: Compiler) -> None:
    """TransformerEncoder in eval mode: rows without keys, with and without its fast path."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    band = torch.ones(8, 8).tril().triu(-2) == 0
    compiled, x = compile(model), tokens(8)
    padded = torch.arange(8) >= torch.tensor([[3], [8]])
    real = ~padded
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            found = compiled(x, mask=band, src_key_padding_mask=padded)
            same(found[real], model(x, mask=band, src_key_padding_mask=padded)[real])


@report("pytorch/pytorch#42929")
def _(compile: Compiler) -> None:
    """Weights that MultiheadAttention returns in training have the dropout of its output."""
    layer = nn.MultiheadAttention(8, 1, dropout=0.5, batch_first=True, bias=False)
    compiled, x = compile(layer), tokens()
    out, weights = compiled(x, x, x)
    value = F.linear(x, layer.in_proj_weight[16:])
    same(out, F.linear(weights @ value, layer.out_proj.weight))
    kept = weights[weights != 0] / 2
    exact = layer.eval()(x, x, x)[1][weights != 0]
    same(kept, exact)
    assert 0 < kept.numel() < weights.numel()


@report("huggingface/transformers#17306")
def _(compile: Compiler) -> None:
    """The smallest float16 number as a mask overflows when a negative score is added."""

    def f(x: Tensor, hidden: Tensor) -> Tensor:
        scores = (x @ x.mT).half() + hidden[:, None] * torch.tensor(torch.finfo(torch.float16).min).half()
        return torch.softmax(scores.float(), -1) @ x

    compiled = compile(f)
    for hidden in (torch.arange(5) > 2, torch.arange(5) < 1):
        x = tokens()
        found, expected = compiled(x, hidden.expand(2, 5)), f(x, hidden.expand(2, 5))
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)  # eager rounds its scores to 11 bits


@report("pytorch/pytorch#145460")
def _(compile: Compiler) -> None:
    """FlexAttention with a learned bias that its score function closes over."""
    from torch.nn.attention.flex_attention import flex_attention

    def f(x: Tensor, slope: Tensor) -> Tensor:
        def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + slope[h] * (k - q)

        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return flex_attention(heads, heads, heads, score_mod=bias)  # type: ignore[return-value]

    compiled = compile(f)
    for count in (5, 7):  # torch has no gradients of it on a CPU
        x, slope = tokens(count), torch.randn(2)
        same(compiled(x, slope), f(x, slope))


@report("pytorch/pytorch#101967")
def _(compile: Compiler) -> None:
    """A key that the mask hides may be as large as 1e10 without changing the result."""

    def f(x: Tensor, seen: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], seen[:, None, None])

    compiled, x, seen = compile(f), tokens(), torch.arange(5).expand(2, 5) < 4
    first = compiled(x, seen)
    x[:, 4] = 1e10
    same(compiled(x, seen)[:, :, :4], f(x, seen)[:, :, :4])
    same(compiled(x, seen)[:, :, :4], first[:, :, :4])


@report("huggingface/transformers#18185")
def _(compile: Compiler) -> None:
    """Masked scores that are scaled and shifted come back to life in the softmax."""

    low = torch.finfo(torch.float32).min

    def f(x: Tensor, bias: Tensor) -> Tensor:
        scores = (x @ x.mT) * 3 + torch.full((5, 5), low).triu(1)
        return torch.softmax(torch.max(scores + bias, torch.tensor(low)), -1) @ x

    compiled = compile(f)
    for size in (1.0, 1e30):
        x, bias = tokens(), torch.rand(5, 5) * size
        same(compiled(x, bias), f(x, bias))


# --- decoders ----------------------------------------------------------------------------------------


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


class Causal(nn.Module):
    """Rotated queries and keys, a window of tokens, logits."""

    def __init__(self, window: int = 1000) -> None:
        super().__init__()
        self.window, self.table, self.project = window, nn.Embedding(16, 8), nn.Linear(8, 24)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(self.table(ids)).chunk(3, -1)
        place = torch.arange(ids.shape[1])
        if attention_mask is not None:
            place = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        angle = place[..., None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
        q, k = _rotated(q, angle), _rotated(k, angle)
        scores = q @ k.mT / math.sqrt(8)
        far = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
        keep = (far >= 0) & (far < self.window)
        if attention_mask is not None:
            keep = keep & attention_mask[:, None].bool()
        return torch.softmax(scores.masked_fill(~keep, -1e9), -1) @ v @ self.table.weight.T


def _decodes(model: nn.Module, parts: list[int]) -> None:
    """A prompt, then so many tokens at a time, gives the logits of the whole."""
    decoder, ids = attngraph.compile(model.eval(), cache=True), torch.randint(16, (2, sum(parts)))
    with torch.no_grad():
        whole = model(ids)
        found, state = decoder.prefill(ids[:, : parts[0]])
        same(found, whole[:, : parts[0]])
        at = parts[0]
        for count in parts[1:]:
            same(decoder.decode(ids[:, at : at + count], state), whole[:, at : at + count])
            at += count


@report("huggingface/transformers#39408", DECODER)
def _(compile: Compiler) -> None:
    """A window of n tokens sees n tokens, not n + 1, in every step of a decoder."""
    for window in (1, 3):
        _decodes(Causal(window), [2, 1, 1, 1, 1])


@report("huggingface/transformers#41228", DECODER)
def _(compile: Compiler) -> None:
    """A window over a cache when several new tokens come at once."""
    _decodes(Causal(3), [1, 4, 2, 1])


@report("pytorch/executorch#21749", DECODER)
def _(compile: Compiler) -> None:
    """A prompt in chunks: the causal mask of a later chunk sees the earlier ones."""
    _decodes(Causal(), [3, 4, 2])


@report("unslothai/unsloth#3795", DECODER)
def _(compile: Compiler) -> None:
    """Rows padded on the left have places of their own in a prompt and in later tokens."""
    model, ids = Causal().eval(), torch.randint(16, (2, 5))
    decoder, mask = attngraph.compile(model, cache=True), torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    with torch.no_grad():
        found, state = decoder.prefill(ids, attention_mask=mask)
        after = torch.randint(16, (2, 1))
        step = decoder.decode(after, state)
        for row, padding in enumerate((0, 2)):
            alone = model(torch.cat([ids[row : row + 1, padding:], after[row : row + 1]], 1))[0]
            same(found[row, padding:], alone[:-1])
            same(step[row], alone[-1:])


@report("time-series-foundation-models/lag-llama#81", DECODER)
def _(compile: Compiler) -> None:
    """Rotary places go on after the cached tokens, and a new prompt starts at 0."""

    model = Causal().eval()
    decoder = attngraph.compile(model, cache=True)
    with torch.no_grad():
        for count in (4, 2):
            ids = torch.randint(16, (1, count + 1))
            _, state = decoder.prefill(ids[:, :-1])
            same(decoder.decode(ids[:, -1:], state), model(ids)[:, -1:])


# --- sizes, exceptions, files ----------------------------------------------------------------------


@report("pytorch/pytorch#136640")
def _(compile: Compiler) -> None:
    """A size that is 1 in one call, so that it is broadcast, and not in another."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return attend(x.view(-1, 2, 8) * y.view(-1, 2, 8))

    compiled = compile(f)
    for one, other in ((1, 3), (3, 3), (3, 1), (1, 1)):
        x, y = torch.randn(one * 16), torch.randn(other * 16)
        same(compiled(x, y), f(x, y))


@report("pytorch/pytorch#138847")
def _(compile: Compiler) -> None:
    """A branch on whether the number of tokens is even."""

    def f(x: Tensor) -> Tensor:
        return attend(x) * (2 if x.shape[1] % 2 == 0 else -1)

    compiled = compile(f)
    for count in (4, 5, 6, 1, 0, 7):
        x = tokens(count)
        same(compiled(x), f(x))


@report("pytorch/pytorch#174166")
def _(compile: Compiler) -> None:
    """An exception that forward catches, in some calls."""

    def f(x: Tensor, name: str) -> Tensor:
        try:
            return attend(x) * getattr(x, name)
        except AttributeError:
            return attend(x) - 1

    compiled, x = compile(f), tokens()
    for name in ("ndim", "no_such_attribute", "itemsize"):
        same(compiled(x, name), f(x, name))


@report("pytorch/pytorch#101107")
def _(compile: Compiler) -> None:
    """Pickles and copies of a compiled model have their own weights."""
    model = Causal().eval()
    compiled, ids = compile(model), torch.randint(16, (2, 5))
    before = compiled(ids)
    copies = [copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))]
    with torch.no_grad():
        model.table.weight.mul_(0.5)
    same(compiled(ids), model(ids))
    for one in copies:
        same(one(ids), before)


@report("pytorch/pytorch#99455", PIECES + "it makes a tensor that needs gradients")
def _(compile: Compiler) -> None:
    """A tensor that forward makes with requires_grad=True."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.ones(8, requires_grad=True)
        return attend(x) * y, y

    x = tokens()
    same(compile(f)(x), f(x))


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", cases(__name__))
def test_what_was_reported_elsewhere_is_right_here(key: str) -> None:
    check(REPORTS[key])
