"""Builds one graph from the lines of its text: inputs, values, results.

Line numbers are not known here: a malformed line raises ValueError, and the reader (`ir/graph/reader.py`)
adds the line's number.
"""

import operator
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._guards import SLoc
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, has_free_unbacked_symbols

from attngraph.ir.graph.call import implied, infer
from attngraph.ir.graph.formula import Formulas
from attngraph.ir.graph.literals import Formula, Name, TensorType, read_name, read_type, read_value, split
from attngraph.ir.graph.program_graph import Input, Output, Rate
from attngraph.ir.operations import is_pure, packet_of
from attngraph.ir.ops import nodes

Places = Mapping[str, tuple[int, int]]
"""For names of sizes the input, by number, and its dimension that they are taken from."""
_BETWEEN_PARTS = ("rows", "pages", "carried", Rate.PROMPT.value, Rate.LOOK.value)
_KINDS = ("buffer", "constant", Rate.WEIGHTS.value, "parameter", *_BETWEEN_PARTS)
_WORDS = ("kernel", "values", "absorb", "family", "by")
"""Arguments of attention nodes that are keywords, not values."""


class _Sizes(ShapeEnv):
    """The symbolic sizes of a graph that is read. No code of the user's makes them: torch need not look for
    the line (for which it imports its other compilers)."""

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> Any:
        return SLoc(framework_loc or "a graph that was read", None), ""


def symbols_of(sizes: Mapping[str, int], measured: int = 0) -> tuple[FakeTensorMode, dict[str, torch.SymInt]]:
    """A mode in which these sizes are symbols, and the symbols, by name; besides u0, u1, ..., so many sizes
    without an example."""
    env = _Sizes()
    found: dict[str, torch.SymInt] = {}
    for name, hint in sizes.items():
        source = ConstantSource(name)
        symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC, do_not_specialize_zero_one=hint < 2)
        made = env.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(made, torch.SymInt)
        found[name] = made
    found |= {f"u{number}": env.create_unbacked_symint() for number in range(measured)}
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # with symbolic sizes, to keep a result takes longer than to infer it again
    return mode, found


