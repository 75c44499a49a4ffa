"""Comparing a model on simulated ranks with itself on one device, values and gradients."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.report.ranks import RanksEntry

Compared = Callable[..., RanksEntry]


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


@pytest.fixture
def same_on_ranks() -> Compared:
    """Checks that so many ranks give the results and the gradients of one device, in float64 or
    (not `wide`) as the model is; returns the report's entry about ranks."""

    def compared(
        model: nn.Module, ranks: int, *args: Any, gradients: bool = True, wide: bool = True, **kwargs: Any
    ) -> RanksEntry:  # fmt: skip
        model, rounding = (model.double(), 1e-8) if wide else (model, 1e-5)
        alone = copy.deepcopy(model)
        compiled = attngraph.compile(model, mesh=attngraph.SimulatedMesh(tensor=ranks))
        with torch.set_grad_enabled(gradients):
            torch.manual_seed(5)
            found = _first(compiled(*args, **kwargs))
            torch.manual_seed(5)
            wanted = _first(alone(*args, **kwargs))
        torch.testing.assert_close(found, wanted, rtol=100 * rounding, atol=rounding)
        if gradients:
            weight = torch.randn_like(wanted)
            found.backward(weight)
            wanted.backward(weight)
            largest = max(float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None)
            for (name, mine), (_, theirs) in zip(
                model.named_parameters(), alone.named_parameters(), strict=True
            ):
                if theirs.grad is not None:
                    torch.testing.assert_close(
                        mine.grad, theirs.grad, rtol=100 * rounding, atol=rounding * max(1, largest), msg=name
                    )
        entry = compiled.report.ranks
        assert isinstance(entry, RanksEntry)
        return entry

    return compared
