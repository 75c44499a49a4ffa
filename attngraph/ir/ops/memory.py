"""Large blocks of memory on the CPU, used again for new tensors once they are free.

The C library gives large blocks back to the system when they are freed. A new one is made of pages that the
system clears when they are first touched, which takes longer than writing the block does. So blocks of the
results of compiled code, of values in between and of caches come from here: a block that is freed is kept for
the next tensor of about its size, until `budgets.MEMORY_KEPT` bytes are. Linux is asked for pages of 2 MiB,
each of which is cleared and looked up in a fraction of the time that 512 of 4 KiB take.
"""

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.ir import budgets

LARGE = 1 << 20
"""Bytes from which on a tensor's memory comes from here. The C library keeps smaller blocks itself."""

_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)

_own = threading.local()
_free: dict[int, Tensor] = {}
"""Blocks in no use by identity, the one that was freed first in front. Any thread may free one at any time,
also between two operations of this file, so no lock could be held: each operation on it is atomic."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor that is not initialised, as `torch.empty` makes it. The storage of a large one on
    the CPU cannot be resized."""
    traced = torch._C._len_torch_dispatch_stack() > 0
    if traced or device.type != "cpu" or (size := math.prod(shape) * dtype.itemsize) < LARGE:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    block = _taken(size)
    if block is None:
        block = _block(size)
    view = _view(block.data_ptr(), size, _WRITABLE)
    weakref.finalize(view, _give_back, block).atexit = False
    return torch.frombuffer(view, dtype=dtype).view(tuple(shape))


def empty_strided(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The same with strides, which leave no gaps. It is not a view."""
    traced = torch._C._len_torch_dispatch_stack() > 0
    if traced or device.type != "cpu" or math.prod(shape) * dtype.itemsize < LARGE:
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)
    found = empty(shape, dtype, device)
    return found.new_empty(0).set_(found.untyped_storage(), 0, tuple(shape), tuple(strides))


def kept() -> int:
    """Bytes of all blocks in no use."""
    return sum(block.numel() for block in list(_free.values()))


def let_go() -> None:
    """Give all blocks in no use back to the C library, and this thread's workspace."""
    _free.clear()
    _own.held = None


def workspace(count: int) -> Tensor:
    """Memory of this thread for so many float32, which the next call of this function uses again."""
    held: Tensor | None = getattr(_own, "held", None)
    if held is None or held.numel() < count:
        held = _own.held = _block(4 * count).view(torch.float32)
    return held[:count]


def _block(size: int) -> Tensor:
    """A new block."""
    block = torch.empty(size, dtype=torch.uint8)
    if _HUGE is not None and size >= LARGE:
        first = -(-block.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(block.data_ptr() + size - first), _HUGE
        )
    return block


def _taken(size: int) -> Tensor | None:
    """A block in no use of at least so many bytes, and at most twice as many."""
    fitting = (block for block in list(_free.values()) if size <= block.numel() <= 2 * size)
    for block in sorted(fitting, key=Tensor.numel):
        if _free.pop(id(block), None) is not None:  # else another thread was faster
            return block
    return None


def _give_back(block: Tensor) -> None:
    """Keep a block that is free; those that were freed first go where there are too many bytes."""
    _free[id(block)] = block
    while kept() > budgets.MEMORY_KEPT:
        for oldest in list(_free)[:1]:
            _free.pop(oldest, None)


_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200
