"""A decoder's graph captured as a CUDA graph: one launch in place of hundreds.

The second call with tokens of the same shapes is captured (`cpu/record/replay.py` says when), on memory that
stays: what a call gives is copied there, weights and pages are read where they lie. A captured graph cannot
ask the device for a number, nor read the host's memory; where an operation does, PyTorch refuses to capture
it, and the graph goes on to run operation by operation. Results lie in the graph's memory until its next run;
those that are kept for longer are copied.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.cpu.record.links import Kinds
from attngraph.codegen.cpu.record.recording import NotRecorded, addresses
from attngraph.codegen.triton.device import as_captured
from attngraph.ir.ops.cached_attention import tell, told

_log = logging.getLogger("attngraph.codegen.triton")


class Captured:
    """Captures a call.

    Args:
        kinds: the decoder's graph, and how its inputs change.
        inputs: the call's, whose shapes every run has.

    Attributes:
        made: the results of this call, until they are taken.
        nbytes: of what calls give and of the results.

    Raises:
        NotRecorded: an operation of the graph cannot be captured.
    """

    def __init__(self, kinds: Kinds, inputs: Sequence[Tensor]) -> None:
        self._kinds, self._inputs = kinds, list(inputs)
        self._copies = []  # what differs from call to call; what the key of the recording says does not
        for n in kinds.changing:
            self._inputs[n] = inputs[n].clone()
            numbers = told(inputs[n]) if n in kinds.counted else None
            if numbers is None:
                self._copies.append(n)
            else:
                tell(self._inputs[n], numbers)
        self._where = addresses([inputs[n] for n in kinds.in_place])
        self._graph = torch.cuda.CUDAGraph()
        run = kinds.shorten(kinds.graph.module)
        try:
            with as_captured():  # compiles kernels that are launched otherwise than before
                run(*self._inputs)
            with torch.cuda.graph(self._graph):
                self._results = list(run(*self._inputs))
        except RuntimeError as problem:
            _log.info("a step is not captured as a CUDA graph: %s", problem)
            raise NotRecorded from problem
        outputs = kinds.graph.outputs
        self._is_copied = [
            o.kind != "pages" and isinstance(r, Tensor) for o, r in zip(outputs, self._results, strict=True)
        ]
        own = [self._inputs[n] for n in kinds.changing] + [r for r in self._results if isinstance(r, Tensor)]
        self.nbytes = sum(t.nbytes for t in own)
        self.made: list[Any] | None = self.run(inputs)

    def is_valid(self, inputs: Sequence[Tensor]) -> bool:
        """Whether weights and pages lie where they lay."""
        return addresses([inputs[n] for n in self._kinds.in_place]) == self._where

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The results."""
        for n in self._copies:
            self._inputs[n].copy_(inputs[n])
        self._graph.replay()
        pairs = zip(self._results, self._is_copied, strict=True)
        return [result.clone() if is_copied else result for result, is_copied in pairs]
