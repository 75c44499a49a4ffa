"""What is computed token by token keeps the digits of small numbers, as PyTorch's own functions do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph

F = nn.functional
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "expm1": lambda x: torch.expm1(x * 1e-5) * 1e5,
    "log1p": lambda x: torch.log1p(x.abs() * 1e-5) * 1e5,
    "log1p of large ones": lambda x: torch.log1p(x.abs() * 1e30),
    "logsigmoid": lambda x: F.logsigmoid(x / 9 + 8) * 1e3,
    "logsigmoid below": lambda x: F.logsigmoid(x * 9 - 20),
    "softplus": lambda x: F.softplus(x / 9 - 9) * 1e4,
    "softplus, sharper": lambda x: F.softplus(x * 9, beta=3.0, threshold=5.0),
    "elu": lambda x: F.elu(x * 1e-4) * 1e4,
    "selu": lambda x: F.selu(x * 3),
    "celu": lambda x: F.celu(x, 0.5),
}


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.into, self.head = nn.Embedding(31, 16), nn.Linear(16, 48), nn.Linear(16, 31)
        self.function = function

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.into(x).chunk(3, -1)
        hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        x = x + (q @ k.mT / 4).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self.head(self.function(x))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_small_numbers(name: str) -> None:
    torch.manual_seed(0)
    model, ids = Layer(FUNCTIONS[name]).eval(), torch.randint(0, 31, (2, 20))
    with torch.no_grad():
        eager, exact = model(ids), model.double()(ids)
        found, _ = attngraph.compile(model.float(), cache=True).prefill(ids)
    ours, own = (float((t.double() - exact).abs().max()) for t in (found, eager))
    assert ours <= 2 * own + 1e-6 * float(exact.abs().max())
