"""What a decoder keeps of its tokens may be what another attention gave, as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph

IDS = torch.arange(18).reshape(2, 9) * 5 % 13


def attend(q: Tensor, k: Tensor, v: Tensor, window: int = 99) -> Tensor:
    i = torch.arange(q.shape[-2])
    seen = (i <= i[:, None]) & (i > i[:, None] - window)
    return (q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def of_other_heads(x: Tensor, a: Tensor) -> Tensor:
    joined = attend(*[heads(a, 2)] * 3).transpose(1, 2).flatten(2)
    return attend(heads(x, 4), *[heads(joined, 4)] * 2).transpose(1, 2).flatten(2)


def over_two_windows(x: Tensor, a: Tensor) -> Tensor:
    b = attend(x, x, x, 3)
    return attend(x, b, b) + attend(x, x, b, 3)


READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "keys and values": lambda x, a: attend(x, a, a),
    "times a number": lambda x, a: attend(x, a, -a * 0.5),
    "queries too": lambda x, a: attend(a, a, a),
    "in a window": lambda x, a: attend(x, a, a, 3),
    "thrice": lambda x, a: attend(x, *[attend(x, a, a)] * 2) + a,
    "of other heads": of_other_heads,
    "over two windows": over_two_windows,
}


class Reading(nn.Module):
    def __init__(self, reads: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.out, self.reads = nn.Embedding(13, 8), nn.Linear(8, 13), reads
        self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.out(self.reads(x, attend(x, self.key(x), self.value(x))))


@pytest.mark.parametrize("reads", READERS.values(), ids=list(READERS))
def test_keys_and_values_may_be_what_another_attention_gave(
    reads: Callable[[Tensor, Tensor], Tensor],
) -> None:
    model = Reading(reads).eval()
    decoder = attngraph.compile(model, cache=attngraph.CacheConfig(proof=False), backend="reference")
    with torch.no_grad():
        found, state = decoder.prefill(IDS[:, :4])
        steps = [decoder.decode(IDS[:, n : n + 1], state) for n in range(4, 9)]
        assert torch.allclose(torch.cat([found, *steps], 1), model(IDS), atol=1e-4)
