"""A call of a compiled module has all of its effects on the model, or none."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir.ops.declare import one_run, shared
from tests.cache.faults import KINDS, fails, places


class Counting(nn.Module):
    """Attention that keeps a mean of its results, a number of calls, and the latest result."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.calls, self.latest = nn.Buffer(torch.zeros(8)), nn.Buffer(torch.zeros(())), None

    def forward(self, x: Tensor) -> Tensor:
        found = (x @ x.mT).softmax(-1) @ x
        self.calls += 1
        self.mean += (found.mean((0, 1)) - self.mean) / self.calls
        self.latest = found
        return found


def effects(model: Counting) -> tuple[list[float], float, int]:
    return model.mean.tolist(), float(model.calls), id(model.latest)


def test_buffers_and_attributes_change_together_or_not_at_all() -> None:
    model = Counting()
    compiled = attngraph.compile(model, min_scores=0)
    x = torch.randn(2, 40, 8)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        tried = 0
        for kind in KINDS:
            for at in places(kind, lambda: compiled(x), 40):
                before = effects(model)
                if fails(kind, at, lambda: compiled(x)):
                    tried += 1
                    changed = [a != b for a, b in zip(before, effects(model), strict=True)]
                    assert all(changed[1:]) or not any(changed), f"{changed} of mean, calls, latest"
        assert tried > 40


def test_what_operations_of_a_run_share_ends_with_it_wherever_it_is_interrupted() -> None:
    def run() -> None:
        with one_run():
            assert shared() is not None

    for at in range(1, 40):
        left = iter(range(at))

        def trace(frame: Any, event: str, _: Any, left: Any = left) -> Any:
            if event == "line" and next(left, None) is None:
                raise KeyboardInterrupt
            return trace

        try:
            sys.settrace(trace)
            run()
        except KeyboardInterrupt as problem:
            problem.__traceback__ = None
        finally:
            sys.settrace(None)
        assert shared() is None
