"""Recorded calls of decoders give what whole sequences give, whatever happens between two calls."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import CacheConfig, Decoder
from attngraph.codegen.cpu import decode
from attngraph.codegen.cpu.native import Chain
from attngraph.codegen.cpu.record import replay
from attngraph.codegen.cpu.record.recording import Recording
from attngraph.ir import budgets
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from tests.cache.small import greedy, stirred
from tests.runtime.small import together

VOCABULARY = 40


def learned() -> nn.Module:
    return stirred(DecoderLM(DecoderLMConfig(VOCABULARY, 2, 16, 2, max_tokens=128)))


def rotary() -> nn.Module:
    return stirred(ModernDecoder(ModernDecoderConfig(VOCABULARY, 2, 16, 4, 2, 4, 32)))


class Biased(nn.Module):
    """A layer of attention whose scores have a bias by distance: of a table, or of a slope for each head.
    With a window it sees the latest tokens alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.table = nn.Embedding(12, 2)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, 2, 8).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        at = torch.arange(s)
        apart = at[:, None] - at[None, :]
        mask = apart < 0
        scores = q @ k.transpose(-1, -2) / 8**0.5
        if self.kind == "window":
            mask = mask | (apart >= 6)
        elif self.kind == "table":
            scores = scores + self.table(apart.clamp(0, 11)).permute(2, 0, 1)
        else:
            scores = scores - self.slopes[:, None, None] * apart
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, s, 16))
        return x @ self.embed.weight.T


MODELS = {
    "learned": learned,
    "rotary": rotary,
    **{kind: (lambda kind=kind: stirred(Biased(kind))) for kind in ("window", "table", "slopes")},
}


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each run of a recording gave results."""
    runs: list[bool] = []
    run = Recording.run

    def counted(self: Any, inputs: Any) -> Any:
        found = run(self, inputs)
        runs.append(found is not None)
        return found

    monkeypatch.setattr(Recording, "run", counted)
    yield runs


def made(name: str, **config: Any) -> tuple[nn.Module, Decoder]:
    model = MODELS[name]()
    return model, attngraph.compile(model, cache=CacheConfig(**config) if config else True)


shared = functools.cache(made)
"""The same, for tests that leave the model and its recordings as they are."""


def recordings(decoder: Decoder) -> list[Recording]:
    """Those of a decoder that was derived once."""
    (step,) = decoder._derived.all()
    return [r for r in step._step._run._recordings.values() if isinstance(r, Recording)]


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def whole(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=2e-4, atol=2e-4)


def walk(decoder: Decoder, tokens: Tensor, first: int) -> list[Tensor]:
    """The logits of each token from `first` on."""
    state = decoder.prefill(tokens[:, :first])[1]
    return [decoder.decode(tokens[:, n : n + 1], state) for n in range(first, tokens.shape[1])]


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("name", MODELS)
def test_many_steps_while_pages_grow(name: str, layout: str, replayed: list[bool]) -> None:
    model, decoder = shared(name, layout=layout)
    tokens = ids(3, 84)
    wanted = whole(model, tokens)
    found = walk(decoder, tokens, 4)  # kept while later steps run
    assert sum(replayed) > 70 and all(replayed)
    for n, logits in enumerate(found, start=4):
        close(logits.reshape(3, -1), wanted[:, n])


def test_batches_of_different_sizes_and_several_states_in_turn(replayed: list[bool]) -> None:
    model, decoder = shared("rotary")
    batches = [ids(rows, 30, rows) for rows in (1, 2, 2, 5)]
    other = ids(2, 30, 9)
    other[:, :4] = batches[1][:, :4]
    states = [decoder.prefill(tokens[:, : 3 + n])[1] for n, tokens in enumerate(batches)]
    batches, states = [*batches, other], [*states, states[1].copy()]  # which goes its own way
    wanted = [whole(model, tokens) for tokens in batches]
    found: list[tuple[int, int, Tensor]] = []
    for step in range(20):
        for n, (tokens, state) in enumerate(zip(batches, states, strict=True)):
            at = (3, 4, 5, 6, 4)[n] + step
            found.append((n, at, decoder.decode(tokens[:, at : at + 1], state)))
    assert sum(replayed) > 60
    for n, at, logits in found:
        close(logits.flatten(0, 1), wanted[n][:, at])


def test_rows_that_divide_the_same_tokens_in_another_way(replayed: list[bool]) -> None:
    """As many tokens in all, but more blocks of queries than in the step that was recorded."""
    model, decoder = shared("rotary")
    tokens = ids(4, 16)
    wanted = whole(model, tokens)
    for lengths in ([7, 7, 7, 7], [7, 7, 7, 7], [13, 13, 1, 1], [1, 9, 9, 9], [16, 4, 4, 4], [7, 7, 7, 7]):
        logits, state = decoder.prefill([tokens[n, :count] for n, count in enumerate(lengths)])
        for row, count in enumerate(lengths):
            close(logits[row, :count], wanted[row, :count])
        assert state.lengths == lengths
    assert sum(replayed) >= 4


def test_weights_change_between_steps(replayed: list[bool]) -> None:
    model, decoder = made("rotary")
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = ids(2, 8)

    def check() -> None:
        for _ in range(3):
            wanted = whole(model, tokens)
            for n, logits in enumerate(walk(decoder, tokens, 4), start=4):
                close(logits.flatten(0, 1), wanted[:, n])

    check()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    check()
    square = next(m for m in model.modules() if isinstance(m, nn.Linear) and m.in_features == m.out_features)
    square.weight.data = square.weight.data.T  # the same memory, read in another order
    check()
    square.weight = nn.Parameter(torch.randn_like(square.weight) / 4)
    check()
    model.load_state_dict(kept)
    check()
    model.load_state_dict({name: value * 0.9 for name, value in kept.items()}, assign=True)
    check()
    assert sum(replayed) > 30


@pytest.mark.slow
def test_other_dtypes_and_back(replayed: list[bool]) -> None:
    model, decoder = made("learned")
    tokens = ids(2, 8)
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        for _ in range(3):
            wanted = whole(model, tokens)
            try:
                found = walk(decoder, tokens, 4)
            except attngraph.errors.AttnGraphError:
                assert dtype is torch.float64
                break
            for n, logits in enumerate(found, start=4):
                close(logits.flatten(0, 1), wanted[:, n])


@pytest.mark.slow
def test_threads_share_a_decoder(replayed: list[bool]) -> None:
    model, decoder = shared("rotary")
    batches = [ids(2, 40, seed) for seed in range(4)]
    wanted = [whole(model, tokens) for tokens in batches]
    walk(decoder, batches[0][:, :6], 3)
    found: dict[int, list[Tensor]] = {}

    def run(n: int) -> None:
        found[n] = walk(decoder, batches[n], 4)

    together([functools.partial(run, n) for n in range(4)])
    assert sum(replayed) > 50
    for n, logits in found.items():
        close(torch.cat(logits, 1), wanted[n][:, 4:])


def test_results_stay_until_the_same_thread_steps_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's step between a step and the writing of its keys to the pages changes nothing."""
    from attngraph.runtime.kv_cache import KVCache

    model, decoder = shared("learned")
    mine, theirs = ids(1, 12), ids(1, 12, 1)
    wanted, other_state = whole(model, mine), decoder.prefill(theirs[:, :4])[1]
    state = decoder.prefill(mine[:, :4])[1]
    write, main = KVCache.write, threading.get_ident()
    at = iter(range(4, 12))

    def late(self: KVCache, news: Any, given: Any, counts: Any) -> None:
        if threading.get_ident() == main:
            n = next(at)
            step = threading.Thread(target=decoder.decode, args=(theirs[:, n : n + 1], other_state))
            step.start()
            step.join()
        write(self, news, given, counts)

    monkeypatch.setattr(KVCache, "write", late)
    for n in range(4, 12):
        close(decoder.decode(mine[:, n : n + 1], state).flatten(0, 1), wanted[:, n])


