"""The report says heads of heads, and places of another axis of what else is computed apart: the rows of a
map, the frames of a video."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attngraph


class Rows(nn.Module):
    """Attention along each row of a map, with 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(32, 96, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(x).reshape(b, 3, 4, 8, h, w).unbind(1)
        weights = torch.einsum("bndhw,bndhv->bnhwv", q, k).softmax(-1)
        return torch.einsum("bnhwv,bndhv->bndhw", weights, v).reshape(b, c, h, w)


class Columns(nn.Module):
    """Attention along each column of a map, without heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(8, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, 1)
        weights = torch.einsum("bchw,bcgw->bwhg", q, k).softmax(-1)
        return torch.einsum("bwhg,bcgw->bchw", weights, v)


class MapToContext(nn.Module):
    """The places of a map attend to a text: height is an axis that queries alone have."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Conv2d(8, 8, 1), nn.Conv1d(8, 16, 1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        k, v = self.kv(text).chunk(2, 1)
        weights = torch.einsum("bchw,bcs->bhws", self.q(x), k).softmax(-1)
        return torch.einsum("bhws,bcs->bchw", weights, v)


class Frames(nn.Module):
    """A video: 4 heads within each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(3, 0, 1, 4, 2, 5)
        return ((q @ k.mT).softmax(-1) @ v).transpose(2, 3).flatten(3)


class CutBeforeTheProduct(nn.Module):
    """Heads are cut from the features, and then one weight serves all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (4, 8))
        weights = torch.einsum("bqhd,bkhd->bhqk", self.q(x), self.k(x)).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, x)


class Grouped(nn.Module):
    """4 heads on 2 key/value heads, which are turned by position and scaled by head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        turned = torch.arange(x.shape[1])[:, None].cos()
        k, v = ((k * turned).repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        return ((q * turned * self.scale) @ k.mT).softmax(-1) @ v


class GivenHeads(nn.Module):
    """Nothing says what the dimensions of the inputs are."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


def heads(model: nn.Module, *shapes: tuple[int, ...]) -> str:
    (found,) = attngraph.explain(model, *(torch.randn(shape) for shape in shapes)).attention
    return found.heads_in_words()


def test_rows_of_a_map_are_no_heads() -> None:
    assert heads(Rows(), (2, 32, 6, 5)) == "4 heads of width 8, at each of 6 places of another axis"
    assert heads(Columns(), (2, 8, 6, 5)) == "1 head of width 8, at each of 5 places of another axis"


def test_an_axis_of_the_queries_alone_is_told_as_theirs() -> None:
    words = heads(MapToContext(), (2, 8, 6, 7), (2, 8, 11))
    assert words == "1 head of width 8, for queries at 6 places of another axis"


def test_frames_of_a_video_are_no_heads() -> None:
    assert heads(Frames(), (2, 5, 12, 32)) == "4 heads of width 8, at each of 5 places of another axis"


@pytest.mark.parametrize(
    ("model", "shapes", "words"),
    [
        (CutBeforeTheProduct, [(2, 12, 32)], "4 heads of width 8"),
        (Grouped, [(2, 12, 32)], "4 heads on 2 key/value heads of width 8"),
        (GivenHeads, [(2, 4, 12, 8)] * 3, "4 heads of width 8"),
    ],
)
def test_heads_stay_heads(model: type[nn.Module], shapes: list[tuple[int, ...]], words: str) -> None:
    assert heads(model(), *shapes) == words


def test_the_report_says_it_in_its_text_and_keeps_it_in_json() -> None:
    report = attngraph.explain(Rows(), torch.randn(2, 32, 6, 5))
    assert "4 heads of width 8, at each of 6 places of another axis, mask: none" in str(report)
    assert type(report).from_json(report.to_json()).attention[0].axes == ((6,), ())
