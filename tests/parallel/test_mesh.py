"""Heads and tokens divided together on 2 x 2 simulated ranks: values and gradients of one device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.report.entries import Entries
from tests.parallel.test_tokens import KV, Model

Compared = Callable[..., Entries]


def _ids(tokens: int = 16) -> Tensor:
    return torch.randint(3, 32, (2, tokens))


@pytest.mark.parametrize("kind", ["causal", "window", "rotary", "table", "slopes", "sink"])
def test_each_rank_has_some_heads_of_some_tokens(same_on_mesh: Compared, kind: str) -> None:
    """Rotary positions, tables and sinks by head, masks: each rank of the first axis has its heads, each of
    the second its tokens of those, so it fetches the keys of half of the heads."""
    report = same_on_mesh(Model(kind), _ids())
    assert report.ranks is not None and report.context is not None
    assert "heads" in {e.what for e in report.ranks.divided}
    assert [a.attentions for a in report.context.axes] == [1] and report.context.whole == ()
    keys = next(f for f in report.context.fetched if f.what == "keys or values")
    seen = 2 if kind == "window" else 8
    assert max(keys.bytes) <= 2 * seen * (KV // 2) * 4 * 8


@pytest.mark.slow
def test_random_numbers_are_those_of_one_device() -> None:
    model = Model("causal").train().double()
    model.layers.append(nn.Dropout(0.3))
    model.layers[1].forward = lambda x, about, drop=nn.functional.dropout: drop(x, 0.3)
    x, both = _ids(), []
    for mesh in (None, attngraph.SimulatedMesh(tensor=2, context=2)):
        torch.manual_seed(3)
        both.append(attngraph.compile(model, mesh=mesh, min_scores=0)(x))
    torch.testing.assert_close(*both)


def test_an_axis_of_one_rank_divides_nothing() -> None:
    for axes, left in (({"tensor": 2, "context": 1}, "tensor"), ({"tensor": 1, "context": 2}, "context")):
        mesh = attngraph.compile(nn.Linear(2, 2), mesh=attngraph.SimulatedMesh(**axes))._options.devices.mesh
        assert [axis.group for axis in mesh.axes] == [left]


def test_one_axis_cannot_divide_both() -> None:
    both = attngraph.ShardConfig(tensor="x", context="x")
    with pytest.raises(ValueError, match="cannot divide both heads and tokens"):
        attngraph.compile(nn.Linear(2, 2), mesh=attngraph.SimulatedMesh(x=2), shard=both)


@pytest.mark.parametrize("axes", [{"context": 2}, {"tensor": 2, "context": 2}])
def test_a_decoder_has_no_axis_of_tokens(axes: dict[str, int]) -> None:
    """A decoder gets one token a call, so there are no tokens to divide: heads are."""
    with pytest.raises(ValueError, match="a decoder is divided by heads"):
        attngraph.compile(nn.Linear(2, 2), cache=True, mesh=attngraph.SimulatedMesh(**axes))
    attngraph.compile(nn.Linear(2, 2), cache=True, mesh=attngraph.SimulatedMesh(tensor=2, context=1))
