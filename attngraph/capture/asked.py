"""What a forward asks of what has no value in a trace, and what it is answered.

Of tensors, besides their values, sizes and dtypes: their layout in memory, whether they are leaves, whether
they have a gradient, attributes that users put on them. A trace has stand-ins in the places of the arguments,
so it must be told what is true of the arguments. What was asked is part of a call's key, and what was not
asked is not. Layouts are a matter of all arguments, as an intermediate value lies in memory as they do. What
nobody can compare, such as an address, is refused.

Whether a value is true (`assert mask.any()`, `if n > 6`): a comparison of sizes is a decision of the trace
(`sides.py`); a condition on values, one of whose answers only raises, is one more result of the graph. The
machine looks at it before anything is written. Where it does not hold, or the graph fails, the model itself
is run, and raises its own error; so it does not matter for the result of a call how a check is recognised: by
the bytecode around the question.

For the number itself of a size (`int(n)`, `range(n)`): torch makes a number of it without a word, and the
graph serves that number alone. The first line that asks is noted, for the report.
"""

import contextlib
import dis
import functools
import linecache
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from attngraph.capture.instead import instead
from attngraph.capture.lines import CAPTURE, TORCH, is_torchs, line_at, outside, room_of, user_lines
from attngraph.capture.sides import Decision
from attngraph.capture.state.kinds import own_attributes
from attngraph.ir.graph.source import short_path
from attngraph.report.entries import Break

_T: Any = torch.Tensor
QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "is_leaf": lambda t: t.is_leaf, "grad": lambda t: t.grad is None, "grad_fn": lambda t: t.grad_fn is None,
    "retains_grad": lambda t: t.retains_grad, "output_nr": lambda t: t.output_nr,
    "is_pinned": lambda t: t.is_pinned(), "is_shared": lambda t: t.is_shared(),  # type: ignore[no-untyped-call]
    "is_inference": lambda t: t.is_inference(), "is_conj": lambda t: t.is_conj(),
    "is_neg": lambda t: t.is_neg(), "_is_view": lambda t: t._is_view(), "_base": lambda t: t._base is None,
}  # fmt: skip
"""What can be asked of an argument, and compared at each call."""
_ASKED_BY: dict[str, Any] = {name: getattr(torch.Tensor, name) for name in QUESTIONS}
_ASKS = {ask if callable(ask) else ask.__get__: name for name, ask in _ASKED_BY.items()}
_WITH_VALUE = {
    "grad": "the gradient of an argument", "grad_fn": "the gradient of an argument",
    "_base": "what a tensor is a view of",
}  # fmt: skip
"""Questions whose answer is None or something that a graph cannot have."""
_LAYOUT = frozenset(
    {_T.stride, _T.is_contiguous, _T.storage_offset, _T.dim_order, _T.as_strided, torch.as_strided,
    torch.as_strided_copy, torch.as_strided_scatter, _T._is_view}
)  # fmt: skip
_VERSION, _BASE = _T._version.__get__, _T._base.__get__
_NOT_IN_PIECES = (_VERSION, _BASE)
"""Torch.compile answers the first for tensors that have none (of inference mode), where eager raises, and
does not look at the second again."""
_ADDRESSES = {
    _T.data_ptr: "the address of a tensor", _T.untyped_storage: "the memory of a tensor",
    _T.storage: "the memory of a tensor", _T.is_set_to: "the memory of a tensor",
    _VERSION: "how often a tensor was written to", _BASE: _WITH_VALUE["_base"],
    _T.__reduce_ex__: "the memory of a tensor",
}  # fmt: skip
_REQUIRES = _T.requires_grad.__set__
_VIEWS_OR_COPIES = frozenset(
    {"reshape", "reshape_as", "flatten", "ravel", "contiguous", "to", "type", "type_as", "float", "double",
     "half"}
)  # fmt: skip
_NO_WRITES = ("__index__", "__int__", "__invert__", "__init__", "__iter__", "__init_subclass__")
Note = Callable[..., None]


