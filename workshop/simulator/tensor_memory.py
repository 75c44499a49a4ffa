"""Tensor memory and its products (tcgen05, sm_100), which threads begin and barriers end.

A product reads shared or tensor memory and adds to tensor memory. Those that one thread begins follow each
other; warps know that they are over when a barrier says so at which `tcgen05_commit` arrives, which tells of
all that its thread began before.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from triton.experimental.gluon.language._semantic import _compute_tmem_reg_layout
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout

from workshop.simulator.barriers import one
from workshop.simulator.engines import shared_operand
from workshop.simulator.memory import Box, Buffer, Face
from workshop.simulator.order import Wrong
from workshop.simulator.schedule import World
from workshop.simulator.values import Value, shape_of, size_of

Steps = Generator[None, None, None]
COLUMNS = 512


class Columns(Face):
    """A view of tensor memory: rows lie beside each other, a column has 4 bytes of each."""

    def bytes(self, box: Box) -> tuple[int, int]:
        first = end = 0
        for (a, b), n in zip(box[:-2], self.shape[:-2], strict=True):
            first, end = first * n + a, end * n + b - 1
        width, size = self.shape[-1], size_of(self.dtype)
        first, end = first * width + box[-1][0], end * width + box[-1][1]
        return self.start + first * size, self.start + end * size

    def forget(self, first: int, end: int) -> None:
        flat = self.written.movedim(-2, 0).reshape(self.shape[-2], -1)
        flat[:, self.within(first, end, size_of(self.dtype))] = False
        self.written = flat.reshape(self.shape[-2], *self.shape[:-2], self.shape[-1]).movedim(0, -2)


class TensorMemory(Buffer):
    """What a kernel holds of it."""

    def slice(self, start: int, length: int, dim: int = -1) -> Buffer:
        return super().slice(start, length, dim)

    def get_reg_layout(self, num_warps: Any = None, instr_variant: str = "32x32b") -> Any:
        """How it lies in registers."""
        shape, warps = self.shape, num_warps or World.current.warps
        return _compute_tmem_reg_layout(self.dtype, shape, shape, self.layout, warps, instr_variant)

    def load(self, layout: Any = None) -> Value:
        _four(self)
        return super().load(layout or self.get_reg_layout())

    def store(self, value: Value, pred: Any = True) -> None:
        _four(self)
        if pred:
            super().store(value)


def _four(memory: Buffer) -> None:
    if World.current.warps % 4:
        raise Wrong(f"{memory} is read or written by {World.current.warps} warps, not by groups of four")


def allocate_tensor_memory(
    element_ty: Any, shape: Any, layout: Any, value: Any = None, name: str = ""
) -> Any:
    """A buffer in tensor memory."""
    shape, program = shape_of(shape), World.current.program
    if not isinstance(layout, TensorMemoryLayout) or shape[-2] not in (64, 128):
        raise Wrong(f"{name} of {shape} in tensor memory lies as {layout}")
    found = TensorMemory(Columns(name, element_ty, shape, layout, []))
    program.columns += found.face.bytes(found.box)[1] * layout.col_stride // 4
    if program.columns > COLUMNS:
        raise Wrong(f"tensor memory: {program.columns} columns with {name}; a program may have {COLUMNS}")
    if value is not None:
        found.store(value)
    return found


def tcgen05_mma(
    a: Any, b: Any, acc: Any, *, use_acc: Any = True, pred: Any = True, mbarriers: Sequence[Any] = (),
    mbarrier_preds: Sequence[Any] | None = None, **_: Any
) -> Steps:  # fmt: skip
    """acc + a @ b, begun by one thread."""
    yield
    if not pred:
        return
    thread = World.current
    product = thread.fork(f"the product that {thread.name} began")
    product.seen |= thread.begun
    if not isinstance(acc, TensorMemory):
        raise Wrong(f"tcgen05_mma adds to tensor memory, not to {acc}")
    left = a.take(product, "tensor") if isinstance(a, TensorMemory) else shared_operand(a, "a", product)
    right = shared_operand(b, "b", product)
    if left.dtype != right.dtype or acc.shape != [left.shape[0], right.shape[1]]:
        raise Wrong(f"sums of {acc.shape} for {list(left.shape)} {a.dtype} @ {list(right.shape)} {b.dtype}")
    found = left.float() @ right.float()
    if use_acc:
        found = found + acc.take(product, "tensor")
    acc.put(product, "tensor", found)
    thread.program.begun |= 1 << product.event
    thread.begun |= product.seen | 1 << product.event
    for barrier, chosen in zip(mbarriers, mbarrier_preds or [True] * len(mbarriers), strict=True):
        yield from tcgen05_commit(barrier, chosen)


def tcgen05_commit(barrier: Any, pred: Any = True, descs: Any = ()) -> Steps:
    """Arrive when all that this thread began is over."""
    yield
    if pred:
        told, thread = one(barrier), World.current
        told.check(thread)
        told.under_way += 1
        events, name = thread.begun, thread.name
        World.now.later(lambda: told.commit(events, name))
