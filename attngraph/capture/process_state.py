"""What a forward does to the process, which a graph of it would lose: it draws random numbers of Python or
numpy, sets seeds or defaults of torch, or computes gradients.

A trace runs the forward once, so a number that Python or numpy draws would be a constant of the graph. That
is right only for one that can have no other value (`random.randrange(1)`). torch's own random numbers are
operations of the graph.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attngraph.capture.instead import replaced
from attngraph.ir.graph.source import short_path

Note = Callable[..., None]
_OUTSIDE, _BY_TORCH = "do that outside of the model", "let torch draw them (torch.rand)"
_SETTERS: tuple[tuple[Any, str], ...] = (
    *((place, name) for place in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")),
)
_OF_A_RANGE = "randrange", "randint", "uniform", "choice"
"""Functions of Python's random that may have one possible value."""
_SEEDS = 24
_BACKWARD = "_engine_run_backward"
"""What every function of torch.autograd that computes gradients calls."""
_DECORATORS = "torch.utils._contextlib"
"""Where torch's modes are entered that decorate a function of the user's."""
_DEFAULTS = {"dtype": torch.get_default_dtype, "device": torch.get_default_device}


@contextlib.contextmanager
def process_state_kept(note: Note, line_of: Callable[[str], str]) -> Iterator[None]:
    """Call `note` with what the body does to the process's state, the line, and advice; undo what it draws.
    `splits`: whether torch.compile notices it.

    Args:
        line_of: the first line of the model's code that uses a name, or "".
    """
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    draws = random.getstate()
    draws_of_numpy = None if numpy is None else numpy.get_state()
    defaults = {name: get() for name, get in _DEFAULTS.items()}
    gradients = torch.is_grad_enabled()
    with contextlib.ExitStack() as stack:
        for owner, name in _SETTERS:
            noted = _noted(getattr(owner, name, None), note, f"forward() calls torch.{name}", _OUTSIDE)
            stack.enter_context(replaced(owner, name, noted))
        run = getattr(torch.autograd, _BACKWARD, None)
        stack.enter_context(
            replaced(torch.autograd, _BACKWARD, _noted(run, note, "forward() computes gradients", _OUTSIDE))
        )
        enter = torch.inference_mode.__enter__

        def entered(mode: torch.inference_mode) -> None:
            before = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
            enter(mode)
            frame = sys._getframe(1)
            of_torch = _room(frame) == "torch" and frame.f_globals["__name__"] != _DECORATORS
            if not of_torch and before != (torch.is_inference_mode_enabled(), torch.is_grad_enabled()):
                what = "forward() enters torch.inference_mode"
                note(what, line_of("inference_mode"), _OUTSIDE, splits=False)

        stack.enter_context(replaced(torch.inference_mode, "__enter__", entered))
        for name in _OF_A_RANGE:
            stack.enter_context(replaced(random, name, _of_one_value(getattr(random, name))))
        yield
    for name, get in _DEFAULTS.items():
        if get() != defaults[name]:
            note(f"forward() changes torch's default {name}", line_of(f"set_default_{name}"), _OUTSIDE)
    if torch.is_grad_enabled() != gradients:
        torch.set_grad_enabled(gradients)
        note("forward() switches gradients on or off for its caller", line_of("set_grad_enabled"), _OUTSIDE)
    if random.getstate() != draws:
        random.setstate(draws)
        note("forward() draws random numbers from Python's random", line_of("random"), _BY_TORCH)
    if numpy is not None and _as_values(numpy.get_state()) != _as_values(draws_of_numpy):
        numpy.set_state(draws_of_numpy)
        note("forward() draws random numbers from numpy", line_of("random"), _BY_TORCH)


def _of_one_value(draw: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which draws nothing where all draws are equal."""

    @functools.wraps(draw)
    def run(*args: Any, **kwargs: Any) -> Any:
        before, found = random.getstate(), []
        for seed in range(_SEEDS):
            random.seed(seed)
            found.append(draw(*args, **kwargs))
        random.setstate(before)
        first = found[0]
        return first if all(each is first or each == first for each in found) else draw(*args, **kwargs)

    return run


def _as_values(state: Any) -> tuple[Any, ...]:
    """numpy's state, of which a part is an array."""
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)


def _noted(function: Any, note: Note, what: str, advice: str) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        frame: types.FrameType | None = sys._getframe(1)
        by_torch = _room(frame) == "torch" and function.__name__ != _BACKWARD
        while _room(frame) in ("torch", "attngraph"):
            assert frame is not None
            frame = frame.f_back
        if frame is not None and not by_torch:  # else an operation of torch's own puts it back
            note(what, f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}", advice)
        return function(*args, **kwargs)

    return run


def _room(frame: types.FrameType | None) -> str:
    """The package whose code runs in a frame."""
    return "" if frame is None else str(frame.f_globals.get("__name__")).partition(".")[0]
