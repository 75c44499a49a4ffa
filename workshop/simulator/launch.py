"""Launches: a kernel on tensors of the CPU, in one random order, with the registers that its warps have."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from workshop.simulator.memory import Descriptor, Memory, Pointer
from workshop.simulator.order import Wrong, line_of
from workshop.simulator.schedule import World

REGISTERS = 65536
"""Of a multiprocessor, for the threads of a program."""


@dataclasses.dataclass
class Options:
    """Of a launch: Triton's; `resident`: how many programs run at once (None: all); `ordered`: additions to
    one element must be ordered, so that sums are the same each time."""

    num_warps: int = 4
    maxnreg: int | None = None
    resident: int | None = None
    ordered: bool = False

    def check_registers(self, own: int, warps: list[int], wanted: list[int]) -> None:
        """Whether the registers that partitions ask for are there (setmaxnreg)."""
        if not wanted:
            return
        wrong = [n for n in wanted if n % 8 or not 24 <= n <= 256]
        if wrong or len(wanted) != len(warps):
            raise Wrong(
                f"setmaxnreg takes multiples of 8 from 24 to 256 for {len(warps)} partitions, not {wanted}"
            )
        if self.maxnreg is None:
            return
        # Partitions of fewer than four warps share a group, whose registers are those of the largest.
        groups = [(w, n) for w, n in zip(warps, wanted, strict=True) if w % 4 == 0]
        small = [(w, n) for w, n in zip(warps, wanted, strict=True) if w % 4]
        if small:
            groups.append((-(-sum(w for w, _ in small) // 4) * 4, max(n for _, n in small)))
        total = own + sum(w for w, _ in groups)
        if 32 * total * self.maxnreg > REGISTERS:
            raise Wrong(f"{32 * total} threads of {self.maxnreg} registers are more than {REGISTERS}")
        left = (self.maxnreg * total - sum(w * n for w, n in groups)) // own
        if left < 24:
            raise Wrong(
                f"partitions ask for {wanted} registers; of {total} warps with {self.maxnreg} each the first "
                f"one would keep {left}"
            )


class Kernel:
    """In place of a compiled kernel: `Kernel(function, seed)[grid](*arguments, **options)`."""

    def __init__(self, function: Callable[..., Any], seed: int = 0, **options: Any) -> None:
        self.function, self.seed, self.options = function, seed, options

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            names = list(inspect.signature(self.function).parameters)
            given = dict(zip(names, arguments, strict=False))
            given |= {name: value for name, value in options.items() if name in names}
            chosen = {f.name: options[f.name] for f in dataclasses.fields(Options) if f.name in options}
            launch(self.function, grid, given, self.seed, **{**chosen, **self.options})

        return call


def launch(
    kernel: Callable[..., Any],
    grid: Sequence[int],
    arguments: Mapping[str, Any],
    seed: int = 0,
    **options: Any,
) -> None:
    """Run a kernel (of `load`) in one random order, on tensors of the CPU, in place.

    Args:
        arguments: tensors become pointers, host-side `TensorDescriptor`s boxes; all else is passed on.

    Raises:
        Wrong: the kernel has a fault, which the message names with its line.
    """
    chosen = Options(**options)
    memories: dict[Any, Memory] = {}

    def memory_of(tensor: Tensor, name: str) -> Memory:
        key = tensor.untyped_storage().data_ptr(), tensor.dtype
        return memories.setdefault(key, Memory(tensor, name, chosen.ordered))

    def passed(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Pointer(memory_of(value, name), value.storage_offset())
        if hasattr(value, "block_shape"):
            base, shape = value.base, (value.shape, value.strides, value.block_shape)
            return Descriptor(memory_of(base, name), base.storage_offset(), *shape, value.layout)
        if isinstance(value, tuple):
            return tuple(passed(f"{name}[{i}]", each) for i, each in enumerate(value))
        return value

    given = {name: passed(name, value) for name, value in arguments.items()}
    try:
        World(grid, chosen, lambda: kernel(**given), seed).run()
    except Wrong as problem:
        place = line_of(problem.place)
        if not problem.place[1] or place in str(problem):
            raise
        raise type(problem)(f"{problem}\n  {World.current.name} at {place}") from None
