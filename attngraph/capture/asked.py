"""What a forward asks of tensors besides their values, sizes and dtypes: their layout in memory, whether they
are leaves, whether they have a gradient, and attributes that users put on them.

A trace has stand-ins in the places of the arguments, so it must be told what is true of the arguments. What
was asked is part of a call's key, and what was not asked is not. Layouts are a matter of all arguments, as an
intermediate value lies in memory as they do. What nobody can compare, such as an address, is refused.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from attngraph.capture.state.fingerprint import fingerprint
from attngraph.capture.state.parts import own_attributes
from attngraph.ir.graph.source import short_path

_T: Any = torch.Tensor
QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "is_leaf": lambda t: t.is_leaf, "grad": lambda t: t.grad is None, "grad_fn": lambda t: t.grad_fn is None,
    "retains_grad": lambda t: t.retains_grad, "output_nr": lambda t: t.output_nr,
    "is_pinned": lambda t: t.is_pinned(), "is_shared": lambda t: t.is_shared(),  # type: ignore[no-untyped-call]
    "is_inference": lambda t: t.is_inference(), "is_conj": lambda t: t.is_conj(),
    "is_neg": lambda t: t.is_neg(), "_is_view": lambda t: t._is_view(),
}  # fmt: skip
"""What can be asked of an argument, and compared at each call."""
_ASKED_BY: dict[str, Any] = {name: getattr(torch.Tensor, name) for name in QUESTIONS}
_ASKS = {ask if callable(ask) else ask.__get__: name for name, ask in _ASKED_BY.items()}
_WITH_VALUE = ("grad", "grad_fn")
"""Questions whose answer is None or something that a graph cannot have."""
_LAYOUT = frozenset(
    {
        _T.stride, _T.is_contiguous, _T.storage_offset, _T.dim_order, _T.as_strided, torch.as_strided,
        torch.as_strided_copy, torch.as_strided_scatter, _T._is_view,
    }
)  # fmt: skip
_ADDRESSES = {
    _T.data_ptr: "the address of a tensor", _T.untyped_storage: "the memory of a tensor",
    _T.storage: "the memory of a tensor", _T.is_set_to: "the memory of a tensor",
    _T._version.__get__: "how often a tensor was written to", _T._base.__get__: "what a tensor is a view of",
    _T.__reduce_ex__: "the memory of a tensor",
}  # fmt: skip
_VERSION = _T._version.__get__
"""Torch.compile answers it for tensors that have none (of inference mode), where eager raises."""
_REQUIRES = _T.requires_grad.__set__
_VIEWS_OR_COPIES = frozenset(
    {
        "reshape",
        "reshape_as",
        "flatten",
        "ravel",
        "contiguous",
        "to",
        "type",
        "type_as",
        "float",
        "double",
        "half",
    }
)
Note = Callable[..., None]


class Asked(TorchFunctionMode):
    """Hears what code asks of tensors while it is entered, and answers for the arguments.

    Attributes:
        found: the arguments' numbers, and what was asked of each. layouts: whether layouts in memory matter.
    """

    def __init__(self, stand_ins: Sequence[Tensor], arguments: Sequence[Tensor], note: Note) -> None:
        super().__init__()
        self.found: set[tuple[int, str]] = set()
        self.layouts = False
        self._arguments = {id(s): (n, t) for n, (s, t) in enumerate(zip(stand_ins, arguments, strict=True))}
        self._note = note
        self._writes = self._copies = False

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS and args and id(args[0]) in self._arguments:
            return self._answer(_ASKS[func], *self._arguments[id(args[0])], func, args, kwargs)
        if func in _LAYOUT:
            self.layouts = True
        elif func in _ADDRESSES:
            self._refuse(_ADDRESSES[func], splits=func != _VERSION)
        elif func in _ASKS and _ASKS[func] == "grad" and getattr(args[0], "is_leaf", False):
            self._refuse("the gradient of a weight")
        name = getattr(func, "__name__", "")
        if _asks_for_gradients(func, name, args, kwargs):
            self._note("forward() asks for gradients of a tensor", _line(sys._getframe(1)), of_arguments=True)
        self._copies |= name in _VIEWS_OR_COPIES
        self._writes |= _writes(name) or "out" in kwargs
        self.layouts |= self._copies and self._writes
        return func(*args, **kwargs)

    def _answer(
        self, question: str, number: int, argument: Tensor, func: Any, args: Any, kwargs: Any
    ) -> Any:  # fmt: skip
        """The answer for an argument itself."""
        self.found.add((number, question))
        answer = QUESTIONS[question](argument)
        if question not in _WITH_VALUE:
            return answer
        if not answer:
            self._refuse("the gradient of an argument")
        return None if answer else func(*args, **kwargs)

    def _refuse(self, what: str, splits: bool = True) -> None:
        frame = sys._getframe(2)
        while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
            frame = frame.f_back  # another mode passed it on
        if str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "attngraph"):
            return  # what torch's own code asks does not decide what it computes
        what = f"forward() asks for {what}"
        told = _line(frame), "compute it outside of the model"
        self._note(what, *told, of_arguments=True, splits=splits)


def _line(frame: types.FrameType) -> str:
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def _asks_for_gradients(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether a tensor is to need a gradient from here on that needed none, which a graph would not do."""
    if func == _REQUIRES or name == "requires_grad_":
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        return bool(wanted) and not args[0].requires_grad
    return bool(kwargs.get("requires_grad"))


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (name.startswith("__i") and name not in _NO_WRITES)
    return name.endswith("_")


_NO_WRITES = ("__index__", "__int__", "__invert__", "__init__", "__iter__", "__init_subclass__")


def answers(tensors: Sequence[Tensor], asked: frozenset[tuple[int, str]], layouts: bool) -> tuple[Any, ...]:
    """What is true of a call's tensors of what was asked, for its key."""
    found = [(number, what, QUESTIONS[what](tensors[number])) for number, what in sorted(asked)]
    if layouts:
        found += [layout_of(tensor) for tensor in tensors]
    return tuple(found)


def layout_of(tensor: Tensor) -> Any:
    """How a tensor lies in memory: nothing to tell if it does so as a new one would."""
    if tensor.layout is not torch.strided or (tensor.is_contiguous() and not tensor.storage_offset()):
        return ()
    return tensor.stride(), tensor.storage_offset()


def lend_attributes(stand_in: Tensor, original: Tensor) -> bool:
    """Give a stand-in the attributes that users put on a tensor. False if there are tensors among them, which
    a graph would have as constants."""
    held = own_attributes(original)
    for name, value in held.items():
        if name not in vars(stand_in):
            setattr(stand_in, name, value)
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(held))


def key_of_attributes(tensor: Tensor) -> Any:
    """What is compared of them at each call."""
    held = own_attributes(tensor)
    return tuple(fingerprint([held])) if held else ()
