"""What the tests of fusion share: the comparison of a compiled callable with eager."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def tensors_of(result: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(result)
    opened = [vars(x) if hasattr(x, "__dict__") and not isinstance(x, Tensor) else x for x in leaves]
    found: list[Tensor] = []
    for leaf, inside in zip(leaves, opened, strict=True):
        found += [leaf] if isinstance(leaf, Tensor) else tensors_of(inside) if inside is not leaf else []
    return found


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Differences between what two callables gave, each said in words; empty where there are none."""

    differences: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.differences


def compare_values(expected: Any, actual: Any, tolerance: float) -> list[str]:
    wanted, found = tensors_of(expected), tensors_of(actual)
    if len(wanted) != len(found):
        return [f"{len(found)} tensors instead of {len(wanted)}"]
    problems = []
    for place, (a, b) in enumerate(zip(wanted, found, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            problems.append(f"result {place} is {b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}")
        elif a.requires_grad != b.requires_grad:
            problems.append(f"result {place}: requires_grad is {b.requires_grad}")
        elif not torch.equal(a.isnan(), b.isnan()):
            problems.append(f"result {place}: NaN in other places")
        elif not torch.allclose(a, b, atol=tolerance, rtol=tolerance, equal_nan=True):
            problems.append(f"result {place}: off by {float((a - b).abs().nan_to_num().max()):.3g}")
    return problems


def gradients(result: Any, wanted: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of a fixed random combination of all results for `wanted`."""
    generator = torch.Generator().manual_seed(1)
    terms = [
        (
            torch.where(r.isfinite(), r, 0) * torch.randn(r.shape, generator=generator, dtype=torch.float64)
        ).sum()
        for r in tensors_of(result)
        if r.requires_grad
    ]
    if not terms or not wanted:
        return [None for _ in wanted]
    return list(torch.autograd.grad(torch.stack(terms).sum(), wanted, allow_unused=True))


def compare_gradients(
    expected: Sequence[Tensor | None], actual: Sequence[Tensor | None], tolerance: float
) -> list[str]:
    problems = []
    for place, (a, b) in enumerate(zip(expected, actual, strict=True)):
        a, b = (torch.zeros(()) if g is None else g for g in (a, b))
        if not torch.allclose(
            a.double(),
            b.double().expand_as(a) if a.ndim else b.double(),
            atol=tolerance,
            rtol=tolerance,
            equal_nan=True,
        ):
            problems.append(f"gradient {place}: off by {float((a - b).abs().nan_to_num().max()):.3g}")
    return problems


def compare_calls(
    eager: Callable[..., Any], compiled: Callable[..., Any], inputs: Sequence[Any],
    named: Mapping[str, Any] | None = None, *, tolerance: float = 1e-10, seed: int | None = None,
) -> Comparison:  # fmt: skip
    """Both called on copies of the same inputs, floating ones requiring gradients where grad mode is on;
    results, then gradients of inputs and parameters, compared."""

    def copied(tree: Any) -> Any:
        grads = torch.is_grad_enabled()
        return pytree.tree_map(
            lambda x: (
                x.detach().clone().requires_grad_(grads and x.is_floating_point())
                if isinstance(x, Tensor)
                else x
            ),
            tree,
        )

    results, found = [], []
    parameters = list(eager.parameters()) if isinstance(eager, nn.Module) else []
    for function in (eager, compiled):
        args, kwargs = copied((tuple(inputs), dict(named or {})))
        if seed is not None:
            torch.manual_seed(seed)
        result = function(*args, **kwargs)
        results.append(result)
        if torch.is_grad_enabled():
            leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            found.append(gradients(result, [t for t in (*leaves, *parameters) if t.requires_grad]))
    problems = compare_values(results[0], results[1], tolerance)
    if found and not problems:
        problems = compare_gradients(found[0], found[1], 10 * tolerance)
    return Comparison(tuple(problems))


@pytest.fixture(scope="session")
def compare() -> Callable[..., Comparison]:
    return compare_calls
