"""Decoders of attention whose heads and batch are arranged in other ways than `[batch, heads, tokens,
width]`, or whose query heads pick their key head by a list: equal to the model, no head is kept twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.cache.small import by_steps

HEADS, WIDTH = 4, 8
BYTES = 4 * WIDTH
"""Of one key head of one token, in float32."""


def causal(scores: Tensor) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores / WIDTH**0.5).masked_fill(hidden, -torch.inf).softmax(-1)


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, WIDTH)).transpose(1, 2)


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (split(t, HEADS).transpose(0, 1) for t in (q, k, v))
    return (causal(q @ k.mT) @ v).permute(1, 2, 0, 3).flatten(2)


def heads_before_the_batch_in_one_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b = q.shape[0]
    q, k, v = (split(t, HEADS).transpose(0, 1).flatten(0, 1) for t in (q, k, v))
    return (causal(q @ k.mT) @ v).unflatten(0, (HEADS, b)).permute(1, 2, 0, 3).flatten(2)


def queries_with_an_axis_in_front(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(-1, (2, 2, WIDTH)).permute(2, 0, 3, 1, 4)  # [R, B, G, T, D]
    k, v = split(k, 2), split(v, 2)
    return (causal(q @ k.mT) @ v).permute(1, 3, 0, 2, 4).flatten(2)


def one_key_head_for_heads_in_front(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = split(q, HEADS).transpose(0, 1)  # [H, B, T, D], keys are [B, T, D]
    return (causal(q @ k.mT) @ v).permute(1, 2, 0, 3).flatten(2)


def picked(groups: list[int], how: str = "index") -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    listed = torch.tensor(groups)

    def pick(x: Tensor) -> Tensor:
        if how == "index":
            return x[:, listed]
        if how == "index_select":
            return x.index_select(1, listed)
        return x.gather(1, listed[:, None, None].expand(x.shape[0], -1, *x.shape[2:]))

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = split(q, HEADS), pick(split(k, 2)), pick(split(v, 2))
        return (causal(q @ k.mT) @ v).transpose(1, 2).flatten(2)

    return model


class Layer(nn.Module):
    """Token ids to logits through one attention."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], key_heads: int) -> None:
        super().__init__()
        width = HEADS * WIDTH
        self.embed, self.out = nn.Embedding(40, width), nn.Linear(width, 40)
        self.q = nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, key_heads * WIDTH) for _ in range(2))
        self.attention = attention

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.out(x + self.attention(self.q(x), self.k(x), self.v(x)))


CASES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int]] = {
    "heads first": (heads_first, 4),
    "heads before the batch in one axis": (heads_before_the_batch_in_one_axis, 4),
    "queries with an axis in front": (queries_with_an_axis_in_front, 2),
    "one key head": (one_key_head_for_heads_in_front, 1),
    "picked, two neighbours share": (picked([0, 0, 1, 1]), 2),
    "picked, in turn": (picked([0, 1, 0, 1]), 2),
    "picked, unevenly": (picked([0, 0, 0, 1]), 2),
    "picked, the last one first": (picked([1, 1, 0, 0]), 2),
    "picked, by index_select": (picked([0, 0, 1, 1], "index_select"), 2),
    "picked, by gather": (picked([0, 0, 1, 1], "gather"), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_every_arrangement_has_a_decoder_that_keeps_each_key_head_once(name: str) -> None:
    attention, key_heads = CASES[name]
    torch.manual_seed(0)
    model = Layer(attention, key_heads).eval()
    ids = torch.randint(0, 40, (3, 9))
    compiled = attngraph.compile(model, cache=True)
    found, _ = by_steps(compiled, ids, 4)
    with torch.no_grad():
        torch.testing.assert_close(found, model(ids), rtol=1e-5, atol=1e-5)
    assert compiled.report.cache is not None
    assert compiled.report.cache.bytes_per_token == 2 * key_heads * BYTES


@pytest.mark.parametrize("by_softmax", [True, False])
def test_a_bag_of_words_has_a_decoder_that_keeps_values_alone(by_softmax: bool) -> None:
    def average(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = v.shape[1]
        seen = torch.ones(t, t).tril()
        if by_softmax:
            return torch.zeros(t, t).masked_fill(seen == 0, -torch.inf).softmax(-1) @ v
        return (seen / seen.sum(1, keepdim=True)) @ v

    model = Layer(average, HEADS).eval()
    ids = torch.randint(0, 40, (3, 9))
    compiled = attngraph.compile(model, cache=True)
    found, _ = by_steps(compiled, ids, 4)
    with torch.no_grad():
        torch.testing.assert_close(found, model(ids), rtol=1e-5, atol=1e-5)
    assert compiled.report.cache is not None
    assert compiled.report.cache.bytes_per_token == HEADS * BYTES


def test_two_products_that_a_mask_chooses_between_are_computed_anew(decodes: Any) -> None:
    """The attention has two keys for each token, in parts one after the other."""

    def near_and_far(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[1])
        scores = torch.where(i[:, None] - i < 3, q @ k.mT, q.sin() @ k.sin().mT)
        return causal(scores) @ v

    assert len(decodes(Layer(near_and_far, HEADS)).report.cache.anew) == 1


def test_the_last_logits_with_others_are_told_with_what_to_return() -> None:
    class Last(Layer):
        def forward(self, ids: Tensor) -> Tensor:
            found = super().forward(ids)
            return found[:, [-1], :] + found[:, :1]

    with pytest.raises(
        attngraph.NoDecoderError, match="only the last token is read; return the logits of all"
    ):
        attngraph.compile(Last(heads_first, HEADS).eval(), cache=True).prefill(
            torch.zeros(1, 5, dtype=torch.int64)
        )


def test_the_list_of_heads_may_be_an_argument() -> None:
    """The list is an argument: other sequences may come with another one."""

    class Picked(Layer):
        def forward(self, ids: Tensor, listed: Tensor) -> Tensor:  # type: ignore[override]
            x = self.embed(ids)
            k, v = (split(t, 2)[:, listed] for t in (self.k(x), self.v(x)))
            return self.out((causal(split(self.q(x), HEADS) @ k.mT) @ v).transpose(1, 2).flatten(2))

    model = Picked(heads_first, 2).eval()
    ids = torch.randint(0, 40, (2, 9))
    compiled = attngraph.compile(model, cache=True)
    for groups in ([0, 0, 1, 1], [1, 0, 0, 1]):
        listed = torch.tensor(groups)
        logits, state = compiled.prefill(ids[:, :4], listed=listed)
        pieces = [logits, compiled.decode(ids[:, 4:], state)]
        with torch.no_grad():
            torch.testing.assert_close(torch.cat(pieces, 1), model(ids, listed), rtol=1e-5, atol=1e-5)


def test_a_width_that_no_weight_fixes_is_refused_with_that_reason() -> None:
    def attend(x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return (x @ x.mT).masked_fill(later, -1e9).softmax(-1) @ x

    with pytest.raises(attngraph.NoDecoderError, match="how many values a token has follows from"):
        attngraph.compile(attend, cache=True).prefill(torch.randn(2, 7, 8))
