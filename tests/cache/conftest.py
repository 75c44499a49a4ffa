"""What the tests of decoders share: pages in which nothing is zero by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.models.sampling import beam_search
from attngraph.runtime import pages
from tests.cache.small import greedy

Decodes = Callable[..., attngraph.Decoder]


@pytest.fixture
def decodes(poisoned: None) -> Decodes:
    """Asserts all that a decoder promises of a model: the tokens are those of recomputing, for prompts of
    unequal length, padded on either side, computed in chunks, in a copy, in another order of rows, after a
    reset, in an engine, and as beams. Returns the decoder."""

    def check(model: nn.Module, vocabulary: int = 24, new: int = 16) -> attngraph.Decoder:
        model.eval()
        generator = torch.Generator().manual_seed(3)
        rows = [torch.randint(3, vocabulary, (n,), generator=generator) for n in (7, 2, 12)]
        wanted = [greedy(_Logits(model), row[None], new)[0, len(row) :] for row in rows]
        decoder = attngraph.compile(model, cache=True)
        found = decoder.generate(rows, new)
        whole = [torch.cat(both) for both in zip(rows, wanted, strict=True)]
        assert [row[-len(w) :].tolist() for row, w in zip(found, whole, strict=True)] == [
            row.tolist() for row in whole
        ]
        _assert_padding_changes_nothing(decoder, rows, wanted)
        _assert_states_are_independent(decoder, model, rows)
        engine = attngraph.Engine(decoder, max_batch=2, chunk=3)
        requests = [engine.submit(row, 10) for row in rows]
        engine.run()
        assert [r.result() for r in requests] == [row[:10].tolist() for row in wanted]
        _assert_beams_are_those_of_recomputing(decoder, model, torch.stack([rows[0][:4], rows[2][:4]]))
        return decoder

    return check


def _assert_beams_are_those_of_recomputing(decoder: attngraph.Decoder, model: nn.Module, ids: Tensor) -> None:
    whole = _Logits(model)
    with torch.no_grad():
        wanted, _ = beam_search(whole, ids, 6, 3)
    assert torch.equal(decoder.generate(ids, 6, num_beams=3), wanted[:, 0])


class _Logits(nn.Module):
    """A model whose result is its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = getattr(logits := self.model(ids), "logits", logits)
        return found


def _assert_padding_changes_nothing(
    decoder: attngraph.Decoder, rows: list[Tensor], wanted: list[Tensor]
) -> None:
    longest = max(map(len, rows))
    for left in (True, False):
        ids = torch.full((len(rows), longest), 1)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            place = slice(longest - len(row), None) if left else slice(0, len(row))
            ids[number, place], mask[number, place] = row, 1
        padded = decoder.generate(ids, 8, attention_mask=mask)[:, -8:]
        assert torch.equal(padded, torch.stack([row[:8] for row in wanted]))
    logits, state = decoder.prefill(ids, attention_mask=mask)
    assert (logits[mask == 0] == 0).all() and state.lengths == [len(row) for row in rows]


def _assert_states_are_independent(decoder: attngraph.Decoder, model: nn.Module, rows: list[Tensor]) -> None:
    """Chunks of a prompt, a copy, reordered rows and a reset row."""
    first = rows[2]

    def last(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return _Logits(model)(ids[None])[0, -1]

    _, state = decoder.prefill([first[:1], rows[0]])
    for at, end in ((1, 4), (4, 5), (5, len(first))):
        logits = decoder.decode([first[at:end], first[:0]], state)
    torch.testing.assert_close(logits[0, -1], last(first), rtol=1e-4, atol=1e-4)
    other = state.copy()
    decoder.decode(torch.tensor([5, 6]), state)
    other.reorder([1, 0, 0])
    more = torch.tensor([7, 8, 9])
    logits = decoder.decode(more, other)[:, -1]
    for row, before in enumerate((rows[0], first, first)):
        wanted = last(torch.cat([before, more[row : row + 1]]))
        torch.testing.assert_close(logits[row], wanted, rtol=1e-4, atol=1e-4)
    other.reset(1)
    logits = decoder.decode([more[:0], rows[1], more[:1]], other)
    torch.testing.assert_close(logits[1, len(rows[1]) - 1], last(rows[1]), rtol=1e-4, atol=1e-4)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever no token has been written to holds NaN."""
    empty = pages.Pages._empty

    def filled(self: Any, members: Any, pages: int) -> Tensor:
        made = empty(self, members, pages)
        return (
            made.fill_(torch.nan)
            if made.is_floating_point()
            else made.fill_(-7 if made.dtype != torch.bool else True)
        )

    monkeypatch.setattr(pages.Pages, "_empty", filled)
