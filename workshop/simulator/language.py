"""Gluon's names, each with what stands for it here. Types and layouts are Gluon's own; a name that is not
listed is an error that says so."""

from __future__ import annotations

import importlib
import math
import re
import types
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
from triton.experimental.gluon import language as gluon
from triton.experimental.gluon.language.nvidia.hopper.mbarrier import MBarrierLayout

from workshop.simulator import barriers, engines, tensor_memory, values
from workshop.simulator.barriers import Barrier, Barriers, one
from workshop.simulator.memory import Buffer, Face
from workshop.simulator.order import Wrong
from workshop.simulator.schedule import Thread, World
from workshop.simulator.values import Value, apply, size_of

Steps = Generator[None, None, Any]


# --- tensors ---


def _full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
    return Value(torch.full(values.shape_of(shape), value, dtype=values.dtype_of(dtype)), layout, dtype)


def _arange(start: int, end: int, layout: Any = None) -> Value:
    return Value(torch.arange(int(start), int(end), dtype=torch.int32), layout)


def _where(condition: Any, a: Any, b: Any) -> Any:
    def choose(c: Any, x: Any, y: Any) -> torch.Tensor:
        x, y = _alike(x, y)
        return torch.where(torch.as_tensor(c), x, y)

    return apply(choose, condition, a, b)


