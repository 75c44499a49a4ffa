"""A model that attends by FlexAttention has a decoder where its functions let no token see a later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attngraph
from attngraph.errors import NoDecoderError

Function = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Model(nn.Module):
    """One layer: ids [B, S] to logits [B, S, 20]."""

    def __init__(self, mask: Function | None, score: Callable[[Any], Function] | None = None) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(1))
        self.bias, self.slopes = nn.Parameter(torch.randn(64, 2)), nn.Buffer(torch.tensor([0.5, 0.25]))
        self.mask, self.score = mask, None if score is None else score(self)

    def forward(self, ids: Tensor) -> Tensor:
        x, n, mask = self.embed(ids), ids.shape[1], None
        if self.mask is not None:
            mask = create_block_mask(self.mask, None, None, n, n, device="cpu")
        for layer in self.layers:
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            out: Any = flex_attention(q, k, v, score_mod=self.score, block_mask=mask)
            x = x + out.transpose(1, 2).flatten(2)
        return self.out(x)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], Model]] = {
    "causal": lambda: Model(causal),
    "a window": lambda: Model(lambda b, h, q, k: (q >= k) & (q - k < 4)),
    "a score function": lambda: Model(
        None, lambda m: lambda s, b, h, q, k: torch.where(k <= q, s, -torch.inf)
    ),
    "slopes": lambda: Model(causal, lambda m: lambda s, b, h, q, k: s + m.slopes[h] * (k - q)),
    "a table": lambda: Model(causal, lambda m: lambda s, b, h, q, k: s + m.bias[(q - k).abs(), h]),
    "a soft cap": lambda: Model(causal, lambda m: lambda s, b, h, q, k: 5 * torch.tanh(s / 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_its_decoder_gives_the_tokens_of_the_model(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        found = attngraph.compile(model, cache=True).generate(torch.tensor([[1, 2, 3], [4, 5, 6]]), 8)
        assert torch.equal(model(found).argmax(-1)[:, 2:-1], found[:, 3:])


@pytest.mark.parametrize(
    "mask, shown", [(None, "no mask"), (lambda b, h, q, k: (q >= k) | (k < 3), "keep k <= 2 or k <= q")]
)
def test_a_mask_that_shows_later_tokens_is_named(mask: Function | None, shown: str) -> None:
    with pytest.raises(NoDecoderError, match=f"it sees later tokens .{shown}.*Token 0 sees token 1"):
        attngraph.compile(Model(mask).eval(), cache=True).generate(torch.tensor([[1, 2, 3]]), 2)