def _mode(n: int, decoder: Decoder, state: Any) -> Any:
    return (torch.inference_mode, torch.no_grad, torch.enable_grad)[n % 3]()


def _threads(n: int, decoder: Decoder, state: Any) -> Any:
    torch.set_num_threads(1 + n // 4 % 2)
    return contextlib.nullcontext()


def _a_token_out_of_range(n: int, decoder: Decoder, state: Any) -> Any:
    if n in (4, 5, 12):
        with pytest.raises((IndexError, RuntimeError)):
            decoder.decode(torch.full((2, 1), VOCABULARY + 7), state)
    return contextlib.nullcontext()


def _other_dtypes_of_tokens(n: int, decoder: Decoder, state: Any) -> Any:
    return contextlib.nullcontext((torch.int64, torch.int32)[n % 2])


@pytest.mark.parametrize(
    "before",
    [_mode, _a_token_out_of_range, _other_dtypes_of_tokens, pytest.param(_threads, marks=pytest.mark.slow)],
)
def test_what_happens_between_two_steps(before: Callable[..., Any], replayed: list[bool]) -> None:
    model, decoder = made("learned")
    tokens = ids(2, 24)
    wanted, state = whole(model, tokens), decoder.prefill(tokens[:, :4])[1]
    for n in range(4, 24):
        with before(n, decoder, state) as dtype:
            step = tokens[:, n : n + 1]
            logits = decoder.decode(step.to(dtype) if isinstance(dtype, torch.dtype) else step, state)
        close(logits.flatten(0, 1), wanted[:, n])
    assert sum(replayed) > 10


def test_a_recording_does_not_keep_the_pages_of_a_state() -> None:
    _, decoder = shared("rotary")
    tokens = ids(2, 10)
    state = decoder.prefill(tokens[:, :4])[1]
    for n in range(4, 10):
        decoder.decode(tokens[:, n : n + 1], state)
    pages = {t.untyped_storage().data_ptr() for t in state.stores().values()}
    assert recordings(decoder)
    for recording in recordings(decoder):
        held = [v for v in recording.values.values() if isinstance(v, Tensor)]
        held += [t for reader in recording.readers for t in reader.link.held]
        assert pages.isdisjoint(t.untyped_storage().data_ptr() for t in held)


def test_generation_beams_and_the_engine_choose_what_the_model_chooses() -> None:
    model, decoder = shared("rotary")
    prompt = ids(2, 5)
    wanted = greedy(functools.partial(whole, model), prompt, 12)
    for _ in range(2):
        assert decoder.generate(prompt, max_new_tokens=12).tolist() == wanted.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay.Replay, "_may_record", lambda self, inputs: False)
        beams = decoder.generate(prompt, max_new_tokens=12, num_beams=3)
    for _ in range(2):
        assert decoder.generate(prompt, max_new_tokens=12, num_beams=3).tolist() == beams.tolist()
    engine = attngraph.Engine(decoder)
    for _ in range(2):
        requests = [engine.submit(row, max_new_tokens=12) for row in prompt]
        engine.run()
        for request, row in zip(requests, wanted, strict=True):
            assert request.result() == row[5:].tolist()


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("name", ["learned", "rotary", "window"])
def test_prompts_of_many_tokens_are_recorded_too(name: str, layout: str, replayed: list[bool]) -> None:
    """Rows of other lengths, and chunks after kept tokens, of as many tokens in all."""
    model, decoder = shared(name, layout=layout)
    tokens = ids(2, 90)
    wanted = whole(model, tokens)
    for lengths in ([40, 40], [40, 40], [79, 1], [20, 60], [40, 40]):
        logits, state = decoder.prefill([tokens[n, :count] for n, count in enumerate(lengths)])
        chunk = [tokens[n, count : count + 5] for n, count in enumerate(lengths)]
        more = decoder.decode(chunk, state)
        for row, count in enumerate(lengths):
            close(logits[row, :count], wanted[row, :count])
            close(more[row], wanted[row, count : count + 5])
    assert len(replayed) >= (3 if layout == "paged" else 5) and all(replayed)


