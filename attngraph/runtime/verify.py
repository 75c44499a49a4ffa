"""Compares a compiled model's results with those of the eager model.

By the flash-attention rule: the error against the float64 model is at most twice the eager model's, plus
rounding, with NaN and infinities in the same places.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.capture.structure import flatten
from attngraph.ir.ops.others import EXPERT_ROWS
from attngraph.meaning.check import comparison
from attngraph.meaning.check.comparison import FLASH, Comparison
from attngraph.meaning.check.oracle import Oracle


@dataclasses.dataclass(frozen=True)
class Agreement(Comparison):
    """The largest errors of the compiled and of the eager model against float64, and the largest value, over
    all results."""

    def __str__(self) -> str:
        verdict = "equal to eager" if self.holds else "NOT equal to eager"
        if self.problem:
            return f"{verdict}: {super().__str__()}"
        return (
            f"{verdict}: largest distance from the float64 answer {self.error:.1e}, eager's own "
            f"{self.eager_error:.1e} (values up to {self.scale:.1f})"
        )


def compare(
    compiled: Callable[..., Any], model: Callable[..., Any], args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Agreement:  # fmt: skip
    """Run the compiled model, the eager one and its float64 copy on the same inputs, without gradients.

    The model must be deterministic (eval mode, or no dropout).
    """
    kwargs = kwargs or {}
    with torch.no_grad():
        mine = tensors_of(compiled(*args, **kwargs))
        eager = tensors_of(model(*args, **kwargs))
        exact_model = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
        wide_args, wide_kwargs = pytree.tree_map_only(Tensor, Oracle().widened, (args, kwargs))
        exact = tensors_of(_in_float64(exact_model, wide_args, wide_kwargs))
    if len(mine) != len(eager):
        return Agreement(
            FLASH, problem="another number of results", detail=f"{len(mine)} instead of {len(eager)}"
        )
    error = eager_error = scale = 0.0
    for place, (a, b, c) in enumerate(zip(mine, eager, exact, strict=True)):
        found = comparison.compare(a, c, FLASH, eager=b)
        if found.problem:
            where = f" (result {place})" if len(mine) > 1 else ""
            return Agreement(FLASH, problem=found.problem, detail=found.detail + where)
        error, scale = max(error, found.error), max(scale, found.scale)
        eager_error = max(eager_error, found.eager_error)
    return Agreement(FLASH, error, scale, eager_error)


def _in_float64(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the widened model returns."""
    try:
        return model(*args, **kwargs)
    except RuntimeError:
        with _GroupedProducts() as met:
            result = model(*args, **kwargs)
        if not met.any:
            raise
        return result


class _GroupedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes the products of tokens with the weights of their expert, which torch has in no float64."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        found = _grouped(*args, **given) if str(func) == "aten._grouped_mm.default" else None
        self.any |= found is not None
        return func(*args, **given) if found is None else found


def _grouped(
    x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor | None:
    """Such a product in float64, `[tokens, D]` by `[experts, D, H]`; tokens end at `offs`; else None."""
    if offs is None or bias is not None or x.dtype != torch.float64 or (x.ndim, weight.ndim) != (2, 3):
        return None
    return EXPERT_ROWS(x, weight, offs, torch.zeros(1, dtype=torch.int64, device=x.device))  # type: ignore[no-any-return]


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors in what a model returns, in order."""
    return [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]


def logits_of_tokens(call: Callable[[int], Any], tokens: int) -> Tensor:
    """The logits of every token, `[B, T, V]`, of a model that may give the last one's alone.

    Args:
        call: what the model returns for so many tokens from the beginning.
    """

    def logits(end: int) -> Tensor:
        result = call(end)
        found = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
        return found if isinstance(found, Tensor) else tensors_of(result)[0]

    found = logits(tokens)
    if found.ndim == 3 and found.shape[1] == tokens:
        return found
    parts = [logits(end) for end in range(1, tokens + 1)]
    return torch.stack([part.reshape(len(part), -1) for part in parts], 1)


def results_of(result: Any) -> list[Tensor]:
    """The tensors in what a side of a comparison returns, and its arrays (of numpy, say) as tensors."""
    known = (leaf for leaf in flatten(result)[0] if hasattr(leaf, "__array__"))  # as tensors have
    return [leaf if isinstance(leaf, Tensor) else torch.tensor(leaf.__array__()) for leaf in known]
