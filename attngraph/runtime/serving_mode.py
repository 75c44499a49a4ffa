"""The mode in which decoders serve: no gradients, and no inference mode even if the caller is inside of it.

A state outlives the call that makes it, and a tensor of `torch.inference_mode()` cannot be written outside of
that mode. So whatever a decoder keeps is an ordinary tensor, and calls inside and outside of inference mode
can follow each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def serving(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run without gradients and outside of inference mode."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first enables gradients
            return function(*args, **kwargs)

    return run
