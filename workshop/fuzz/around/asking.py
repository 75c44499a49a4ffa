"""Functions that ask something of their argument besides values, or of what surrounds the call."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attngraph
from attngraph.errors import AttnGraphError
from workshop.fuzz.around.places import WRAPPERS

ASKED = (
    "2.0 if x.is_contiguous() else 3.0", "2.0 if x.stride(0) > x.stride(-1) else 3.0",
    "x.storage_offset() + 1.0",
    "float(x.stride()[1])", "2.0 if x.is_leaf else 3.0", "2.0 if x.grad is None else 3.0",
    "2.0 if x.grad_fn is None else 3.0", "getattr(x, 'scale', 2.0)", "2.0 if hasattr(x, 'scale') else 3.0",
    "2.0 if x.requires_grad else 3.0", "2.0 if x.is_inference() else 3.0", "2.0 if x._base is None else 3.0",
    "2.0 if x._is_view() else 3.0", "1.0 + x._version", "2.0 if isinstance(x, nn.Parameter) else 3.0",
    "2.0 if x.untyped_storage().nbytes() > 300 else 3.0", "x.as_strided((2, 3, 4), (1, 2, 3)).sum()",
    "written(x)", "written_flat(x)", "2.0 if x.T.is_contiguous() else 3.0",
    "float(x.mT.contiguous().stride(-1))",
    "x.dtype.itemsize * 1.0", "2.0 if torch.is_grad_enabled() else 3.0",
    "2.0 if torch.is_inference_mode_enabled() else 3.0",
    "torch.zeros(()).dtype.itemsize * 1.0", "2.0 if torch.is_autocast_enabled('cpu') else 3.0",
    "2.0 if x.dim_order() == (0, 1, 2) else 3.0", "float(x.element_size())", "2.0 if x.is_shared() else 3.0",
)  # fmt: skip
"""What a function asks of its argument, or of what surrounds the call."""

_ASKING = """
import functools, torch
from torch import nn
def written(x):
    y = x * 1
    z = y.mT if x.shape[0] > 100 else y
    z = z.reshape(-1)
    z.add_(1)
    return y.sum()
def written_flat(x):
    y = torch.empty_like(x).copy_(x)
    y.flatten()[:3] = 7.0
    return y.sum()
{setup}
class Held:
    pass
def forward(x, self=Held()):
    p = (x @ x.mT / 3).softmax(-1)
    return (p @ x) * ({use})
"""


def _arguments() -> dict[str, Callable[[], Tensor]]:
    """Tensors that differ in nothing but what code can ask of them besides values."""

    def with_(tensor: Tensor, **attributes: Any) -> Tensor:
        vars(tensor).update(attributes)
        return tensor

    def graded() -> Tensor:
        found = torch.randn(2, 6, 8, requires_grad=True)
        torch.autograd.backward(found.sum())
        return found

    def inferred() -> Tensor:
        with torch.inference_mode():
            return torch.randn(2, 6, 8)

    return {
        "plain": lambda: torch.randn(2, 6, 8), "transposed": lambda: torch.randn(2, 8, 6).mT,
        "offset": lambda: torch.randn(3, 6, 8)[1:], "stepped": lambda: torch.randn(2, 12, 16)[:, ::2, ::2],
        "expanded": lambda: torch.randn(1, 6, 8).expand(2, 6, 8),
        "rows last": lambda: torch.randn(6, 8, 2).permute(2, 0, 1),
        "leaf": lambda: torch.randn(2, 6, 8, requires_grad=True),
        "computed": lambda: torch.randn(2, 6, 8, requires_grad=True) * 1, "graded": graded,
        "attribute": lambda: with_(torch.randn(2, 6, 8), scale=3.0),
        "other attribute": lambda: with_(torch.randn(2, 6, 8), scale=5.0),
        "parameter": lambda: nn.Parameter(torch.randn(2, 6, 8)),
        "written": lambda: torch.randn(2, 6, 8).add_(1),
        "view": lambda: torch.randn(96).view(2, 6, 8), "inference": inferred,
        "double": lambda: torch.randn(2, 6, 8, dtype=torch.float64),
        "shared": lambda: torch.randn(2, 6, 8).share_memory_(),  # type: ignore[no-untyped-call]
    }  # fmt: skip


class _Changes(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if "softmax" in str(func) else found


class _Sees(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if "softmax" in str(func) else found


@contextlib.contextmanager
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
    "a function mode": _Changes, "a dispatch mode": _Sees, "double": _double,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "device": lambda: torch.device("cpu"),
}  # fmt: skip


def check(seed: int) -> str:
    """What is wrong with one function that asks something of its argument or of what surrounds the call."""
    chosen = random.Random(seed)
    read, wrapper = chosen.choice(ASKED), chosen.choice([w for w in WRAPPERS if w.name in _FREE])
    setup, use = (part.replace("READ", f"({read})") for part in (wrapper.setup, wrapper.use))
    space: dict[str, Any] = {"__name__": "around_asking"}
    exec(compile(_ASKING.format(setup=setup, use=use), "around_asking.py", "exec"), space)
    torch.manual_seed(seed)
    compiled = attngraph.compile(space["forward"], min_scores=0)
    makers, told = _arguments(), []
    two = chosen.sample(list(SURROUNDINGS), 2)  # so that calls differ in their arguments alone, too
    for _ in range(4):
        name, around = chosen.choice(list(makers)), chosen.choice(two)
        told.append(f"{name} under {around}")
        x = makers[name]()
        found, want = (_answer(f, x, SURROUNDINGS[around]) for f in (compiled, space["forward"]))
        if not _agree(found, want):
            return f"{read} / {wrapper.name} / {', '.join(told)}: {found} and not {want}"
    return ""


_FREE = (
    "forward",
    "helper",
    "helper of a helper",
    "in a list",
    "in a dict of lists",
    "partial",
    "callable object",
    "generator",
)
"""Wrappers that need no class."""


def _answer(function: Callable[..., Any], x: Tensor, around: Callable[[], Any]) -> Any:
    with around():
        try:
            return function(x)
        except AttnGraphError:
            raise
        except Exception as problem:  # the function's own
            return type(problem).__name__


def _agree(found: Any, want: Any) -> bool:
    if isinstance(found, str) or isinstance(want, str):
        return bool(found == want) if isinstance(found, str) and isinstance(want, str) else False
    share = 0.03 if want.dtype == torch.bfloat16 else 1e-3  # of a size that rounding has in such a program
    close = float((found.double() - want.double()).abs().max()) <= share * float(want.abs().max()) + 1e-3
    return close and found.dtype == want.dtype and found.requires_grad == want.requires_grad