class Asked(TorchFunctionMode):
    """Hears what code asks of tensors while it is entered, and answers for the arguments. `found`: the
    arguments' numbers, and what was asked of each. `layouts`: whether layouts in memory matter."""

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
            self._refuse(_ADDRESSES[func], func not in _NOT_IN_PIECES)
        elif func in _ASKS and _ASKS[func] == "grad" and getattr(args[0], "is_leaf", False):
            self._refuse("the gradient of a weight")
        name = getattr(func, "__name__", "")
        wanted = bool(kwargs.get("requires_grad"))
        if func == _REQUIRES or name == "requires_grad_":
            asked = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            wanted = bool(asked) and not args[0].requires_grad
        if wanted:  # a tensor needs a gradient from here on that needed none, which a graph would not do
            where = line_at(sys._getframe(1))
            self._note("forward() asks for gradients of a tensor", where, of_arguments=True)
        self._copies |= name in _VIEWS_OR_COPIES
        self._writes |= _writes(name) or "out" in kwargs
        self.layouts |= self._copies and self._writes
        return func(*args, **kwargs)

    def _answer(self, question: str, number: int, argument: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        self.found.add((number, question))
        answer = QUESTIONS[question](argument)
        if question not in _WITH_VALUE:
            return answer
        if not answer:
            self._refuse(_WITH_VALUE[question], func not in _NOT_IN_PIECES)
        return None if answer else func(*args, **kwargs)

    def _refuse(self, what: str, splits: bool = True) -> None:
        # Another mode may have passed the question on; what torch's own code asks decides nothing.
        frame = outside(sys._getframe(2), lambda f: f.f_code.co_name == "__torch_function__")
        if frame is not None and room_of(frame) not in ("torch", "attngraph"):
            advice = "compute it outside of the model"
            self._note(f"forward() asks for {what}", line_at(frame), advice, of_arguments=True, splits=splits)


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (name.startswith("__i") and name not in _NO_WRITES)
    return name.endswith("_")


def answers(tensors: Sequence[Tensor], asked: frozenset[tuple[int, str]], layouts: bool) -> tuple[Any, ...]:
    """What is true of a call's tensors of what was asked, for its key."""
    found: list[Any] = [(number, what, QUESTIONS[what](tensors[number])) for number, what in sorted(asked)]
    for t in tensors if layouts else ():  # nothing is to tell of one that lies in memory as a new one would
        is_as_new = t.layout is not torch.strided or (t.is_contiguous() and not t.storage_offset())
        found.append(() if is_as_new else (t.stride(), t.storage_offset()))
    return tuple(found)


def lend_attributes(stand_in: Tensor, original: Tensor) -> bool:
    """Give a stand-in the attributes that users put on a tensor. False if there are tensors among them, which
    a graph would have as constants."""
    held = own_attributes(original)
    for name, value in held.items():
        if name not in vars(stand_in):
            setattr(stand_in, name, value)
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(held))


# --- whether something is true ---

_TRACING = (
    "fx", "_subclasses", "_prims", "_prims_common", "_refs", "_decomp", "_dispatch", "_export", "export",
    "_higher_order_ops", "_functorch", "_library", "_logging", "_dynamo", "utils", "_meta_registrations.py",
    "_ops.py", "_guards.py", "_compile.py", "_jit_internal.py", "overrides.py",
)  # fmt: skip
"""The parts of torch that run in a trace alone, and those that stand between them and what asks. What they
ask (whether a tensor is contiguous, say) does not decide what the model does."""
_PASSED_ON = (TORCH + "__init__.py", CAPTURE, contextlib.__file__, functools.__file__)
"""Code that asks for what calls it."""
_INSTRUCTIONS = 200
"""Instructions that are followed to find out whether a way of a branch only raises."""


