"""Tensor contents as JSON: dtype, shape, and the bytes, compressed. No pickle, no numpy."""

from __future__ import annotations

import base64
import ctypes
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


def decode(found: dict[str, Any]) -> Tensor:
    """The tensor that `encode` encoded."""
    content = bytearray(zlib.decompress(base64.b64decode(found["data"])))
    dtype = read_value(found["dtype"])
    if not content:
        return torch.empty(found["shape"], dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).reshape(found["shape"])
