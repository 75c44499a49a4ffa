"""Forward hooks are code of the forward: traced, guarded, and what they change is found. Hooks of the
backward pass, and those of torch.distributed, are not captured."""

from __future__ import annotations

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

Same = Callable[..., None]


@pytest.mark.slow
def test_forward_hooks_of_submodules_run_at_every_call_as_under_torch_compile(
    layer: type[nn.Module], x: Tensor, same: Same
) -> None:
    model = nn.Sequential(layer(), layer())
    seen: list[torch.Size] = []
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    model[1].register_forward_hook(lambda module, args, result: seen.append(result.shape))
    compiled = attngraph.compile(model)
    for calls in (1, 2, 3):
        found = compiled(x)
        assert len(seen) == calls
        assert seen[-1] == found.shape
    expected = model(x)
    same(found, expected)
    assert len(compiled.report.attention) >= 2


class Factor:
    """What a hook may be: an object with a method."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def times(self, module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> Tensor:
        return result * self.factor


def test_forward_hooks_are_code_of_the_forward(layer: type[nn.Module], x: Tensor, same: Same) -> None:
    model = nn.Sequential(layer(), layer())
    hook = Factor(3.0)
    model[0].register_forward_hook(hook.times)
    model[1].register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
    )
    model.register_forward_hook(
        lambda module, args, result: setattr(module, "last", result) or result - args[0]
    )
    compiled = attngraph.compile(model, strict=True)
    same(compiled(x), model(x))
    same(compiled._orig_mod.last, model(x) + x)
    hook.factor = 5.0  # what a hook reads is guarded like what a forward reads
    same(compiled(x), model(x))
    assert len(compiled.report.attention) == 2
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    same(torch.autograd.grad(compiled(x).square().sum(), list(model.parameters())), wanted)


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
def test_hooks_that_make_a_weight_are_in_the_graph(
    install: Callable[..., nn.Module], layer: type[nn.Module], x: Tensor, same: Same
) -> None:
    model = nn.Sequential(layer(), layer()).eval()
    install(model[0].qkv)
    compiled = attngraph.compile(model, strict=True)
    same(compiled(x), model(x))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    same(compiled(x), model(x))
    assert len(compiled.report.attention) == 2


def _twice(module: nn.Module, args: tuple[Tensor, ...], *result: Tensor) -> Any:
    """A hook for either side of a forward."""
    return (result or args)[0] * 2


class Hooking(nn.Module):
    """Its first call installs a hook that changes what it returns. (Hooks of transformers' models collect
    their attentions.)"""

    def __init__(self, layer: type[nn.Module], register: str, marked: bool) -> None:
        super().__init__()
        self.layer, self.register, self.marked = layer(), register, marked
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not (self.hooked if self.marked else self.layer._forward_hooks or self.layer._forward_pre_hooks):
            getattr(self.layer, self.register)(_twice)
            if self.marked:
                self.hooked = True
        result: Tensor = self.layer(x)
        return result


HOOKS = [name for name, held in vars(nn.Module()).items() if "hook" in name and isinstance(held, dict)]


def hooks_of(model: nn.Module) -> dict[str, int]:
    """How many hooks of each kind each module has."""
    return {f"{path}.{name}": len(getattr(m, name)) for path, m in model.named_modules() for name in HOOKS}


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "by its hooks"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_the_first_call_installs_are_installed_once(
    register: str, marked: bool, layer: type[nn.Module], x: Tensor, same: Same
) -> None:
    model = Hooking(layer, register, marked)
    model.eval()
    other = copy.deepcopy(model)
    compiled = attngraph.compile(other, strict=True)
    with torch.no_grad():
        for _ in range(3):
            same(compiled(x), model(x))
            assert hooks_of(other) == hooks_of(model)
        same(other(x), model(x))
    assert sum(hooks_of(other).values()) == 1
    assert other.hooked == marked


def test_backward_hooks_of_submodules_run(layer: type[nn.Module], x: Tensor) -> None:
    model = nn.Sequential(layer(), layer())
    seen: list[int] = []
    model[1].register_full_backward_hook(lambda *_: seen.append(1))
    compiled = attngraph.compile(model)
    for calls in (1, 2):
        compiled(x.requires_grad_()).sum().backward()
        assert len(seen) == calls


@pytest.mark.slow
def test_hooks_on_the_compiled_model_and_on_parameters_run(layer: type[nn.Module], x: Tensor) -> None:
    model = layer()
    compiled = attngraph.compile(model)
    seen: list[int] = []
    compiled.register_forward_hook(lambda *_: seen.append(1))
    model.qkv.weight.register_hook(lambda gradient: gradient * 0)
    for _ in range(2):
        compiled(x).sum().backward()
    assert len(seen) == 2
    assert (model.qkv.weight.grad == 0).all()


def test_a_backward_hook_is_refused_with_its_name(layer: type[nn.Module], x: Tensor) -> None:
    model = nn.Sequential(layer(), layer())
    model[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError) as refused:
        attngraph.compile(model, strict=True)(x)
    for part in ("the backward hook", "of the module 1 would not run", "remove the hook"):
        assert part in str(refused.value)


class Careful(Hooking):
    """Looks at values unless it is being compiled, as code does that has two ways."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and float(x.abs().sum()) < 0:
            raise ValueError("never")
        return super().forward(x)


def test_a_first_call_is_judged_as_a_trace_runs_it(layer: type[nn.Module], x: Tensor, same: Same) -> None:
    model = Careful(layer, "register_forward_hook", marked=True).eval()
    compiled = attngraph.compile(model, strict=True)
    with torch.no_grad():
        same(compiled(x), model(x))
    assert sum(hooks_of(model).values()) == 1
