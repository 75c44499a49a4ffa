"""What a process remembers of kernels: the plans of calls, and what did not run.

A plan takes hundreds of microseconds (formulas are walked, tiles are chosen), a launch some tens, so plans
are kept. When a kernel does not compile or launch, smaller tiles are tried, then other kernels. Failures are
reported once, in the log and in reports (`remarks`), with the reason: out of shared memory or registers, or a
compiler error. Device errors (an illegal address) also occur in the next kernel, so the user sees them. While
a CUDA graph is captured, drivers refuse much that works otherwise and the capture is lost with the first
error, so nothing is concluded from it: the user sees it.
"""

import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from attngraph.codegen.remarks import Remarks
from attngraph.codegen.scalar.form import SMALL
from attngraph.codegen.triton import tuned, visits
from attngraph.codegen.triton.device import is_captured, is_exact, name_of
from attngraph.codegen.triton.plan import Blocks, Plan
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops.kernels import Reads, Sizes

_log = logging.getLogger("attngraph.codegen.triton")
_failed: set[tuple[Hashable, torch.device]] = set()
_said = Remarks()
IN_CAPTURE = (
    "Raised while a CUDA graph was being captured, where kernels cannot be compiled or loaded and no other "
    "tiles are tried: make a call of these shapes once before the capture."
)
P = TypeVar("P", bound=Plan)
K = TypeVar("K")
R = TypeVar("R")


def smaller(blocks: Blocks) -> list[Blocks]:
    """Blocks to try after these, in order: a tile at a time, without pipelining, then tiles of half the size,
    and so on."""
    plain = dataclasses.replace(blocks, q=64 if blocks.groups else blocks.q, ahead=False, groups=False)
    found = [*([plain] if plain != blocks else []), dataclasses.replace(plain, stages=1)]
    while found[-1].q > 16 or found[-1].k > 16:
        last = found[-1]
        found.append(Blocks(max(16, last.q // 2), max(16, last.k // 2), min(4, last.warps), 1))
    return found if found[0] != blocks else found[1:]


def run(plan: P, device: torch.device, call: Callable[[P], R], otherwise: Callable[[], R]) -> R:
    """Make the call with the first blocks that run, beginning with the plan's own; else call `otherwise`."""
    problems: list[str] = []
    for blocks in _in_order(plan.blocks):
        chosen = plan if blocks == plan.blocks else dataclasses.replace(plan, blocks=blocks)
        found, problem = once(chosen, device, call)
        if found is not None:
            return found
        if problem:
            problems.append(problem)
            _say(plan, f"{blocks} does not run on {device}, smaller tiles are tried: {problem}")
    if problems:
        _say(plan, f"no tiles run on {device}, PyTorch's operations instead")
    return otherwise()


def once(plan: K, device: torch.device, call: Callable[[K], R]) -> tuple[R | None, str]:
    """The result of a call. None where it does not run, and why, unless that was told before."""
    if _failed and (plan, device) in _failed:
        return None, ""
    try:
        return call(plan), ""
    except (IndexError, torch.OutOfMemoryError):
        raise  # the fault is in the caller's tensors
    except Exception as error:  # compilers and drivers fail in many ways
        if is_captured(device):
            error.add_note(IN_CAPTURE)
            raise
        _failed.add((plan, device))
        return None, f"{type(error).__name__}: {error}".strip()


def _in_order(blocks: Blocks) -> Iterator[Blocks]:
    yield blocks
    yield from smaller(blocks)


def _say(plan: Plan, what: str) -> None:
    _log.warning("%s; for\n%s", what, plan.program)
    _said.add(plan.program, what)


def note(program: ScoreProgram, what: str) -> None:
    """Store a remark on a program for reports although nothing failed; each remark once."""
    if _said.add(program, what):
        _log.info("%s; for\n%s", what, program)


def remarks(program: ScoreProgram) -> tuple[str, ...]:
    """The failures and remarks of a program in this process."""
    return _said.of(program)


MOST = 4096
"""Plans that are kept, of one kernel."""


class KeptPlans(Generic[K]):
    """The plans of one kernel, by all that they follow from."""

    def __init__(self) -> None:
        self._found: dict[Hashable, K] = {}

    def get(self, key: Hashable, make: Callable[[], K]) -> K:
        """The plan of this key, made where it is not known."""
        try:
            return self._found[key]
        except KeyError:
            if len(self._found) >= MOST:
                self._found.clear()
            found = self._found[key] = make()
            return found


def key_of(
    program: ScoreProgram, operands: Sequence[Tensor], reads: Reads, sizes: Sizes, gradients: bool = False
) -> Hashable:
    """All that the plan of a call follows from: the program, how its tensors lie in memory, whether sizes are
    large, the device, and what was measured on it. `gradients`: also which tensors want gradients."""
    device = operands[0].device
    found: tuple[Hashable, ...] = (
        program, device, max(map(abs, sizes), default=0) >= SMALL,
        name_of(device), tuned.changes(), visits.WORTH, is_exact(operands[0]),
        *[(t.dtype, t.shape, t.stride()) for t in (*operands, *reads)],
    )  # fmt: skip
    return (*found, *[t.requires_grad for t in (*operands, *reads)]) if gradients else found
