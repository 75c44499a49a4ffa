"""The report says heads of heads, and places of another axis of what else is computed apart: the rows of a
map, the frames of a video."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph


class Projecting(nn.Module):
    """What a function makes of a module, of its layers and of the inputs."""

    def __init__(self, function: Callable[..., Tensor], **layers: Any) -> None:
        super().__init__()
        self.__dict__["function"] = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)  # type: ignore[no-any-return]


def rows(m: Any, x: Tensor) -> Tensor:
    """Attention along each row of a map, with 4 heads."""
    b, c, h, w = x.shape
    q, k, v = m.qkv(x).reshape(b, 3, 4, 8, h, w).unbind(1)
    weights = torch.einsum("bndhw,bndhv->bnhwv", q, k).softmax(-1)
    return torch.einsum("bnhwv,bndhv->bndhw", weights, v).reshape(b, c, h, w)


def columns(m: Any, x: Tensor) -> Tensor:
    """Attention along each column of a map, without heads."""
    q, k, v = m.qkv(x).chunk(3, 1)
    weights = torch.einsum("bchw,bcgw->bwhg", q, k).softmax(-1)
    return torch.einsum("bwhg,bcgw->bchw", weights, v)


def map_to_context(m: Any, x: Tensor, text: Tensor) -> Tensor:
    """The places of a map attend to a text: height is an axis that queries alone have."""
    k, v = m.kv(text).chunk(2, 1)
    weights = torch.einsum("bchw,bcs->bhws", m.q(x), k).softmax(-1)
    return torch.einsum("bhws,bcs->bchw", weights, v)


def frames(m: Any, x: Tensor) -> Tensor:
    """A video: 4 heads within each frame."""
    q, k, v = m.qkv(x).unflatten(-1, (3, 4, 8)).permute(3, 0, 1, 4, 2, 5)
    return ((q @ k.mT).softmax(-1) @ v).transpose(2, 3).flatten(3)  # type: ignore[no-any-return]


def cut_before_the_product(m: Any, x: Tensor) -> Tensor:
    """Heads are cut from the features, and then one weight serves all of them."""
    x = x.unflatten(-1, (4, 8))
    weights = torch.einsum("bqhd,bkhd->bhqk", m.q(x), m.k(x)).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, x)


def grouped(m: Any, x: Tensor) -> Tensor:
    """4 heads on 2 key/value heads, which are turned by position and scaled by head."""
    q = m.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
    k, v = m.kv(x).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
    turned = torch.arange(x.shape[1])[:, None].cos()
    k, v = ((k * turned).repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    return ((q * turned * m.scale) @ k.mT).softmax(-1) @ v  # type: ignore[no-any-return]


ROWS = Projecting(rows, qkv=nn.Conv2d(32, 96, 1))
FOUR = "4 heads of width 8"
MODELS: list[tuple[nn.Module, list[tuple[int, ...]], str]] = [
    (ROWS, [(2, 32, 6, 5)], f"{FOUR}, at each of 6 places of another axis"),
    (
        Projecting(columns, qkv=nn.Conv2d(8, 24, 1)), [(2, 8, 6, 5)],
        "1 head of width 8, at each of 5 places of another axis",
    ),
    (
        Projecting(map_to_context, q=nn.Conv2d(8, 8, 1), kv=nn.Conv1d(8, 16, 1)), [(2, 8, 6, 7), (2, 8, 11)],
        "1 head of width 8, for queries at 6 places of another axis",
    ),
    (
        Projecting(frames, qkv=nn.Linear(32, 96)), [(2, 5, 12, 32)],
        f"{FOUR}, at each of 5 places of another axis",
    ),
    (Projecting(cut_before_the_product, q=nn.Linear(8, 8), k=nn.Linear(8, 8)), [(2, 12, 32)], FOUR),
    (
        Projecting(grouped, q=nn.Linear(32, 32), kv=nn.Linear(32, 32), scale=torch.ones(4, 1, 1)),
        [(2, 12, 32)], "4 heads on 2 key/value heads of width 8",
    ),
    # nothing says what the dimensions of the inputs are
    (Projecting(lambda m, q, k, v: (q @ k.mT).softmax(-1) @ v), [(2, 4, 12, 8)] * 3, FOUR),
]  # fmt: skip


@pytest.mark.parametrize(("model", "shapes", "words"), MODELS, ids=lambda p: p if isinstance(p, str) else "")
def test_heads_and_places_of_other_axes_are_told_apart(
    model: nn.Module, shapes: list[tuple[int, ...]], words: str
) -> None:
    (found,) = attngraph.explain(model, *(torch.randn(shape) for shape in shapes)).attention
    assert found.heads_in_words() == words


def test_the_report_says_it_in_its_text_and_keeps_it_in_json() -> None:
    report = attngraph.explain(ROWS, torch.randn(2, 32, 6, 5))
    assert "4 heads of width 8, at each of 6 places of another axis, mask: none" in str(report)
    assert type(report).from_json(report.to_json()).attention[0].axes == ((6,), ())
