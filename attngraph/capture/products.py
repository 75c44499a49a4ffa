"""Products under autocast that torch writes out as other products: `einsum` and `tensordot`.

Autocast casts the operands of the products that these become. torch.export records them before, in the dtype
that their operands have, so under autocast they are written out while the trace runs.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_WRITTEN_OUT: dict[Any, str] = {torch.einsum: "einsum", torch.tensordot: "tensordot"}


def products_cast() -> contextlib.AbstractContextManager[Any]:
    """While it is active, products are recorded as autocast computes them."""
    return _WrittenOut() if torch._C._is_any_autocast_enabled() else contextlib.nullcontext()


class _WrittenOut(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _WRITTEN_OUT:
            return func(*args, **(kwargs or {}))
        composite = getattr(torch._VF, _WRITTEN_OUT[func])

        def written_out(*operands: Any, **named: Any) -> Any:
            return getattr(torch.ops.aten, _WRITTEN_OUT[func]).default.decompose(*operands, **named)

        setattr(torch._VF, _WRITTEN_OUT[func], written_out)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            setattr(torch._VF, _WRITTEN_OUT[func], composite)
