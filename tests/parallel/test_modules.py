"""Plain modules on simulated ranks: which are divided, which are not and why, and that nothing is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.passes.shard_heads.parts import HOLDS_RUNS
from attngraph.report.ranks import RanksEntry

Compared = Callable[..., RanksEntry]
PACKED_WHOLE = set() if HOLDS_RUNS else {"qkv.weight"}
"""An older torch cannot hold a part of a packed projection."""


class Attention(nn.Module):
    """Attention with packed projections, `kv` key/value heads, and one of several oddities."""

    def __init__(self, heads: int = 4, kv: int = 4, odd: str = "") -> None:
        super().__init__()
        self.heads, self.kv, self.odd = heads, kv, odd
        self.qkv = nn.Linear(32, 8 * (heads + 2 * kv))
        self.out = nn.Linear(8 * heads, 32)
        self.norm = nn.RMSNorm(8)
        self.table = nn.Parameter(torch.randn(heads, 9))
        self.sink = nn.Parameter(torch.randn(heads))
        self.register_buffer("slopes", torch.rand(heads))

    def forward(self, x: Tensor) -> Tensor:
        s = x.shape[1]
        packed = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv, 8)).transpose(1, 2)
        q, k, v = packed.split([self.heads, self.kv, self.kv], 1)
        if self.odd == "norms":
            q, k = self.norm(q), self.norm(k)
        k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        i = torch.arange(s)
        scores = q @ k.mT / 8**0.5
        if self.odd == "table":
            scores = scores + self.table[:, (i[:, None] - i).clamp(0, 8)]
        if self.odd == "slopes":
            scores = scores - self.slopes[:, None, None] * (i[:, None] - i)
        scores = scores.masked_fill(i > i[:, None], float("-inf"))
        if self.odd == "sink":
            column = self.sink[None, :, None, None].expand(x.shape[0], -1, s, 1)
            p = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            p = scores.softmax(-1)
        p = F.dropout(p, 0.3, self.odd == "dropout")
        return self.out((p @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("odd", ["", "norms", "table", "slopes", "sink"])
def test_attention_is_divided_by_heads(same_on_ranks: Compared, odd: str) -> None:
    entry = same_on_ranks(Attention(odd=odd), 2, torch.randn(2, 5, 32, dtype=torch.float64))
    assert [(e.what, e.count) for e in entry.divided] == [("heads", 4)]
    assert [s.what for s in entry.sent] == ["all-reduce"]
    assert {n for n, _, _ in entry.whole} & {"qkv.weight", "out.weight", "table"} == PACKED_WHOLE


@pytest.mark.parametrize(
    ("heads", "kv", "ranks"), [(8, 2, 4), (6, 3, 2), (8, 1, 2), (8, 1, 4), (8, 2, 8), (3, 3, 2), (4, 4, 3)]
)
def test_key_heads_that_are_fewer_than_ranks_are_shared_and_heads_that_cannot_be_divided_are_left(
    same_on_ranks: Compared, heads: int, kv: int, ranks: int
) -> None:
    """To every rank."""
    entry = same_on_ranks(Attention(heads, kv), ranks, torch.randn(2, 5, 32, dtype=torch.float64))
    whole = {name: reason for name, _, reason in entry.whole}
    if heads == 8:
        assert [(e.what, e.count) for e in entry.divided] == [("heads", 8)]
        assert "qkv.weight" in whole  # told, not hidden
    else:
        assert entry.divided == () and entry.sent == ()
        assert "divided among" in whole["out.weight"] or "heads" in whole["out.weight"]


@pytest.mark.slow
def test_dropout_of_weights_is_that_of_one_device(same_on_ranks: Compared) -> None:
    """The numbers of heads in the random numbers are those of the whole model."""
    model = Attention(odd="dropout").double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    both = []
    for mesh in (None, attngraph.SimulatedMesh(tensor=2)):
        torch.manual_seed(3)
        both.append(attngraph.compile(model, mesh=mesh)(x))
    torch.testing.assert_close(*both)


class GatedMLP(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.up = nn.Linear(16, 96 if packed else 48)
        self.gate = nn.Linear(16, 48)
        self.down = nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1) if self.packed else (self.up(x), self.gate(x))
        return x + self.down(F.silu(a) * b)


@pytest.mark.parametrize("packed", [False, True])
def test_mlps_are_divided_by_hidden_units(same_on_ranks: Compared, packed: bool) -> None:
    entry = same_on_ranks(GatedMLP(packed), 4, torch.randn(3, 16, dtype=torch.float64))
    assert [(e.what, e.count) for e in entry.divided] == [("hidden units", 48)]
    assert len(entry.sent) == 1
    whole = {n for n, _, _ in entry.whole if n.startswith(("up", "down"))}
    assert whole == ({"up.weight"} if packed and PACKED_WHOLE else set())


class Mixing(nn.Module):
    """Hidden units that depend on each other: no MLP. Or (`sum`) what is multiplied last is also a result:
    dividing it would only add messages."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.a, self.b = nn.LayerNorm(32), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        match self.how:
            case "softmax":
                y = y.softmax(-1)
            case "norm":
                y = self.norm(y)
            case "flip":
                y = y + y.flip(-1)
            case "cumsum":
                y = y.cumsum(-1)
            case "sum":
                x = x + self.a(x)
                return self.b(x), x
        return self.down(y)


