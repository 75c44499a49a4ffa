"""Shape and dtype inference: runs an op on fake tensors, so nothing is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher


def infer(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any = None) -> Any:
    """The fake result of an op on nodes' fake values; `mode` is used where no argument is a tensor."""
    values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    tensors = [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, Tensor)]
    mode = getattr(tensors[0], "fake_mode", None) if tensors else mode
    if mode is None:
        return target(*values[0], **values[1])
    # Without the Python dispatcher, composite ops specialise symbolic sizes to numbers. Guards are suppressed
    # because inference after the trace must not add conditions to the trace's own.
    with mode, enable_python_dispatcher(), mode.shape_env.suppress_guards(), torch.no_grad():
        return target(*values[0], **values[1])
