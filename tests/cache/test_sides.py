"""Decoders of models that branch on sizes: every answer is that of the model for whole sequences, or refused.

What is on another side of a branch than the first example has a graph of its own, or a reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import AttnGraphError, CacheError
from tests.cache.small import greedy

Asks = Callable[[int, int], Any]
WORDS = 23


class Branching(nn.Module):
    """A causal model that asks for its sizes in a helper, and scales its input by the answer."""

    def __init__(self, asks: Asks, places: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out, self.asks = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS), asks
        self.places = nn.Parameter(torch.randn(places, 8)) if places else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scaled(self.embed(ids), *ids.shape)
        if self.places is not None:
            x = x + self.places[: ids.shape[1]]
        scores = x @ x.mT / 3
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return self.out(scores.masked_fill(future, -torch.inf).softmax(-1) @ x)

    def scaled(self, x: Tensor, rows: int, tokens: int) -> Tensor:
        return x * 2 if self.asks(rows, tokens) else x


def decoder_of(model: nn.Module, **config: Any) -> attngraph.Decoder:
    cache = attngraph.CacheConfig(**config) if config else True
    return attngraph.compile(model.eval(), cache=cache, backend="reference")


def ids_of(rows: int, tokens: int) -> Tensor:
    return torch.randint(0, WORDS, (rows, tokens), generator=torch.Generator().manual_seed(rows + tokens))


def is_right(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-4)


def prefilled(decoder: attngraph.Decoder, model: nn.Module, ids: Tensor) -> bool | None:
    """Whether the logits of prompts are the model's; None if they are refused."""
    with torch.no_grad():
        try:
            found = decoder.prefill(ids)[0]
        except AttnGraphError:
            return None
        return is_right(found, model(ids))


BRANCHES: dict[str, tuple[Asks, list[tuple[int, int]]]] = {
    "n > 6": (lambda rows, n: n > 6, []),
    "n % 2": (lambda rows, n: n % 2, []),
    "n > 1": (lambda rows, n: n > 1, [(1, 1), (2, 1)]),
    "n == 5": (lambda rows, n: n == 5, [(1, 5)]),
    "max(n, 4) > 4": (lambda rows, n: max(n, 4) > 4, []),
    "rows > 1": (lambda rows, n: rows > 1, []),
    "rows > 2": (lambda rows, n: rows > 2, [(2, 1), (2, 9)]),
    "rows * n > 16": (lambda rows, n: rows * n > 16, []),
}
"""The question, and the sizes for which there is no graph."""


@pytest.mark.parametrize("name", BRANCHES)
def test_each_side_of_a_branch_has_a_graph_of_its_own_or_is_refused(name: str) -> None:
    asks, without = BRANCHES[name]
    model = Branching(asks)
    decoder = decoder_of(model)
    sizes = [(2, 9), (1, 5), (2, 1), (3, 12), (1, 1)]
    found = {size: prefilled(decoder, model, ids_of(*size)) for size in sizes}
    assert found == {size: None if size in without else True for size in sizes}
    if name == "n % 2":
        assert torch.equal(decoder.generate(ids_of(2, 5), 4), greedy(model, ids_of(2, 5), 4))


def test_a_row_does_not_cross_a_branch_and_its_state_is_as_before() -> None:
    model, ids = Branching(lambda rows, n: n > 6), ids_of(2, 8)
    decoder, crossed = decoder_of(model), r"test_sides.py:\d+ whether tokens <= 6, and does something else"
    with torch.no_grad():
        _, state = decoder.prefill(ids[:, :5])
        assert is_right(decoder.decode(ids[:, 5:6], state), model(ids[:, :6])[:, 5:])
    with pytest.raises(CacheError, match=crossed):
        decoder.decode(ids[:, 6:7], state)
    assert state.lengths == [6, 6]
    with pytest.raises(CacheError, match="give rows of other lengths in calls of their own"):
        decoder.prefill([[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8]])
    with pytest.raises(CacheError, match=crossed):
        decoder.generate(ids[:1, :5], max_new_tokens=4, num_beams=2)
    assert torch.equal(decoder.generate(ids[:, :5], max_new_tokens=4), greedy(model, ids[:, :5], 4))


def test_rows_that_become_fewer_cross_a_branch_on_their_number() -> None:
    decoder = decoder_of(Branching(lambda rows, n: rows > 1))
    _, state = decoder.prefill(ids_of(2, 5))
    state.reorder([1])
    with pytest.raises(CacheError, match="whether sequences > 1"):
        decoder.decode(torch.zeros(1, dtype=torch.int64), state)


