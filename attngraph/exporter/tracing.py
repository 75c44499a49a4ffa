"""torch.export's trace of a rewritten module, with the sizes that were symbolic still symbolic."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from attngraph.capture.trace_lock import LOCK
from attngraph.errors import ExportError
from attngraph.ir.modes import without_autocast


def traced(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Sequence[Sequence[int]]
) -> ExportedProgram:
    """The program of a call. `dynamic`: for each tensor in order, which dimensions are symbolic.

    Raises:
        ExportError: torch.export cannot trace it.
    """
    counted = iter(dynamic)

    def dims(leaf: Any) -> Any:
        return dict.fromkeys(next(counted), Dim.AUTO) if isinstance(leaf, Tensor) else None

    of_args, of_kwargs = pytree.tree_map(dims, (args, dict(kwargs)))
    shapes: Any = {**({"args": of_args} if args else {}), **of_kwargs}
    if not any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(module.forward).parameters.values()):
        shapes = of_args
    quiet = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = quiet.level
    try:
        quiet.setLevel(logging.CRITICAL)
        with LOCK.trace(), torch.no_grad(), without_autocast(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = torch.export.export(module, args, dict(kwargs), dynamic_shapes=shapes, strict=False)
        # Torch's text of guards fails on inputs of several kinds; sizes are checked by the range constraints.
        made._guards_code = []
        return made
    except ExportError:
        raise
    except Exception as problem:
        reason = next((line for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
        raise ExportError(f"torch.export cannot trace the rewritten model: {reason}") from problem
    finally:
        quiet.setLevel(level)


def varies(size: Any) -> bool:
    """Whether a size, as a number, a symbol of torch or a formula, is no fixed number."""
    formula = size.node.expr if isinstance(size, torch.SymInt) else size
    return bool(getattr(formula, "free_symbols", ()))
