"""The two memories: buffers in shared memory with their layouts, and global memory behind pointers and boxes.

A buffer is an allocation seen by a dtype, a shape and a layout (a `Face`). What was written by one face can't
be read by another: its bytes lie elsewhere. What was never written can't be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from workshop.simulator.order import Access, Accesses, Agent, Wrong, apart
from workshop.simulator.schedule import World
from workshop.simulator.values import Value, dtype_of, gluon_dtype, size_of

Box = tuple[tuple[int, int], ...]


class Face:
    """One view of an allocation, from one of its bytes on."""

    fences = "shared memory"

    def __init__(
        self, name: str, dtype: Any, shape: Sequence[int], layout: Any, faces: list[Face], start: int = 0
    ) -> None:  # fmt: skip
        self.name, self.dtype, self.shape, self.layout, self.faces = name, dtype, tuple(shape), layout, faces
        rank = getattr(layout, "rank", 0) or len(getattr(layout, "order", "ab"))
        self.start, self.tile = start, self.shape[-rank:]
        self.data = torch.empty(self.shape, dtype=dtype_of(dtype))
        self.written = torch.zeros(self.shape, dtype=torch.bool)
        self.accesses: Accesses = faces[0].accesses if faces else Accesses()
        faces.append(self)

    def bytes(self, box: Box) -> tuple[int, int]:
        """The bytes within which a box lies: whole tiles, whose elements the layout mixes."""
        first = end = 0
        for (a, b), size in zip(box, self.shape[: len(self.shape) - len(self.tile)], strict=False):
            first, end = first * size + a, end * size + b - 1
        tile = math.prod(self.tile) * size_of(self.dtype)
        return self.start + first * tile, self.start + (end + 1) * tile

    def forget(self, first: int, end: int) -> None:
        """What was written to these bytes."""
        tiles = self.written.reshape(-1, math.prod(self.tile))
        tiles[self.within(first, end, tiles.shape[1] * size_of(self.dtype))] = False

    def within(self, first: int, end: int, size: int) -> slice:
        """Which parts of so many bytes these bytes lie in."""
        return slice(max(0, (first - self.start) // size), max(0, -((self.start - end) // size)))

    def apart(self, box: Box, other: Face, its: Box) -> bool:
        """Whether two boxes share no byte."""
        if other is self:
            return apart(box, its)
        (a, b), (c, d) = self.bytes(box), other.bytes(its)
        return a >= d or c >= b

    def name_of(self, box: Box) -> str:
        """As in the kernel."""
        parts = [
            "" if (a, b) == (0, n) else str(a) if b == a + 1 else f"{a}:{b}"
            for (a, b), n in zip(box, self.shape, strict=True)
        ]
        while parts and not parts[-1]:
            parts.pop()
        return f"{self.name}[{', '.join(part or ':' for part in parts)}]" if parts else self.name


class Buffer:
    """What a kernel holds of shared memory: a box of a face, its dimensions in some order; all by default."""

    def __init__(self, face: Face, box: Box | None = None, dims: tuple[int, ...] | None = None) -> None:
        self.face, self.dtype, self.layout = face, face.dtype, face.layout
        self.box = tuple((0, n) for n in face.shape) if box is None else box
        self.dims = tuple(range(len(self.box))) if dims is None else dims
        self.shape = [self.box[d][1] - self.box[d][0] for d in self.dims]
        self.order = [sorted(self.dims).index(d) for d in self.dims]
        self.is_turned = self.order != sorted(self.order)

    def index(self, place: int) -> Buffer:
        """One of its first dimension."""
        return type(self)(self.face, self._cut(0, place, 1), self.dims[1:])

    def slice(self, start: int, length: int, dim: int = 0) -> Buffer:
        """Some of a dimension."""
        return type(self)(self.face, self._cut(dim, start, length), self.dims)

    def permute(self, order: Sequence[int]) -> Buffer:
        """Its dimensions in another order."""
        return type(self)(self.face, self.box, tuple(self.dims[i] for i in order))

    def reshape(self, shape: Sequence[int]) -> Buffer:
        """Without some dimensions of size 1."""
        large = tuple(d for d, n in zip(self.dims, self.shape, strict=True) if n != 1)
        found = type(self)(self.face, self.box, large)
        if list(shape) != found.shape:
            raise Wrong(f"{self} of {self.shape} is given the shape {list(shape)}")
        return found

    def _cut(self, dim: int, start: int, length: int) -> Box:
        at = self.dims[dim]
        first, end = self.box[at]
        if not 0 <= start <= start + length <= end - first:
            raise Wrong(f"{self} has {end - first} in dimension {dim}, not {start} to {start + length}")
        return (*self.box[:at], (first + start, first + start + length), *self.box[at + 1 :])

    def _reinterpret(self, dtype: Any = None, shape: Any = None, layout: Any = None) -> Buffer:
        face = self.face
        wanted = (dtype or face.dtype, tuple(shape or self.shape), layout or face.layout)
        first, end = face.bytes(self.box)
        known = [f for f in face.faces if (f.dtype, f.shape, f.layout, f.start) == (*wanted, first)]
        found = type(self)(known[0] if known else type(face)(face.name, *wanted, face.faces, first))
        cut = any(self.box[d] != (0, face.shape[d]) for d in self.dims)
        if cut or self.is_turned or found.face.bytes(found.box)[1] > end:
            raise Wrong(f"{self} is seen as {list(wanted[1])} of {wanted[0]}: it is smaller, turned, or cut")
        return found

    def take(self, agent: Agent, proxy: str) -> Tensor:
        """Its values, read by an agent."""
        at = self._noted(agent, proxy, "")
        if not bool(self.face.written[at].all()):
            raise Wrong(f"{agent.name} reads {self}, of which something was never written by this layout")
        return self.face.data[at].permute(self.order)

    def put(self, agent: Agent, proxy: str, values: Tensor) -> None:
        """Write it."""
        at = self._noted(agent, proxy, "w")
        self.face.data[at].permute(self.order).copy_(values)
        self.face.written[at] = True
        for other in self.face.faces:
            if other is not self.face:
                other.forget(*self.face.bytes(self.box))

    def _noted(self, agent: Agent, proxy: str, writes: str) -> Any:
        self.face.accesses.add(agent, self.face, self.box, proxy, writes)
        return tuple(slice(a, b) if d in self.dims else a for d, (a, b) in enumerate(self.box))

    def load(self, layout: Any) -> Value:
        """Read it into registers."""
        return Value(self.take(World.current, "generic").clone(), layout, self.dtype)

    def store(self, value: Value) -> None:
        """Write it from registers."""
        if value.shape != self.shape or value.dtype != self.dtype:
            raise Wrong(
                f"{self} is stored {value.shape} of {value.dtype}; it has {self.shape} of {self.dtype}"
            )
        self.put(World.current, "generic", value.v)

    def _keep_alive(self) -> None:
        """Says nothing here."""

    def __str__(self) -> str:
        return self.face.name_of(self.box)


# --- global memory ---


class Memory:
    """A tensor's storage, as a kernel of this launch sees it: who wrote each element last, and who read it.

    Args:
        ordered: whether additions to one place must be ordered, too, so that sums are the same each time.
    """

    fences = "global memory"

    def __init__(self, tensor: Tensor, name: str, ordered: bool) -> None:
        self.flat = torch.tensor([], dtype=tensor.dtype).set_(tensor.untyped_storage())
        self.name, self.ordered = name, ordered
        self.groups: list[tuple[Access, ...]] = [()]
        self.writers: Tensor | None = None
        self.reads: list[Access] = []
        self.clocks: dict[int, tuple[int, int]] = {}

    def name_of(self, box: tuple[int, int, Any]) -> str:
        """Which elements."""
        low, high = box[0], box[1] - 1
        return f"{self.name}[{low}]" if low == high else f"{self.name} (of elements {low} to {high})"

    def note(self, agent: Agent, places: Tensor, proxy: str, writes: str) -> None:
        """Elements are read or written."""
        if not places.numel():
            return
        low, high = int(places.min()), int(places.max()) + 1
        if low < 0 or high > self.flat.numel():
            raise Wrong(
                f"{agent.name}: {self.name} has {self.flat.numel()} elements, not {low} to {high - 1}"
            )
        new = Access(agent, self, (low, high, places), proxy, writes)
        if self.writers is None and writes:
            self.writers = torch.zeros(self.flat.numel(), dtype=torch.int32)
        if self.writers is not None:
            self._after_writes(new, agent, places)
        if not writes:
            self.reads.append(new)
            return
        for old in self.reads:
            near = old.box[0] < high and low < old.box[1] and not agent.seen >> old.event & 1
            if near and bool(torch.isin(old.box[2], places).any()):
                new.follows(old, agent)

    def _after_writes(self, new: Access, agent: Agent, places: Tensor) -> None:
        assert self.writers is not None
        last = self.writers[places]
        first = int(last[0])
        groups = [first] if bool((last == first).all()) else sorted(set(last.tolist()))
        for group in groups:
            for old in self.groups[group]:
                new.follows(old, agent, "a" if self.ordered else "a+")
            if new.writes:
                same = [old for old in self.groups[group] if old.writes == new.writes and new.writes != "w"]
                self.groups.append((*(old for old in same if old.who != new.who or new.writes == "+"), new))
                last[last == group] = -len(self.groups)
        if new.writes:
            self.writers[places] = -last - 1


class Pointer:
    """A place in global memory, or several."""

    def __init__(self, memory: Memory, at: Any) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=gluon_dtype(memory.flat.dtype))

    def __add__(self, by: Any) -> Pointer:
        return Pointer(self.memory, self.at + by)

    __radd__ = __add__

    def places(self, mask: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """Elements, a scalar as one of shape (); which of them are meant (None: all); and these in a row."""
        at = self.at.v if isinstance(self.at, Value) else torch.tensor(self.at)
        if mask is None or mask is True:
            return at, None, at.reshape(-1)
        chosen = mask.v if isinstance(mask, Value) else torch.tensor(bool(mask))
        at, chosen = at.expand_as(at + chosen), chosen.expand_as(at + chosen)
        return at, chosen, at[chosen].reshape(-1)


class Descriptor:
    """A tensor in global memory of which boxes are copied (TMA)."""

    def __init__(
        self, memory: Memory, offset: int, shape: Any, strides: Any, block: Any, layout: Any
    ) -> None:
        self.memory, self.offset, self.layout = memory, offset, layout
        self.shape, self.strides, self.block_shape = list(shape), list(strides), list(block)
        self.dtype = gluon_dtype(memory.flat.dtype)
        size = size_of(self.dtype)
        self.nbytes_per_cta = int(math.prod(self.block_shape)) * size
        self.block_type = SimpleNamespace(shape=self.block_shape, nbytes=self.nbytes_per_cta)
        width, name = self.block_shape[-1] * size, memory.name
        if layout.element_bitwidth != 8 * size:
            raise Wrong(f"{name}: {layout} is not for {self.dtype}")
        if any(s * size % 16 for s in (offset, *self.strides[:-1])) or self.strides[-1] != 1:
            raise Wrong(
                f"{name}: rows at {offset}, {self.strides}: not multiples of 16 bytes, and 1 as the last"
            )
        if max(self.block_shape) > 256 or width < 16 or width < layout.swizzle_byte_width:
            raise Wrong(f"{name}: boxes of {self.block_shape} do not go with {layout}")

    def box(self, at: Sequence[int], buffer: Buffer) -> tuple[Any, Any, Tensor]:
        """Where a box and a tensor meet: in the box, in the tensor, and the tensor; the buffer must fit."""
        name = self.memory.name
        if len(at) != len(self.shape):
            raise Wrong(f"{name} has {len(self.shape)} dimensions, the box is at {list(at)}")
        if buffer.dtype != self.dtype or buffer.shape != self.block_shape or buffer.is_turned:
            told = f"{buffer} is {buffer.shape} of {buffer.dtype}" + (", turned" if buffer.is_turned else "")
            raise Wrong(f"boxes of {name} are {self.block_shape} of {self.dtype}; {told}")
        if buffer.layout != self.layout:
            raise Wrong(f"boxes of {name} lie as {self.layout}; {buffer} lies as {buffer.layout}")
        inside, outside = [], []
        for first, size, extent in zip(at, self.block_shape, self.shape, strict=True):
            low = min(max(first, 0), extent)
            high = max(low, min(first + size, extent))
            inside.append(slice(low - first, high - first) if high > low else slice(0, 0))
            outside.append(slice(low, high))
        return (
            tuple(inside),
            tuple(outside),
            self.memory.flat.as_strided(self.shape, self.strides, self.offset),
        )

    def note(self, agent: Agent, outside: Sequence[slice], writes: str) -> None:
        """Elements of a box are read or written."""
        places = torch.tensor(self.offset)
        for s, n in zip(outside, self.strides, strict=True):
            places = places.unsqueeze(-1) + torch.arange(s.start, s.stop) * n
        self.memory.note(agent, places.reshape(-1), "async", writes)
