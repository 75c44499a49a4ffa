"""A forward may switch gradients on or off itself: its results have gradients where the model's have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph


def attend(x: Tensor) -> Tensor:
    return (x @ x.mT).softmax(-1) @ x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)


class Decorated(Model):
    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        return attend(self.layer(x))


class InPart(Model):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = attend(self.layer(x))
        with torch.no_grad():
            z = self.layer(y)
            with torch.set_grad_enabled(True):
                return y, z, self.layer(y)


class ForGood(Model):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = attend(self.layer(x))
        torch.set_grad_enabled(not torch.is_grad_enabled())
        return y, self.layer(y)


class Inferring(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = attend(self.layer(x))
        return y + 1


class NotInferring(Model):
    @torch.inference_mode(False)
    def forward(self, x: Tensor) -> Tensor:
        return attend(self.layer(x))


REASONS = {
    (Decorated, "no_grad"): "forward() switches gradients on, which its caller has switched off",
    (InPart, "no_grad"): "forward() switches gradients on, which its caller has switched off",
    (ForGood, "no_grad"): "forward() switches gradients on or off for its caller",
    (ForGood, "enable_grad"): "forward() switches gradients on or off for its caller",
    (ForGood, "inference_mode"): "forward() switches gradients on or off for its caller",
    (Inferring, "no_grad"): "forward() enters torch.inference_mode; the model runs as it is",
    (Inferring, "enable_grad"): "forward() enters torch.inference_mode; the model runs as it is",
    (NotInferring, "no_grad"): "forward() enters torch.inference_mode; the model runs as it is",
    (NotInferring, "inference_mode"): "forward() enters torch.inference_mode; the model runs as it is",
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [Decorated, InPart, ForGood, Inferring, NotInferring])
def test_results_have_gradients_where_the_models_have(kind: Any, mode: Any) -> None:
    torch._dynamo.reset()
    model = kind()
    compiled = attngraph.compile(copy.deepcopy(model))
    x, found, values = torch.randn(2, 5, 8), [], []
    for each in (model, compiled, compiled):
        with mode():
            results = each(x)
            after = torch.is_grad_enabled()
        results = results if isinstance(results, tuple) else (results,)
        found.append([after, [(t.requires_grad, t.is_inference()) for t in results]])
        values.append([t.detach() for t in results])
    assert found[0] == found[1] == found[2]
    torch.testing.assert_close(values[1:], [values[0], values[0]])
    reason = REASONS.get((kind, mode.__name__))
    assert [b.reason for b in compiled.report.breaks][:1] == ([reason] if reason else [])
