"""What is found with a buffer's values holds for these values alone: when they change, it is found again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.cache.models import WIDTH, Small, apart, attend, causal
from tests.cache.small import by_steps, some_ids

TOKENS, KEPT = 12, 6


def by_a_table(m: Any, x: Tensor) -> Tensor:
    """A table in a buffer says how much a token takes from which."""
    return (x @ x.mT * m.table[: x.shape[1], : x.shape[1]]) @ x


def from_the_next(m: Any, x: Tensor) -> Tensor:
    return x + m.table * torch.cat([x[:, 1:], x[:, :1]], 1)


def decays() -> nn.Buffer:
    return nn.Buffer((0.9 ** apart(32)).tril())


def _one_entry(table: Tensor) -> None:
    table[5, 2] += 0.3


def _all_ones(table: Tensor) -> None:
    table.fill_(1.0)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Tensor], None]]] = {
    "a mask that then shows all": (
        lambda: Small(by_a_table, table=nn.Buffer(causal(32).float())), _all_ones),
    "a table of decays": (lambda: Small(by_a_table, table=decays()), _one_entry),
    "a factor of nothing": (lambda: Small(from_the_next, table=nn.Buffer(torch.zeros(1))), _all_ones),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_traced_again_and_a_decoder_is_derived_again_or_refused(name: str) -> None:
    make, change = CASES[name]
    model, ids = make(), some_ids(1, TOKENS)
    decoder, compiled = attngraph.compile(model, cache=True), attngraph.compile(model, min_scores=0)
    with torch.no_grad():
        compiled(ids)
        decoder.prefill(ids[:, :KEPT])
        change(model.table)
        torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-4)
        try:
            found, _ = by_steps(decoder, ids, KEPT)
        except attngraph.NoDecoderError:
            return  # no decoder is right for the new values
        torch.testing.assert_close(found, model(ids), rtol=1e-4, atol=1e-4)


def test_a_state_of_other_values_does_not_go_on() -> None:
    model, ids = Small(by_a_table, table=decays()), some_ids(1, TOKENS)
    decoder = attngraph.compile(model, cache=True)
    with torch.no_grad():
        _, state = decoder.prefill(ids[:, :KEPT])
        model.table.mul_(0.5)
        with pytest.raises(attngraph.CacheError, match="has changed since the prompt"):
            decoder.decode(ids[:, KEPT : KEPT + 1], state)
        logits, state = decoder.prefill(ids[:, :KEPT])
        logits = decoder.decode(ids[:, KEPT : KEPT + 1], state)
        torch.testing.assert_close(logits[:, -1], model(ids[:, : KEPT + 1])[:, -1], rtol=1e-4, atol=1e-4)


def test_a_buffer_whose_values_nothing_was_found_with_may_change() -> None:
    model = Small(lambda m, x: attend(*[x * m.table] * 3), table=nn.Buffer(torch.rand(WIDTH) + 1))
    decoder, ids = attngraph.compile(model, cache=True), some_ids(1, TOKENS)
    with torch.no_grad():
        decoder.prefill(ids)
        model.table.mul_(2)
        logits, _ = decoder.prefill(ids)
        torch.testing.assert_close(logits, model(ids), rtol=1e-4, atol=1e-4)
    assert len(decoder._derived.all()) == 1
