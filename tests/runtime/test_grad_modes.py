"""A forward may switch gradients on or off itself: its results have gradients where the model's have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.runtime.small import Of, attend


def _in_part(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = attend(m.layer(x))
    with torch.no_grad():
        z = m.layer(y)
        with torch.set_grad_enabled(True):
            return y, z, m.layer(y)


def _for_good(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = attend(m.layer(x))
    torch.set_grad_enabled(not torch.is_grad_enabled())
    return y, m.layer(y)


def _inferring(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    with torch.inference_mode():
        y = attend(m.layer(x))
    return (y + 1,)


ON = "forward() switches gradients on, which its caller has switched off"
FOR_CALLER = "forward() switches gradients on or off for its caller"
INFERENCE = "forward() enters torch.inference_mode; the model runs as it is"
MODES = torch.enable_grad, torch.no_grad, torch.inference_mode
SWITCHING: dict[str, tuple[Callable[..., Any], tuple[str, str, str]]] = {
    "decorated": (torch.enable_grad()(lambda m, x: (attend(m.layer(x)),)), ("", ON, "")),
    "in part": (_in_part, ("", ON, "")),
    "for good": (_for_good, (FOR_CALLER, FOR_CALLER, FOR_CALLER)),
    "inferring": (_inferring, (INFERENCE, INFERENCE, "")),
    "not inferring": (
        torch.inference_mode(False)(lambda m, x: (attend(m.layer(x)),)), ("", INFERENCE, INFERENCE)
    ),
}  # fmt: skip
"""With the reason why it is in pieces under each mode."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SWITCHING)
def test_results_have_gradients_where_the_models_have(name: str, mode: Any) -> None:
    torch._dynamo.reset()
    function, reasons = SWITCHING[name]
    model, x = Of(function, layer=nn.Linear(8, 8)), torch.randn(2, 5, 8)
    compiled, found, values = attngraph.compile(model), [], []
    for each in (model, compiled, compiled):
        with mode():
            results, after = each(x), torch.is_grad_enabled()
        found.append([after, [(t.requires_grad, t.is_inference()) for t in results]])
        values.append([t.detach() for t in results])
    assert found[0] == found[1] == found[2]
    torch.testing.assert_close(values[1:], [values[0], values[0]])
    reason = reasons[MODES.index(mode)]
    assert [b.reason for b in compiled.report.breaks][:1] == ([reason] if reason else [])
