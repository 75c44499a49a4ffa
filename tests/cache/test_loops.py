"""Decoders of models with a loop over tokens in which one step hands anything to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import attngraph
from attngraph.codegen.cpu.loops import whole_step
from attngraph.codegen.cpu.record.recording import Recording
from attngraph.ir.language.step_program import parse
from tests.cache.models import LOOPS, PRODUCTS, VOCABULARY, Small
from tests.cache.small import some_ids

STATES: dict[str, Callable[[], nn.Module]] = {
    "a loop": lambda: Small(LOOPS["LSTM cells"]),
    "a sum": lambda: Small(PRODUCTS["features that are a softmax"]),
}


@pytest.mark.parametrize("name", STATES)
def test_a_row_goes_back_to_a_snapshot(name: str) -> None:
    """Tokens cannot be taken out of what rows carry, but a row goes back to where a call began."""
    decoder = attngraph.compile(STATES[name](), cache=attngraph.CacheConfig(snapshots=2))
    ids = some_ids(1, 9)
    _, state = decoder.prefill(ids[:, :5])
    before = decoder.decode(ids[:, 5:6], state)
    decoder.decode(ids[:, 6:8], state)
    with pytest.raises(attngraph.CacheError, match=r"from 8 to 7 tokens.*can go back to 5, 6"):
        state.crop(7)
    state.crop(5)
    torch.testing.assert_close(decoder.decode(ids[:, 5:6], state), before)
    with pytest.raises(attngraph.CacheError, match="snapshots"):
        state.crop(2)


@pytest.mark.parametrize("name", STATES)
def test_saved_states_and_models_go_on(name: str, tmp_path: Any) -> None:
    model = STATES[name]()
    decoder, ids, more = attngraph.compile(model, cache=True), some_ids(2, 9), torch.tensor([4, 5])
    wanted = decoder.generate(ids, 8)
    _, state = decoder.prefill(ids)
    state.save(tmp_path / "state")
    loaded = attngraph.KVCache.load(tmp_path / "state")
    assert torch.equal(decoder.decode(more, loaded), decoder.decode(more, state))
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


@pytest.mark.parametrize("name", ["LSTM cells", "written in place", "a running maximum", "counted tokens"])
def test_the_steps_of_a_loop_are_one_token_program_or_it_is_told_what_is_not(name: str) -> None:
    decoder = attngraph.compile(Small(LOOPS[name]), cache=True)
    decoder.prefill(torch.randint(0, VOCABULARY, (2, 5)))
    (note,) = (n for r in decoder.report.passes for n in r.notes if "a step of the loop over tokens" in n)
    if name == "counted tokens":
        assert "in PyTorch, " in note
        return
    program = next(n.args[5] for n in decoder._derived.latest.graph.graph.nodes if "loop" in str(n.target))
    assert whole_step(program) is not None
    assert "1 token program(s)" in note and "PyTorch" not in note
    inside = [e for e in decoder.report.programs if repr(e.program) in program]
    assert inside and all(entry.kernel.name == "cpu.tokens" for entry in inside)


@pytest.mark.parametrize("name", ["LSTM cells", "two steps back"])
def test_a_recorded_step_serves_steps_of_one_token_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row begins or has another number of tokens, the graph runs; states stay as they were."""
    served: list[bool] = []
    run = Recording.run

    def watched(self: Recording, inputs: Any) -> Any:
        found = run(self, inputs)
        served.append(found is not None)
        return found

    monkeypatch.setattr(Recording, "run", watched)
    model = Small(LOOPS[name])
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
