"""The sizes that an exported program is valid for, checked by the program itself.

A trace takes one branch where a model asks for a size. A compiled model traces again for other sizes; a file
must refuse them. In pt2 it is an assertion with a message. ONNX has none: there an index is out of range
unless the conditions hold, so that the runtime fails instead of computing something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.graph.conditions import python_text, test_of

_NOWHERE = 1 << 20
"""An index that nothing has."""


class Limits:
    """Conditions on sizes; `names` has the name of each size that they mention, for people."""

    def __init__(self, conditions: Sequence[Any], names: Mapping[str, str]) -> None:
        known = (c for c in dict.fromkeys(conditions) if {str(s) for s in c.free_symbols} <= set(names))
        self.conditions = [c for c in known if not _is_of_ones(c)]
        self._names = names

    def words(self) -> list[str]:
        """The conditions as users may read them: `x.shape[1] <= 64`."""
        return [
            re.sub(r"\w+", lambda m: self._names.get(m[0], m[0]), python_text(c)) for c in self.conditions
        ]

    def hold(self, sizes: Mapping[str, Any], device: torch.device) -> Tensor | None:
        """Whether all hold, as a tensor that a trace follows; None where there are none."""
        found: Tensor | None = None
        known = {n: torch.scalar_tensor(s, dtype=torch.int64, device=device) for n, s in sizes.items()}
        for condition in self.conditions:
            names, test = test_of(condition)
            one = torch.as_tensor(test(*(known[name] for name in names)), device=device)
            found = one if found is None else found & one
        return found

    def checked(self, tensor: Tensor, holds: Tensor | None, in_onnx: bool) -> Tensor:
        """The tensor, unless the conditions do not hold."""
        if holds is None:
            return tensor
        if not in_onnx:
            torch._assert_async(holds, f"this file is for sizes with {' and '.join(self.words())}")
            return tensor
        place = torch.where(holds, 0, _NOWHERE).reshape(1)
        nothing = torch.zeros(1, dtype=tensor.dtype, device=tensor.device).index_select(0, place)
        return tensor + nothing.reshape(()) if tensor.dtype != torch.bool else tensor | nothing.reshape(())


def _is_of_ones(condition: Any) -> bool:
    """Whether a condition only says that a size is at least 2, as torch takes all symbolic sizes to be."""
    text = str(condition)
    return re.fullmatch(r"\w+ >= [012]|[012] <= \w+", text) is not None
