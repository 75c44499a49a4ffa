"""What the tests of `models/` share: attention written out as loops over Python floats.

The reference knows nothing of views, broadcasting or softmax kernels. It is handed to tests as a
fixture, so that no test has to import from another file of the tests.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

Keep = Callable[[int, int, int, int], bool]


def always(b: int, h: int, q: int, k: int) -> bool:
    return True


def softmax_by_definition(scores: list[float]) -> list[float]:
    total = math.fsum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


def attention_by_loops(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, keep: Keep = always
) -> Tensor:
    """softmax over the kept keys, element by element, in float64.

    query `[B, Hq, Sq, D]`, key `[B, Hkv, Skv, D]`, value `[B, Hkv, Skv, Dv]` to
    `[B, Hq, Sq, Dv]`; query head h uses key/value head h // (Hq / Hkv). A row that keeps nothing
    is NaN.
    """
    batch, heads, queries, width = query.shape
    kv_heads, keys, value_width = key.shape[1], key.shape[2], value.shape[3]
    q, k, v = query.tolist(), key.tolist(), value.tolist()
    output = torch.full((batch, heads, queries, value_width), math.nan, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            for i in range(queries):
                kept = [j for j in range(keys) if keep(b, h, i, j)]
                if not kept:
                    continue
                scores = [
                    scale * math.fsum(q[b][h][i][d] * k[b][g][j][d] for d in range(width)) for j in kept
                ]
                weights = softmax_by_definition(scores)
                for d in range(value_width):
                    output[b, h, i, d] = math.fsum(
                        weight * v[b][g][j][d] for weight, j in zip(weights, kept, strict=True)
                    )
    return output


def project_heads(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """x `[B, T, C]` times weight `[H * D, C]`, cut into heads by slices: `[B, H, T, D]`."""
    flat = torch.einsum("btc,oc->bto", x, weight)
    flat = flat if bias is None else flat + bias
    width = flat.shape[-1] // heads
    return torch.stack([flat[..., h * width : (h + 1) * width] for h in range(heads)], dim=1)


def join_heads(x: Tensor, project: nn.Linear) -> Tensor:
    """Heads `[B, H, T, Dv]` side by side, through the output projection: `[B, T, C]`."""
    joined = torch.cat([x[:, h] for h in range(x.shape[1])], dim=-1)
    output = torch.einsum("bti,oi->bto", joined, project.weight)
    return output if project.bias is None else output + project.bias


@pytest.fixture
def attend() -> Callable[..., Tensor]:
    return attention_by_loops


@pytest.fixture
def heads_of() -> Callable[..., Tensor]:
    return project_heads


@pytest.fixture
def join() -> Callable[..., Tensor]:
    return join_heads
