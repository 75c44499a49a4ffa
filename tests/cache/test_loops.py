"""Decoders of models with a loop over tokens in which one step hands anything to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.codegen.cpu.loops import whole_step
from attngraph.codegen.cpu.record.recording import Recording
from attngraph.ir.language.step_program import parse
from tests.cache.small import (
    VOCABULARY,
    WIDTH,
    Mixing,
    goes_back_to_snapshots,
    goes_on_when_loaded,
    refuses,
)  # fmt: skip


def _running_maximum(model: Mixing, x: Tensor) -> Tensor:
    found, most = [], torch.full_like(x[:, 0], -torch.inf)
    for t in range(x.shape[1]):
        most = torch.maximum(most, x[:, t])
        found.append(most)
    return torch.stack(found, 1)


def _first_token_begins(model: Mixing, x: Tensor) -> Tensor:
    gate, found = model.gate(x), [x[:, 0]]
    for t in range(1, x.shape[1]):
        found.append(torch.tanh(found[-1] * gate[:, t] + x[:, t]))
    return torch.stack(found, 1)


def _own_beginning(model: Mixing, x: Tensor) -> Tensor:
    state, found = model.begin.expand(x.shape[0], -1), []
    for t in range(x.shape[1]):
        state = torch.sin(state + x[:, t])
        found.append(state)
    return torch.stack(found, 1)


def _cells_that_begin_with_new_zeros(model: Mixing, x: Tensor) -> Tensor:
    hidden = x.new_zeros(x.shape[0], WIDTH)
    state, found = hidden, []
    for t in range(x.shape[1]):
        hidden, state = model.lstm(x[:, t], (hidden, state))
        found.append(hidden)
    return torch.stack(found, 1)


class Logits(Mixing):
    """The loop itself makes the logits."""

    def __init__(self) -> None:
        super().__init__(_cells_that_begin_with_new_zeros)

    def forward(self, ids: Tensor) -> Tensor:
        x, found = self.embed(ids), []
        hidden = x.new_zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            hidden = self.gru(x[:, t], hidden)
            found.append(self.logits(hidden))
        return torch.stack(found, 1)


def _two_steps_back(model: Mixing, x: Tensor) -> Tensor:
    state = before = torch.zeros_like(x[:, 0])
    found = []
    for t in range(x.shape[1]):
        state, before = torch.sin(state + before + x[:, t]), state
        found.append(state)
    return torch.stack(found, 1)


def _without_the_own_token(model: Mixing, x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        found.append(state)
        state = torch.tanh(state + x[:, t])
    return x + torch.stack(found, 1)


def _lstm(model: Mixing, x: Tensor) -> Tensor:
    state, found = None, []
    for part in x.unbind(1):
        state = model.lstm(part, state)
        found.append(state[0])
    return torch.stack(found, 1)


def _gru_written_in_place(model: Mixing, x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), torch.empty_like(x)
    for t in range(x.shape[1]):
        state = model.gru(x[:, t], state)
        found[:, t] = state
    return found


def _heads_joined_with_rows(model: Mixing, x: Tensor) -> Tensor:
    state, found = torch.zeros(x.shape[0], 2, WIDTH // 2), []
    for t in range(x.shape[1]):
        part = x[:, t].view(-1, 2, WIDTH // 2)
        state = torch.tanh(state.flatten(0, 1) + part.flatten(0, 1)).view(x.shape[0], 2, WIDTH // 2)
        found.append(state.flatten(1))
    return torch.stack(found, 1)


def _counts(model: Mixing, x: Tensor) -> Tensor:
    count, state, found = torch.zeros(x.shape[0], 1, dtype=torch.int64), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        count = torch.where(x[:, t, :1] > 0, count + 1, 0)
        state = torch.where(count > 1, state, x[:, t])
        found.append(state * count)
    return torch.stack(found, 1)


def _tokens_first(model: Mixing, x: Tensor) -> Tensor:
    state, found = torch.zeros(1, x.shape[0], WIDTH), []
    for part in x.transpose(0, 1).split(1):
        state = torch.tanh(model.gate(state) + part)
        found.append(state)
    return torch.cat(found).transpose(0, 1)


DECODED: dict[str, Callable[[Mixing, Tensor], Tensor]] = {
    "a running maximum": _running_maximum,
    "a loop that begins with the first token": _first_token_begins,
    "a state that is learned": _own_beginning,
    "a step that looks two steps back": _two_steps_back,
    "cells that begin with new zeros": _cells_that_begin_with_new_zeros,
    "a result without the own token": _without_the_own_token,
    "LSTM cells": _lstm,
    "GRU cells, written in place": _gru_written_in_place,
    "heads joined with the rows": _heads_joined_with_rows,
    "a count of tokens": _counts,
    "tokens in the first dimension": _tokens_first,
}  # fmt: skip


@pytest.mark.parametrize("name", DECODED)
def test_a_loop_decodes(name: str, decodes: Any) -> None:
    decoder = decodes(Mixing(DECODED[name]), VOCABULARY, 24)
    cache = decoder.report.cache
    assert cache.bytes_per_token == 0
    assert sum(size for _, size in cache.carried) > 0


def test_a_loop_that_makes_the_logits_decodes(decodes: Any) -> None:
    decodes(Logits(), VOCABULARY, 24)


FOLDS: dict[str, Callable[[Mixing, Tensor], Tensor]] = {
    "cumprod": lambda model, x: model.gate(x).cumprod(1),
    "cumprod of whole numbers": lambda model, x: x * (x[..., :1] > -1).cumprod(1),
    "cummax": lambda model, x: x.cummax(1).values,
    "cummin of a width beside heads": lambda model, x: x.unflatten(-1, (2, 4)).transpose(1, 2).cummin(-2)[0]
    .transpose(1, 2).flatten(2),
    "logcumsumexp": lambda model, x: (100 * x).logcumsumexp(-2) / 100,
    "logcumsumexp with nothing at the beginning": lambda model, x: x.masked_fill(x > -1, -torch.inf)
    .logcumsumexp(1).exp(),
}  # fmt: skip


class Recurrent(nn.Module):
    """A model with one of PyTorch's recurrent networks as its only mixer."""

    def __init__(self, layer: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer, self.logits = (
            nn.Embedding(VOCABULARY, WIDTH),
            layer,
            nn.Linear(width, VOCABULARY),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        first = getattr(self.layer, "batch_first", True)
        found = self.layer(x)[0] if first else self.layer(x.transpose(0, 1))[0].transpose(0, 1)
        result: Tensor = self.logits(found)
        return result


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: Recurrent(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "two layers of LSTM, tokens first": lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, 2)),
    "LSTM with a projection": lambda: Recurrent(nn.LSTM(WIDTH, 6, batch_first=True, proj_size=4), 4),
    "RNN without biases": lambda: Recurrent(nn.RNN(WIDTH, 5, batch_first=True, bias=False), 5),
    "RNN with relu": lambda: Recurrent(nn.RNN(WIDTH, WIDTH, batch_first=True, nonlinearity="relu")),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_network_of_pytorch_decodes(name: str, decodes: Any) -> None:
    decodes(RECURRENT[name](), VOCABULARY, 24)


@pytest.mark.slow
def test_a_network_that_runs_in_both_directions_is_refused() -> None:
    model = Recurrent(nn.GRU(WIDTH, 4, batch_first=True, bidirectional=True)).eval()
    refuses(model, r"test_loops\.py:\d+: .*both directions")


@pytest.mark.parametrize("name", FOLDS)
def test_an_operation_that_folds_all_tokens_so_far_decodes(name: str, decodes: Any) -> None:
    decoder = decodes(Mixing(FOLDS[name]), VOCABULARY, 24)
    assert decoder.report.cache.bytes_per_token == 0


@pytest.mark.parametrize(
    "mix", [lambda model, x: x.flip(1).cummax(1).values.flip(1), lambda model, x: x + x.cummax(0).values]
)
def test_a_fold_of_later_tokens_or_of_rows_is_refused(mix: Callable[[Mixing, Tensor], Tensor]) -> None:
    refuses(Mixing(mix), rows=2)


def _by_place(model: Mixing, x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(state + x[:, t] * (t + 1))
        found.append(state)
    return torch.stack(found, 1)


def _looks_ahead(model: Mixing, x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(state + x[:, min(t + 1, x.shape[1] - 1)])
        found.append(state)
    return torch.stack(found, 1)


def _backwards(model: Mixing, x: Tensor) -> Tensor:
    return _first_token_begins(model, x.flip(1)).flip(1)


def _mixes_rows(model: Mixing, x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(state.mean(0, keepdim=True) + x[:, t])
        found.append(state)
    return torch.stack(found, 1)


def _another_last_step(model: Mixing, x: Tensor) -> Tensor:
    found = _first_token_begins(model, x)
    return torch.cat([found[:, :-1], torch.tanh(found[:, -1:] * found[:, -2:-1])], 1)


def _every_other_token(model: Mixing, x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(state + x[:, t]) if t % 2 else torch.sin(state + x[:, t])
        found.append(state)
    return torch.stack(found, 1)


def _all_so_far(model: Mixing, x: Tensor) -> Tensor:
    found = [x[:, 0]]
    for t in range(1, x.shape[1]):
        found.append(torch.tanh(x[:, t] + torch.stack(found).amax(0)))
    return torch.stack(found, 1)


def _frozen(model: Mixing, x: Tensor) -> Tensor:
    """From the fourth token on, a part of the step is what it was there."""
    state, part, found = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        part = torch.sin(state + x[:, t]) if t < 4 else part
        state = torch.tanh(state + x[:, t])
        found.append(state + part)
    return torch.stack(found, 1)


REFUSED: dict[str, Callable[[Mixing, Tensor], Tensor]] = {
    "a step that depends on the token's place": _by_place,
    "a step that looks ahead": _looks_ahead,
    "a loop from the end": _backwards,
    "a step that mixes rows": _mixes_rows,
    "a step that is frozen": _frozen,
    "another last step": _another_last_step,
    "two kinds of steps": _every_other_token,
    "a step that needs all that came before": _all_so_far,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_is_not_of_equal_steps_is_refused(name: str) -> None:
    refuses(Mixing(REFUSED[name]), rows=2)


def test_a_row_goes_back_to_a_snapshot() -> None:
    goes_back_to_snapshots(Mixing(DECODED["GRU cells, written in place"]))


def test_a_saved_state_goes_on(tmp_path: Any) -> None:
    goes_on_when_loaded(Mixing(DECODED["LSTM cells"]), tmp_path)


def test_a_saved_model_with_a_loop_is_loaded(tmp_path: Any) -> None:
    model = Mixing(DECODED["LSTM cells"]).eval()
    decoder = attngraph.compile(model, cache=True)
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    wanted = decoder.generate(ids, 8)
    decoder.save(tmp_path / "saved")
    assert torch.equal(attngraph.load(tmp_path / "saved", model).generate(ids, 8), wanted)


@pytest.mark.parametrize(
    "line",
    [
        "v0 = open('x')",
        "v0 = aten.nothing.at_all(t0)",
        "v0 = x0",
        "v0 = torch.ones",
        "v0 +",
        "v0 = aten.from_file.default('/tmp/x', True, 4)",
        "v0 = aten.add_.Tensor(t0, t0)",
        "v0 = aten.add.out(t0, t0, out=t0)",
        "v0 = load_library.__self__.load_library('/x.so')",
        "v0 = attngraph.all_reduce.default(t0, '0')",
    ],
)
def test_a_malformed_step_program_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"step program|operator|defined|operation|no op|other processes"):
        parse(f"begin:\n    return t0\nstep:\n    {line}\n    return v0")


@pytest.mark.parametrize("name", ["a running maximum", "LSTM cells", "GRU cells, written in place"])
def test_the_steps_of_a_loop_are_one_token_program(name: str) -> None:
    decoder = attngraph.compile(Mixing(DECODED[name]).eval(), cache=True)
    decoder.prefill(torch.randint(0, VOCABULARY, (2, 5)))
    program = next(n.args[5] for n in decoder._derived.latest.graph.graph.nodes if "loop" in str(n.target))
    assert whole_step(program) is not None
    (note,) = (n for r in decoder.report.passes for n in r.notes if "a step of the loop over tokens" in n)
    assert "1 token program(s)" in note and "PyTorch" not in note
    inside = [e for e in decoder.report.programs if repr(e.program) in program]
    assert inside and all(entry.kernel.name == "cpu.tokens" for entry in inside)


@pytest.mark.parametrize("name", ["a step that looks two steps back", "LSTM cells"])
def test_a_recorded_step_serves_steps_of_one_token_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row begins or has another number of tokens, the graph runs; states stay as they were."""
    served: list[bool] = []
    run = Recording.run

    def watched(self: Recording, inputs: Any) -> Any:
        found = run(self, inputs)
        served.append(found is not None)
        return found

    monkeypatch.setattr(Recording, "run", watched)
    model = Mixing(DECODED[name]).eval()
    decoder = attngraph.compile(model, cache=True)
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids)
    for _ in range(3):  # prompts of one token have the shapes of steps
        _, state = decoder.prefill(ids[:, :1])
    assert not any(served)
    for t in range(1, 6):
        before = state.copy()
        found = decoder.decode(ids[:, t : t + 1], state)
        torch.testing.assert_close(found, whole[:, t : t + 1])
        torch.testing.assert_close(decoder.decode(ids[:, t : t + 1], before), found)
    assert any(served) and all(served)
    served.clear()
    found = decoder.decode([ids[0, 6:8], ids[1, :0]], state)
    torch.testing.assert_close(found[0], whole[0, 6:8])
    state.reset(1)
    found = decoder.decode([ids[0, 8:9], ids[1, :1]], state)
    torch.testing.assert_close(found, torch.stack([whole[0, 8:9], whole[1, :1]]))
    assert not any(served)
    found = decoder.decode([ids[0, 9:10], ids[1, 1:2]], state)
    torch.testing.assert_close(found, torch.stack([whole[0, 9:10], whole[1, 1:2]]))
    assert served[-1]


def test_what_c_cannot_carry_of_a_step_is_told() -> None:
    decoder = attngraph.compile(Mixing(DECODED["a count of tokens"]).eval(), cache=True)
    decoder.prefill(torch.randint(0, VOCABULARY, (2, 5)))
    (note,) = (n for r in decoder.report.passes for n in r.notes if "a step of the loop over tokens" in n)
    assert "in PyTorch, " in note
