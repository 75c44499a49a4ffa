"""Faults that come at a chosen place of our own code: an interrupt before the n-th line of Python, or no
memory in the n-th call of torch. Where they come during a call, the call has changed all or nothing, or what
it changed is an error at every later use."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import attngraph
from attngraph.capture.instead import LOCK
from attngraph.ir.ops.declare import shared

HERE = Path(attngraph.__file__).parent
ROOTS = tuple(str(p.resolve()) for p in (HERE, HERE / "passes", HERE / "codegen"))
GRAPHS = "<eval_with_key>"
"""The file that torch.fx says its code is in."""
_OPS = torch._ops.__file__


class Fault:
    """Counts places in the code of a block, and raises at the n-th (0: nowhere)."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, problem: type[BaseException]) -> None:
        self.count += 1
        if self.count == self.at:
            raise problem("here")


@contextlib.contextmanager
def at_line(fault: Fault) -> Iterator[None]:
    """An interrupt before a line."""

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            fault(KeyboardInterrupt)
        return line

    def called(frame: FrameType, *_: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(ROOTS) else None

    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(None)


@contextlib.contextmanager
def at_call(fault: Fault) -> Iterator[None]:
    """No memory in a call of torch, by our code or a graph's."""

    def called(frame: FrameType, event: str, function: Any) -> None:
        name = frame.f_code.co_filename
        ours = name.startswith(ROOTS) or GRAPHS in name or name == _OPS
        of_torch = "torch" in str(getattr(function, "__module__", "")) or isinstance(
            getattr(function, "__self__", None), torch.Tensor
        )
        if event == "c_call" and ours and of_torch:
            fault(MemoryError)

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)


KINDS = {"line": at_line, "call": at_call}


def places(kind: str, run: Callable[[], Any], most: int | None, seed: int = 0) -> list[int]:
    """The places of a call, counted by running it: all, or so many of them."""
    fault = Fault(0)
    with KINDS[kind](fault):
        run()
    every = list(range(1, fault.count + 1))
    return every if most is None or most >= len(every) else sorted(random.Random(seed).sample(every, most))


def fails(kind: str, at: int, run: Callable[[], Any]) -> bool:
    """Run a call with a fault; whether it failed. What surrounds calls is as it was."""
    mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    try:
        with KINDS[kind](Fault(at)):
            run()
    except (KeyboardInterrupt, MemoryError) as problem:
        problem.__traceback__ = None
        failed = True
    else:
        failed = False
    torch._C._set_grad_enabled(mode[0])  # torch's own context managers are not safe from interrupts
    assert torch.is_inference_mode_enabled() == mode[1]
    assert not LOCK._waiting and LOCK._tracer is None
    assert shared() is None
    return failed
