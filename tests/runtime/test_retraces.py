"""Why a model is traced again is told: in the report, and as a warning if a cause keeps coming."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir.budgets import RETRACES_TOLD
from tests.runtime.small import agree, attend, sequence

LOGGER = "attngraph"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.inner = 0, nn.Linear(8, 8)
        self.inner.gain = 1

    def forward(self, x: Tensor, scale: float = 1.0, options: dict[str, Any] | None = None) -> Tensor:
        q = self.inner(x) * self.inner.gain
        return torch.softmax(q @ q.mT * scale, -1) @ x + self.step


def _set(path: str, value: Any) -> Callable[[Any, Tensor], Any]:
    """Sets an attribute and calls."""
    *way, last = path.split(".")
    return lambda c, x: (setattr(c.inner if way else c, last, value), c(x))


CHANGES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "an attribute": (_set("step", 3), "the attribute step of the model"),
    "a new attribute": (_set("fresh", 1), "the attribute fresh of the model"),
    "of a module": (_set("inner.gain", 2), "the attribute inner.gain of the model"),
    "a number": (lambda c, x: c(x, 2.0), "which arguments are given, or their structure"),
    "mode": (lambda c, x: c.train()(x), "train() or eval() mode"),
    "dtype": (lambda c, x: c(x.requires_grad_()), "requires_grad of the argument x"),
    "gradients": (lambda c, x: torch.no_grad()(c)(x), "whether gradients are recorded"),
    "sizes": (lambda c, x: c(x[0]), "the number of dimensions of the argument x"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_report_names_what_changed(name: str, x: Tensor) -> None:
    change, what = CHANGES[name]
    compiled = attngraph.compile(Model().eval())
    compiled(x)
    assert compiled.report.retraces == ()
    change(compiled, x)
    assert compiled.report.retraces == ((what, 1),)
    assert f"traced again x 1   because of {what}" in str(compiled.report)


def in_blocks(x: Tensor) -> Tensor:
    return sum((x[:, at : at + 3].mean(1) for at in range(0, x.shape[1], 3)), torch.zeros(()))


def test_a_size_that_is_a_number_is_named() -> None:
    fixed = [sequence(tokens) for tokens in (4, 5)]
    for given in fixed:
        torch._dynamo.mark_static(given, 1)
    counted = [sequence(7), sequence(7, 3), sequence(8)]  # by a loop
    for model, calls in ((attend, fixed), (in_blocks, counted)):
        compiled = agree(model, *calls)
        assert compiled.report.retraces == (("dimension 1 of tensor argument 0", 1),)


@pytest.mark.slow
def test_a_cause_that_keeps_coming_is_warned_of_once(x: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    compiled = attngraph.compile(Model().eval())
    with caplog.at_level(logging.INFO, LOGGER):
        for number in range(RETRACES_TOLD + 2):
            compiled.step = number
            compiled(x)
    told = [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith(LOGGER)]
    assert ("INFO", "traced again because of the attribute step of the model (1, and it was 0)") in told
    (warning,) = (text for level, text in told if level == "WARNING")
    assert warning.startswith("traced again for the 4th time because of the attribute step of the model (4,")
    assert warning.endswith("What to do: give what changes as a tensor, or keep it constant.")


def test_a_size_that_keeps_changing_is_not_to_be_given_as_a_tensor(caplog: pytest.LogCaptureFixture) -> None:
    compiled = attngraph.compile(lambda x: torch.softmax(x @ x.mT, -1) @ x + int(x.shape[1]) % 7)
    for tokens in range(5, 6 + RETRACES_TOLD):
        compiled(torch.randn(2, tokens, 4))
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert "What to do: pad calls to a few sizes" in warning and "as a tensor" not in warning


def test_a_call_that_the_model_does_not_take_is_its_own_error_and_nothing_else(
    x: Tensor, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    compiled = attngraph.compile(Model().eval())
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'scal'"):
        compiled(x, scal=2.0)
    with pytest.raises(RuntimeError, match="dtype"):
        compiled(x.double())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compiled(x[..., :3])
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "Traceback" not in capfd.readouterr().err
    compiled(x)
    assert compiled.report.attention and not compiled.report.breaks


def test_going_on_in_pieces_is_said_once_with_what_a_hook_changes(
    x: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    model, seen = Model().eval(), []
    model.inner.register_forward_hook(lambda *given: seen.append(given))
    compiled = attngraph.compile(model)
    for _ in range(2):
        compiled(x)
    (record,) = (r for r in caplog.records if r.name.startswith(LOGGER))
    text = record.getMessage()
    assert len(seen) == 2
    assert "forward() changes the local variable seen at tests/runtime/test_retraces.py:" in text
    assert "Continuing in pieces" in text
    assert "strict" not in text