class Answered:
    """The answers that Python code got in a trace to questions whether something is true.

    Attributes:
        checks: the conditions on values that the trace took to hold: one-element tensors of truth values,
            each with the line that asks for it.
    """

    def __init__(self) -> None:
        self.checks: list[tuple[Tensor, str]] = []
        self._decisions: dict[Decision, None] = {}
        self._one: dict[Any, Any] = {}

    @contextlib.contextmanager
    def listening(self, one: Any) -> Iterator[None]:
        """Answer the body's questions. Those about the size `one`, if it is a symbol, are answered as if it
        were 1: a graph for one sequence then has an axis of sequences."""
        self._one = {one.node.expr: sympy.Integer(1)} if isinstance(one, torch.SymInt) else {}
        of_tensor = torch._C.TensorBase.__bool__

        def of_value(tensor: Tensor) -> bool:
            known = not isinstance(tensor, FakeTensor) or tensor.constant is not None
            passing = None if known or tensor.numel() != 1 else _passing_answer(sys._getframe(1))
            if passing is None:
                return bool(of_tensor(tensor))
            condition = tensor if tensor.dtype == torch.bool else tensor != 0
            return self._checked(condition.reshape(()), passing, sys._getframe(1))

        def of_sizes(ask: Callable[[torch.SymBool], bool]) -> Callable[[torch.SymBool], bool]:
            return lambda value: self._of_sizes(value, ask, sys._getframe(1))

        with instead((Tensor, "__bool__", lambda _: of_value), (torch.SymBool, "__bool__", of_sizes)):
            yield

    def decisions(self, env: Any) -> tuple[Decision, ...]:
        """What was decided about sizes, in the sizes that are left at the end of the trace."""
        if env is None:
            return ()
        told = (d._replace(relation=env.replace(d.relation)) for d in self._decisions)
        return tuple(dict.fromkeys(d for d in told if getattr(d.relation, "free_symbols", ())))

    def _of_sizes(
        self, value: torch.SymBool, ask: Callable[[torch.SymBool], bool], frame: types.FrameType
    ) -> bool:
        """Torch notes a question as a condition of the graph, but for those that it answers by what it takes
        for granted: that a symbolic size is at least 2. One row, or one token, may have another answer, so
        every question is noted that is asked by code which runs without a trace, too: the user's, and that of
        torch's layers."""
        formula = value.node.expr
        if free_unbacked_symbols(value):
            passing = _passing_answer(frame)
            if passing is None:
                return ask(value)
            condition = torch.scalar_tensor(value, dtype=torch.bool)  # type: ignore[arg-type]
            return self._checked(condition, passing, frame)
        asks = outside(frame, lambda f: f.f_code.co_filename.startswith(_PASSED_ON))
        if not formula.free_symbols or asks is None or _is_tracing(asks.f_code.co_filename):
            return ask(value)
        if self._one.keys().isdisjoint(formula.free_symbols):
            answer = ask(value)
        else:
            env: Any = value.node.shape_env
            formula = formula.xreplace(self._one)
            answer = bool(env.evaluate_expr(formula))
        relation = formula if answer else sympy.Not(formula)
        # A question of torch's layers is told as one of the line that calls them.
        line = line_at(outside(asks, lambda f: f.f_back is not None and is_torchs(f)))
        self._decisions[Decision(relation, line, _passing_answer(asks) is answer)] = None
        return answer

    def _checked(self, condition: Tensor, passing: bool, frame: types.FrameType) -> bool:
        line = line_at(outside(frame, is_torchs))
        self.checks.append((condition if passing else condition.logical_not(), line))
        return passing


@functools.lru_cache(maxsize=4096)
def _is_tracing(file: str) -> bool:
    return file.startswith(TORCH) and file.removeprefix(TORCH).split(os.sep)[0] in _TRACING


def _passing_answer(frame: types.FrameType) -> bool | None:
    """The answer to the question whether a value is true, which this frame's code asks now, that does not
    lead to an exception; None if both answers go on, or neither."""
    code = frame.f_code
    if is_torchs(frame) and code is not torch._assert.__code__:
        return None
    return _passing_at(code, frame.f_lasti)


