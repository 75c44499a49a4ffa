"""Memory for values in between on the CPU, kept from one call to the next.

The C library gives large blocks back to the system when they are freed. A new one is made of pages that the
system clears when they are first touched, which takes longer than writing the block does.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_own = threading.local()


def workspace(count: int) -> Tensor:
    """Memory of this thread for so many float32, which the next call of this function uses again."""
    kept: Tensor | None = getattr(_own, "kept", None)
    if kept is None or kept.numel() < count:
        kept = _own.kept = torch.empty(count)
    return kept[:count]
