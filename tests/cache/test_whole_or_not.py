"""A call that fails anywhere has changed nothing, or what it changed is an error at every later use.

Faults come before lines of our Python and in calls of torch (`faults.py`), in each call that changes a state,
for a state that keeps everything that a state can keep. By default at places drawn by chance; slow tests try
them all."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph import CacheConfig, CacheError, KVCache
from attngraph.ir.ops import memory
from tests.cache.faults import KINDS, fails, places
from tests.cache.models import VOCABULARY, Small, apart, attend, convolved, heads, joined

pytestmark = pytest.mark.usefixtures("graphs_of_this_run")

AT, FEW = 14, 24
CONFIGS = {
    "contiguous": CacheConfig(rollback=2),
    "paged": CacheConfig(layout="paged", page=3, rollback=2, snapshots=2),
    "no slack": CacheConfig(rollback=0),
    "rounded": CacheConfig(dtype=torch.int8, rollback=2),
}


def mixed(m: Any, x: Tensor) -> Tensor:
    """Attention to all tokens, to a window, a convolution, a mean of all tokens, linear attention with a
    decay, a running maximum."""
    far, (q, k, v) = apart(x.shape[1]), m.qkv(x).chunk(3, -1)
    for keep in (far >= 0, (far >= 0) & (far < 4)):
        x = x + joined(attend(*(heads(t) for t in m.qkv(x).chunk(3, -1)), keep))
    x = x + convolved(m, x)
    x = x + x.cumsum(1) / (far[:, :1] + 1)
    x = x + ((q @ k.mT) * (0.9 ** far.clamp(min=0) * (far >= 0))) @ v / 8
    return x + x.cummax(1)[0]


@functools.cache
def made(config: str) -> tuple[Any, KVCache, Tensor, Tensor]:
    """A decoder, a state of two rows of AT tokens, tokens, and their logits."""
    torch.manual_seed(0)
    model = Small(mixed)
    ids = torch.randint(0, VOCABULARY, (2, 60))
    with torch.no_grad():
        whole = model(ids)
    decoder = attngraph.compile(model, cache=CONFIGS[config])
    _, state = decoder.prefill(ids[:, :9])
    for n in range(9, AT):
        decoder.decode(ids[:, n : n + 1], state)
    return decoder, state, ids, whole


CALLS: dict[str, Callable[[Any, KVCache, Tensor], Any]] = {
    "a token": lambda d, s, ids: d.decode(ids[:, AT : AT + 1], s),
    "a chunk": lambda d, s, ids: d.decode(ids[:, AT : AT + 20], s),
    "some tokens": lambda d, s, ids: d.decode([ids[0, AT : AT + 3], ids[1, AT : AT + 1]], s),
    "a row ends": lambda d, s, ids: s.reset(1),
    "rows change places": lambda d, s, ids: s.reorder([1, 0]),
    "a row is copied": lambda d, s, ids: s.reorder([1, 1, 0]),
    "a copy": lambda d, s, ids: s.copy(),
}
PLACES = {"rows change places": [1, 0], "a row is copied": [1, 1, 0]}
CLOSE = dict.fromkeys(CONFIGS, 1e-4) | {"rounded": 0.1}
OFTEN = 3
"""So often a call is made before places are counted: it is recorded by then."""


def outcome(config: str, call: str, state: KVCache) -> str:
    """What a state is after a call that failed: "before", "after", or "error" at every use."""
    decoder, base, ids, whole = made(config)
    try:
        lengths = state.lengths
    except CacheError as fault:
        assert "did not end" in str(fault) and "What to do" in str(fault)
        uses = [
            state.copy,
            state.reset,
            lambda: state.reorder([0]),
            lambda: decoder.decode(ids[:, :1], state),
        ]
        for use in uses:
            with pytest.raises(CacheError, match="did not end"):
                use()
        return "error"
    done = base.copy()
    CALLS[call](decoder, done, ids)
    for name, rows, then in (("before", [0, 1], base), ("after", PLACES.get(call, [0, 1]), done)):
        if lengths == then.lengths:
            tokens = [ids[r, n : n + 1] for r, n in zip(rows, lengths, strict=True)]
            found = decoder.decode(torch.stack(tokens), state.copy())
            wanted = torch.stack([whole[r, n : n + 1] for r, n in zip(rows, lengths, strict=True)])
            if torch.allclose(found, wanted, rtol=CLOSE[config], atol=CLOSE[config]):
                return name
    raise AssertionError("the state is neither what it was nor what the call makes of it")


def check(config: str, call: str, kind: str, most: int | None) -> collections.Counter[str]:
    decoder, base, ids, whole = made(config)
    run = CALLS[call]
    for _ in range(OFTEN):
        run(decoder, base.copy(), ids)
    counted, other = base.copy(), base.copy()
    found: collections.Counter[str] = collections.Counter()
    for at in places(kind, lambda: run(decoder, counted, ids), most):
        state = base.copy()
        if fails(kind, at, lambda state=state: run(decoder, state, ids)):  # type: ignore[misc]
            found[outcome(config, call, state)] += 1
    logits = decoder.decode(ids[:, AT : AT + 1], other)  # a state that no failure has touched
    torch.testing.assert_close(logits, whole[:, AT : AT + 1], rtol=CLOSE[config], atol=CLOSE[config])
    return found


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_fails_changes_all_or_nothing(config: str, call: str, kind: str) -> None:
    found = check(config, call, kind, FEW)
    assert found.total() > 0
    assert found["after"] <= 2, "the state changes at the end of a call"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_call_that_fails_at_any_place_changes_all_or_nothing(config: str, call: str) -> None:
    found = check(config, call, "line", None) + check(config, call, "call", None)
    print(f"{config}, {call}: {found.total()} places, {dict(found)}")
    assert found["before"] > 10 and found["after"] <= 3


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_a_state_that_could_not_grow_goes_on_as_it_was(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, base, ids, whole = made("contiguous" if layout == "contiguous" else "paged")
    state, real = base.copy(), memory.empty

    def short(*_: Any) -> Tensor:
        raise MemoryError("no memory")

    refused = 0
    for n in range(AT, 60):
        before = [group.capacity for group in state.groups.values()]
        monkeypatch.setattr(memory, "empty", short)
        try:
            logits = decoder.decode(ids[:, n : n + 1], state)
        except MemoryError:
            refused += 1
            assert state.lengths == [n, n] and [g.capacity for g in state.groups.values()] == before
            monkeypatch.setattr(memory, "empty", real)
            logits = decoder.decode(ids[:, n : n + 1], state)
        torch.testing.assert_close(logits, whole[:, n : n + 1], rtol=1e-4, atol=1e-4)
    assert refused > 1 or layout == "contiguous"


def test_a_saved_state_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, base, _, _ = made("contiguous")
    path = tmp_path / "state"
    base.save(path)
    kept, save = path.read_bytes(), torch.save

    def full(value: Any, file: Any) -> None:
        save(value, file)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        base.save(path)
    assert path.read_bytes() == kept and list(tmp_path.iterdir()) == [path]


def test_a_request_goes_on_after_a_step_that_was_interrupted() -> None:
    decoder, _, ids, _ = made("paged")

    def started() -> tuple[attngraph.Engine, list[Any]]:
        engine = attngraph.Engine(decoder, max_batch=2, chunk=4)
        prompts = (ids[0, :6], ids[1, :3], ids[0, 3:5])
        requests = [engine.submit(p, 5, temperature=n * 0.7, seed=n) for n, p in enumerate(prompts)]
        engine.step()
        return engine, requests

    engine, requests = started()
    wanted = [request.result() for request in requests]
    ended: collections.Counter[str] = collections.Counter()
    for step in range(4):
        for kind in KINDS:
            counted, _ = started()
            for _ in range(step):
                counted.step()
            for at in places(kind, counted.step, 8, seed=step):
                engine, requests = started()
                for _ in range(step):
                    engine.step()
                fails(kind, at, engine.step)
                for request, tokens in zip(requests, wanted, strict=True):
                    try:
                        assert request.result() == tokens
                        ended["right"] += 1
                    except (CacheError, MemoryError) as fault:
                        assert request.error is fault
                        ended["error"] += 1
                assert not engine.running and not engine.waiting
    assert ended["right"] > 10 * ended["error"], ended
