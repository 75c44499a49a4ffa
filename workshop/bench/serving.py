"""What drafts and shared beginnings of prompts save on the CPU.

    python -m workshop serving [--new 96] [--json FILE]

A Llama of 100M parameters with random weights, float32. Two questions:

    a draft        one prompt that repeats itself, continued greedily: without a draft, and with what followed
                   the last time that the text had its latest tokens (`draft="lookup"`). A model with random
                   weights soon repeats itself as well, so nearly every guess is right: this is what a draft
                   can save, not what it saves on your text. `per_step`: tokens that a step gave.
    beginnings     requests of an engine whose prompts share nine tenths, and as many of the same lengths that
                   share nothing. `shared`: the part of the prompts' tokens that were not computed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import attngraph
from workshop.bench import models
from workshop.harness import Cell, Options, Row, Suite, in_turns

PROMPT, REQUESTS = 320, 12


def drafted(decoder: attngraph.Decoder, vocabulary: int, new: int, rounds: int) -> dict[str, Row]:
    ids = torch.randint(vocabulary, (1, 24)).repeat(1, 4)
    ways: dict[str, dict[str, Any]] = {
        "no draft": {},
        "lookup, 8": {"draft": "lookup"},
        "lookup, 4": {"draft": "lookup", "draft_tokens": 4},
    }
    run = functools.partial(decoder.generate, ids, new)
    wanted, steps = run(), dict[str, int]()
    kind = type(decoder.calls.derived.all()[-1])
    for name, options in ways.items():
        with mock.patch.object(kind, "advance", autospec=True, side_effect=kind.advance) as advance:
            if not torch.equal(run(**options), wanted):
                raise AssertionError(f"{name}: other tokens than without a draft")
        steps[name] = advance.call_count
    found = in_turns({name: functools.partial(run, **way) for name, way in ways.items()}, rounds, 1)
    for name, row in found.items():
        row |= {"tokens_per_second": new / row["seconds"], "per_step": new / steps[name]}
    return found


def served(decoder: attngraph.Decoder, vocabulary: int, prompt: int, rounds: int) -> dict[str, Row]:
    begin = torch.randint(vocabulary, (prompt * 9 // 10,))
    shared: dict[str, float] = {}

    def serve(name: str, alike: bool) -> None:
        engine = attngraph.Engine(decoder, max_batch=4)
        for _ in range(REQUESTS):
            ids = torch.randint(vocabulary, (prompt,))
            if alike:
                ids[: len(begin)] = begin
            engine.submit(ids, 8)
        engine.run()
        counts = engine.counters()
        shared[name] = counts["shared_tokens"] / counts["prompt_tokens"]

    ways = {"nothing shared": False, "nine tenths shared": True}
    calls = {name: functools.partial(serve, name, alike) for name, alike in ways.items()}
    found = in_turns(calls, rounds, 1)
    for name, row in found.items():
        row |= {"requests_per_second": REQUESTS / row["seconds"], "shared": shared[name]}
    return found


def cells(options: Options) -> Iterator[Cell]:
    new, prompt, rounds = (8, 80, 2) if options.small else (options.new, PROMPT, 4)

    @functools.cache
    def made() -> tuple[attngraph.Decoder, int]:
        model = models.made(models.tiny_llama if options.small else models.llama)
        return attngraph.compile(model, cache=True), model.config.vocab_size

    yield Cell("a draft", lambda: drafted(*made(), new, rounds))
    yield Cell("beginnings", lambda: served(*made(), prompt, rounds))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--new", type=int, default=96)


SUITE = Suite("serving", __doc__, cells, _arguments)
MAIN = SUITE.main
