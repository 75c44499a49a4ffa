"""Tensor contents as JSON: dtype, shape, and the bytes, compressed. No pickle, no numpy.

What is read may be anybody's: as many bytes are unpacked as the shape says, and no more than `MOST_BYTES`.
"""

import base64
import ctypes
import math
import zlib
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.graph.literals import format_dtype, read_value


def encode(tensor: Tensor) -> dict[str, Any]:
    """A tensor as a JSON-compatible dict."""
    plain = tensor.detach().cpu().contiguous()
    content = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.itemsize) if plain.numel() else b""
    data = base64.b64encode(zlib.compress(content, 1)).decode("ascii")
    return {"dtype": format_dtype(tensor.dtype), "shape": list(tensor.shape), "data": data}


MOST_BYTES = 1 << 30
"""Of one tensor that the code of a model makes, or that passes look at."""


def decode(found: Any) -> Tensor:
    """The tensor that `encode` encoded.

    Raises:
        ValueError: it is none, or holds more or less than its shape says.
    """
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