def test_requests_of_an_engine_are_each_alone_and_their_chunks_are_no_prompts() -> None:
    model = Branching(lambda rows, n: n > 6 and rows == 1)
    engine = attngraph.Engine(decoder_of(model), max_batch=2, chunk=3)
    prompts = [ids_of(1, n)[0] for n in (9, 3, 8)]
    requests = [engine.submit(p, max_new_tokens=2) for p in prompts]
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.result() == greedy(model, prompt[None], 2)[0, len(prompt) :].tolist()
    with pytest.raises(CacheError, match="whether tokens <= 6"):
        engine.submit(prompts[1], max_new_tokens=5).result()


def test_a_question_that_makes_no_difference_to_one_token_or_one_row_refuses_nothing() -> None:
    class Flagged(Branching):
        def scaled(self, x: Tensor, rows: int, tokens: int) -> Tensor:
            causal = tokens > 1
            y = x if rows == 1 else x * 1.0
            return y + nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal)

    model = Flagged(lambda rows, n: None)
    decoder = decoder_of(model)
    sizes = [(2, 9), (1, 5), (2, 1), (1, 1)]
    assert all(prefilled(decoder, model, ids_of(*size)) for size in sizes)
    assert len(decoder._derived.all()) == 1


@pytest.mark.parametrize("places", [5, 8, 9])
def test_a_model_of_few_places_is_traced_with_as_many_tokens_as_it_takes(places: int) -> None:
    model = Branching(lambda rows, n: False, places)
    decoder = decoder_of(model)
    assert prefilled(decoder, model, ids_of(2, 4))
    assert prefilled(decoder, model, ids_of(2, places))
    with pytest.raises(CacheError, match=f"at most {places} fit"):
        decoder.prefill(ids_of(2, places + 1))


def test_a_model_of_even_lengths_is_traced_with_one() -> None:
    class Even(Branching):
        def scaled(self, x: Tensor, rows: int, tokens: int) -> Tensor:
            if tokens % 2:
                raise ValueError("an odd number of tokens")
            return x

    model = Even(lambda rows, n: None)
    decoder = decoder_of(model)
    assert prefilled(decoder, model, ids_of(2, 6))
    assert prefilled(decoder, model, ids_of(1, 4))
    assert prefilled(decoder, model, ids_of(2, 8))


def test_a_loop_over_tokens_that_does_something_else_with_short_sequences_is_refused() -> None:
    class Looping(Branching):
        def scaled(self, x: Tensor, rows: int, tokens: int) -> Tensor:
            total, found = torch.zeros_like(x[:, 0]), []
            for t in range(tokens):
                total = total * 0.5 + x[:, t]
                found.append(total)
            return torch.stack(found, 1) * (2 if tokens > 6 else 1)

    with pytest.raises(AttnGraphError, match="gives something else"):
        decoder_of(Looping(lambda rows, n: None)).prefill(ids_of(2, 9))


def test_a_saved_decoder_keeps_what_it_is_for(tmp_path: Path) -> None:
    model = Branching(lambda rows, n: n > 6 and rows > 1)
    decoder = decoder_of(model)
    assert prefilled(decoder, model, ids_of(2, 9))
    loaded = attngraph.load(decoder.save(tmp_path / "saved"), model, strict=True)
    assert prefilled(loaded, model, ids_of(2, 9))  # type: ignore[arg-type]
    for size in ((2, 5), (1, 9)):
        assert prefilled(loaded, model, ids_of(*size)) is None  # type: ignore[arg-type]


QUESTIONS = (
    "n > {}", "n <= {}", "n == {}", "n % 3 == 1", "n // 4 > 1", "(n + {}) // 3 % 2", "min(n, {}) == n",
    "n in ({}, 9)", "max(n, {}) > 7", "rows == 2", "rows * n > 2 * {}", "rows + n > {}",
    "len(range(0, n, {})) > 1", "n / 4 > 1.5",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(1, 7))
def test_no_answer_of_a_random_program_is_wrong(seed: int) -> None:
    chance = random.Random(seed)
    one, two = (chance.choice(QUESTIONS).format(chance.randint(2, 12)) for _ in range(2))
    code = compile(f"lambda rows, n: ({one}) and not ({two})", "a program", "eval")
    model = Branching(eval(code))
    decoder, answers = decoder_of(model), 0
    for _ in range(4):
        rows, tokens = chance.randint(1, 3), chance.randint(1, 10)
        ids = ids_of(rows, tokens + 2)
        with torch.no_grad():
            try:
                found, state = decoder.prefill(ids[:, :tokens])
                assert is_right(found, model(ids[:, :tokens]))
                answers += 1
                assert is_right(decoder.decode(ids[:, tokens:], state), model(ids)[:, tokens:])
            except AttnGraphError:
                continue
    assert answers
