"""A decoder's graph recorded once and replayed: one call of compiled code in place of hundreds of operations.

For one token most of the time outside of the weights is spent between operations; for a prompt of a hundred
tokens it is still a tenth. The second call with tokens of the same shapes is recorded (`recorder.py`). A
recording serves calls of its thread with the same shapes, while the weights lie where they lay; the pages of
the cache may move. All other calls run the graph.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.codegen.cpu.record.places import places
from attngraph.codegen.cpu.record.recorder import NotNow, NotRecorded, Recorder
from attngraph.codegen.cpu.record.recording import Recording
from attngraph.codegen.cpu.record.step_graph import Kinds
from attngraph.codegen.cpu.toolchain import CompilerError
from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph

_FIRST, _SECOND = "the first call of its kind", "the second"
_Key = tuple[Any, ...]


class Replay:
    """Computes a graph's results from its inputs, as its module does.

    Args:
        graph: a decoder's graph, lowered.
        shorten: makes a module cheaper to call.
    """

    def __init__(self, graph: ProgramGraph, shorten: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
        self.kinds, self.module = Kinds(graph, shorten), shorten(graph.module)
        self._recordings: OrderedDict[_Key, Recording | str | None] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, *inputs: Tensor) -> Sequence[Any]:
        if not self._may_record(inputs) or not self._lock.acquire(blocking=False):
            return self.module(*inputs)  # type: ignore[no-any-return]
        try:
            recording = self._recording(inputs)
        finally:
            self._lock.release()
        if isinstance(recording, Recorder):
            return recording.made
        found = None if recording is None else recording.run(inputs)
        return self.module(*inputs) if found is None else found

    def _may_record(self, inputs: Sequence[Tensor]) -> bool:
        tokens = self.kinds.tokens
        most = budgets.RECORDED_TOKENS
        if tokens is None or not 0 < inputs[tokens].shape[1] <= most or torch.is_grad_enabled():
            return False
        return (
            not torch._C._len_torch_dispatch_stack() and torch._C._functorch.peek_interpreter_stack() is None
        )

    def _recording(self, inputs: Sequence[Tensor]) -> Recording | Recorder | None:
        """The recording for a call, or what has just run and recorded it; None where it is the first of its
        kind, or nothing can be recorded. Each thread has recordings of its own, because results stay in a
        recording's memory until its next run."""
        key = (
            threading.get_ident(), torch.get_num_threads(),
            *((inputs[n].shape, inputs[n].dtype) for n in self.kinds.changing),
            places([inputs[n] for n in self.kinds.fixed]),
        )  # fmt: skip
        found = self._recordings.pop(key, _FIRST)
        made: Recorder | None = None
        if found is _FIRST:
            found = _SECOND
        elif found is _SECOND or (isinstance(found, Recording) and not found.is_valid(inputs)):
            recorded = self._record(inputs)
            if isinstance(recorded, Recorder):
                made, found = recorded, recorded.recording
            else:
                found = recorded
        self._recordings[key] = found
        if made is not None or found is _SECOND:
            self._drop_oldest()
        return made or (found if isinstance(found, Recording) else None)

    def _drop_oldest(self) -> None:
        """Keep as many recordings as may be kept; those that were not used for longest go first."""
        while len(self._recordings) > budgets.RECORDINGS or self._bytes() > budgets.RECORDED_BYTES:
            self._recordings.popitem(last=False)

    def _bytes(self) -> int:
        return sum(r.nbytes for r in self._recordings.values() if isinstance(r, Recording))

    def _record(self, inputs: Sequence[Tensor]) -> Recorder | str | None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                return Recorder(self.kinds, inputs)
        except NotNow:
            return _SECOND
        except (CompilerError, NotRecorded):
            return None
