"""Decoders inside of torch.inference_mode() answer as outside of it, and their states cross its border."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import CacheConfig, KVCache
from attngraph.capture.guards import ValueGuard
from attngraph.ir import budgets
from attngraph.ir.ops.cached_attention import Rows, counts
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from attngraph.models.mla import MLAConfig, MLADecoder

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
inside, outside = torch.inference_mode, contextlib.nullcontext
Mode = Callable[[], Any]
pytestmark = [pytest.mark.usefixtures("graphs_of_this_run")]
CROSSINGS = pytest.mark.parametrize("first, second", [(inside, inside), (inside, outside), (outside, inside)])


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return DecoderLM(DecoderLMConfig(40, 2, 16, 2, max_tokens=48)).eval()


def tokens(rows: int, count: int) -> Tensor:
    return torch.randint(0, 40, (rows, count), generator=torch.Generator().manual_seed(count))


def whole(model: nn.Module, *args: Tensor) -> Tensor:
    with torch.no_grad():
        return model(*args)


def latent() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 1, "width": 24, "heads": 4, "latent": 16, "nope": 6, "rope": 4}
    return MLADecoder(MLAConfig(**sizes, value=5, query_rank=8, hidden=16)).eval()


CASES: dict[str, tuple[Callable[[], nn.Module], CacheConfig]] = {
    "contiguous": (language_model, CacheConfig()),
    "paged": (language_model, CacheConfig(layout="paged", page=4)),
    "a latent": (latent, CacheConfig()),
}


@pytest.mark.parametrize("name", CASES)
@CROSSINGS
def test_a_state_may_be_made_used_and_changed_on_either_side(
    first: Mode, second: Mode, name: str, tmp_path: Path
) -> None:
    (make, config), ids = CASES[name], tokens(2, 20)
    model = make()
    decoder = attngraph.compile(model, cache=config)
    with first():
        start, state = decoder.prefill(ids[:, :5])
    pieces = [start]
    for mode, (begin, end) in zip((second, first, second), ((5, 6), (6, 9), (9, 12)), strict=True):
        with mode():
            pieces.append(decoder.decode(ids[:, begin:end].clone(), state))
    torch.testing.assert_close(torch.cat(pieces, 1), whole(model, ids[:, :12]), **CLOSE)
    with first():
        state.reorder([1, 0, 1])
        copied = state.copy()
        copied.save(tmp_path / "state")
        loaded = KVCache.load(tmp_path / "state")
        state.crop(11)
    order = ids[[1, 0, 1]]
    for found, at in ((state, 11), (copied, 12), (loaded, 12)):
        with second():
            logits = decoder.decode(order[:, at:].clone(), found)
        torch.testing.assert_close(logits, whole(model, order)[:, at:], **CLOSE)


@CROSSINGS
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_generate_gives_the_same_tokens_inside(first: Mode, second: Mode, options: dict[str, Any]) -> None:
    model, ids = language_model(), tokens(2, 7)
    decoder = attngraph.compile(model, cache=True)
    wanted = attngraph.compile(model, cache=True).generate(ids, 6, **options)
    for mode in (first, second):
        with mode():
            assert torch.equal(decoder.generate(ids.clone(), 6, **options), wanted)


@CROSSINGS
def test_an_engine_may_be_stepped_on_either_side(first: Mode, second: Mode) -> None:
    decoder = attngraph.compile(language_model(), cache=True)
    prompts = [tokens(1, n)[0] for n in (3, 9, 4, 6)]
    wanted = [decoder.generate(p, 5)[0, len(p) :].tolist() for p in prompts]
    engine = attngraph.Engine(attngraph.compile(language_model(), cache=True), max_batch=2, chunk=4)
    with first():
        requests = [engine.submit(p.clone(), 5) for p in prompts]
        for _ in range(3):
            engine.step()
    with second():
        engine.run()
    assert [r.result() for r in requests] == wanted


@CROSSINGS
def test_what_is_computed_once_for_a_prompt_crosses_too(first: Mode, second: Mode) -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(EncoderDecoderConfig(layers=1, width=16, heads=2)).eval()
    source, target = tokens(2, 6), tokens(2, 9)
    decoder = attngraph.compile(model, cache=CacheConfig(tokens="target"))
    with first():
        start, state = decoder.prefill(target[:, :4], source=source.clone())
    with second():
        state.reorder([1, 0])
        rest = decoder.decode(target[[1, 0], 4:].clone(), state)
    wanted = whole(model, source, target)
    torch.testing.assert_close(start, wanted[:, :4], **CLOSE)
    torch.testing.assert_close(rest, wanted[[1, 0], 4:], **CLOSE)


def test_one_decoder_is_derived_for_both_sides() -> None:
    decoder = attngraph.compile(language_model(), cache=True)
    for mode in (inside, outside, torch.no_grad, inside):
        with mode():
            decoder.prefill(tokens(2, 5))
    assert len(decoder._derived.all()) == 1


@pytest.mark.parametrize("needs_gradients", [True, False])
def test_a_model_made_inside_is_served_on_either_side(needs_gradients: bool) -> None:
    with inside():
        model, ids = language_model().requires_grad_(needs_gradients), tokens(2, 9)
    decoder = attngraph.compile(model, cache=True)
    for mode in (outside, inside):
        with mode():
            start, state = decoder.prefill(ids[:, :5])
            rest = decoder.decode(ids[:, 5:], state)
        torch.testing.assert_close(torch.cat([start, rest], 1), whole(model, ids), **CLOSE)


def test_counts_of_tensors_without_a_version_are_read_each_time() -> None:
    with inside():
        rows = Rows(*(torch.tensor(n) for n in ([[0]], [0, 3], [0], [0])))
        assert counts(rows).new == [3]
        rows.starts[1] = 2
        assert counts(rows).new == [2]


def test_a_large_buffer_without_a_version_is_compared_by_its_contents() -> None:
    with inside():
        buffer = torch.zeros(budgets.GUARDED_ELEMENTS + 1)
    guard = ValueGuard([buffer])
    assert guard.holds([buffer])
    with inside():
        buffer[7] = 1
    assert not guard.holds([buffer])
