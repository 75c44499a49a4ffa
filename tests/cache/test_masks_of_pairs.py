"""Masks that a model is given for pairs of tokens: a decoder goes on by the rule that they follow."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.cache.small import greedy

VOCAB, WIDTH, HEADS = 61, 32, 2
IDS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))


class Masked(nn.Module):
    """`how` says what the model does with what it is given."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv, self.how = nn.Linear(WIDTH, 3 * WIDTH), how

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.embedding(ids)).chunk(3, -1)
        )
        scores = q @ k.mT / 4
        match self.how:
            case "added":
                scores = scores + mask
            case "hides":
                scores = scores.masked_fill(mask, -torch.inf)
            case "keeps":
                scores = scores.masked_fill(mask == 0, -1e9)
        return self.head((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def given(how: str, layout: str, tokens: int, window: int = 100) -> Tensor:
    hidden = torch.ones(tokens, tokens, dtype=torch.bool)
    hidden = hidden.triu(1) | hidden.tril(-window)
    mask = {"added": torch.zeros(tokens, tokens).masked_fill(hidden, -torch.inf), "hides": hidden,
            "keeps": (~hidden).long()}[how]  # fmt: skip
    return {"QT": mask, "1QT": mask[None], "B1QT": mask.expand(2, 1, tokens, tokens)}[layout]


@pytest.mark.parametrize("layout", ["QT", "1QT", "B1QT"])
@pytest.mark.parametrize("how", ["added", "hides", "keeps"])
@torch.no_grad()
def test_new_tokens_go_on_by_the_rule(how: str, layout: str) -> None:
    model, more = Masked(how).eval(), torch.cat([IDS, IDS[:, :3]], 1)
    decoder = attngraph.compile(model, cache=True)
    logits, state = decoder.prefill(IDS, mask=given(how, layout, 9))
    assert torch.allclose(logits, model(IDS, given(how, layout, 9)), atol=1e-5)
    wanted = model(more, given(how, layout, 12))[:, 9:]
    assert torch.allclose(decoder.decode(more[:, 9:10], state), wanted[:, :1], atol=1e-5)
    own = given(how, layout, 12)[..., 10:, :]
    assert torch.allclose(decoder.decode(more[:, 10:], state, mask=own), wanted[:, 1:], atol=1e-5)
    whole = greedy(lambda ids: model(ids, given(how, layout, ids.shape[1])), IDS, 6)
    assert decoder.generate(IDS, 6, mask=given(how, layout, 9)).equal(whole)


@torch.no_grad()
def test_another_rule_is_another_graph(tmp_path: Path) -> None:
    model = Masked("hides").eval()
    decoder = attngraph.compile(model, cache=True)
    wanted = model(IDS, given("hides", "QT", 9)), model(IDS, given("hides", "QT", 9, 3))
    for window in (0, 1, 0, 1):
        found, _ = decoder.prefill(IDS, mask=given("hides", "QT", 9, 3 if window else 100))
        assert torch.allclose(found, wanted[window], atol=1e-5)
    cache = decoder.report.cache
    assert cache is not None and {window for _, _, window, _ in cache.stores} == {3}
    decoder.save(tmp_path / "saved")
    loaded = attngraph.load(tmp_path / "saved", model)
    assert torch.allclose(loaded.prefill(IDS, mask=given("hides", "QT", 9, 3))[0], wanted[1], atol=1e-5)
    one = loaded.prefill(IDS[:, :1], mask=given("hides", "QT", 1))[0]
    assert torch.allclose(one, wanted[0][:, :1], atol=1e-5)
    _, state = decoder.prefill(IDS, mask=given("hides", "QT", 9))
    with pytest.raises(ValueError, match=r"mask follows the rule q \+ 1 <= k since the prompt"):
        decoder.decode(IDS[:, :1], state, mask=torch.zeros(1, 10, dtype=torch.bool).fill_(True))


@torch.no_grad()
def test_padding_stands_beside_the_rule() -> None:
    model = Masked("hides").eval()
    real = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    mask = (given("hides", "QT", 9) | (real == 0)[:, None])[:, None]
    found, state = attngraph.compile(model, cache=True).prefill(IDS, real, mask=mask)
    assert torch.allclose(found[1, 3:], model(IDS[1:, 3:], given("hides", "QT", 6))[0], atol=1e-5)
    assert state.lengths == [9, 6]


@pytest.mark.parametrize("layout", ["QT", "1QT", "B1QT"])
@pytest.mark.parametrize("how", ["added", "hides", "keeps"])
@torch.no_grad()
def test_one_token_is_taken_to_have_a_causal_mask(how: str, layout: str) -> None:
    model, ids = Masked(how).eval(), IDS[:, :1]
    decoder = attngraph.compile(model, cache=True)
    wanted = greedy(lambda ids: model(ids, given(how, layout, ids.shape[1])), ids, 6)
    assert decoder.generate(ids, 6, mask=given(how, layout, 1)).equal(wanted)
    assert "one entry tells no rule" in str(decoder.report)
    _, state = decoder.prefill(ids, mask=given(how, layout, 1))
    with pytest.raises(ValueError, match="mask follows the rule"):
        decoder.decode(IDS[:, 1:5], state, mask=given(how, layout, 5, 2)[..., 1:, :])


class Translator(nn.Module):
    """An encoder-decoder whose masks are arguments, as in "The Annotated Transformer" (Rush, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.mixers, self.head = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(9)),
            nn.Linear(WIDTH, VOCAB),
        )

    def mixed(self, n: int, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (m(t) for m, t in zip(self.mixers[n : n + 3], (x, y, y), strict=True))  # type: ignore[arg-type]
        return x + (q @ k.mT / 6).masked_fill(mask == 0, -1e9).softmax(-1) @ v

    def forward(self, ids: Tensor, source: Tensor, source_mask: Tensor, mask: Tensor) -> Tensor:
        y = self.source(source)
        y = self.mixed(0, y, y, source_mask)
        x = self.target(ids)
        x = self.mixed(3, x, x, mask)
        return self.head(self.mixed(6, x, y, source_mask))  # type: ignore[no-any-return]


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("rows", [1, 2, 3])
@torch.no_grad()
def test_a_translator_begins_with_one_token(rows: int, tokens: int) -> None:
    model, ids = Translator().eval(), torch.arange(rows * tokens).reshape(rows, tokens)
    source = torch.randint(1, VOCAB, (rows, 6), generator=torch.Generator().manual_seed(4))
    source_mask = torch.ones(rows, 1, 6)
    source_mask[-1, :, 4:] = 0

    def mask(tokens: int) -> Tensor:
        return torch.ones(1, tokens, tokens).tril()

    wanted = greedy(lambda ids: model(ids, source, source_mask, mask(ids.shape[1])), ids, 8)
    decoder = attngraph.compile(model, cache=True)
    found = decoder.generate(ids, 8, source=source, source_mask=source_mask, mask=mask(tokens))
    assert found.equal(wanted)


@pytest.mark.parametrize("name", ["all", "a prefix", "random", "one for each row"])
@torch.no_grad()
def test_masks_that_show_later_tokens_or_follow_no_rule(name: str) -> None:
    prefix = given("hides", "QT", 9).clone()
    prefix[:, :4] = False
    mask, match = {
        "all": (torch.zeros(9, 9, dtype=torch.bool), "Token 0 sees token 1"),
        "a prefix": (prefix, "follows no rule of their places"),
        "random": (torch.rand(2, 1, 9, 9) > 0.5, "follows no rule of their places"),
        "one for each row": (
            torch.stack([given("hides", "QT", 9), given("hides", "QT", 9, 3)])[:, None],
            "follows no rule of their places",
        ),
    }[name]  # fmt: skip
    with pytest.raises(attngraph.NoDecoderError, match=match):
        attngraph.compile(Masked("hides").eval(), cache=True).prefill(IDS, mask=mask)


@torch.no_grad()
def test_attention_mask_of_pairs() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=HEADS,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    least = torch.finfo(torch.float32).min
    mask = given("added", "B1QT", 9, 4).clamp(min=least)  # a window that the configuration does not know
    decoder = attngraph.compile(model, cache=True)
    logits, state = decoder.prefill(IDS, attention_mask=mask)
    assert torch.allclose(logits, model(IDS, attention_mask=mask).logits, atol=1e-5)
    more = torch.cat([IDS, IDS[:, :1]], 1)
    wanted = model(more, attention_mask=given("added", "B1QT", 10, 4).clamp(min=least)).logits[:, 9:]
    assert torch.allclose(decoder.decode(IDS[:, :1], state), wanted, atol=1e-5)
    cache = decoder.report.cache
    assert cache is not None and {window for _, _, window, _ in cache.stores} == {4}
