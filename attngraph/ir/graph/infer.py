"""Shape and dtype inference: runs an op on fake tensors, so nothing is computed.

Equal layers have equal calls. For each environment of symbolic sizes, results are known by what inference
depends on; a result that follows from values is inferred each time, because its sizes are new ones.
"""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

_KNOWN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""For each environment of symbolic sizes the results of calls."""
_BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


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


def infer_once(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    """As `infer`; what is known of an equal call is not inferred again. Nobody may write to the result."""
    if mode is None or mode.shape_env is None or not _is_of_sizes(target):
        return infer(target, args, kwargs, mode)
    known = _KNOWN.setdefault(mode.shape_env, {})
    try:
        call = target, _described(fx.map_arg((args, kwargs), lambda n: n.meta["val"]))
        found = known.get(call)
    except (TypeError, RuntimeError, AttributeError):  # an operand without a plain layout
        return infer(target, args, kwargs, mode)
    if found is None:
        found = known[call] = infer(target, args, kwargs, mode)
    return found


@functools.lru_cache(maxsize=4096)
def _is_of_sizes(target: Any) -> bool:
    """Whether an op's result has no sizes that follow from values."""
    return not any(tag in getattr(target, "tags", ()) for tag in _BY_VALUES)


def _described(value: Any) -> Any:
    """An operand as far as shapes and types depend on it; equal for equal layers."""
    if isinstance(value, Tensor):
        layout = (tuple(map(_described, value.shape)), tuple(map(_described, value.stride())))
        return value.dtype, value.device, layout
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(inner)) for name, inner in value.items())
    if isinstance(value, slice):
        return slice, _described((value.start, value.stop, value.step))
    return type(value), value
