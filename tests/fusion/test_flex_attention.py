"""FlexAttention is read as what its score and mask functions compute, and trained on a CPU too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

import attngraph

B, H, S, D = 2, 4, 24, 16
X = torch.randn(B, H, S, D)
SLOPES, TABLE, SCALE = torch.rand(H), torch.randn(2 * S, H), torch.tensor(0.5, dtype=torch.float64)
DOCUMENTS = (torch.arange(S) > torch.tensor([[9], [4]])).long()
OUTSIDE = create_block_mask(lambda b, h, q, k: q >= k, None, None, S, S, device="cpu")
LONG = create_block_mask(lambda b, h, q, k: q >= k, None, None, 200, 200, device="cpu")
COMPILED: Any = torch.compile(flex_attention)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def scored(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: flex_attention(x, x, x, score_mod=function)  # type: ignore[return-value]


def masked(function: Callable[..., Tensor], batch: int | None = None) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        mask = create_block_mask(function, batch, None, x.shape[2], x.shape[2], device="cpu")
        return flex_attention(x, x * 2, x, block_mask=mask)  # type: ignore[return-value]

    return run


def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[b, q] == DOCUMENTS[b, k]


def of_tokens(x: Tensor) -> Tensor:
    heads = x.transpose(1, 2)
    found: Any = flex_attention(heads, heads, heads)
    return found.transpose(1, 2).view(x.shape[0], x.shape[1], -1)  # type: ignore[no-any-return]


def compiled_blocks(x: Tensor) -> Tensor:
    """Blocks of the diagonal alone: where it is compiled, FlexAttention looks at no others."""
    numbers, places = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]])
    mask = BlockMask.from_kv_blocks(numbers, places.int(), seq_lengths=(x.shape[2], x.shape[2]))
    return COMPILED(x, x, x, block_mask=mask)  # type: ignore[no-any-return]


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "alone": (lambda x: flex_attention(x, x, x), "s = 0.25 * dot"),
    "of tokens": (of_tokens, "s = 0.25 * dot"),
    "slopes": (scored(lambda s, b, h, q, k: s + SLOPES[h] * (k - q)), "s = 0.25 * dot + (k - q) * r0[h]"),
    "a table": (scored(lambda s, b, h, q, k: s + TABLE[(q - k).abs(), h]), "r0[abs(q - k), h]"),
    "a row of a table": (scored(lambda s, b, h, q, k: s + TABLE[k][h]), "s = 0.25 * dot + r0[k, h]"),
    "a number in a tensor": (scored(lambda s, b, h, q, k: s * SCALE), "s = 0.125 * dot"),
    "a soft cap": (scored(lambda s, b, h, q, k: 20 * torch.tanh(s / 20)), "s = 20 * tanh(0.0125 * dot)"),
    "minus infinity": (scored(lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf)), "keep k <= q"),
    "causal": (masked(lambda b, h, q, k: q >= k), "keep k <= q"),
    "a window": (masked(lambda b, h, q, k: (q >= k) & (q - k < 5)), "keep k >= q - 4 and k <= q"),
    "documents": (
        masked(and_masks(lambda b, h, q, k: q >= k, same_document), B),
        "keep k <= q and r0[min(b, 1), min(k, 23)] == r0[min(b, 1), min(q, 23)]",
    ),
    "a row without keys": (masked(lambda b, h, q, k: (q >= k) & (q > 3)), "keep 4 <= q and k <= q"),
    "a mask from outside": (lambda x: flex_attention(x, x, x, block_mask=OUTSIDE), "keep k <= q"),
    "shared keys": (lambda x: flex_attention(x, x[:, :2], x[:, :2], enable_gqa=True, scale=1.0), "s = dot"),
    "beside its log-sum-exp": (
        lambda x: flex_attention(x, x, x, return_aux=AuxRequest(lse=True)), "s = 0.25 * dot",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_fused_by_what_its_functions_mean(name: str) -> None:
    function, program = FUNCTIONS[name]
    with torch.no_grad():
        compiled = attngraph.compile(function, strict=True, min_scores=0)
        found, expected = compiled(X), function(X)
    assert program in compiled.report.attention[0].program
    pairs = [(found, expected)] if isinstance(found, Tensor) else [(found[0], expected[0])]
    if not isinstance(found, Tensor):
        pairs.append((found[1].lse + 0, expected[1].lse))
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, program",
    [
        (compiled_blocks, "s = 0.25 * dot\nkeep r0[0, 0, q, k]"),
        (lambda x: COMPILED(x, x * 2, x, block_mask=LONG), "s = 0.5 * dot\nkeep k <= q and r0[0, 0, q, k]"),
        (lambda x: COMPILED(x, x * 2, x), "s = 0.5 * dot"),
    ],
    ids=["blocks", "causal", "no mask"],
)
def test_blocks_that_a_compiled_one_skips_are_hidden(function: Callable[[Tensor], Any], program: str) -> None:
    x = torch.randn(1, 2, 200, 16)
    with torch.no_grad():
        compiled = attngraph.compile(function, strict=True, min_scores=0)
        torch.testing.assert_close(compiled(x), function(x))
    found = compiled.report.attention[0].program
    assert found.removesuffix("\np = where(isnan(p), 0.0, p)") == program


@pytest.mark.parametrize("place", ["around", "inside"])
def test_autocast_narrows_its_operands(place: str) -> None:
    def attend(x: Tensor) -> Any:
        return flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s - (q - k).abs())

    def inside(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(x)

    function = inside if place == "inside" else attend
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=place == "around"):
        compiled = attngraph.compile(function, strict=True, min_scores=0)
        found, expected = compiled(X), function(X)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


class Layer(nn.Module):
    """Causal attention whose scores have a weight of their own: x [B, S, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.bias = nn.Linear(32, 96), nn.Parameter(torch.randn(S, 4))
        self.by_hand = False

    def score(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + self.bias[(q - k).abs(), h]

    def forward(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        if self.by_hand:
            scores = self.score(q @ k.mT / 8**0.5, i, torch.arange(4)[:, None, None], i[:, None], i)
            out = scores.masked_fill(i > i[:, None], -torch.inf).softmax(-1) @ v
        else:
            mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, len(i), len(i), device="cpu")
            out = flex_attention(q, k, v, score_mod=self.score, block_mask=mask)  # type: ignore[assignment]
        return out.transpose(1, 2).flatten(2)


def test_it_has_gradients_on_a_cpu_however_few_its_scores_are() -> None:
    """Torch's own has none there."""
    layer, x = Layer(), torch.randn(2, S, 32)
    compiled = attngraph.compile(layer)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        layer(x)
    compiled(x).square().sum().backward()
    found = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    layer.by_hand = True
    layer(x).square().sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-4)


def test_a_score_function_may_index_by_numbers_and_places_where_gradients_flow() -> None:
    rows = torch.randn(S, 5)

    def run(x: Tensor) -> Any:
        return flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s + rows[q, h] * rows[k, -1])

    x = X.clone().requires_grad_()
    found = attngraph.compile(run, strict=True, min_scores=0)(x)
    bias = rows.T[:H, :, None] * rows[:, -1]
    expected = nn.functional.scaled_dot_product_attention(x, x, x, bias)
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_two_graphs_serve_all_lengths() -> None:
    """One for a block of the mask, and one for several."""
    run = masked(lambda b, h, q, k: q >= k)
    with torch.no_grad():
        compiled = attngraph.compile(run, strict=True, min_scores=0)
        for tokens in (24, 200, 128, 300, 5):
            x = torch.randn(2, 4, tokens, 8)
            found = nn.functional.scaled_dot_product_attention(x, x * 2, x, is_causal=True)
            torch.testing.assert_close(compiled(x), found, rtol=1e-5, atol=1e-5)
    assert compiled.report.graphs == 2


def test_a_model_that_changes_what_its_score_function_reads_is_followed() -> None:
    slopes = torch.rand(H)

    def run(x: Tensor) -> Any:
        return flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s + slopes[h] * (k - q))

    with torch.no_grad():
        compiled = attngraph.compile(run, strict=True, min_scores=0)
        for _ in range(2):
            torch.testing.assert_close(compiled(X), run(X))
            slopes.mul_(-2)
