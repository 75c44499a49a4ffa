"""What works beside the warps: copies of boxes (TMA) and products of warp groups (wgmma); and plain loads.

Either is an agent of its own, whose accesses are ordered after what its warps did before it began, and before
what they do only after a wait: `mbarrier.wait` for copies to shared memory, `store_wait` for those from it,
`warpgroup_mma_wait` for products. A product's accumulator cannot be read before. Values are computed at once:
where no two accesses race, nobody can tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gluon

from workshop.simulator.barriers import Barriers, one
from workshop.simulator.memory import Buffer, Descriptor, Pointer
from workshop.simulator.order import Agent, Wrong, here, line_of
from workshop.simulator.schedule import World
from workshop.simulator.values import Value

Steps = Generator[None, None, Any]


# --- copies ---


def async_load(
    descriptor: Descriptor, at: Sequence[int], barrier: Barriers, result: Buffer, pred: Any = True, **_: Any
) -> Steps:
    """A box from global to shared memory; what lies outside of the tensor is zero."""
    yield
    if not pred:
        return
    thread, told = World.current, one(barrier)
    inside, outside, tensor = descriptor.box(at, result)
    told.send(thread, descriptor.nbytes_per_cta)
    copy = thread.fork(f"the copy of {descriptor.memory.name} that {thread.name} began")
    descriptor.note(copy, outside, "")
    values = torch.zeros(descriptor.block_shape, dtype=tensor.dtype)
    values[inside] = tensor[outside]
    result.put(copy, "async", values)
    thread.program.begun |= 1 << copy.event
    World.now.later(lambda: told.came(copy))


def to_global(writes: str) -> Callable[..., Steps]:
    """A box of shared memory that is stored in global memory, or added to what is there."""

    def copy(descriptor: Descriptor, at: Sequence[int], src: Buffer) -> Steps:
        yield
        thread = World.current
        inside, outside, tensor = descriptor.box(at, src)
        reader = thread.fork(f"the copy to {descriptor.memory.name} that {thread.name} began")
        writer = Agent(reader.name, reader.seen, reader.fenced)
        values = src.take(reader, "async")[inside]
        descriptor.note(writer, outside, writes)
        tensor[outside] = tensor[outside] + values if writes == "+" else values
        thread.stores.append(SimpleNamespace(reader=reader, writer=writer, read=False))

    return copy


def store_wait(pendings: int, read_only: bool = True) -> Steps:
    """Until only so many copies to global memory still read shared memory, or, otherwise, are under way."""
    yield
    thread = World.current
    over = thread.stores[: max(0, len(thread.stores) - pendings)]
    for store in over:
        store.read = True
        thread.seen |= 1 << store.reader.event | (0 if read_only else 1 << store.writer.event)
    if not read_only:
        del thread.stores[: len(over)]


def make_tensor_descriptor(
    base: Pointer, shape: Any, strides: Any, block_shape: Any, layout: Any, padding_option: str = "zero"
) -> Descriptor:
    """A descriptor that a kernel makes."""
    if padding_option != "zero":
        raise Wrong(f"the simulator pads with zeros, not {padding_option}")
    return Descriptor(base.memory, base.at, shape, strides, block_shape, layout)


# --- products of warp groups ---


class Product:
    """A product that is under way, in place of its accumulator."""

    def __init__(self, value: Value, agent: Agent) -> None:
        self.value, self.agent, self.line, self.over = value, agent, here(), False

    def __str__(self) -> str:
        return f"a product that warpgroup_mma_wait has not given ({line_of(self.line)})"

    def _used(self, *_: Any) -> Any:
        raise Wrong(f"an operation on {self}")

    __getattr__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _used
    __neg__ = __getitem__ = __lt__ = __gt__ = __le__ = __ge__ = _used


def shared_operand(given: Any, name: str, agent: Agent) -> torch.Tensor:
    """An operand of a product, in shared memory as products read it."""
    if not isinstance(given, Buffer) or not isinstance(given.layout, gluon.NVMMASharedLayout):
        raise Wrong(f"operand {name} of a product, {given}, lies as {getattr(given, 'layout', None)}")
    if len(given.shape) != 2 or (given.is_turned and given.dtype.primitive_bitwidth != 16):
        raise Wrong(f"operand {name} of a product, {given}, has the shape {given.shape}, or is turned")
    return given.take(agent, "async")


def _operand_in_registers(given: Value, layout: Any) -> torch.Tensor:
    lies = given.layout
    if not isinstance(lies, gluon.DotOperandLayout) or lies.operand_index or lies.parent != layout:
        raise Wrong(f"operand a of a product lies as {lies}, not as DotOperandLayout(0, {layout})")
    if lies.k_width * given.dtype.primitive_bitwidth != 32:
        raise Wrong(f"operand a of {given.dtype} has k_width {lies.k_width}")
    return given.v


def warpgroup_mma(a: Any, b: Any, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    """acc + a @ b, by groups of four warps."""
    thread = World.current
    before = acc.value if isinstance(acc, Product) else acc
    layout = before.layout
    if not isinstance(layout, gluon.NVMMADistributedLayout) or list(layout.version) != [3, 0]:
        raise Wrong(f"an accumulator lies as NVMMADistributedLayout of version [3, 0], not {layout}")
    rows, columns = layout.warps_per_cta
    if rows * columns != thread.warps or thread.warps % 4:
        raise Wrong(f"{layout} is for {layout.warps_per_cta} warps; {thread.name} has {thread.warps}")
    product = thread.fork(f"the product that {thread.name} began")
    in_registers = isinstance(a, Value)
    left = _operand_in_registers(a, layout) if in_registers else shared_operand(a, "a", product)
    right = shared_operand(b, "b", product)
    if left.dtype != right.dtype or left.shape[1] != right.shape[0]:
        raise Wrong(f"a product of {list(left.shape)} {left.dtype} and {list(right.shape)} {right.dtype}")
    if before.shape != [left.shape[0], right.shape[1]] or before.shape[0] % (16 * rows):
        raise Wrong(f"an accumulator of {before.shape} for {list(left.shape)} @ {list(right.shape)}")
    if layout.instr_shape[1] % 8 or before.shape[1] % layout.instr_shape[1]:
        raise Wrong(f"{layout.instr_shape} does not divide {before.shape}")
    found = left.float() @ right.float()
    begun = Product(Value(found + before.v if use_acc else found, layout), product)
    thread.products.append(begun)
    return begun if is_async else warpgroup_mma_wait(0, (begun,))


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    """Until only so many products are under way; what `deps` hold is then given."""
    thread = World.current
    if not deps:
        raise Wrong("warpgroup_mma_wait needs deps")
    while len(thread.products) > num_outstanding:
        product = thread.products.pop(0)
        product.over = True
        thread.seen |= 1 << product.agent.event
    found = tuple(d.value if isinstance(d, Product) and d.over else d for d in deps)
    return found[0] if len(found) == 1 else found


# --- global memory by pointers ---


def load(pointer: Pointer, mask: Any = None, other: Any = None, volatile: bool = False, **_: Any) -> Any:
    """`gl.load`; a volatile one tells of what is there, and of nothing before it."""
    at, chosen, places = pointer.places(mask)
    memory, layout, thread = pointer.memory, getattr(pointer.at, "layout", None), World.current
    if volatile and not at.shape:
        return atomic(lambda old, _: old)(pointer, 0, mask, "relaxed")
    memory.note(thread, places, "generic", "")
    asked = here(), memory, places.tolist() if not at.shape else None
    thread.asks = (asked, thread.asks[1] + 1 if thread.asks[0] == asked else 0)
    if thread.asks[1] > 9999 and not at.shape:
        raise Wrong(f"{thread.name} asks for {memory.name} again and again, and not by an atomic operation")
    if not at.shape:
        return memory.flat[places].item() if places.numel() else other
    if chosen is None:
        return Value(memory.flat[at], layout)
    filled = other.v if isinstance(other, Value) else torch.tensor(0 if other is None else other)
    found = filled.to(memory.flat.dtype).expand(at.shape).clone()
    found[chosen] = memory.flat[places]
    return Value(found, layout)


def _chosen(value: Any, at: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
    raw = (value.v if isinstance(value, Value) else torch.tensor(value)).expand(at.shape)
    return (raw if chosen is None else raw[chosen]).reshape(-1)


def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    """`gl.store`."""
    at, chosen, places = pointer.places(mask)
    thread, memory = World.current, pointer.memory
    memory.note(thread, places, "generic", "w")
    memory.flat[places] = _chosen(value, at, chosen).to(memory.flat.dtype)
    if at.shape:
        thread.since |= 1 << thread.event


def atomic(change: Callable[[Any, Any], Any]) -> Callable[..., Steps]:
    """An atomic operation on one element; or additions to several, which order nothing."""

    def operate(pointer: Pointer, value: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Steps:
        yield
        thread, memory = World.current, pointer.memory
        at, chosen, places = pointer.places(mask)
        if at.shape:
            memory.note(thread, places, "generic", "+")
            memory.flat.index_add_(0, places, _chosen(value, at, chosen).to(memory.flat.dtype))
            thread.since |= 1 << thread.event
            return None
        if not places.numel():
            return None
        place = int(at)
        memory.note(thread, places, "generic", "a")
        old = memory.flat[place].item()
        if sem in (None, "acq_rel", "release"):
            seen, fenced = thread.released()
            known = memory.clocks.get(place, (0, 0))
            memory.clocks[place] = known[0] | seen & ~thread.since, known[1] | fenced & ~thread.since
        if sem in (None, "acq_rel", "acquire"):
            thread.acquire(*memory.clocks.get(place, (0, 0)))
        memory.flat[place] = change(old, value)
        if memory.flat[place].item() != old:
            World.now.wake()
        asked = here(), memory, place, World.now.changes
        if thread.polled == asked:
            thread.blocked = lambda: f"asks for {memory.name}[{place}] again and again, which is {old}"
            yield
        thread.polled = asked
        return old

    return operate


def atomic_cas(pointer: Pointer, cmp: Any, val: Any, sem: Any = None, scope: Any = None) -> Steps:
    """Compare and swap."""
    return atomic(lambda old, _: val if old == cmp else old)(pointer, val, None, sem, scope)
