"""`torch.cuda` of the stand-in: one card, one stream, all work done when it is asked for."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from workshop.standin import Graph, StandIn

PROPERTIES = SimpleNamespace(
    name="stand-in", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30,
    shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10, warp_size=32,
    max_threads_per_multi_processor=2048, L2_cache_size=50 << 20, regs_per_multiprocessor=65536,
)  # fmt: skip
"""Of an H100."""


class Stream:
    """Work in the order in which it is asked for."""

    cuda_stream, device = 0, torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    """A place in the work that is always past."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, _: Any = None) -> None: ...
    def wait(self, _: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class CapturedGraph:
    """A `torch.cuda.CUDAGraph`."""

    device: StandIn

    def __init__(self, *_: Any) -> None:
        self._graph: Graph | None = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        self.device.capture_begin()

    def capture_end(self) -> None:
        self._graph = self.device.capture_end()

    def replay(self) -> None:
        if self._graph is None:
            raise RuntimeError("a graph is replayed that was not captured")
        self._graph.replay()

    def reset(self) -> None:
        self._graph = None

    def pool(self) -> tuple[int, int]:
        return 0, 0


def _widened(operand: Any) -> Any:
    """An operand of a product, whose bits the interpreter would multiply if it is of bfloat16."""
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    bits = operand.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


@contextlib.contextmanager
def _same(*_: Any) -> Iterator[None]:
    yield


def patch(device: StandIn) -> None:
    """torch.cuda asks this device instead of a driver."""
    cuda: Any = torch.cuda
    stream = Stream()
    CapturedGraph.device = device
    known = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda _: None,
        "get_device_properties": lambda *_: PROPERTIES, "get_device_name": lambda *_: PROPERTIES.name,
        "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
        "is_bf16_supported": lambda *_, **__: True, "synchronize": lambda *_: None,
        "empty_cache": lambda: None, "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream, "Stream": Stream,
        "Event": Event, "stream": _same, "device": _same, "_sleep": lambda _: None,
        "is_current_stream_capturing": lambda: device.is_capturing,
        "CUDAGraph": CapturedGraph, "graph_pool_handle": lambda: (0, 0),
        "memory_allocated": lambda *_: device.allocated,
        "max_memory_allocated": lambda *_: device.largest,
        "reset_peak_memory_stats": lambda *_: device.forget_largest(),
        "manual_seed": lambda _: None, "manual_seed_all": lambda _: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda s, *_: torch.set_rng_state(s),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
    }  # fmt: skip
    for name, stood_in in known.items():
        setattr(cuda, name, stood_in)
    run = interpreter.GridExecutor.__call__

    def launched(executor: Any, *args: Any, **options: Any) -> Any:
        if device.is_capturing:
            return device.capture_kernel(lambda: launched(executor, *args, **options))
        with device.one_launch():
            return run(executor, *args, **options)

    interpreter.GridExecutor.__call__ = launched  # type: ignore[method-assign]
    product = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = (  # type: ignore[method-assign]
        lambda builder, a, b, *rest: product(builder, _widened(a), _widened(b), *rest)
    )
    Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]
    Tensor.is_pinned = lambda self, *_: False  # type: ignore[method-assign,assignment]
    Tensor.record_stream = lambda self, *_: None  # type: ignore[method-assign,assignment]
