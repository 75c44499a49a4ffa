"""A decoder's graph recorded once and replayed: one call of compiled code in place of hundreds of operations.

For one token most of the time outside of the weights is spent between operations; for a prompt of a hundred
tokens it is still a tenth. The second call with tokens of the same shapes is recorded (`recording.py`). A
recording serves calls of its thread with the same shapes, while the weights lie where they lay; the pages of
the cache may move. All other calls run the graph. (On a GPU a recording is a captured graph of another kind,
`codegen/triton/captured.py`.)
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from attngraph.codegen.cpu.record.links import Kinds
from attngraph.codegen.cpu.record.recording import NotNow, NotRecorded, Recording, places
from attngraph.codegen.cpu.toolchain import CompilerError
from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops.cached_attention import told

_FIRST, _SECOND = "the first call of its kind", "the second"


class Recorded(Protocol):
    """A call that was recorded: `Recording` says more of each."""

    made: list[Any] | None
    nbytes: int

    def is_valid(self, inputs: Sequence[Tensor]) -> bool: ...
    def run(self, inputs: Sequence[Tensor]) -> list[Any] | None: ...


RECORDERS: dict[str, Callable[[Kinds, Sequence[Tensor]], Recorded]] = {"cpu": Recording}
"""What records a call, by the kind of its device."""


class Replay:
    """Computes a graph's results from its inputs, as its module does.

    Args:
        graph: a decoder's graph, lowered.
        shorten: makes a module cheaper to call.
    """

    def __init__(self, graph: ProgramGraph, shorten: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
        self.kinds, self.module = Kinds(graph, shorten), shorten(graph.module)
        self._recordings: OrderedDict[tuple[Any, ...], Recorded | str | None] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, *inputs: Tensor) -> Sequence[Any]:
        if not self._may_record(inputs) or not self._lock.acquire(blocking=False):
            return self.module(*inputs)  # type: ignore[no-any-return]
        try:
            recording = self._recording(inputs)
        finally:
            self._lock.release()
        if recording is not None and recording.made is not None:
            made, recording.made = recording.made, None
            return made
        found = None if recording is None else recording.run(inputs)
        return self.module(*inputs) if found is None else found

    def _may_record(self, inputs: Sequence[Tensor]) -> bool:
        tokens = self.kinds.tokens
        most = budgets.RECORDED_TOKENS
        if tokens is None or not 0 < inputs[tokens].shape[1] <= most or torch.is_grad_enabled():
            return False
        if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        kind = inputs[tokens].device.type
        return kind in RECORDERS and not (kind == "cuda" and torch.cuda.is_current_stream_capturing())

    def _recording(self, inputs: Sequence[Tensor]) -> Recorded | None:
        """The recording for a call, which may have just recorded it; None where it is the first of its kind,
        or nothing can be recorded. Each thread has recordings of its own, because results stay in a
        recording's memory until its next run."""
        kinds, own = self.kinds, list[Any]()
        if not inputs[kinds.changing[0]].is_cpu:  # a captured graph is of these pages, and of rows so divided
            own = [
                places([inputs[n] for n in kinds.pages]),
                *(tuple(told(inputs[n]) or ()) for n in kinds.counted),
            ]
        key = (
            threading.get_ident(), torch.get_num_threads(),
            *((inputs[n].shape, inputs[n].dtype) for n in kinds.changing),
            places([inputs[n] for n in kinds.fixed]), *own,
        )  # fmt: skip
        found = before = self._recordings.pop(key, _FIRST)
        if before is _FIRST:
            found = _SECOND
        elif before is _SECOND or (before and not isinstance(before, str) and not before.is_valid(inputs)):
            found = self._record(inputs)
        self._recordings[key] = found  # the latest; those that were not used for longest go first
        if found is not before:
            while len(self._recordings) > budgets.RECORDINGS or self._bytes() > budgets.RECORDED_BYTES:
                self._recordings.popitem(last=False)
        return None if isinstance(found, str) else found

    def _bytes(self) -> int:
        return sum(r.nbytes for r in self._recordings.values() if r and not isinstance(r, str))

    def _record(self, inputs: Sequence[Tensor]) -> Recorded | str | None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                kind = inputs[self.kinds.changing[0]].device.type
                return RECORDERS[kind](self.kinds, inputs)
        except NotNow:
            return _SECOND
        except (CompilerError, NotRecorded):
            return None
