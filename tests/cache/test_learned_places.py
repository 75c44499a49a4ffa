"""Models that put learned values before those of the tokens: soft prompts, prefixes of keys, memory tokens.

A decoder's rows begin with places that nobody gives; whatever is done with a state counts tokens alone.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.cache.small import greedy

VOCAB, WIDTH, LEARNED = 61, 32, 3


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Layer(nn.Module):
    """Causal attention; with `keys`, over so many learned keys and values besides."""

    def __init__(self, rotary: bool = True, keys: int = 0) -> None:
        super().__init__()
        self.qkv, self.rotary, self.keys = nn.Linear(WIDTH, 3 * WIDTH), rotary, keys
        self.learned = nn.Parameter(torch.randn(2, keys, WIDTH)) if keys else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.rotary:
            q, k = rotated(q), rotated(k)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if self.learned is not None:
            k, v = (
                torch.cat([p.expand(len(x), -1, -1), t], 1) for p, t in zip(self.learned, (k, v), strict=True)
            )
            later = torch.cat([later.new_zeros(x.shape[1], self.keys), later], 1)
        return x + (q @ k.mT / 6).masked_fill(later, -torch.inf).softmax(-1) @ v


class Learned(nn.Module):
    """A language model with soft tokens before its text. `cut`: whether it gives the text's logits alone.
    `before`: layers of the text alone."""

    def __init__(self, layers: int = 2, rotary: bool = True, cut: bool = True, before: int = 0) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.soft, self.cut = nn.Parameter(torch.randn(LEARNED, WIDTH)), cut
        self.before = nn.ModuleList(Layer(rotary) for _ in range(before))
        self.layers = nn.ModuleList(Layer(rotary) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.before:
            x = layer(x)
        x = torch.cat([self.soft.expand(len(ids), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[:, LEARNED:] if self.cut else self.head(x)


class Prefix(nn.Module):
    """Learned keys and values in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.places = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(Layer(keys=LEARNED) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: Learned(1),
    "soft tokens": Learned,
    "without rotary": lambda: Learned(rotary=False),
    "logits of learned places": lambda: Learned(cut=False),
    "keys and values": Prefix,
}


