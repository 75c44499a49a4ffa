"""Speculative decoding: whatever a draft guesses, the tokens are those without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import CacheConfig
from attngraph.runtime.draft import looked_up
from tests.cache.test_generate import VOCABULARY, stir

pytestmark = pytest.mark.usefixtures("graphs_of_this_run")

transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")

KINDS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64)),
    "a window": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=6)),
    "Mamba-2": lambda: transformers.Mamba2ForCausalLM(transformers.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=16, state_size=8, num_hidden_layers=1, num_heads=4,
        head_dim=8, n_groups=1, chunk_size=8)),
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def pair(request: Any) -> tuple[Any, Any]:
    """A model and its decoder."""
    torch.manual_seed(0)
    model = KINDS[request.param]().eval()
    return model, attngraph.compile(model, cache=CacheConfig(dtype=None))


def drafts(model: nn.Module, decoder: Any, wanted: Tensor) -> dict[str, Any]:
    """Drafts that are right always, never, sometimes; and other decoders."""
    known = {tuple(row[:n].tolist()): row[n:].tolist() for row in wanted for n in range(1, len(row))}

    def right(tokens: Tensor) -> Sequence[int]:
        return known.get(tuple(tokens.tolist()), [])

    def sometimes(tokens: Tensor) -> Sequence[int]:
        return [n if (n + len(tokens)) % 3 else (n + 1) % VOCABULARY for n in right(tokens)]

    return {
        "right": right, "wrong": lambda tokens: [(n + 1) % VOCABULARY for n in right(tokens)],
        "sometimes": sometimes, "none": lambda tokens: [], "foreign": lambda tokens: [VOCABULARY + 7, -1],
        "lookup": "lookup", "decoder": decoder,
    }  # fmt: skip


@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_changes_no_token(pair: tuple[Any, Any], sampled: bool) -> None:
    model, decoder = pair
    options: dict[str, Any] = {"do_sample": True, "seed": 3, "top_k": 6} if sampled else {}
    for seed in range(2):
        ids = stir(model, seed)
        wanted = decoder.generate(ids, 14, eos_token_id=2, pad_token_id=12, **options)
        for name, draft in drafts(model, decoder, wanted).items():
            found = decoder.generate(
                ids, 14, eos_token_id=2, pad_token_id=12, draft=draft, draft_tokens=4, **options
            )
            assert torch.equal(found, wanted), name


def test_right_guesses_save_steps(pair: tuple[Any, Any], monkeypatch: Any) -> None:
    model, decoder = pair
    ids = stir(model, 4)[:1]
    wanted = decoder.generate(ids, 13)
    kind, calls = type(decoder._derived.latest), list[int]()
    advance = kind.advance

    def counted(self: Any, state: Any, counts: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(sum(counts))
        return advance(self, state, counts, *args, **kwargs)

    monkeypatch.setattr(kind, "advance", counted)
    found = decoder.generate(ids, 13, draft=drafts(model, decoder, wanted)["right"], draft_tokens=3)
    assert torch.equal(found, wanted)
    assert calls == [4, 4, 4, 4]


def test_guesses_do_not_reach_past_what_fits(pair: tuple[Any, Any]) -> None:
    model, _ = pair
    ids = stir(model, 6)[:1]
    decoder = attngraph.compile(model, cache=CacheConfig(max_length=10))
    ends = int(decoder.generate(ids, 5)[0, 8])
    wanted = decoder.generate(ids, 40, eos_token_id=ends)
    found = decoder.generate(ids, 40, eos_token_id=ends, draft=lambda tokens: [1] * 8)
    assert torch.equal(found, wanted)


def test_one_prompt_with_a_draft_can_be_steered(pair: tuple[Any, Any]) -> None:
    model, decoder = pair
    ids = stir(model, 5)[:1]
    seen, other = list[list[int]](), list[list[int]]()
    options = {"repetition_penalty": 1.5, "stopping_criteria": [lambda tokens, _: tokens.shape[1] >= 13]}
    wanted = decoder.generate(ids, 14, on_token=lambda t: seen.append(t.tolist()), **options)
    found = decoder.generate(ids, 14, on_token=lambda t: other.append(t.tolist()), draft="lookup", **options)
    assert torch.equal(found, wanted)
    assert seen == other
    assert found.shape == (1, 13)
    with pytest.raises(ValueError, match="several rows"):
        decoder.generate(ids.repeat(2, 1), 14, draft="lookup", **options)


def test_what_is_no_draft_is_told(pair: tuple[Any, Any]) -> None:
    model, decoder = pair
    ids = stir(model, 5)
    with pytest.raises(TypeError, match="found "):
        decoder.generate(ids, 4, draft=model)
    with pytest.raises(ValueError, match="draft_tokens"):
        decoder.generate(ids, 4, draft="lookup", draft_tokens=0)
    with pytest.raises(ValueError, match="beams"):
        decoder.generate(ids, 4, draft="lookup", num_beams=2)


def test_what_followed_the_latest_tokens_is_looked_up() -> None:
    def guess(*tokens: int, most: int = 4) -> list[int]:
        return looked_up(torch.tensor(tokens), most)

    assert guess(1, 2, 3, 4, 5, 1, 2, 3) == [4, 5, 1, 2]
    assert guess(1, 2, 9, 7, 2, 8, 1, 2) == [9, 7, 2, 8]
    assert guess(5, 6, 5, 6) == [5, 6, 5, 6]
    assert guess(1, 2, 3) == guess(1) == []


class WithHeads(nn.Module):
    """A causal model that returns its hidden states beside the logits, and what Medusa's heads say of them;
    `guess` is a head that predicts several tokens, one after the other (EAGLE, MTP)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.mixed, self.joined = nn.Linear(16, 48), nn.Linear(32, 16)
        self.heads = nn.ModuleList(nn.Linear(16, VOCABULARY) for _ in range(3))

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = self.embedding(ids)
        q, k, v = self.mixed(x).chunk(3, -1)
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        x = x + (q @ k.mT / 4).masked_fill(later, -torch.inf).softmax(-1) @ v
        guesses = torch.stack([head(x) for head in self.heads], 2)
        return {
            "logits": self.head(x),
            "hidden": x,
            "guesses": guesses,
            "every": (ids, x),
            "whole": x.mean(1),
        }

    def guess(self, tokens: Tensor, hidden: Tensor) -> list[int]:
        found, token = [], tokens[-1]
        for _ in range(4):
            hidden = self.joined(torch.cat([hidden, self.embedding(token)])).tanh()
            token = self.head(hidden).argmax()
            found.append(int(token))
        return found


