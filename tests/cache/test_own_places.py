"""An index that reads each token at its own place changes nothing; one that reads others has no decoder."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import NoDecoderError

Reads = Callable[[Tensor, Tensor], Tensor]
OWN: dict[str, Reads] = {
    "arange": lambda x, i: x[:, i],
    "a stride of one": lambda x, i: x[:, i // 1 * 1],
    "modulo": lambda x, i: x[:, i % len(i)],
    "clamped": lambda x, i: x[:, i.clamp(max=len(i) - 1)],
    "counted": lambda x, i: x[:, torch.ones_like(i).cumsum(0) - 1],
    "gathered": lambda x, i: x.gather(1, i[None, :, None].expand(x.shape)),
    "selected": lambda x, i: x.mT.index_select(2, i).mT,
}
IDS = torch.arange(18).reshape(2, 9)


class Reading(nn.Module):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out, self.reads = nn.Embedding(23, 8), nn.Linear(8, 23), reads

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.out(x + self.reads(x, torch.arange(ids.shape[1])))


def decoder_of(model: nn.Module, proof: bool) -> attngraph.Decoder:
    config = attngraph.CacheConfig(proof=proof)
    return attngraph.compile(model.eval(), cache=config, backend="reference")


@pytest.mark.parametrize("name", OWN)
def test_a_token_that_reads_its_own_place_is_itself(name: str) -> None:
    model = Reading(OWN[name])
    decoder = decoder_of(model, proof=False)
    with torch.no_grad():
        found, state = decoder.prefill(IDS[:, :7])
        found = torch.cat([found, decoder.decode(IDS[:, 7:], state)], 1)
        assert torch.allclose(found, model(IDS), atol=1e-5)


@pytest.mark.parametrize("proof", [True, False])
def test_places_that_are_turned_round_twice_are_refused_at_their_line(proof: bool) -> None:
    model = Reading(lambda x, i: x[:, i.flip(0)].flip(1))
    with pytest.raises(
        NoDecoderError, match=r"index at .*test_own_places.py:\d+: it takes tokens by an index"
    ):
        decoder_of(model, proof).prefill(IDS)
