"""Exported files are for the sizes that the model's questions allow, one row and one token among them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph


class Asking(nn.Module):
    def __init__(self, asks: Callable[[int, int], Any]) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.mT * (2.0 if self.asks(*x.shape[:2]) else 1.0)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ x


class Flagged(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.shape[0] == 1 else x * 1.0)


ASKS: dict[str, tuple[Callable[[int, int], Any], set[tuple[int, int]]]] = {
    "rows > 1": (lambda rows, n: rows > 1, {(1, 7), (1, 1), (1, 2)}),
    "n > 1, which makes no difference": (lambda rows, n: n > 1, set()),
    "n > 1 and rows > 1": (lambda rows, n: n > 1 and rows > 1, {(1, 7), (1, 2)}),
    "rows + n > 3": (lambda rows, n: rows + n > 3, {(1, 1), (1, 2)}),
    "n > 0": (lambda rows, n: n > 0, set()),
}
"""The question, and the sizes that are refused: not those of one token, whose weight is 1 in any case, where
that was compared."""


@pytest.mark.parametrize("name", ASKS)
def test_a_file_refuses_sizes_for_which_the_model_does_something_else(name: str, tmp_path: Path) -> None:
    asks, refused = ASKS[name]
    model = Flagged(asks) if "no difference" in name else Asking(asks)
    compiled = attngraph.compile(model, min_scores=0)
    report = attngraph.export(compiled, tmp_path / "m.pt2", (torch.randn(3, 7, 4),))
    assert any("only for sizes" in remark for remark in report.remarks) == bool(refused)
    file = torch.export.load(tmp_path / "m.pt2").module()
    for size in ((3, 7), (1, 7), (3, 1), (1, 1), (2, 9), (1, 2)):
        x = torch.randn(*size, 4)
        if size in refused:
            with pytest.raises(RuntimeError, match="this file is for sizes with"):
                file(x)
        else:
            assert torch.allclose(file(x), model(x), atol=1e-5)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(23, 8), nn.Linear(8, 23)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * (2.0 if ids.shape[1] > 12 else 1.0)
        scores = x @ x.mT
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return self.out(scores.masked_fill(future, -torch.inf).softmax(-1) @ x)


def test_the_file_of_a_decoder_asks_for_the_length_of_each_row(tmp_path: Path) -> None:
    decoder = attngraph.compile(Words().eval(), cache=True, backend="reference")
    report = attngraph.export(decoder, tmp_path / "d.pt2", (torch.randint(0, 23, (2, 8)),))
    assert any("tokens in a row <= 12" in remark for remark in report.remarks)
    step = torch.export.load(tmp_path / "d.pt2").module()
    past = report.empty_cache(2)
    tokens = torch.randint(0, 23, (2, 13))
    step(tokens, torch.tensor([12, 3]), past)
    with pytest.raises(RuntimeError, match="tokens in a row <= 12"):
        step(tokens, torch.tensor([13, 3]), past)