class Body:
    """A graph under construction; every method raises ValueError for a malformed line.

    Args:
        places: where sizes are taken from, in a text whose types are taken as they are written. None: types
            are inferred and compared with the written ones.
        libraries: whose operations the text may name, besides PyTorch's and attngraph's.
    """

    def __init__(
        self, mode: FakeTensorMode, symbols: Mapping[str, torch.SymInt], places: Places | None = None,
        libraries: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.mode, self.places, self.libraries = mode, places, libraries
        self.graph = fx.Graph()
        self.formulas = Formulas(symbols, self.graph, mode)
        self.inputs: list[Input] = []
        self.outputs: list[Output] = []
        self.values: dict[str, fx.Node] = {}
        self.ended = False
        self._module = self._source = self._note = ""
        self._written: Any = None
        self._of_type: dict[TensorType, torch.Tensor] = {}

    def input(self, line: str) -> None:
        """`  buffer $mask: bool[4, 4],`"""
        found = re.fullmatch(r"  (?:(\w+) )?(%arg\d+|\$'.*'|\$\".*\"|\$[\w.\-]+): (.*),", line)
        if found is None or found[1] not in (None, *_KINDS):
            raise ValueError(f"expected an input such as `$weight: f32[4, 4],`, found {line[:60]!r}")
        name = found[2]
        if name in self.values:
            raise ValueError(f"{name} stands twice among the inputs")
        kind = "argument" if name[0] == "%" else found[1] or "parameter"
        wanted = read_type(found[3])
        if not isinstance(wanted, TensorType):
            raise ValueError(f"an input is one tensor, found {found[3]!r}")
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        node.meta["val"] = self._allocated(wanted)
        for name_of_size, (number, axis) in (self.places or {}).items():
            if number == len(self.inputs):
                self.formulas.take(name_of_size, node, axis)
        self.formulas.found(node, wanted.shape)
        self.values[name] = node
        if kind == "rows":
            self.values[f"$rows {read_name(name, '$')}"] = node
        self.inputs.append(Input(kind, name[4:] if kind == "argument" else _whole_name(kind, name)))

    def statement(self, line: str, program: str) -> None:
        """A value, the name of a module, or the results. `program`: the score program's lines below it."""
        code, _, comment = line.rpartition("  # ") if "  # " in line else (line, "", "")
        code = code.strip()
        if code.startswith("["):
            self._module = read_name(code[1:-1], "")
        elif code.startswith("return "):
            self._return(code)
        else:
            found = re.fullmatch(r"(%\d+) = ([\w.]+)\((.*)\) : (.*)", code)
            if found is None:
                raise ValueError(f"expected a value such as `%3 = add(%1, %2) : f32[4]`, found {line[:60]!r}")
            if found[1] in self.values:
                raise ValueError(f"{found[1]} is defined twice")
            self._source, _, note = comment.partition("; ")
            self._note = note if self.places is not None else ""
            self._value(found[1], found[2], found[3], read_type(found[4]), program)

    def _value(self, name: str, op: str, text: str, wanted: Any, program: str) -> None:
        kind = nodes.NAMED.get(op)
        is_cached = kind is not None and issubclass(kind, nodes.Cached)
        if is_cached and self.places is None:
            raise ValueError("graphs of a decoder cannot be read back: what they keep is not in the text")
        self._written = self._allocated(wanted) if self.places is not None else None
        args, kwargs = self._arguments(text)
        if kind is not None:
            shared = {n: self.values[f"$rows {n}"] for n in ("starts", "first") if is_cached}
            if op == "attention" and self._written is not None:
                self._written = (self._written, None)
            node = self._call(kind.target, args, _attention(kind, kwargs, program) | shared)
            node.args, node.kwargs = nodes.AttentionOp.of(node).args, {}
        elif op == "token_program":
            given = [kwargs[f"r{number}"] for number in range(len(kwargs))]
            node = self._call(torch.ops.attngraph.token_program.default, [given, program], {})
        else:
            node = self._call(
                _target(op, args, kwargs, self.libraries, self.places is not None), args, kwargs
            )
        if op == "attention":
            self.values[f"{name}.1"] = self._call(operator.getitem, [node, 1], {})
            node = self._call(operator.getitem, [node, 0], {})
        self.values[name] = node
        if self._note:
            node.meta["tokens"] = self._note
        if self.places is None:
            self._hold(node.meta["val"], wanted)

    def _allocated(self, wanted: Any) -> Any:
        """A value without data of the written type; ValueError where that does not say what it is."""
        if isinstance(wanted, list):
            return [self._allocated(one) for one in wanted]
        if wanted is None:
            raise ValueError("the type of a number that is computed from data is not in the text")
        known = self._of_type.get(wanted)
        if known is not None and self.places is not None:
            return known  # nothing but its type is asked of a value that was not inferred
        shape = [self.formulas.value(s) for s in wanted.shape]
        strides = None if wanted.strides is None else [self.formulas.value(s) for s in wanted.strides]
        about: dict[str, Any] = {"dtype": wanted.dtype, "device": wanted.device}
        with self.mode:
            made = torch.empty(shape, **about)
            made = made if strides is None else torch.empty_strided(shape, strides, **about)
        self._of_type[wanted] = made
        return made

    def _arguments(self, text: str) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for part in split(text):
            name, equals, value = part.partition("=")
            if equals and re.fullmatch(r"[a-z_]\w*", name) and value[:1] != "=":
                kwargs[name] = value if name in _WORDS else self._resolved(value)
            else:
                args.append(self._resolved(part))
        return args, kwargs

    def _resolved(self, text: str) -> Any:
        def resolve(value: Any) -> Any:
            if isinstance(value, list):
                return [resolve(v) for v in value]
            if isinstance(value, Name):
                return self._named(value)
            return self.formulas.node(value) if isinstance(value, Formula) else value

        return resolve(read_value(text))

    def _named(self, name: str) -> fx.Node:
        if name not in self.values:
            whole, dot, place = name.rpartition(".")
            if not dot or whole not in self.values or not place.isdigit():
                raise ValueError(f"{name} is not defined above")
            self.values[name] = self._call(operator.getitem, [self.values[whole], int(place)], {})
        return self.values[name]

    def _call(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        node: fx.Node = self.graph.call_function(target, tuple(args), kwargs)
        if self._source:
            node.meta["source"] = self._source
        if self._module:
            node.meta["nn_module_stack"] = {"": (f"model.{self._module}", "")}
        if self.places is not None:
            whole = node.args[0] if target is operator.getitem else None
            is_part = isinstance(whole, fx.Node)
            node.meta["val"] = whole.meta["val"][node.args[1]] if is_part else self._written  # type: ignore[union-attr, index]
            return node
        try:
            node.meta["val"] = infer(target, node.args, node.kwargs, self.mode)
        except (RuntimeError, ValueError, TypeError, IndexError) as problem:
            raise ValueError(f"{target} cannot be applied to these operands: {problem}") from problem
        return node

    def _hold(self, value: Any, wanted: Any) -> None:
        """Compare the inferred type with the written one."""
        found = [v for v in value if v is not None] if isinstance(value, (tuple, list)) else [value]
        expected = wanted if isinstance(wanted, list) else [wanted]
        for one, type_ in zip(found, expected, strict=False):
            if type_ is None or not isinstance(one, torch.Tensor):
                continue
            if any(has_free_unbacked_symbols(extent) for extent in one.shape):
                raise ValueError(
                    "data decide a size of its result when it runs. Such a graph can be looked at, but "
                    "passes cannot be run on its text"
                )
            shape = [self.formulas.value(s) for s in type_.shape]
            same = [*map(str, one.shape)] == [*map(str, shape)]
            if one.dtype != type_.dtype or not same:
                raise ValueError(
                    f"written as {type_.dtype}[{', '.join(type_.shape)}], but it is "
                    f"{one.dtype}[{', '.join(map(str, one.shape))}]"
                )

    def _return(self, code: str) -> None:
        results = []
        for part in split(code.removeprefix("return ")[1:-1]):
            found = re.fullmatch(
                r"(?:(?:(buffer|argument|attribute|check|shown|pages|carried|look|tied) )?(\$.*?) = )?(.*?)"
                r"(?: order \[([\d, ]*)\])?(?: place (\d+))?",
                part,
            )
            assert found is not None  # the pattern matches any text
            results.append(self._resolved(found[3]))
            order = tuple(int(n) for n in split(found[4])) if found[4] else ()
            kind, place = found[1] or "value", int(found[5]) if found[5] else None
            self.outputs.append(Output(kind, _whole_name(kind, found[2]) if found[2] else "", order, place))
        self.graph.output(tuple(results))
        self.ended = True


def _whole_name(kind: str, text: str) -> str:
    """The full name for a printed one: in the model these lack the prefix of capture's wrapper module."""
    name = read_name(text, "$")
    plain = ("value", "check", "shown", "tied", Rate.WEIGHTS.value, *_BETWEEN_PARTS)
    return name if kind in plain else f"model.{name}"


def _target(op: str, args: list[Any], kwargs: dict[str, Any], libraries: Collection[str], runs: bool) -> Any:
    """The op of a call: `add`, `add.Scalar`, `library.op`, `library.op.overload`."""
    packet, more = packet_of(op, libraries, runs)
    overloads = packet.overloads()
    target = implied(packet, args, kwargs) if not more else None
    if more and more[0] in overloads:
        target = getattr(packet, more[0])
    if target is None:
        raise ValueError(f"no form of {op} takes these arguments")
    if not is_pure(target):
        raise ValueError(f"{target} writes to its operands, or takes more than tensors and plain values")
    return target


def _attention(kind: type[nodes.AttentionOp], kwargs: Mapping[str, Any], program: str) -> dict[str, Any]:
    """The arguments of an attention after its operands, by their names in the schema."""
    found: dict[str, Any] = {"reads": [], "sizes": [], "program": program}
    for letter, name in (("r", "reads"), ("n", "sizes")):
        while f"{letter}{len(found[name])}" in kwargs:
            found[name].append(kwargs[f"{letter}{len(found[name])}"])
    if "values" in kwargs:
        first, _, end = kwargs["values"].partition(":")
        found |= {"key_up": None, "value_up": None, "values": [int(first), int(end) - int(first)]}
    known = {a.name for a in kind.target._schema.arguments} - {"values"}
    return found | {name: value for name, value in kwargs.items() if name in known}