def test_rows_that_keep_more_than_a_recording_is_made_for_run_the_graph(
    replayed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "LONG", 4 * 40 * (30 + 20))  # 4 heads, 40 new tokens: up to 30 kept ones
    model, decoder = made("rotary")
    tokens = ids(1, 200)
    wanted, state = whole(model, tokens), None
    for first in range(0, 200, 40):
        part = tokens[:, first : first + 40]
        logits, state = (decoder.decode(part, state), state) if state else decoder.prefill(part)
        close(logits, wanted[:, first : first + 40])
        decoder.prefill(part)  # nothing kept
    assert replayed.count(False) >= 2 and replayed.count(True) >= 2


def test_what_takes_more_memory_than_recordings_may_is_not_recorded(
    replayed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, decoder = made("learned")
    one, other = ids(1, 60), ids(1, 50)
    decoder.prefill(one), decoder.prefill(one)
    (recording,) = recordings(decoder)
    monkeypatch.setattr(budgets, "RECORDED_BYTES", recording.nbytes)
    for tokens in (one, other, other, one):
        close(decoder.prefill(tokens)[0], whole(model, tokens))
    assert sum(r.nbytes for r in recordings(decoder)) <= recording.nbytes
    monkeypatch.setattr(budgets, "RECORDED_BYTES", 1000)
    runs = len(replayed)
    for _ in range(4):
        close(decoder.prefill(ids(1, 70))[0], whole(model, ids(1, 70)))
    assert len(replayed) == runs


def test_the_logits_of_the_call_that_records_are_the_callers_alone(replayed: list[bool]) -> None:
    """Later calls do not write to them, and the recording keeps no copy of them."""
    _, decoder = made("learned")
    decoder.prefill(ids(1, 60))
    logits, _ = decoder.prefill(ids(1, 60))
    before = logits.clone()
    (recording,) = recordings(decoder)
    links = [link for piece in recording.pieces if isinstance(piece, Chain) for link in piece.links]
    kept = {t.untyped_storage().data_ptr() for link in links for t in link.results}
    assert recording.renewed and logits.untyped_storage().data_ptr() not in kept
    assert all(t.shape[-1] != VOCABULARY for link in links for t in link.results)
    later, _ = decoder.prefill(ids(1, 60, seed=1))
    assert replayed == [True] and not torch.equal(later, before)
    assert torch.equal(logits, before)
