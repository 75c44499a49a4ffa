"""Whether a call is part of something that needs the model's own operations."""

from __future__ import annotations

import functools
import logging

import torch

from attngraph.capture.guards import run_past
from attngraph.capture.trace_lock import LOCK

log = logging.getLogger(__name__)


def is_transformed() -> bool:
    """Whether the call is part of another trace, or of a transformation (vmap, jvp) that needs the model's
    own operations. The original model is then run instead."""
    if LOCK.traces_here():
        return True
    # Torch's flags are those of the process: while another thread traces, they tell nothing about this one.
    begun = -1 if LOCK.is_tracing() else LOCK.begun
    exports = torch.compiler.is_exporting() or torch.compiler.is_compiling()
    return (
        (exports and begun == LOCK.begun)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or (bool(around := run_past()) and _told(around))
    )


@functools.cache
def _told(around: str) -> bool:
    """Tell once that something around a call is not run past."""
    log.warning("under %s the model itself runs, and not what was compiled", around)
    return True