def _alike(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (torch.tensor(t, dtype=torch.int32) if type(t) is int else torch.as_tensor(t) for t in (x, y))
    dtype = torch.result_type(x, y)
    return x.to(dtype), y.to(dtype)


def _fma(a: Any, b: Any, c: Any) -> Any:
    """Rounded once: products of 32 bits are exact in 64."""
    return apply(
        lambda *xs: torch.addcmul(*(torch.as_tensor(x).double() for x in (xs[2], *xs[:2]))).float(), a, b, c
    )


def _binary(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda a, b, **_: apply(lambda x, y: function(*_alike(x, y)), a, b)


def _trans(value: Any, *dims: Any) -> Any:
    return value.permute((dims[0] if len(dims) == 1 else dims) or (1, 0))


def _inline_asm(asm: str, constraints: str, args: Sequence[Any], *_: Any, **__: Any) -> Any:
    """Named barriers; no other instruction is known."""
    found = re.fullmatch(
        r"\s*(?:bar|barrier)\.(sync|arrive)\s+(\d+),\s*(\d+);\s*(?:mov\.u32 \$0, 0;\s*)?", asm
    )
    if found is None:
        raise Wrong(f"the simulator does not know the instruction {asm!r}")
    return barriers.named(found[1], int(found[2]), int(found[3]))


def _static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise Wrong(f"static_assert: {message}")


def _barrier() -> None:
    """All warps of a partition: what one of them then tells of holds for all."""
    World.current.since = 0


# --- shared memory and partitions ---


def _allocate(element_ty: Any, shape: Any, layout: Any, value: Any = None, name: str = "") -> Any:
    program, shape = World.current.program, values.shape_of(shape)
    program.allocate(math.prod(shape) * size_of(element_ty), name)
    if isinstance(layout, MBarrierLayout):
        names = [f"{name}[{i}]" for i in range(shape[0])] if len(shape) > 1 else [name]
        return Barriers([Barrier(each) for each in names], name)
    if isinstance(layout, gluon.NVMMASharedLayout) and layout.element_bitwidth != 8 * size_of(element_ty):
        raise Wrong(f"{name}: {layout} is not for {element_ty}")
    buffer = Buffer(Face(name, element_ty, shape, layout, []))
    if value is not None:
        buffer.store(value)
    return buffer


def _allocate_mbarrier(batch: Any = None, two_ctas: bool = False, name: str = "") -> Any:
    return _allocate(gluon.int64, [1] if batch is None else [batch, 1], MBarrierLayout(), name=name)


def _warp_specialize(functions: Any, worker_num_warps: Any, worker_num_regs: Any = None, *_: Any) -> Steps:
    """The first function goes on here, the others in warps of their own, and all meet at the end."""
    parent, world = World.current, World.now
    world.options.check_registers(parent.warps, list(worker_num_warps), list(worker_num_regs or ()))
    workers = []
    for place, ((function, args), warps) in enumerate(zip(functions[1:], worker_num_warps, strict=True), 1):
        name = f"{parent.name} {function.__name__} {place}"
        workers.append(Thread(name, parent.program, warps, parent))
        world.spawn(workers[-1], _worker(workers[-1], function(*args)))
    name, parent.name = parent.name, f"{parent.name} {functions[0][0].__name__} 0"
    result = functions[0][0](*functions[0][1])
    if isinstance(result, types.GeneratorType):
        result = yield from result
    parent.finish()
    while not all(worker.is_over for worker in workers):
        parent.blocked = lambda: "waits for the other partitions to end"
        yield
    for worker in workers:
        parent.acquire(*worker.released())
    parent.name = name
    return result


def _worker(worker: Thread, body: Steps) -> Steps:
    yield from body
    worker.is_over = True


# --- names ---


def _passed(value: Any, *_: Any) -> Any:
    return value


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _program_id(axis: int) -> Any:
    return World.current.program.at[int(axis)]


LANGUAGE: dict[str, Any] = {
    "full": _full, "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype, layout),
    "arange": _arange,
    "zeros_like": lambda x: Value(torch.zeros_like(x.v), x.layout, x.dtype), "where": _where, "fma": _fma,
    "broadcast_to": lambda x, shape: Value(x.v.expand(values.shape_of(shape)), x.layout, x.dtype),
    "convert_layout": lambda x, layout, assert_trivial=False: Value(x.v, layout, x.dtype),
    "set_auto_layout": lambda x, layout: Value(x.v, layout, x.dtype), "trans": _trans, "permute": _trans,
    "cdiv": lambda a, b: values.floor_divide(a + b - 1, b), "program_id": _program_id,
    "num_programs": lambda axis: World.now.grid[int(axis)], "num_warps": lambda: World.current.warps,
    "inline_asm_elementwise": _inline_asm, "static_assert": _static_assert, "static_range": range,
    "range": lambda *a, **_: range(*map(int, a)), "expand_dims": values.expand_dims, "cast": values.convert,
    "constexpr": _passed, "to_tensor": _passed, "multiple_of": _passed, "max_contiguous": _passed,
    "max_constancy": _passed, "assume": _nothing, "static_print": _nothing, "device_print": _nothing,
    "maximum": _binary(torch.fmax), "minimum": _binary(torch.fmin), "fdiv": _binary(torch.true_divide),
    "div_rn": _binary(torch.true_divide), "max": values.reduced(values.largest),
    "min": values.reduced(lambda v, d: -values.largest(-v, d)),
    "sum": values.reduced(lambda v, d: v.sum(d, dtype=v.dtype if v.dtype != torch.bool else torch.int32)),
    **{name: partial(apply, getattr(torch, name)) for name in (
        "exp", "exp2", "log", "log2", "sigmoid", "abs", "sqrt", "rsqrt", "sin", "cos", "erf", "floor",
        "ceil")},
    "sqrt_rn": partial(apply, torch.sqrt), "SliceLayout": values.slice_layout, "load": engines.load,
    "store": engines.store, "barrier": _barrier, "thread_barrier": _barrier, "debug_barrier": _barrier,
    "atomic_add": engines.atomic(lambda old, by: old + by), "atomic_cas": engines.atomic_cas,
    "atomic_xchg": engines.atomic(lambda old, new: new), "atomic_max": engines.atomic(max),
    "atomic_min": engines.atomic(min), "allocate_shared_memory": _allocate,
    "warp_specialize": _warp_specialize,
}  # fmt: skip
TMA: dict[str, Any] = {
    "async_load": engines.async_load, "async_copy_global_to_shared": engines.async_load,
    "async_store": engines.to_global("w"), "async_copy_shared_to_global": engines.to_global("w"),
    "async_atomic_add": engines.to_global("+"), "store_wait": engines.store_wait,
    "make_tensor_descriptor": engines.make_tensor_descriptor,
}  # fmt: skip


def _of_barrier(act: Callable[..., Any]) -> Callable[..., Steps]:
    def step(bar: Any, *given: Any, pred: Any = True, **named: Any) -> Steps:
        yield
        if pred:
            found = act(one(bar), *given, **named)
            if found is not None:
                yield from found

    return step


MBARRIER: dict[str, Any] = {
    "init": lambda bar, count: one(bar).init(int(count)),
    "wait": _of_barrier(lambda bar, phase, deps=(): bar.wait(phase)),
    "arrive": _of_barrier(lambda bar, count=1: bar.arrive(World.current, count, True)),
    "expect": _of_barrier(lambda bar, bytes_per_cta: bar.expect(World.current, int(bytes_per_cta))),
    "invalidate": _nothing, "fence_init_release_cluster": _nothing, "allocate_mbarrier": _allocate_mbarrier,
}  # fmt: skip
HOPPER: dict[str, Any] = {
    "warpgroup_mma": engines.warpgroup_mma, "warpgroup_mma_wait": engines.warpgroup_mma_wait,
    "warpgroup_mma_init": _passed, "fence_async_shared": lambda cluster=False: World.current.fence(),
}  # fmt: skip
BLACKWELL: dict[str, Any] = {
    "allocate_tensor_memory": tensor_memory.allocate_tensor_memory, "tcgen05_mma": tensor_memory.tcgen05_mma,
    "tcgen05_commit": tensor_memory.tcgen05_commit, "fence_async_shared": HOPPER["fence_async_shared"],
    "add2": _binary(torch.add), "sub2": _binary(torch.sub), "mul2": _binary(torch.mul), "fma2": _fma,
}  # fmt: skip


class Namespace:
    """A module of Gluon's: what stands for its functions, and its own types."""

    def __init__(self, module: types.ModuleType, functions: dict[str, Any]) -> None:
        self.module, self.functions = module, functions

    def __getattr__(self, name: str) -> Any:
        if name in self.functions:
            return self.functions[name]
        real = getattr(self.module, name)
        if callable(real) and not isinstance(real, type):
            raise Wrong(f"the simulator has no {self.module.__name__}.{name}")
        return stand_in(real)


_GLUON = "triton.experimental.gluon"
_MODULES = {
    module: Namespace(module, functions)
    for path, functions in (
        ("triton", {"cdiv": LANGUAGE["cdiv"]}), ("triton.language", LANGUAGE), (_GLUON, {}),
        (f"{_GLUON}.language.nvidia.hopper.tma", TMA),
        (f"{_GLUON}.language", LANGUAGE), (f"{_GLUON}.language.nvidia.hopper", HOPPER),
        (f"{_GLUON}.language.nvidia.hopper.mbarrier", MBARRIER),
        (f"{_GLUON}.language.nvidia.blackwell", BLACKWELL),
        (f"{_GLUON}.language.nvidia.blackwell.tma", TMA),
    )
    for module in [importlib.import_module(path)]
}  # fmt: skip
_BY_OBJECT = {
    id(real): ours
    for space in _MODULES.values()
    for name, ours in space.functions.items()
    if (real := getattr(space.module, name, None)) is not None
}


def stand_in(real: Any) -> Any:
    """What stands for a module or function of Gluon's, a constant's value; all else is itself."""
    if isinstance(real, types.ModuleType):
        return _MODULES.get(real, real)
    if isinstance(real, gluon.constexpr):
        return stand_in(real.value)
    return _BY_OBJECT.get(id(real), real)