@pytest.mark.parametrize("beside", ["hidden", "guesses", "every"])
@torch.no_grad()
def test_heads_of_the_models_own(beside: str) -> None:
    model = WithHeads().eval()
    prompts = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    wanted = attngraph.compile(model, cache=True).generate(prompts, 20)
    decoder = attngraph.compile(model, cache=CacheConfig(beside=beside))
    seen = []

    def exactly(tokens: Tensor, given: Tensor) -> list[int]:
        """Guesses what is right, and compares what it is given with what forward returns."""
        whole = model(tokens[None, :-1])
        own = (whole["guesses"] if beside == "guesses" else whole["hidden"])[0, -1].flatten()
        torch.testing.assert_close(given, own, rtol=1e-4, atol=1e-5)
        row = next(row for row in wanted if row[: len(tokens)].equal(tokens))
        seen.append(len(tokens))
        return row[len(tokens) :][:3].tolist()

    assert decoder.generate(prompts, 20, draft=exactly).equal(wanted)
    assert len(seen) <= 12  # of 2 x 20 tokens
    own = {"hidden": model.guess, "every": model.guess,
           "guesses": lambda tokens, given: given.view(3, -1).argmax(-1)}[beside]  # fmt: skip
    assert decoder.generate(prompts, 20, draft=own).equal(wanted)
    sampled = decoder.generate(prompts, 20, temperature=1.0, seed=3)
    assert decoder.generate(prompts, 20, temperature=1.0, seed=3, draft=own).equal(sampled)
    same = decoder.generate(prompts[:1].expand(2, -1), 20, draft=own)
    assert same.equal(wanted[:1].expand(2, -1))
    # All else is given logits alone.
    logits, state = decoder.prefill(prompts)
    assert (
        logits.shape == (2, 7, VOCABULARY) and decoder.decode(prompts[:, :1], state).shape[-1] == VOCABULARY
    )
    assert decoder.generate(prompts, 5, num_beams=2).shape == (2, 12)
    assert attngraph.Engine(decoder).submit(prompts[0], 5).result() == wanted[0, 7:12].tolist()


@torch.no_grad()
def test_what_a_draft_is_given_is_saved_and_not_exported(tmp_path: Path) -> None:
    model, prompts = WithHeads().eval(), torch.ones(1, 5, dtype=torch.int64)
    decoder = attngraph.compile(model, cache=CacheConfig(beside="hidden"))
    wanted = decoder.generate(prompts, 12, draft=model.guess)
    decoder.save(tmp_path / "saved")
    assert attngraph.load(tmp_path / "saved", model).generate(prompts, 12, draft=model.guess).equal(wanted)
    with pytest.raises(attngraph.ExportError, match="beside the logits"):
        attngraph.export(decoder, tmp_path / "decoder.pt2", (prompts,))


@torch.no_grad()
def test_heads_need_something_beside_the_logits() -> None:
    model, prompts = WithHeads().eval(), torch.ones(1, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"beside=\.\.\.\) names a result"):
        attngraph.compile(model, cache=True).generate(prompts, 4, draft=model.guess)
    for beside, match in (
        ("nothing", "forward returns no nothing for a draft"),
        ("whole", "its result whole is"),
    ):
        with pytest.raises(attngraph.NoDecoderError, match=match):
            attngraph.compile(model, cache=CacheConfig(beside=beside)).prefill(prompts)
    with pytest.raises(ValueError, match="8 bits"):
        CacheConfig(beside="hidden", dtype=torch.int8)
    with pytest.raises(TypeError, match="a function or module of tokens and of what"):
        attngraph.compile(model, cache=True).generate(prompts, 4, draft=model)
