"""Requests that come and go: each gets what it gets alone, steered by its own options."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    assert engine.state.lengths[:3] == [0, 0, 0]


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


def test_requests_are_steered_each_by_its_own_options(decoder: Decoder) -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(chr(65 + n % 50) for n in ids)

    def forbids(token: int) -> Any:
        return lambda tokens, scores: scores.index_fill(1, torch.tensor([token]), -torch.inf)

    free = alone(decoder, [1, 2, 3], max_new_tokens=8)
    text = Letters().decode(free)
    engine = Engine(decoder, max_batch=4)
    requests = [
        (engine.submit([1, 2, 3], 8, **options), options)
        for options in (
            {}, {"logits_processor": [forbids(free[0])]}, {"repetition_penalty": 1.5},
            {"stop_strings": text[2:4], "tokenizer": Letters()},
            {"eos_token_id": free[1], "min_new_tokens": 5},
            {"stopping_criteria": [lambda tokens, _: tokens.shape[1] >= 6]},
        )
    ]  # fmt: skip
    engine.run()
    for request, options in requests:
        assert request.tokens == alone(decoder, [1, 2, 3], max_new_tokens=8, **options)
    assert requests[1][0].tokens != free
    assert len(requests[5][0].tokens) == 3


def test_a_function_that_fails_ends_its_own_request(decoder: Decoder) -> None:
    def fails(tokens: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("mine")

    def divides(tokens: Tensor, scores: Any) -> bool:
        return 1 / (3 - tokens.shape[1]) < 0

    engine = Engine(decoder, max_batch=3)
    good, bad = engine.submit([1, 2], 6), engine.submit([3], 6, logits_processor=[fails])
    worse = engine.submit([4], 6, stopping_criteria=[divides])
    engine.run()
    assert good.tokens == alone(decoder, [1, 2], max_new_tokens=6)
    for request, kind in ((bad, KeyError), (worse, ZeroDivisionError)):
        with pytest.raises(kind):
            request.result()
    assert {n: c for n, c in engine.counters().items() if c and n in ("failed", "finished")} == {
        "failed": 2, "finished": 1
    }  # fmt: skip


def test_a_request_of_higher_priority_gets_the_next_place(decoder: Decoder) -> None:
    engine = Engine(decoder, max_batch=1)
    first = engine.submit([1], 3)
    engine.step()
    low, high = engine.submit([2], 3), engine.submit([3], 3, priority=2)
    while not high.finished:
        engine.step()
    assert first.finished
    assert not low.tokens
    assert low.result() == alone(decoder, [2], max_new_tokens=3)


def test_bytes_have_a_bound_too(decoder: Decoder) -> None:
    engine = Engine(decoder, max_batch=4, max_bytes=1)
    refused = engine.submit([1, 2], 3)
    with pytest.raises(CacheError, match="do not fit"):
        refused.result()
    assert engine.state is not None
    tokens = 50
    engine = Engine(decoder, max_batch=4, max_bytes=tokens * engine.state.bytes_per_token)
    requests = [engine.submit([n, 2], 18) for n in range(4)]
    while engine.step():
        assert engine.running <= 2
    for n, request in enumerate(requests):
        assert request.tokens == alone(decoder, [n, 2], max_new_tokens=18)
    with pytest.raises(CacheError, match="never fits into 50"):
        engine.submit([1] * 45, 6)
    assert engine.counters()["refused"] == 1


def test_what_happened_can_be_read(decoder: Decoder) -> None:
    engine = Engine(decoder, max_batch=2)
    requests = [engine.submit([n, 2, 3], 4) for n in range(3)]
    requests[2].cancel()
    engine.run()
    times = requests[0].times()
    assert 0 <= times["admitted"] <= times["first_token"] <= times["finished"]
    counts = engine.counters()
    assert counts["submitted"] == 3
    assert counts["finished"] == 2
    assert counts["cancelled"] == 1
    assert (counts["prompt_tokens"], counts["new_tokens"], counts["shared_tokens"]) == (6, 8, 0)
    text = engine.open_metrics()
    assert "# TYPE attngraph_new_tokens counter\nattngraph_new_tokens_total 8\n" in text
    assert "# TYPE attngraph_running gauge\nattngraph_running 0\n" in text
    assert text.endswith("# EOF\n")


def test_requests_can_be_awaited_together(decoder: Decoder) -> None:
    async def read(request: Any) -> list[int]:
        return [token async for token in request]

    async def both(*requests: Any) -> list[list[int]]:
        return await asyncio.gather(*map(read, requests))

    engine = Engine(decoder, max_batch=2)
    found = asyncio.run(both(engine.submit([1, 2], 6), engine.submit([3], 9), engine.submit([4], 2)))
    wanted = [([1, 2], 6), ([3], 9), ([4], 2)]
    assert found == [alone(decoder, prompt, max_new_tokens=count) for prompt, count in wanted]
