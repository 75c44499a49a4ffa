"""Checks of values in a forward (`assert mask.any()`, `if x.isnan().any(): raise`) as results of the graph.

What Python does next depends on values there, but one of the two ways only raises. The trace takes the other;
the condition is one more result, which the machine looks at before anything is written. Where it does not
hold, or the graph fails, the model itself is run, and raises its own error. So it does not matter for the
result of a call how a check is recognised: by the bytecode around the question whether a tensor is true.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from attngraph.ir.graph.source import short_path

_TORCH = os.path.dirname(torch.__file__) + os.sep
_INSTRUCTIONS = 200
"""Instructions that are followed to find out whether a way of a branch only raises."""


class Checks:
    """The conditions on values that a trace took to hold: one-element tensors of truth values, each with the
    line that asks for it."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, str]] = []

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Answer the body's questions whether a tensor without data is true, where one answer only raises."""
        of_tensor, of_number = torch._C.TensorBase.__bool__, torch.SymBool.__bool__

        def is_true(tensor: Tensor) -> bool:
            known = not isinstance(tensor, FakeTensor) or tensor.constant is not None
            passing = None if known or tensor.numel() != 1 else passing_answer(sys._getframe(1))
            if passing is None:
                return bool(of_tensor(tensor))
            condition = tensor if tensor.dtype == torch.bool else tensor != 0
            return self._take(condition.reshape(()), passing, sys._getframe(1))

        def is_true_number(value: torch.SymBool) -> bool:
            passing = passing_answer(sys._getframe(1)) if free_unbacked_symbols(value) else None
            if passing is None:
                return of_number(value)
            condition = torch.scalar_tensor(value, dtype=torch.bool)  # type: ignore[arg-type]
            return self._take(condition, passing, sys._getframe(1))

        with (
            mock.patch.object(torch.Tensor, "__bool__", is_true, create=True),
            mock.patch.object(torch.SymBool, "__bool__", is_true_number),
        ):
            yield

    def _take(self, condition: Tensor, passing: bool, frame: types.FrameType | None) -> bool:
        while frame is not None and _is_torchs(frame.f_code):
            frame = frame.f_back
        line = "" if frame is None else f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        self.found.append((condition if passing else condition.logical_not(), line))
        return passing


def passing_answer(frame: types.FrameType) -> bool | None:
    """The answer to the question whether a value is true, which this frame's code asks now, that does not
    lead to an exception; None if both answers go on, or neither."""
    code = frame.f_code
    if _is_torchs(code) and code is not torch._assert.__code__:
        return None
    return _passing_at(code, frame.f_lasti)


def _is_torchs(code: types.CodeType) -> bool:
    return code.co_filename.startswith(_TORCH)


@functools.lru_cache(maxsize=1024)
def _passing_at(code: types.CodeType, offset: int) -> bool | None:
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: place for place, instruction in enumerate(instructions)}
    # While calls are listened to, Python may stand at an instruction's cache.
    place, turned = places[max(o for o in places if o <= offset)], False
    if instructions[place].opname.startswith(("CALL", "TO_BOOL")):  # bool(x), then a branch
        place += 1
    while instructions[place].opname in ("UNARY_NOT", "TO_BOOL"):
        turned ^= instructions[place].opname == "UNARY_NOT"
        place += 1
    branch = instructions[place]
    if not branch.opname.startswith("POP_JUMP") or not branch.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    ways = {branch.opname.endswith("IF_TRUE"): places[branch.argval]}
    ways[not branch.opname.endswith("IF_TRUE")] = place + 1
    raising = [answer for answer, way in ways.items() if _only_raises(instructions, places, way)]
    return None if len(raising) != 1 else raising[0] is turned


def _only_raises(instructions: list[dis.Instruction], places: dict[int, int], start: int) -> bool:
    """Whether every way from here ends in an exception that the code raises, without a loop."""
    ends, stack, seen = False, [start], set()
    while stack:
        place = stack.pop()
        if place in seen:
            continue
        seen.add(place)
        found: Any = instructions[place]
        name = found.opname
        if name in ("RAISE_VARARGS", "RERAISE"):
            ends = True
            continue
        if len(seen) > _INSTRUCTIONS or name.startswith(("RETURN", "YIELD", "FOR_ITER", "SEND")):
            return False
        if found.opcode in (*dis.hasjrel, *dis.hasjabs):
            if places[found.argval] <= place:
                return False
            stack.append(places[found.argval])
        if not name.startswith("JUMP_FORWARD"):
            stack.append(place + 1)
    return ends
