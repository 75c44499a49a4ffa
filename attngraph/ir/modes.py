"""What surrounds a call of torch: autocast, modes that change operations, hooks of all modules; and Python's
search for unreachable objects.

Our own machinery runs in modes of its own choosing: a graph has the casts of autocast in it already. What a
user put around a call, and a graph cannot honour, is named, so that the model itself runs.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn.modules import module as _modules
from torch.utils import flop_counter
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

P = ParamSpec("P")
R = TypeVar("R")
_GLOBAL_HOOKS = tuple(
    held for name, held in vars(_modules).items() if name.startswith("_global_") and name.endswith("hooks")
)
_COUNTING = getattr(flop_counter, "_FlopCounterMode", flop_counter.FlopCounterMode)
"""A mode that counts operations: ours say how many they are."""


def autocast_of(device: str) -> tuple[bool, torch.dtype]:
    """Whether autocast is on for a kind of device, and the dtype to which it casts."""
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


@contextlib.contextmanager
def without_autocast(devices: Iterable[str] = ("cpu", "cuda")) -> Iterator[None]:
    """Autocast is off in the body, for these kinds of devices."""
    if not torch._C._is_any_autocast_enabled():
        yield
        return
    with contextlib.ExitStack() as stack:
        for device in devices:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def own_modes() -> Iterator[None]:
    """Nothing that the caller put around the body changes what operations in it do."""
    taken = []
    try:
        while torch._C._len_torch_function_stack():
            taken.append(torch._C._pop_torch_function_stack())
        with without_autocast(), _disable_current_modes():
            yield
    finally:
        for mode in reversed(taken):
            torch._C._push_on_torch_function_stack(mode)


def serving(function: Callable[P, R]) -> Callable[P, R]:
    """The function in the mode in which decoders serve: no gradients, and no inference mode either. A
    state outlives the call that makes it, and a tensor of `torch.inference_mode()` cannot be written outside
    of that mode. So whatever a decoder keeps is an ordinary tensor."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first enables gradients
            return function(*args, **kwargs)

    return run


def hooks_of_all_modules() -> str:
    """A hook of the user's that runs around every module of the process, in words; "" if there is none.
    (torch's own only look: its counter of operations sets some, and torch.export while any thread traces.)"""
    hooks = (hook for held in _GLOBAL_HOOKS if held for hook in tuple(held.values()))
    users = any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)
    return "a hook of all modules" if users else ""


def surroundings() -> str:
    """A mode around a call that a graph would run past, in words; "" if there is none."""
    functions = torch._C._len_torch_function_stack()
    for place in range(functions):
        mode = torch._C._get_function_stack_at(place)
        if not isinstance(mode, DeviceContext):
            return f"the mode {type(mode).__name__}, which changes torch's functions"
    seeing = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    other = next((type(m).__name__ for m in reversed(seeing) if not isinstance(m, _COUNTING)), "")
    return other and f"the mode {other}, which sees torch's operations"


def default_device() -> torch.device | None:
    """The device of tensors that are made without one, if it was set."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def settings() -> tuple[object, ...]:
    """What operations ask torch about the process."""
    cuda: Any = torch.backends.cuda
    return (
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        torch.backends.mkldnn.enabled,
    )  # fmt: skip


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Let Python look for unreachable objects after the body only, where many objects are made that stay: it
    looks each time that some thousands were made, at all that are there, and a process that has loaded torch
    has hundreds of thousands."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
