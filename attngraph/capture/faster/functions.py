"""Within one trace, equal calls of torch's functions are traced twice, and repeated after that.

What a function of torch records follows from its arguments (tensors by their layouts, and by which of them
are the same or share memory) and from torch's modes. The layers of a model call the same functions from the
same lines. Where all of that is equal to an earlier call's, and two earlier calls recorded the same
operations, these operations are copied with the other tensors in their places (`repeated.py`). Python runs
for every layer as it would, so whatever it reads or changes needs no thought here. A call that records
anything but plain operations on its operands, or gives anything but tensors, is always traced. Used by
`flat.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import _TorchDispatchModeKey
from torch.overrides import TorchFunctionMode

from attngraph.capture.faster.repeated import Call, NotRepeatable, Recording
from attngraph.capture.stack_traces import user_lines


@contextlib.contextmanager
def equal_functions_traced_twice(noted: Callable[[], Any]) -> Iterator[None]:
    """Let the trace of the body repeat what it knows. `noted`: what the trace has noted so far that is no
    operation; a call that adds to it is not repeated."""
    mode = torch._guards.detect_fake_mode(())
    recording: Any = torch._ops._get_dispatch_mode_pre_dispatch
    proxies = recording(_TorchDispatchModeKey.PROXY)
    if mode is None or proxies is None:
        yield
        return
    with _EqualFunctions(proxies.tracer, mode, noted):
        yield


@dataclasses.dataclass
class _Known:
    """Calls with equal keys: what the last one recorded, and whether two recorded the same."""

    recording: Recording
    is_confirmed: bool = False


class _EqualFunctions(TorchFunctionMode):
    """The calls of torch's functions in one trace.

    Attributes:
        known: calls by their keys; None where a call cannot be repeated.
        others: functions that do not give tensors.
    """

    def __init__(self, tracer: Any, mode: Any, noted: Callable[[], Any]) -> None:
        super().__init__()
        self.tracer, self.mode, self.noted = tracer, mode, noted
        self.known: dict[Any, _Known | None] = {}
        self.others: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.others:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            call = Call.of(self.mode, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        key = func, call.key, _modes(), user_lines(sys._getframe(1))
        known = self.known.get(key)
        if known is not None and known.is_confirmed:
            with contextlib.suppress(NotRepeatable):
                return known.recording.repeat(self.tracer, call)
            return func(*args, **kwargs)
        if known is None and key in self.known:
            return func(*args, **kwargs)
        last, noted = self.tracer.graph._root.prev, self.noted()
        result = func(*args, **kwargs)
        if not _is_of_tensors(result):
            self.others.add(func)
            return result
        try:
            if noted != self.noted():
                raise NotRepeatable
            with torch._C.DisableTorchFunction():
                after = Call.of(self.mode, args, kwargs)
                if after is None or after.key != call.key:
                    raise NotRepeatable
                found = Recording.of(self.tracer, last, call, result)
                if known is not None and not known.recording.agrees(found):
                    raise NotRepeatable
            self.known[key] = _Known(found, known is not None)
        except NotRepeatable:
            self.known[key] = None
        return result


def _is_of_tensors(result: Any) -> bool:
    if isinstance(result, (list, tuple)):
        return bool(result) and all(isinstance(each, Tensor) for each in result)
    return isinstance(result, Tensor)


def _modes() -> Any:
    """The state of torch that operations depend on."""
    autocast = tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(), autocast, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
