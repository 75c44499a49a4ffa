"""Attention over what data choose: rows and tokens picked by a mask, by indices, by a measured number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attngraph

WEIGHT = torch.randn(8, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 3


def heads(x: Tensor) -> list[Tensor]:
    return [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (x @ WEIGHT).chunk(3, -1)]


def attend(x: Tensor) -> Tensor:
    n = x.shape[1]
    q, k, v = (t.view(x.shape[0], n, 2, 4).transpose(1, 2) for t in (x @ WEIGHT).chunk(3, -1))
    hidden = torch.arange(n) > torch.arange(n)[:, None]
    return ((q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


def chosen_rows(x, w):
    return attend(x[w])


def rows_put_back(x, w):
    rows = w.nonzero().squeeze(-1)
    return torch.zeros_like(x).index_copy(0, rows, attend(x[rows]))


def chosen_tokens_after_another(x, w):
    return attend(torch.cat([x[:, :1], x[:, w]], 1)[:, 1:])


def tokens_without_padding(x, w):
    real = w[:, None] | w
    row = torch.arange(x.shape[0])[:, None].expand(real.shape)[real]
    q, k, v = heads(x[real][None])
    out = (q @ k.mT).masked_fill(row[:, None] != row, -torch.inf).softmax(-1) @ v
    return torch.zeros_like(x).masked_scatter(real[..., None], out.transpose(1, 2).flatten(2)[0])


def different_tokens(x, w):
    places = (x.detach()[0, :, 0] * 4).long().unique()
    return attend(places[None, :, None] * x[:1, :1])


def queries_of_other_tokens(x, w):
    q, k, v = heads(x)
    return (q[:, :, w] @ k[:, :, ~w].mT).softmax(-1) @ v[:, :, ~w]


def experts(x, w):
    out = torch.zeros_like(x)
    for chosen in (w, ~w):
        out[:, chosen] = attend(x[:, chosen])
    return out


def a_measured_number(x, w):
    n = w.sum().item()
    torch._check(n > 0)
    torch._check(n <= x.shape[1])
    return attend(x.narrow(1, 0, n))


def a_measured_bound(x, w):
    n = w.sum().item()
    torch._check(n > 0)
    q, k, v = heads(x)
    return (q @ k.mT).masked_fill(torch.arange(x.shape[1]) >= n, -torch.inf).softmax(-1) @ v


X, W = torch.randn(3, 5, 8, dtype=torch.float64), torch.tensor([1, 0, 1, 1, 0]) > 0


def fused(
    function: Callable[..., Tensor], compare: Callable[..., Any], *calls: tuple[Tensor, ...], **options: Any
) -> attngraph.CompileReport:
    """The report, after calls that agree with eager's."""
    compiled = attngraph.compile(function, min_scores=0)
    for call in calls or ((X, W),):
        same = compare(function, compiled, call, **options)
        assert same, same.differences
    return compiled.report


def chosen_heads(x, w):
    q, k, v = (t[:, w[:2]] for t in heads(x))
    return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(
    "function",
    [
        chosen_rows, rows_put_back, chosen_tokens_after_another, tokens_without_padding, different_tokens,
        queries_of_other_tokens, experts, a_measured_number, a_measured_bound, chosen_heads,
    ],
)  # fmt: skip
def test_attention_over_what_data_choose_is_fused(
    function: Callable[..., Tensor], compare: Callable[..., Any]
) -> None:
    x = torch.randn(5, 5, 8, dtype=torch.float64)
    other = [1, 0, 0, 0, 0] if function is chosen_heads else [0, 1, 0, 0, 0]
    report = fused(function, compare, (x, W), (x, torch.tensor(other) > 0))
    assert report.attention and not report.missed


def weights_alone(x, w):
    return (x[:, w] @ x[:, w].mT).softmax(-1)


def weights_of_a_measured_number(x, w):
    n = w.sum().item()
    torch._check(n > 0)
    torch._check(n <= x.shape[1])
    q, k, v = heads(x)
    p = (q @ k.mT).softmax(-1)
    return p @ v, p.narrow(2, 0, n)


@pytest.mark.parametrize("function", [weights_alone, weights_of_a_measured_number])
def test_a_softmax_whose_weights_are_used_in_the_call_is_reported(
    function: Callable[..., Any], compare: Callable[..., Any]
) -> None:
    report = fused(function, compare)
    assert not report.attention and [m.reason.split(",")[0] for m in report.missed]


def returns_weights(x, w):
    q, k, v = heads(x[:, w])
    p = (q @ k.mT).softmax(-1)
    return p @ v, p


def test_weights_of_chosen_tokens_wait_and_their_gradients_are_whole() -> None:
    compiled, x = attngraph.compile(returns_weights), X.clone().requires_grad_()
    found = [torch.autograd.grad(out.square().sum(), p) for out, p in (compiled(x, W), returns_weights(x, W))]
    torch.testing.assert_close(*found)
    assert [entry.what for entry in compiled.report.later] == ["weights"]
    assert not compiled.report.missed


