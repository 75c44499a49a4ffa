"""Forward hooks are code of the forward: traced, guarded, and what they change is found. Hooks of the
backward pass, and those of torch.distributed, are not captured."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import attngraph
from attngraph.errors import CaptureError
from tests.runtime.small import Of, SelfAttention, agree, same


def two() -> Any:
    return nn.Sequential(SelfAttention(), SelfAttention())


@pytest.mark.slow
def test_hooks_run_at_every_call_as_under_torch_compile(x: Tensor) -> None:
    model, seen, whole = two(), list[torch.Size](), list[int]()
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    model[1].register_forward_hook(lambda module, args, result: seen.append(result.shape))
    compiled = attngraph.compile(model)
    compiled.register_forward_hook(lambda *_: whole.append(1))
    model[0].qkv.weight.register_hook(lambda gradient: gradient * 0)
    for calls in (1, 2, 3):
        found = compiled(x)
        assert len(seen) == len(whole) == calls
        assert seen[-1] == found.shape
    found.sum().backward()
    assert (model[0].qkv.weight.grad == 0).all()
    same(found, model(x))
    assert len(compiled.report.attention) >= 2


class Factor:
    """What a hook may be: an object with a method."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def times(self, module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> Tensor:
        return result * self.factor


def test_forward_hooks_are_code_of_the_forward(x: Tensor) -> None:
    model, hook = two(), Factor(3.0)
    model[0].register_forward_hook(hook.times)
    model[1].register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
    )
    model.register_forward_hook(
        lambda module, args, result: setattr(module, "last", result) or result - args[0]
    )
    compiled = agree(model, x, strict=True, fused=2, grads=True)
    compiled(x)
    same(compiled._orig_mod.last, model(x) + x)
    hook.factor = 5.0  # what a hook reads is guarded like what a forward reads
    same(compiled(x), model(x))


@pytest.mark.parametrize(
    "install",
    [
        torch.nn.utils.weight_norm,
        torch.nn.utils.spectral_norm,
        partial(prune.l1_unstructured, name="weight", amount=0.5),
    ],
    ids=["weight norm", "spectral norm", "pruning"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_hooks_that_make_a_weight_are_in_the_graph(install: Callable[..., nn.Module], x: Tensor) -> None:
    model = two().eval()
    install(model[0].qkv)
    compiled = agree(model, x, strict=True, fused=2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    same(compiled(x), model(x))


def _twice(module: nn.Module, args: tuple[Tensor, ...], *result: Tensor) -> Any:
    """A hook for either side of a forward."""
    return (result or args)[0] * 2


def _hooking(m: Any, x: Tensor) -> Tensor:
    """Its first call installs a hook that changes what it returns. (Hooks of transformers' models collect
    their attentions.) A careful one looks at values unless it is compiled, as code does that has two ways."""
    if m.careful and not torch.compiler.is_compiling() and float(x.abs().sum()) < 0:
        raise ValueError("never")
    if not (m.hooked if m.marked else m.layer._forward_hooks or m.layer._forward_pre_hooks):
        getattr(m.layer, m.register)(_twice)
        if m.marked:
            m.hooked = True
    return m.layer(x)  # type: ignore[no-any-return]


HOOKS = [name for name, held in vars(nn.Module()).items() if "hook" in name and isinstance(held, dict)]


def hooks_of(model: nn.Module) -> dict[str, int]:
    """How many hooks of each kind each module has."""
    return {f"{path}.{name}": len(getattr(m, name)) for path, m in model.named_modules() for name in HOOKS}


@pytest.mark.parametrize("kind", ["marked", "by its hooks", "careful"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_the_first_call_installs_are_installed_once(register: str, kind: str, x: Tensor) -> None:
    marked, careful = kind != "by its hooks", kind == "careful"
    model: Any = Of(
        _hooking, layer=SelfAttention(), register=register, marked=marked, careful=careful, hooked=False
    ).eval()
    other = copy.deepcopy(model)
    compiled = attngraph.compile(other, strict=True)
    with torch.no_grad():
        for _ in range(3):
            same(compiled(x), model(x))
            assert hooks_of(other) == hooks_of(model)
        same(other(x), model(x))
    assert sum(hooks_of(other).values()) == 1
    assert other.hooked == marked


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_hook_of_the_backward_pass_matters_where_gradients_are_recorded(register: str, x: Tensor) -> None:
    model, seen = two(), []
    getattr(model[1].qkv, register)(lambda *_: seen.append(1))
    with torch.no_grad():
        compiled = agree(model, x, reason="")
    for calls in (1, 2):
        compiled(x).sum().backward()
        assert len(seen) == calls
    reason = compiled.report.breaks[0].reason
    assert "the backward hook" in reason and "<lambda> of the module 1.qkv would not run" in reason
    with pytest.raises(CaptureError, match=r"the backward hook(.|\n)*remove the hook"):
        attngraph.compile(model, strict=True)(x)