def ids_of(rows: int, tokens: int) -> Tensor:
    return torch.randint(VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_rows_begin_with_learned_places(name: str) -> None:
    torch.manual_seed(0)
    model, ids = MODELS[name]().eval(), ids_of(2, 9)
    decoder = attngraph.compile(model, cache=True)
    logits, state = decoder.prefill(ids)
    assert torch.allclose(logits, model(ids)[:, -9:], atol=1e-5)
    assert state.lengths == [9, 9]
    assert torch.allclose(
        decoder.decode(ids[:, :1], state), model(torch.cat([ids, ids[:, :1]], 1))[:, -1:], atol=1e-5
    )
    for rows, tokens in ((1, 1), (2, 2), (3, 12)):
        assert decoder.generate(ids_of(rows, tokens), 12).equal(greedy(model, ids_of(rows, tokens), 12))
    cache = decoder.report.cache
    assert cache is not None and cache.begins == LEARNED and not cache.anew
    assert cache.attentions == len(model.layers)  # type: ignore[arg-type]
    assert cache.bytes(1, 1) == (LEARNED + 1) * cache.bytes_per_token
    assert "begins with 3 learned places" in str(decoder.report)


@torch.no_grad()
def test_states_count_tokens_alone(tmp_path: Path) -> None:
    model, ids = Learned().eval(), ids_of(2, 9)
    decoder = attngraph.compile(model, cache=attngraph.CacheConfig(max_length=24))
    _, state = decoder.prefill([ids[0], ids[1, :4]])
    assert state.lengths == [9, 4]
    state.crop([5, 4])
    found = decoder.decode([ids[0, 5:7], ids[1, 4:6]], state)
    assert torch.allclose(
        found, torch.stack([model(ids[:1, :7])[0, 5:], model(ids[1:, :6])[0, 4:]]), atol=1e-5
    )
    state.save(tmp_path / "state")
    again = type(state).load(tmp_path / "state")
    assert again.lengths == [7, 6]
    assert decoder.decode(ids[:, 7:8], again).equal(decoder.decode(ids[:, 7:8], state))
    state.reset(1)  # begins anew
    assert state.lengths == [8, 0]
    found = decoder.decode([ids[0, 8:9], ids[1, :1]], state)
    assert torch.allclose(found, torch.stack([model(ids[:1])[0, 8:], model(ids[1:, :1])[0]]), atol=1e-5)
    tree = decoder.decode(ids[:, :3], state, parents=[-1, 0, 0])
    assert torch.allclose(tree[0, 2], model(torch.cat([ids[:1], ids[:1, [0, 2]]], 1))[0, -1], atol=1e-5)
    state.keep([[0, 2], [0]])
    assert state.lengths == [11, 2]
    with pytest.raises(attngraph.CacheError, match="at most 24 fit"):
        decoder.decode(ids_of(2, 14), state)


@torch.no_grad()
def test_padding_beams_drafts_and_an_engine() -> None:
    model, ids = Learned().eval(), ids_of(2, 40)
    decoder = attngraph.compile(model, cache=attngraph.CacheConfig(page=8))
    wanted = [greedy(model, ids[:1], 8)[0, 40:], greedy(model, ids[1:, :4], 8)[0, 4:]]
    padded = ids.clone()
    padded[1] = torch.cat([torch.zeros(36, dtype=torch.int64), ids[1, :4]])
    mask = torch.tensor([[1] * 40, [0] * 36 + [1] * 4])
    found = decoder.generate(padded, 8, attention_mask=mask)
    assert found[:, 40:].equal(torch.stack(wanted))
    engine = attngraph.Engine(decoder, max_batch=1, chunk=4)
    requests = [engine.submit(row, 8) for row in (ids[0], ids[1, :4], ids[0])]
    assert [r.result() for r in requests] == [wanted[0].tolist(), wanted[1].tolist(), wanted[0].tolist()]
    assert engine.counters()["shared_tokens"] == 39  # of the last prompt, which has one token to compute
    assert decoder.generate(ids, 8, draft="lookup").equal(greedy(model, ids, 8))
    alone = decoder.generate(ids[:1], 6, num_beams=3)
    assert decoder.generate(ids, 6, num_beams=3)[:1].equal(alone)


@torch.no_grad()
def test_saved_decoders(tmp_path: Path) -> None:
    model, ids = Prefix().eval(), ids_of(2, 5)
    decoder = attngraph.compile(model, cache=True)
    wanted = decoder.generate(ids, 8)
    decoder.save(tmp_path / "saved")
    assert attngraph.load(tmp_path / "saved", model).generate(ids, 8).equal(wanted)
    with pytest.raises(attngraph.ExportError, match="begins with 3 learned places"):
        attngraph.export(decoder, tmp_path / "decoder.pt2", (ids,))


@torch.no_grad()
def test_tables_of_positions_have_an_end() -> None:
    model, ids = Prefix().eval(), ids_of(1, 30)
    decoder = attngraph.compile(model, cache=True)
    assert decoder.generate(ids, 10).equal(greedy(model, ids, 10))
    assert decoder.report.cache is not None and decoder.report.cache.most_tokens == 40
    with pytest.raises(attngraph.CacheError):
        decoder.generate(ids, 12)


@torch.no_grad()
def test_attention_before_learned_values_join() -> None:
    """Its keys have no learned places, so the graph of places would be wrong, and is not taken."""
    model, ids = Learned(layers=1, before=1).eval(), ids_of(2, 9)
    decoder = attngraph.compile(model, cache=True)
    assert torch.allclose(decoder.prefill(ids)[0], model(ids), atol=1e-5)
    assert decoder.report.cache is not None and not decoder.report.cache.begins
    assert decoder.generate(ids, 6).equal(greedy(model, ids, 6))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
@pytest.mark.parametrize("base", ["gpt2", "llama"])
def test_peft(kind: str, base: str) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        base, vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, n_inner=64,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    learned = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(config), learned).eval()
    ids = ids_of(2, 7)
    decoder = attngraph.compile(model, cache=True)
    assert decoder.generate(ids, 8).equal(greedy(lambda ids: model(input_ids=ids).logits, ids, 8))
    cache = decoder.report.cache
    assert cache is not None and cache.begins == 4 and cache.bytes_per_token == 512
