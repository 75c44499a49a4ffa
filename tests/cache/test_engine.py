"""Requests that come and go: each gets what it gets alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import attngraph
from attngraph import CacheError, Decoder, Engine
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig

pytestmark = pytest.mark.usefixtures("graphs_of_this_run")

VOCABULARY = 40


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    model: nn.Module = ModernDecoder(ModernDecoderConfig(VOCABULARY, 2, 16, 4, 2, 4, 32)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return attngraph.compile(model, cache=attngraph.CacheConfig(max_length=200))


def alone(decoder: Decoder, prompt: list[int], **options: object) -> list[int]:
    found = decoder.generate(torch.tensor(prompt), **options)  # type: ignore[arg-type]
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_every_request_gets_what_it_gets_alone(decoder: Decoder, seed: int) -> None:
    draw = random.Random(seed)
    engine = Engine(
        decoder, max_batch=3, chunk=draw.choice([4, 16, 128]), max_tokens=draw.choice([None, 150])
    )
    requests = []
    for _ in range(9):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 40))]
        count, end = draw.randint(1, 15), draw.choice([None, 3, 7])
        requests.append((engine.submit(prompt, count, eos_token_id=end), prompt, count, end))
        for _ in range(draw.randint(0, 4)):
            engine.step()
            assert engine.running <= 3
    engine.run()
    for request, prompt, count, end in requests:
        assert request.finished
        assert request.tokens == alone(decoder, prompt, max_new_tokens=count, eos_token_id=end)
    assert engine.running == 0
    assert engine.state is not None
    assert engine.state.lengths == [0, 0, 0]


def test_tokens_come_one_by_one_and_others_go_on(decoder: Decoder) -> None:
    engine = Engine(decoder, max_batch=2)
    first, second = engine.submit([1, 2, 3], 8), engine.submit([4, 5], 8)
    stream = iter(first)
    head = [next(stream) for _ in range(3)]
    assert len(second.tokens) == 3
    assert head + list(stream) == alone(decoder, [1, 2, 3], max_new_tokens=8)
    assert second.result() == alone(decoder, [4, 5], max_new_tokens=8)


def test_a_long_prompt_does_not_hold_others_up(decoder: Decoder) -> None:
    engine = Engine(decoder, max_batch=2, chunk=8)
    short = engine.submit([1, 2], 20)
    engine.step()
    long = engine.submit([3] * 60, 4)
    for count in range(2, 8):
        engine.step()
        assert len(short.tokens) == count
        assert not long.tokens
    engine.run()
    assert long.tokens == alone(decoder, [3] * 60, max_new_tokens=4)


def test_a_cancelled_request_frees_its_place(decoder: Decoder) -> None:
    engine = Engine(decoder, max_batch=1)
    first, second, third = (engine.submit([n], 30) for n in (1, 2, 3))
    engine.step()
    third.cancel()
    first.cancel()
    assert first.finished and first.error is None
    assert second.result() == alone(decoder, [2], max_new_tokens=30)
    assert third.tokens == []
    assert not engine.step()


def test_a_bad_request_fails_alone(decoder: Decoder) -> None:
    engine = Engine(decoder, max_batch=3)
    good, bad, other = engine.submit([1, 2], 6), engine.submit([1, 99999], 6), engine.submit([5], 6)
    engine.run()
    assert good.tokens == alone(decoder, [1, 2], max_new_tokens=6)
    assert other.tokens == alone(decoder, [5], max_new_tokens=6)
    with pytest.raises(IndexError):
        bad.result()


def test_what_cannot_be_served_is_refused_at_once(decoder: Decoder) -> None:
    engine = Engine(decoder, max_batch=1, max_tokens=50, max_waiting=2)
    with pytest.raises(CacheError, match="never fits into 50"):
        engine.submit([1] * 45, 6)
    for _ in range(2):
        engine.submit([1], 3)
    with pytest.raises(CacheError, match="2 requests are waiting"):
        engine.submit([1], 3)
    with pytest.raises(ValueError, match="at least one token"):
        engine.submit([])
    with pytest.raises(ValueError, match="top_p"):
        engine.submit([1], top_p=2.0)
    engine.run()
    too_long = Engine(decoder).submit([1] * 190, 20)
    with pytest.raises(CacheError, match="at most 200"):
        too_long.result()


def test_samples_depend_on_the_requests_own_seed_alone(decoder: Decoder) -> None:
    engine = Engine(decoder, max_batch=3)
    requests = [engine.submit([1, 2, 3], 10, temperature=1.3, top_k=20, seed=n % 2) for n in range(5)]
    engine.submit([4] * 30, 3)
    engine.run()
    assert requests[0].tokens == requests[2].tokens == requests[4].tokens
    assert requests[1].tokens == requests[3].tokens != requests[0].tokens
