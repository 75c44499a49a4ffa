"""How types, names and plain values are written in the text of a graph, and read from it.

    f32[s0, 4, 16]   (f32[2, 3], i64[2])   size        types: tensors, several results, numbers
    $h.0.weight      $'odd name'           %arg0        names of inputs
    f32  cuda:0  torch.channels_last  'tanh'  -inf  None  [1, 2]

Any other text is taken to be a size formula, which the reader of the graph parses (`ir/graph/formula.py`).

Beside the text, contents of tensors are JSON: dtype, shape, and the bytes, compressed. What is read may be
anybody's: as many bytes are unpacked as the shape says, and no more than `MOST_BYTES`.
"""

import ast
import base64
import ctypes
import math
import re
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngraph.ir.dtypes import DTYPES

_WORDS: dict[str, Any] = {
    "None": None, "True": True, "False": False, "inf": math.inf, "-inf": -math.inf, "nan": math.nan,
}  # fmt: skip
_LAYOUTS = torch.strided, torch.contiguous_format, torch.preserve_format
_WORDS |= {str(v): v for v in (*_LAYOUTS, torch.channels_last, torch.channels_last_3d)}
_WORDS |= {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_WORDS |= {row.short: dtype for dtype, row in DTYPES.items() if row.short}
_PLAIN = re.compile(r"[\w.\-]+")
_PIECE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|.""", re.DOTALL)
"""A text in quotes, or one letter."""
_DEVICE = re.compile(r"(cpu|cuda|meta|mps|xpu|hpu)(:\d+)?")


class Formula(str):
    """The unparsed text of a size formula."""


class Name(str):
    """The written name of a graph value: `%3`, `%3.1`, `$h.0.weight`."""


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
    """The parts of a list, split at each `mark` that is outside brackets and quotes; ValueError where a
    bracket or a quote is left open."""
    parts, depth, start = [], 0, 0
    for piece in _PIECE.finditer(text):
        letter = piece[0]
        if letter in ("'", '"'):
            raise ValueError(f"a bracket or a quote is not closed in {text!r}")
        depth += (letter in "([{") - (letter in ")]}")
        if letter == mark and depth == 0:
            parts.append(text[start : piece.start()].strip())
            start = piece.end()
    if depth:
        raise ValueError(f"a bracket or a quote is not closed in {text!r}")
    last = text[start:].strip()
    return [*parts, last] if last else parts


def read_value(text: str) -> Any:
    """The value of an argument: a plain value, a list, a `Name`, or, for any other text, a `Formula`;
    ValueError where a bracket or a quote is left open."""
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith(("%", "$")):
        return Name(text)
    if text[:1] == "[":
        return [read_value(part) for part in split(text[1:-1])]
    if text.startswith(("'", '"')):
        return ast.literal_eval(text)
    if _DEVICE.fullmatch(text):
        return torch.device(text)
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return Formula(text)


def read_type(text: str) -> TensorType | list[TensorType] | None:
    """The type that `text` spells: a list of types for several results, None for a number; ValueError where
    it is not a type."""
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


def encode(tensor: Tensor) -> dict[str, Any]:
    """A tensor as a JSON-compatible dict."""
    plain = tensor.detach().cpu().contiguous()
    content = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.itemsize) if plain.numel() else b""
    data = base64.b64encode(zlib.compress(content, 1)).decode("ascii")
    return {"dtype": format_dtype(tensor.dtype), "shape": list(tensor.shape), "data": data}


MOST_BYTES = 1 << 30
"""Of one tensor that the code of a model makes, or that passes look at."""


def decode(found: Any) -> Tensor:
    """The tensor that `encode` encoded; ValueError where it is none, or holds more or less than its shape
    says."""
    try:
        dtype, shape, packed = read_value(found["dtype"]), found["shape"], base64.b64decode(found["data"])
    except (TypeError, KeyError) as problem:
        raise ValueError(f"a tensor has a dtype, a shape and data, found {found!r:.80}") from problem
    whole = isinstance(shape, list) and all(type(n) is int and 0 <= n <= MOST_BYTES for n in shape)
    if not isinstance(dtype, torch.dtype) or not whole or len(shape) > 64:
        raise ValueError(f"{found['dtype']!r:.80} of {shape!r:.80} is no tensor")
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_BYTES:
        raise ValueError(f"a tensor of {size} bytes is larger than {MOST_BYTES}")
    unpacking = zlib.decompressobj()
    try:
        content = bytearray(unpacking.decompress(packed, size + 1))
    except zlib.error as problem:
        raise ValueError(f"the data of a tensor cannot be unpacked: {problem}") from problem
    if len(content) != size or not unpacking.eof:
        raise ValueError(f"the data of a tensor are not the {size} bytes that its shape {shape} says")
    if not content:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool and max(content) > 1:
        raise ValueError("a tensor of truths has a byte that is neither 0 nor 1")
    return torch.frombuffer(content, dtype=dtype).reshape(shape)
