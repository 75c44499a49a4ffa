"""Two sums over ranks that are added become one, if that is proved; a wrong one is noticed and left out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.passes.shard_heads import merge_sums


class SideBySide(nn.Module):
    """Two MLPs of one input, each times a number of the token that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.gate = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid()
        return self.one(x) * gate[..., :1] + self.other(x) * gate[..., 1:]


def _loses_a_bias(builder: Any, entering: Any, sides: Any, group: Any) -> Any:
    """The sum without what is added to it afterwards."""
    found = MERGED(builder, entering, sides, group)
    while found.target is torch.ops.aten.add.Tensor:
        found = found.args[0]
    return found


def _takes_a_side_twice(builder: Any, entering: Any, sides: Any, group: Any) -> Any:
    return MERGED(builder, entering, [sides[0], sides[0]], group)


class _NothingEnters:
    """Each rank then keeps its own part of a factor's gradient."""

    @staticmethod
    def enter(node: Any) -> Any:
        return node


def _forgets_gradients(builder: Any, entering: Any, sides: Any, group: Any) -> Any:
    return MERGED(builder, _NothingEnters, sides, group)


MERGED = merge_sums._merged
WRONG = (_loses_a_bias, _takes_a_side_twice, _forgets_gradients)


@pytest.mark.parametrize("merged", [MERGED, *WRONG])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_of_sums_is_one_where_it_is_proved(
    merged: Any, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_sums, "_merged", merged)
    torch.manual_seed(0)
    model, x = SideBySide().double(), torch.randn(2, 5, 16, dtype=torch.float64)
    compiled = attngraph.compile(model, mesh=attngraph.SimulatedMesh(tensor=ranks))
    torch.testing.assert_close(compiled(x), model(x))
    sent = [s for s in compiled.report.ranks.sent if s.what == "all-reduce"]
    assert len(sent) == (1 if merged is MERGED else 2)
