"""Kinds of differences between ports: each is noticed, and the line that holds it is named."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph

torch.manual_seed(0)
X, Q, K = torch.randn(2, 9, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]] * 2)
SINK = torch.randn(4)
Function = Callable[..., Tensor]


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    place = torch.arange(x.shape[-2])
    return place[:, None], place


def turned(x: Tensor, base: float, half: bool) -> Tensor:
    n, d = x.shape[-2:]
    angle = torch.arange(n)[:, None] * base ** (-torch.arange(0, d, 2) / d)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    if half:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def base(x: Tensor) -> Tensor:
    q = turned(x, 10000.0, True)
    return (q @ q.mT).softmax(-1) @ x


def other_base(x: Tensor) -> Tensor:
    q = turned(x, 500000.0, True)  # here
    return (q @ q.mT).softmax(-1) @ x


def interleaved(x: Tensor) -> Tensor:
    q = turned(x, 10000.0, False)  # here
    return (q @ q.mT).softmax(-1) @ x


def cap_then_mask(x: Tensor) -> Tensor:
    q, k = places(x)
    s = 2 * torch.tanh(x @ x.mT / 2)
    s = s.masked_fill(k > q, -torch.inf)
    return s.softmax(-1) @ x


def mask_then_cap(x: Tensor) -> Tensor:
    q, k = places(x)
    s = (x @ x.mT).masked_fill(k > q, -torch.inf)  # here
    s = 2 * torch.tanh(s / 2)
    return s.softmax(-1) @ x


def wide_softmax(x: Tensor) -> Tensor:
    s = x @ x.mT
    return s.softmax(-1, dtype=torch.float32).to(x.dtype) @ x


def narrow_softmax(x: Tensor) -> Tensor:
    s = x @ x.mT
    return s.bfloat16().softmax(-1).to(x.dtype) @ x  # here


def packed(x: Tensor, documents: Tensor) -> Tensor:
    q, k = places(x)
    seen = (k <= q) & (documents[:, None] == documents[:, :, None])
    return (x @ x.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ x  # here


def not_packed(x: Tensor, documents: Tensor) -> Tensor:
    q, k = places(x)
    return (x @ x.mT).masked_fill(k > q, -torch.inf).softmax(-1) @ x  # here


def with_sink(q: Tensor, sink: Tensor) -> Tensor:
    s = q @ q.mT
    s = torch.cat([s, sink[:, None, None].to(s.dtype).expand(q.shape[0], -1, s.shape[2], 1)], -1)  # here
    return s.softmax(-1)[..., :-1] @ q


def without_sink(q: Tensor, sink: Tensor) -> Tensor:
    s = q @ q.mT
    return s.softmax(-1) @ q  # here


def alibi(q: Tensor) -> Tensor:
    a, b = places(q)
    slopes = 2.0 ** (-2 * torch.arange(1, 5))
    return (q @ q.mT + slopes[:, None, None] * (b - a)).softmax(-1) @ q


def other_slopes(q: Tensor) -> Tensor:
    a, b = places(q)
    slopes = 2.0 ** (-2 * torch.arange(4))  # here
    return (q @ q.mT + slopes[:, None, None] * (b - a)).softmax(-1) @ q


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def other_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)  # here


def tiny_epsilon(x: Tensor) -> Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)


def no_epsilon(x: Tensor) -> Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1.01e-6)  # here


def grouped(q: Tensor, k: Tensor) -> Tensor:
    k = k.repeat_interleave(2, 1)
    return (q @ k.mT).softmax(-1) @ k


def repeated(q: Tensor, k: Tensor) -> Tensor:
    k = k.repeat(1, 2, 1, 1)  # here
    return (q @ k.mT).softmax(-1) @ k


KINDS: dict[str, tuple[Function, Function, tuple[Tensor, ...]]] = {
    "base of rotary positions": (base, other_base, (X,)),
    "pairs of rotary positions": (base, interleaved, (X,)),
    "softcap before and after the mask": (cap_then_mask, mask_then_cap, (X,)),
    "dtype of the softmax": (wide_softmax, narrow_softmax, (X,)),
    "mask of packed documents": (packed, not_packed, (X, DOCUMENTS)),
    "sink": (with_sink, without_sink, (Q, SINK)),
    "slopes": (alibi, other_slopes, (Q,)),
    "epsilon": (norm, other_norm, (X,)),
    "epsilon below float32's rounding": (tiny_epsilon, no_epsilon, (X,)),
    "order of groups": (grouped, repeated, (Q, K)),
}


def marked(function: Function) -> set[int]:
    lines, first = inspect.getsourcelines(function)
    return {first + n for n, line in enumerate(lines) if line.rstrip().endswith("# here")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_noticed_and_its_line_is_named(kind: str) -> None:
    reference, candidate, inputs = KINDS[kind]
    verdict = attngraph.verify(reference, candidate, inputs, budget=10)
    assert verdict.status == "differs", str(verdict)
    named = {int(p.rpartition(":")[2]) for d in verdict.differences for p in (d.reference, d.candidate) if p}
    assert named & (marked(reference) | marked(candidate)), str(verdict)
    for side in (reference, candidate):
        assert attngraph.verify(side, side, inputs, budget=1)


def test_a_setting_of_a_port_of_another_class_is_told() -> None:
    class Port(Windowed):
        pass

    x = torch.randn(1, 6, 8)
    told = str(attngraph.verify(Windowed(3), Port(4), (x,)))
    assert "window is 3 in the reference, 4 in the candidate" in told
    assert "the class is" not in told


class Windowed(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.qkv, self.window = nn.Linear(8, 24), window

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        place = torch.arange(x.shape[1])
        seen = (place <= place[:, None]) & (place > place[:, None] - self.window)
        return (q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ v
