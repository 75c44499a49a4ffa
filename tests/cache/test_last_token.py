"""A model that returns the logits of the last token alone has a decoder, which gives those of every token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attngraph

Pick = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """A language model of one layer that picks what it returns; `first` puts the tokens before the batch."""

    def __init__(self, pick: Pick, first: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(40, 16), nn.Embedding(32, 16)
        self.qkv, self.norm, self.head = nn.Linear(16, 48), nn.LayerNorm(16), nn.Linear(16, 40)
        self.pick, self.first = pick, first

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = self.norm(x + y)
        return self.pick(self, x.transpose(0, 1) if self.first else x), None


LAST: dict[str, Pick] = {
    "a list": lambda m, x: m.head(x[:, [-1], :]),
    "a slice": lambda m, x: m.head(x[:, -1:, :]),
    "a number": lambda m, x: m.head(x[:, -1]),
    "its place": lambda m, x: m.head(x[:, x.shape[1] - 1]),
    "narrow": lambda m, x: m.head(x.narrow(1, x.shape[1] - 1, 1)),
    "after the head": lambda m, x: m.head(x)[:, -1],
    "more work on it": lambda m, x: F.log_softmax(m.head(F.gelu(m.head(m.norm(x[:, -1:]))[..., :16])), -1),
    "a view of it": lambda m, x: m.head(x[:, -1:]).view(x.shape[0], 40),
    "channels first": lambda m, x: m.head(x.mT[:, :, -1]),
}
NOT: dict[str, tuple[Pick, str]] = {
    "the first": (lambda m, x: m.head(x[:, [0]]), "token 0 is read"),
    "the last but one": (lambda m, x: m.head(x[:, [-2]]), "-2 is read"),
    "the last two": (
        lambda m, x: m.head(x[:, -2:]),
        "its dimension 1 holds tokens, but has not as many places",
    ),
    "the mean": (lambda m, x: m.head(x.mean(1)), "every token is read"),
    "the last and the first": (lambda m, x: m.head(x[:, -1] + x[:, 0]), "only the last token is read"),
    "the last by how many there are": (lambda m, x: m.head(x[:, -1]) / x.shape[1], "only the last token"),
    "rows that meet afterwards": (lambda m, x: m.head(x[:, -1]).softmax(0), "softmax"),
    "rows that are sorted": (lambda m, x: m.head(x[:, -1]).sort(0).values, "sort"),
}


def model_of(pick: Pick, first: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(pick, first).eval()


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(0, 40, (rows, tokens), generator=torch.Generator().manual_seed(1))


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """What the model gives for each beginning of the sequences, `[B, T, V]`."""
    with torch.no_grad():
        found = [model(tokens[:, : n + 1])[0].reshape(len(tokens), -1) for n in range(tokens.shape[1])]
    return torch.stack(found, 1)


@pytest.mark.parametrize("name", [*LAST, "tokens first"])
def test_prefill_decode_and_generate_give_what_the_model_gives_for_each_beginning(name: str) -> None:
    first = name == "tokens first"
    model = model_of((lambda m, x: m.head(x[-1])) if first else LAST[name], first)
    compiled = attngraph.compile(model, cache=True)
    tokens = ids(2, 12)
    logits, state = compiled.prefill(tokens[:, :7])
    pieces = [logits, compiled.decode(tokens[:, 7:8], state), compiled.decode(tokens[:, 8:], state)]
    wanted = logits_of(model, tokens)
    torch.testing.assert_close(torch.cat(pieces, 1), wanted, rtol=1e-5, atol=1e-5)
    found = compiled.generate(tokens[:, :7], 4)
    for place in range(7, 11):
        assert torch.equal(found[:, place], logits_of(model, found[:, :place])[:, -1].argmax(-1))
    cache = compiled.report.cache
    assert cache is not None and cache.error is not None and cache.error < 1e-10
    assert any("every token has the result" in n for r in compiled.report.passes for n in r.notes)
    torch.testing.assert_close(compiled(tokens)[0], model(tokens)[0], rtol=1e-5, atol=1e-5)


def test_prompts_may_be_padded() -> None:
    model = model_of(LAST["a list"])
    tokens, mask = ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    logits, _ = attngraph.compile(model, cache=True).prefill(tokens, mask)
    torch.testing.assert_close(logits[:1, 3:], logits_of(model, tokens[:1, 3:]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[1:], logits_of(model, tokens[1:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NOT)
def test_what_is_not_the_last_token_alone_has_no_decoder(name: str) -> None:
    pick, reason = NOT[name]
    with pytest.raises(attngraph.NoDecoderError, match=reason):
        attngraph.compile(model_of(pick), cache=True).prefill(ids(2, 7))
