"""Masks that data choose, with finite numbers: a token from which all keys are hidden weighs all alike,
later ones too. A decoder then says so; for all other prompts it gives what the model gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.errors import CheckError

VOCAB, WIDTH, HIDES = 19, 16, -1e9
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Scores [B, T, T] from scores, a number of each token [B, T], ids, and which keys are no later [T, T]."""


class Small(nn.Module):
    """`squared`: its weights are, so that no attention is found."""

    def __init__(self, mask: Mask, squared: bool = False) -> None:
        super().__init__()
        self.mask, self.squared = mask, squared
        torch.manual_seed(0)
        self.embed, self.gate, self.out = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Linear(WIDTH, 1),
            nn.Linear(WIDTH, VOCAB),
        )
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        past = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        scores = self.q(x) @ self.k(x).mT / 4
        weights = self.mask(scores, self.gate(x)[..., 0], ids, past).softmax(-1)
        weights = weights.square() if self.squared else weights
        return self.out(x + weights @ self.v(x))  # type: ignore[no-any-return]


def chosen(gate: Tensor) -> Tensor:
    return (gate > 0.3)[:, None, :]


def real(ids: Tensor) -> Tensor:
    return (ids != 0)[:, None, :]


def number(flags: Tensor) -> Tensor:
    return flags.float()


MASKS: dict[str, Mask] = {
    "filled": lambda s, g, ids, past: s.masked_fill(chosen(g) | ~past, HIDES),
    "multiplied": lambda s, g, ids, past: (s - number(chosen(g)) * 1e9).masked_fill(~past, HIDES),
    "by two factors": lambda s, g, ids, past: (s - number(chosen(g)) * 1e5 * 1e4).masked_fill(~past, HIDES),
    "by a power": lambda s, g, ids, past: (s - (number(chosen(g)) * 1e3) ** 3).masked_fill(~past, HIDES),
    "by a logarithm": lambda s, g, ids, past: (s + number(~chosen(g)).log()).masked_fill(~past, HIDES),
    "by a quotient": lambda s, g, ids, past: (s - 1 / number(~chosen(g))).masked_fill(~past, HIDES),
    "by an exponential": lambda s, g, ids, past: (s - (number(chosen(g)) * 30).exp()).masked_fill(
        ~past, HIDES
    ),
    "by what is clipped": lambda s, g, ids, past: (s - (number(chosen(g)) * 1e9).relu()).masked_fill(
        ~past, HIDES
    ),
    "padding by its id": lambda s, g, ids, past: s.masked_fill(~(real(ids) & past), HIDES),
    "padding, in one product": lambda s, g, ids, past: s + (1 - number(real(ids)) * number(past)) * -10000.0,
    "padding in a window": lambda s, g, ids, past: s.masked_fill(~(real(ids) & past & past.triu(-2)), HIDES),
}
"""Which may hide the first token from itself."""
NEVER: dict[str, Mask] = {
    "padding, and never itself": lambda s, g, ids, past: s.masked_fill(
        ~((real(ids) & past) | torch.eye(len(past), dtype=torch.bool)), HIDES),
    "padding, by minus infinity": lambda s, g, ids, past: s.masked_fill(~(real(ids) & past), -torch.inf),
    "documents": lambda s, g, ids, past: s.masked_fill(
        ~past | ((ids == 0).cumsum(1)[:, :, None] != (ids == 0).cumsum(1)[:, None, :]), HIDES),
    "a gate that forgets": lambda s, g, ids, past: (
        s + F.logsigmoid(g).cumsum(1)[:, :, None] - F.logsigmoid(g).cumsum(1)[:, None, :]
    ).masked_fill(~past, HIDES),
}  # fmt: skip


def sees_later(model: nn.Module, ids: Tensor, count: int) -> bool:
    """Whether the first tokens' results follow from the others, as the model computes them."""
    others = torch.cat([ids[:, :count], (ids[:, count:] + 7) % VOCAB], 1)
    return not torch.allclose(model(ids)[:, :count], model(others)[:, :count], atol=1e-6, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("name", [*MASKS, *NEVER])
def test_a_decoder_gives_what_the_model_gives_or_says_that_it_cannot(name: str) -> None:
    model = Small({**MASKS, **NEVER}[name]).eval()
    decoder = attngraph.compile(model, cache=True)
    generator = torch.Generator().manual_seed(1)
    raised = []
    for _ in range(40):
        ids = torch.randint(VOCAB, (1, 8), generator=generator)
        ids[0, :3] *= torch.randint(2, (3,), generator=generator)  # padding's id is often among the first
        wanted = model(ids)[:, :5]
        if sees_later(model, ids, 5):
            raised.append(True)
            with pytest.raises(CheckError, match=r"test_data_that_hide\.py:\d+ hides every key"):
                decoder.prefill(ids[:, :5])
            continue
        try:
            found, _ = decoder.prefill(ids[:, :5])
        except CheckError:
            assert name == "padding in a window"  # asked of each token, so that a few are refused in vain
            continue
        raised.append(False)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert any(raised) == (name in MASKS) and not all(raised)
    assert ("is asked in each call" in str(decoder.report)) == (name in MASKS or name == "documents")


@torch.no_grad()
@pytest.mark.parametrize("name", [*MASKS, *NEVER])
def test_what_is_no_attention_is_refused_where_data_may_hide_all(name: str) -> None:
    model = Small({**MASKS, **NEVER}[name], squared=True).eval()
    decoder = attngraph.compile(model, cache=True)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (1, 8), generator=generator)
    if name in MASKS or name == "documents":  # in which it is not seen that a token is in its own
        with pytest.raises(attngraph.NoDecoderError, match="every token is read"):
            decoder.prefill(ids)
        return
    torch.testing.assert_close(decoder.prefill(ids)[0], model(ids), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_nothing_is_written_where_a_token_of_a_chunk_is_hidden() -> None:
    model = Small(MASKS["padding in a window"]).eval()
    decoder = attngraph.compile(model, cache=True)
    ids = torch.tensor([[5, 6, 7, 8, 9, 3]])
    _, state = decoder.prefill(ids[:, :4])
    with pytest.raises(CheckError):
        decoder.decode(torch.tensor([[4, 0, 3]]), state)
    wanted = model(ids)[:, 4:]
    torch.testing.assert_close(decoder.decode(ids[:, 4:], state), wanted, atol=1e-5, rtol=1e-5)


def test_a_mask_that_places_and_data_choose_is_refused() -> None:
    """Whether such a token sees anything is not one question for all places."""

    def mask(s: Tensor, g: Tensor, ids: Tensor, past: Tensor) -> Tensor:
        place = torch.arange(s.shape[1])
        return s.masked_fill(~past | (chosen(g) & (place[:, None] % 3 == 0)), HIDES)

    with pytest.raises(attngraph.NoDecoderError, match="data may hide every key of a token"):
        attngraph.compile(Small(mask).eval(), cache=True).prefill(torch.ones(1, 6, dtype=torch.int64))
