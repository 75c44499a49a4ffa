"""How types, names and plain values are written in the text of a graph, and read from it.

    f32[s0, 4, 16]   (f32[2, 3], i64[2])   size        types: tensors, several results, numbers
    $h.0.weight      $'odd name'           %arg0        names of inputs
    f32  cuda:0  torch.channels_last  'tanh'  -inf  None  [1, 2]

Any other text is taken to be a size formula, which the reader of the graph parses (`ir/graph/formula.py`).
"""

import ast
import re
from typing import Any, NamedTuple

import torch

from attngraph.ir.dtypes import DTYPES

_DTYPES_BY_NAME = {row.short: dtype for dtype, row in DTYPES.items() if row.short}
_WORDS: dict[str, Any] = {
    "None": None, "True": True, "False": False, "inf": float("inf"), "-inf": float("-inf"),
    "nan": float("nan"),
}  # fmt: skip
_TORCH = {
    str(v): v
    for v in (
        torch.strided, torch.contiguous_format, torch.preserve_format, torch.channels_last,
        torch.channels_last_3d,
    )
}  # fmt: skip
_PLAIN = re.compile(r"[\w.\-]+")
_DEVICE = re.compile(r"(cpu|cuda|meta|mps|xpu|hpu)(:\d+)?")


class Formula(NamedTuple):
    """The unparsed text of a size formula."""

    text: str


class Name(NamedTuple):
    """The written name of a graph value: `%3`, `%3.1`, `$h.0.weight`."""

    text: str


class TensorType(NamedTuple):
    """`f32[s0, 4]`; the device is written unless it is the CPU, the strides unless it is contiguous."""

    dtype: torch.dtype
    shape: tuple[str, ...]
    device: str = "cpu"
    strides: tuple[str, ...] | None = None


def format_dtype(dtype: torch.dtype) -> str:
    row = DTYPES.get(dtype)
    return row.short if row is not None and row.short else str(dtype)


def format_name(sigil: str, name: str) -> str:
    """A name after its sigil (`$`, `%`), quoted where it is not plain."""
    return sigil + (name if _PLAIN.fullmatch(name) else repr(name))


def read_name(text: str, sigil: str) -> str:
    """The name that `format_name` wrote."""
    plain = text.removeprefix(sigil)
    return str(ast.literal_eval(plain)) if plain.startswith(("'", '"')) else plain


def split(text: str, mark: str = ",") -> list[str]:
    """The parts of a list, split at each `mark` that is outside brackets and quotes.

    Raises:
        ValueError: a bracket or a quote is left open.
    """
    parts, depth, quote, start = [], 0, "", 0
    place = 0
    while place < len(text):
        letter = text[place]
        if quote:
            place += letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == mark and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
        place += 1
    if depth or quote:
        raise ValueError(f"a bracket or a quote is not closed in {text!r}")
    last = text[start:].strip()
    return [*parts, last] if last else parts


def read_value(text: str) -> Any:
    """The value of an argument: a plain value, a list, a `Name`, or, for any other text, a `Formula`.

    Raises:
        ValueError: a bracket or a quote is left open.
    """
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith(("%", "$")):
        return Name(text)
    if text[:1] == "[":
        return [read_value(part) for part in split(text[1:-1])]
    if text.startswith(("'", '"')):
        return ast.literal_eval(text)
    if text in _DTYPES_BY_NAME:
        return _DTYPES_BY_NAME[text]
    if text in _TORCH:
        return _TORCH[text]
    if _DEVICE.fullmatch(text):
        return torch.device(text)
    if re.fullmatch(r"torch\.\w+", text) and isinstance(getattr(torch, text[6:], None), torch.dtype):
        return getattr(torch, text[6:])
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return Formula(text)


def read_type(text: str) -> TensorType | list[TensorType] | None:
    """The type that `text` spells: a list of types for several results, None for a number.

    Raises:
        ValueError: it is not a type.
    """
    if text == "size":
        return None
    if text.startswith("(") and text.endswith(")"):
        found = [read_type(part) for part in split(text[1:-1])]
        return [f for f in found if isinstance(f, TensorType)]
    form = re.fullmatch(r"([\w.]+)\[([^\]]*)\](?: strides \[([^\]]*)\])?(?: on (\S+))?", text)
    dtype = read_value(form[1]) if form else None
    if form is None or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is no type; a type is written as f32[s0, 4]")
    strides = None if form[3] is None else tuple(split(form[3]))
    return TensorType(dtype, tuple(split(form[2])), form[4] or "cpu", strides)