@pytest.mark.parametrize("how", ["softmax", "norm", "flip", "cumsum", "sum"])
def test_hidden_units_that_depend_on_each_other_are_not_divided(same_on_ranks: Compared, how: str) -> None:
    entry = same_on_ranks(Mixing(how), 2, torch.randn(3, 16, dtype=torch.float64))
    assert entry.divided == () and entry.sent == ()


class Keys(Attention):
    """Also returns what it computes heads from, as models do that fill a cache."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)), k


def test_heads_that_the_model_returns_are_gathered(same_on_ranks: Compared) -> None:
    entry = same_on_ranks(Keys(), 2, torch.randn(2, 5, 32, dtype=torch.float64))
    assert [e.what for e in entry.divided] == ["heads", "gathered"]
    assert sorted(s.what for s in entry.sent) == ["all-gather", "all-reduce"]


class Tied(nn.Module):
    def __init__(self, rows: int, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 16, padding_idx=padding)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).tanh() @ self.table.weight.T


@pytest.mark.parametrize("rows, what", [(64, "rows of a table"), (63, "columns of a table")])
def test_tables_are_divided_by_rows_or_else_by_columns(
    same_on_ranks: Compared, rows: int, what: str
) -> None:  # fmt: skip
    ids = torch.tensor([[0, 5, 62], [31, 32, 1]])
    for padding in (None, 5):
        entry = same_on_ranks(Tied(rows, padding), 2, ids)
        assert [e.what for e in entry.divided] == [what]
        assert entry.parameters[1] * 2 == entry.parameters[0]


def test_a_number_outside_of_the_table_raises_as_on_one_device() -> None:
    compiled = attngraph.compile(Tied(64), mesh=attngraph.SimulatedMesh(tensor=2))
    compiled(torch.tensor([[1, 2]]))
    for wrong in (64, 100, -1):
        with pytest.raises((IndexError, RuntimeError), match="range"):
            compiled(torch.tensor([[1, wrong]]))


def test_the_graph_shows_what_is_sent_and_a_rank_sends_what_the_report_says() -> None:
    """Counted on the tensors that cross, for the tokens of the call."""
    model = nn.Sequential(Attention(), GatedMLPOf32())
    compiled = attngraph.compile(model, mesh=attngraph.SimulatedMesh(tensor=4))
    compiled(torch.randn(2, 5, 32))
    entry = compiled.report.ranks
    assert entry is not None
    text = compiled.report.passes[-1].text
    assert text.count("attngraph.all_reduce(") == 2
    assert entry.sent_per_token == 2 * (2 * 32 * 4 * 3 // 4)
    assert f"sent by each rank: {entry.sent_per_token:,} bytes a token" in str(compiled.report)


class GatedMLPOf32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def test_a_mesh_must_be_one_and_have_named_axes() -> None:
    with pytest.raises(TypeError, match="mesh must be"):
        attngraph.compile(nn.Linear(2, 2), mesh=4)
    with pytest.raises(ValueError, match="give the mesh"):
        attngraph.compile(nn.Linear(2, 2), shard=attngraph.ShardConfig())
    with pytest.raises(ValueError, match="no axis 'model'"):
        mesh = attngraph.SimulatedMesh(tensor=2)
        attngraph.compile(nn.Linear(2, 2), mesh=mesh, shard=attngraph.ShardConfig(tensor="model"))
    with pytest.raises(ValueError, match="at least one rank"):
        attngraph.SimulatedMesh(tensor=0)