def hides_the_first_few(x, w):
    n = w.sum().item()
    q, k, v = heads(x)
    return (q @ k.mT).masked_fill(torch.arange(x.shape[1]) < n, -torch.inf).softmax(-1) @ v


def test_nothing_is_said_of_blind_queries_where_data_decide() -> None:
    compiled = attngraph.compile(hides_the_first_few)
    compiled(X, W)
    assert [entry.warning for entry in compiled.report.attention] == [""]


def two_parts_of_one_tensor(x, w):
    q, k, v = heads(x[:, w])
    scores = torch.cat([q @ k.mT, q @ k[:, :, 1:].mT], -1)
    return scores.softmax(-1) @ torch.cat([v, v[:, :, 1:]], 2)


@pytest.mark.parametrize("measured", [True, False])
def test_an_index_that_leads_outside_of_a_tensor_is_no_view(
    measured: bool, compare: Callable[..., Any]
) -> None:
    report = fused(lambda x, w: two_parts_of_one_tensor(x, w if measured else slice(None)), compare)
    assert [m.reason for m in report.missed] == [
        "its queries, keys or values are no view of a tensor of the model"
    ]


def parts_of_an_unfinished_sum(x, w):
    weights = torch.cat([x[:, :1] @ x.mT] * 2, -1).exp()
    return (weights @ torch.cat([x] * 2, 1) / weights.sum(-1, True)).split(1, -2)[0]


def linear_over_fewer_keys(x, w):
    t = x[:, w]
    return torch.tril(t @ t[:, :1].mT) @ t[:, :1]


def test_several_results_of_one_operation_are_no_sum_and_linear_attention_has_fewer_keys(
    compare: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    fused(parts_of_an_unfinished_sum, compare)
    calls = [(torch.randn(2, 9, 8), torch.arange(9) % n == 0) for n in (2, 3, 1)]
    fused(linear_over_fewer_keys, compare, *calls, tolerance=1e-5)
    assert not [record for record in caplog.records if record.name.startswith("attngraph")]


def test_chunks_of_chosen_tokens_over_no_keys_are_declined(caplog: pytest.LogCaptureFixture) -> None:
    """How many chunks there are only data know, and no head of keys is shared by as many of queries."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        t = x[:, w.nonzero().flatten()]
        more = (0, 0, 0, -t.shape[1] % 4)
        q, k, v = (F.pad(part, more).unflatten(1, (-1, 4)) for part in (t, t[:, :0], t[:, :0]))
        return (q @ k.mT).softmax(-1) @ v

    x, w = torch.randn(2, 6, 8), torch.tensor([1, 0, 1, 1, 0, 1])
    compiled = attngraph.compile(f, min_scores=0)
    assert compiled(x, w).shape == f(x, w).shape == (2, 0, 4, 8)
    assert not [r for r in caplog.records if r.exc_info]
    assert not compiled.report.attention and "report it" not in str(compiled.report)


def test_a_sum_over_chunks_of_the_last_chosen_token_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Whether heads of keys are shared only data know."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        t = x[:1, w]
        padded = (F.pad(part, (0, 0, 0, -t[:, -1:].shape[1] % 4)) for part in (t[:, -1:], t, t))
        q, k, v = (part.unflatten(1, (-1, 4)) for part in padded)
        return ((q @ k.mT).softmax(-1) @ v).sum(-2)

    x, w = torch.randn(3, 9, 8), torch.tensor([True] * 5 + [False] * 4)
    torch.testing.assert_close(attngraph.compile(f, min_scores=0)(x, w), f(x, w))
    assert not [r for r in caplog.records if r.exc_info]


def test_what_follows_a_fused_value_knows_the_sizes_that_it_knew() -> None:
    """Chunks of chosen tokens: the fused result says their number by another formula."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        t = x[:1, w] @ WEIGHT
        t = F.pad(t, (0, 0, 0, -t.shape[1] % 4)).unflatten(1, (-1, 4))
        q, k, v = t.split(8, -1)
        o = (q @ k.mT).softmax(-1) @ v
        return o.masked_fill(o > 0, 0.0)

    compiled = attngraph.compile(model, min_scores=0)
    for chosen in (5, 8, 2):
        x, w = torch.randn(2, 9, 8, dtype=torch.float64), torch.arange(9) < chosen
        torch.testing.assert_close(compiled(x, w), model(x, w))
    assert len(compiled.report.attention) == 1


def test_a_call_that_is_an_error_where_data_tell_strides_is_the_models_error() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        t = x[:, w]
        return F.scaled_dot_product_attention(t, t, t[..., 0], is_causal=True)[..., :1, :]

    x, w = torch.randn(2, 17, 8), torch.arange(17) < 9
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        attngraph.compile(model, min_scores=0)(x, w)
