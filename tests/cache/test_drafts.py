"""Speculative decoding: whatever a draft guesses, the tokens are those without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
