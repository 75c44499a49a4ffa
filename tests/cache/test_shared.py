"""Prompts of an engine that begin alike are computed once, and every request gets what it gets alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import attngraph
from attngraph import CacheConfig, Engine
from tests.cache.test_drafts import KINDS
from tests.cache.test_generate import VOCABULARY, stir

pytestmark = pytest.mark.usefixtures("graphs_of_this_run")

PAGE = 4


@pytest.fixture(scope="module", params=KINDS)
def decoder(request: Any) -> Any:
    model = KINDS[request.param]().eval()
    stir(model, 0)
    return attngraph.compile(model, cache=CacheConfig(page=PAGE))


def alone(decoder: Any, prompt: list[int], count: int) -> list[int]:
    found = decoder.generate(torch.tensor([prompt]), count)
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def drawn(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, VOCABULARY) for _ in range(count)]


def test_requests_at_once_share_what_they_begin_with(decoder: Any) -> None:
    draw = random.Random(0)
    begin = drawn(draw, 23)
    prompts = [[*begin, 3 + n, *drawn(draw, n)] for n in (3, 1, 6, 2, 4)]
    engine = Engine(decoder, max_batch=3, chunk=8)
    requests = [engine.submit(prompt, 5) for prompt in prompts]
    engine.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.tokens == alone(decoder, prompt, 5)
    assert [request.shared for request in requests] == [0, 23, 23, 23, 23]
    assert engine.counters()["shared_tokens"] == 4 * 23


def test_a_chat_that_goes_on_computes_its_new_turn_alone(decoder: Any) -> None:
    draw = random.Random(1)
    engine, talk = Engine(decoder, max_batch=2), drawn(draw, 9)
    for turn in range(3):
        request = engine.submit(talk, 5)
        assert request.result() == alone(decoder, talk, 5)
        assert request.shared == (len(talk) - 4 if turn else 0)
        talk += [*request.tokens, *drawn(draw, 3)]


def test_what_is_used_least_gives_way(decoder: Any) -> None:
    draw = random.Random(2)
    engine = Engine(decoder, max_batch=1, kept=2)
    often, once, never = (drawn(draw, 8) for _ in range(3))
    for prompt in (often, once, [*often, 3, 4], never, [*often, 5, 6]):
        request = engine.submit(prompt, 3)
        assert request.result() == alone(decoder, prompt, 3)
    carries = bool(engine.state and engine.state.plan.carried)
    # Out of a sum no token can be taken: a prompt that goes another way shares none of what was kept.
    assert request.shared == 0 if carries else request.shared >= 8
    again = engine.submit([*once, 7], 3)
    assert again.result() == alone(decoder, [*once, 7], 3)
    assert again.shared == 0


def test_kept_rows_give_way_to_requests_that_need_their_tokens(decoder: Any) -> None:
    draw = random.Random(3)
    engine = Engine(decoder, max_batch=2, max_tokens=30)
    prompts = [drawn(draw, 12) for _ in range(6)]
    for prompt in prompts:
        engine.submit(prompt, 3)
    engine.run()
    assert engine.state is not None
    for prompt in prompts:
        assert engine.submit(prompt, 3).result() == alone(decoder, prompt, 3)
    held = sum(engine.state.lengths)
    assert held <= 30


@pytest.mark.parametrize("seed", range(3))
def test_every_request_gets_what_it_gets_alone_whatever_is_shared(decoder: Any, seed: int) -> None:
    draw = random.Random(seed)
    begins = [drawn(draw, n) for n in (5, 9, 14)]
    begins.append(begins[1] + drawn(draw, 6))
    engine = Engine(decoder, max_batch=3, chunk=draw.choice([4, 64]), kept=draw.choice([0, 2, 5]))
    asked = []
    for _ in range(10):
        prompt = draw.choice(begins) + drawn(draw, draw.randint(0, 5))
        asked.append((engine.submit(prompt, draw.randint(1, 6)), prompt))
        for _ in range(draw.randint(0, 3)):
            engine.step()
        if draw.random() < 0.15:
            asked.pop()[0].cancel()
    engine.run()
    for request, prompt in asked:
        assert request.tokens == alone(decoder, prompt, request.options.max_new_tokens)
    if engine.state is not None:
        assert not any(engine.state.lengths[:3])
