"""`freeze=`: weights in panels give eager's answers; a change is an error, and so is reading what is gone."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import attngraph
from attngraph.errors import FrozenError
from attngraph.ir.graph.program_graph import Rate
from attngraph.ir.ops.panels import GivenUp
from attngraph.models.mla import LatentAttention, MLAConfig
from tests.cache.small import by_steps

WIDTH = 64


class LM(nn.Module):
    """Layers with separate and joined projections, `[out, in]` and `[in, out]`, and a tied table."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.table, self.q = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 8)
        self.up, self.gate, self.down = nn.Linear(WIDTH, 240), nn.Linear(WIDTH, 240), nn.Linear(240, WIDTH)
        self.head = nn.Linear(WIDTH, 128, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, (k, v) = self.q(x), (x @ self.kv).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for t in (q, k, v))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return self.head(x)


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(0, 128, (rows, tokens), generator=torch.Generator().manual_seed(rows * 100 + tokens))


def close(found: Tensor, model: nn.Module, *args: Tensor) -> None:
    wanted = copy.deepcopy(model).double()(*(a.double() if a.is_floating_point() else a for a in args))
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5)


def told(report: Any) -> str:
    return "; ".join(note for r in report.passes if r.name == "freeze-weights" for note in r.notes)


def given_up(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if type(p) is GivenUp]


@torch.no_grad()
@pytest.mark.parametrize("consistent", [False, True])
def test_answers_are_the_models(consistent: bool) -> None:
    model = LM()
    whole = attngraph.compile(model, freeze=True, consistent=consistent)
    decoder = attngraph.compile(model, freeze=True, consistent=consistent, cache=True)
    for rows, tokens in ((1, 9), (2, 40), (2, 3), (1, 130)):
        close(whole(ids(rows, tokens)), model, ids(rows, tokens))
    prompt = ids(2, 12)
    found, _ = by_steps(decoder, prompt, 7)
    close(found, model, prompt)
    assert not consistent or torch.equal(found, whole(prompt))
    assert "6 weight(s) are kept in panels" in told(decoder.report) and not given_up(model)
    assert "6 weight(s) are kept in panels" in str(decoder.report)


@torch.no_grad()
def test_graphs_of_a_model_share_the_panels() -> None:
    compiled = attngraph.compile(LM(), freeze=True)
    compiled(ids(1, 9)), compiled(ids(2, 9))
    found = [g.machine._weights._current for gs in compiled._graphs.values() for g in gs]
    assert len(found) == 2
    one, other = (sorted(t.data_ptr() for t in values.values()) for values in found)
    assert one == other


@torch.no_grad()
@pytest.mark.parametrize("change", ["write", "replace", "load", "data"])
@pytest.mark.parametrize("cache", [False, True])
def test_a_change_is_an_error(cache: bool, change: str) -> None:
    model = LM(tied=False)
    compiled: Any = attngraph.compile(model, freeze=True, cache=cache)
    call = (lambda: compiled.prefill(ids(1, 9))) if cache else (lambda: compiled(ids(1, 9)))
    call()
    other = LM(tied=False)
    if change == "write":
        model.up.weight.mul_(2)
    elif change == "replace":
        model.up.weight = nn.Parameter(model.up.weight + 1)
    elif change == "load":
        model.load_state_dict(other.state_dict())
    else:
        model.up.weight.data = other.up.weight.data  # another address: this much of `.data` is seen
    with pytest.raises(FrozenError, match=r"weight|kv"):
        call()
    close(attngraph.compile(model, freeze=True)(ids(1, 9)), model, ids(1, 9))


@torch.no_grad()
def test_what_is_read_where_it_lies_may_change() -> None:
    model = LM(tied=False)
    compiled = attngraph.compile(model, freeze=True)
    compiled(ids(1, 9))
    model.table.weight.mul_(2)
    close(compiled(ids(1, 9)), model, ids(1, 9))


def test_gradients_flow_past_frozen_weights() -> None:
    model = LM(tied=False)
    compiled = attngraph.compile(model, freeze="release")
    compiled(ids(1, 9)).square().sum().backward()
    found = model.up.weight.grad
    assert "gradients may flow" in told(compiled.report) and not given_up(model)
    model.zero_grad()
    model(ids(1, 9)).square().sum().backward()
    torch.testing.assert_close(found, model.up.weight.grad)