@functools.lru_cache(maxsize=1024)
def _passing_at(code: types.CodeType, offset: int) -> bool | None:
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: place for place, instruction in enumerate(instructions)}
    # While calls are listened to, Python may stand at an instruction's cache.
    place, turned = places[max(o for o in places if o <= offset)], False
    if instructions[place].opname.startswith(("CALL", "TO_BOOL")):  # bool(x), then a branch
        place += 1
    while instructions[place].opname in ("UNARY_NOT", "TO_BOOL"):
        turned ^= instructions[place].opname == "UNARY_NOT"
        place += 1
    branch = instructions[place]
    if not branch.opname.startswith("POP_JUMP") or not branch.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    ways = {branch.opname.endswith("IF_TRUE"): places[branch.argval]}
    ways[not branch.opname.endswith("IF_TRUE")] = place + 1
    raising = [answer for answer, way in ways.items() if _only_raises(instructions, places, way)]
    return None if len(raising) != 1 else raising[0] is turned


def _only_raises(instructions: list[dis.Instruction], places: dict[int, int], start: int) -> bool:
    """Whether every way from here ends in an exception that the code raises, without a loop."""
    ends, stack, seen = False, [start], set()
    while stack:
        place = stack.pop()
        if place in seen:
            continue
        seen.add(place)
        found: Any = instructions[place]
        name = found.opname
        if name in ("RAISE_VARARGS", "RERAISE"):
            ends = True
            continue
        if len(seen) > _INSTRUCTIONS or name.startswith(("RETURN", "YIELD", "FOR_ITER", "SEND")):
            return False
        if found.opcode in (*dis.hasjrel, *dis.hasjabs):
            if places[found.argval] <= place:
                return False
            stack.append(places[found.argval])
        if not name.startswith("JUMP_FORWARD"):
            stack.append(place + 1)
    return ends


# --- for the numbers of sizes ---


class Numbers:
    """The dimensions of arguments for whose number the code asks: the size's name, the file and the line that
    ask first. `of`: the dimensions, (argument, dimension), whose extents involve a symbol."""

    def __init__(self, of: Callable[[frozenset[str]], frozenset[tuple[int, int]]]) -> None:
        self._of = of
        self._found: dict[tuple[int, int], tuple[str, str, int]] = {}

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Note what the body asks. (Nobody asks for a size that is a number because a weight has it.)"""

        def noting(guard: Callable[..., Any]) -> Callable[..., Any]:
            def noted(node: Any, file: str, line: int) -> Any:
                for name in map(str, node.expr.free_symbols):
                    dimensions = self._of(frozenset({name})) - set(self._found)
                    lines = user_lines(sys._getframe(1)) if dimensions else ()
                    if lines:
                        self._found.update(dict.fromkeys(dimensions, (name, *lines[-1][:2])))
                return guard(node, file, line)

            return noted

        return instead((SymNode, "guard_int", noting))

    def told(self, shapes: Sequence[Sequence[Any]], conditions: Sequence[Any]) -> tuple[Break, ...]:
        """What the report says of those that became numbers, or that a condition of the graph fixes."""
        fixed = {str(s) for c in conditions if isinstance(c, sympy.Eq) for s in c.free_symbols}
        found: dict[tuple[str, int], list[str]] = {}
        for (argument, dim), (name, path, line) in sorted(self._found.items()):
            if name in fixed or isinstance(shapes[argument][dim], int):
                found.setdefault((path, line), []).append(f"dimension {dim} of tensor argument {argument}")
        told: list[Break] = []
        for (path, line), dimensions in found.items():
            what = f"the code asks for the number itself of {' and '.join(dimensions)}"
            code = linecache.getline(path, line).strip()
            told.append(Break(f"{what}: {code}", f"{short_path(path)}:{line}"))
        return tuple(told)