@torch.no_grad()
def test_weights_that_the_model_computes_are_computed_once() -> None:
    """A norm of a weight's rows, an adapter that is added; a buffer is state, and stays so."""

    class Computed(LM):
        def __init__(self) -> None:
            super().__init__(tied=False)
            parametrizations.weight_norm(self.up)
            self.a, self.b = (nn.Parameter(torch.randn(s) / 8) for s in ((WIDTH, 2), (2, WIDTH)))
            self.register_buffer("last", torch.randn(WIDTH, WIDTH) / 8)

        def forward(self, tokens: Tensor) -> Tensor:
            x = super().forward(tokens)[..., :WIDTH]
            return F.linear(x, self.q.weight + self.a @ self.b) @ self.last

    model = Computed()
    compiled = attngraph.compile(model, freeze=True)
    close(compiled(ids(2, 9)), model, ids(2, 9))
    ((graph,),) = compiled._graphs.values()
    names = {str(n.target) for n in graph.captured.graph.graph.nodes}
    stage = {str(n.target) for n in graph.captured.graph.stages[Rate.WEIGHTS].graph.nodes}
    assert not any("weight_norm" in n for n in names) and any("weight_norm" in n for n in stage)
    assert "7 weight(s)" in told(compiled.report) and "1 product(s) read" in told(compiled.report)
    model.last.mul_(2)
    close(compiled(ids(2, 9)), model, ids(2, 9))


@torch.no_grad()
def test_folded_weights_and_panels_are_one_stage() -> None:
    model = LatentAttention(MLAConfig(width=128, heads=2, latent=32, nope=64, value=64)).eval()
    x = torch.randn(2, 9, 128)
    compiled = attngraph.compile(model, absorb="fold", freeze=True)
    close(compiled(x), model, x)


# --- given up ---


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_what_was_given_up_cannot_be_read(tied: bool, tmp_path: Path) -> None:
    model = LM(tied)
    kept = copy.deepcopy(model)
    compiled = attngraph.compile(model, freeze="release")
    for rows, tokens in ((1, 9), (2, 12), (1, 1), (2, 9), (1, 9)):
        close(compiled(ids(rows, tokens)), kept, ids(rows, tokens))
    names = ["kv", "q.weight", "up.weight", "gate.weight", "down.weight", *["head.weight"] * (not tied)]
    assert sorted(given_up(model)) == sorted(names)
    size = sum(p.nbytes for n, p in kept.named_parameters() if n in names)
    about = model.up.weight
    assert isinstance(about, nn.Parameter) and about.shape == (240, WIDTH) and "up.weight" in repr(about)
    reads: list[Any] = [
        lambda: model(ids(1, 9)), model.state_dict, lambda: copy.deepcopy(model), lambda: pickle.dumps(model),
        about.double, about.sum, lambda: about.data, about.data_ptr, about.numpy, lambda: about.mul_(2),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(FrozenError, match=r"given up.*freeze='release'"):
            read()
    with pytest.raises(RuntimeError, match="given up"):
        model.load_state_dict(kept.state_dict())
    assert size > 100_000
    compiled.save(tmp_path / "saved", weights=True)
    close(attngraph.load(tmp_path / "saved")(ids(1, 9)), kept, ids(1, 9))
    again = copy.deepcopy(kept)
    close(attngraph.load(tmp_path / "saved", again)(ids(1, 9)), kept, ids(1, 9))
    assert sorted(given_up(again)) == sorted(names)


@torch.no_grad()
@pytest.mark.parametrize("called", [False, True])
def test_a_decoder_is_derived_from_what_is_left(called: bool) -> None:
    """And one that gives weights up itself keeps none alive: neither does a state."""
    model = LM()
    kept, up = copy.deepcopy(model), weakref.ref(model.up.weight)
    if called:
        attngraph.compile(model, freeze="release")(ids(1, 9))
    before = given_up(model)
    decoder = attngraph.compile(model, freeze="release", cache=True)
    logits, state = decoder.prefill(ids(2, 7)[:, :6])
    close(torch.cat([logits, decoder.decode(ids(2, 7)[:, 6:], state)], 1), kept, ids(2, 7))
    assert len(given_up(model)) == 5 and given_up(model)[: len(before)] == before
    gc.collect()
    assert up() is None


@pytest.mark.parametrize("options", [
    {"freeze": "always"}, {"freeze": True, "inductor": True}, {"freeze": True, "passes": ("canonicalize",)},
    {"freeze": True, "mesh": attngraph.SimulatedMesh(tensor=2)},
])  # fmt: skip
def test_options_that_do_not_go_together(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="freeze"):
        attngraph.compile(LM(), **options)
