"""Plain records as JSON values and back, by the types that their classes declare. Nothing is executed, and no
class is made that the caller has not named: what is read may be anybody's.

Files are written as a whole or not at all.
"""

import contextlib
import dataclasses
import functools
import os
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from attngraph.errors import SavedError


def plain(value: Any) -> Any:
    """A record, a tuple, a dtype or a plain value as JSON; SavedError where it has no form in a file."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise SavedError(f"a {type(value).__name__} has no form in a file")


def made(kind: Any, data: Any, name: str = "it") -> Any:
    """The value of this type that `plain` wrote, of a record or of its fields as a tuple; where it is another
    one, a ValueError says which part of it, by `name`."""
    if dataclasses.is_dataclass(kind):
        fields = _types_of(typing.cast(Any, kind))
        if isinstance(data, (list, tuple)) and len(data) == len(fields):
            data = dict(zip(fields, data, strict=True))
        if not isinstance(data, dict) or not fields.keys() >= data.keys():
            unknown = sorted(map(str, set(data) - fields.keys())) if isinstance(data, dict) else data
            raise ValueError(f"{name} is no {kind.__name__}: {unknown!r:.80}")  # type: ignore[union-attr]
        parts = {key: made(fields[key], value, f"{name}.{key}") for key, value in data.items()}
        try:
            return kind(**parts)  # type: ignore[operator]
        except TypeError as problem:
            raise ValueError(f"{name} lacks a field: {problem}") from problem
    kinds = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        every = None if not isinstance(data, (list, tuple)) else (
            kinds[:1] * len(data) if kinds[-1] is Ellipsis else kinds
        )  # fmt: skip
        if every is None or len(every) != len(data):
            raise ValueError(f"{name} is no list of its length: {data!r:.80}")
        entries = enumerate(zip(every, data, strict=True))
        return tuple(made(k, value, f"{name}[{n}]") for n, (k, value) in entries)
    if typing.get_origin(kind) is dict:
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            raise ValueError(f"{name} is no mapping of names: {data!r:.80}")
        return {key: made(kinds[1], value, f"{name}[{key!r:.80}]") for key, value in data.items()}
    if type(None) in kinds:
        return None if data is None else made(kinds[0], data, name)
    if kind is torch.dtype:
        return data if isinstance(data, torch.dtype) else dtype_of(data)
    if kind is float and type(data) is int and abs(data) < 1 << 63:
        return data
    if type(data) is not kind or (kind is int and abs(data) >= 1 << 63):
        raise ValueError(f"{name} is no {getattr(kind, '__name__', kind)}: {data!r:.80}")
    return data


@functools.cache
def _types_of(kind: Any) -> dict[str, Any]:
    """The types of a record's fields, by name."""
    return typing.get_type_hints(kind)


def dtype_of(text: Any) -> torch.dtype:
    """The dtype of a name such as "torch.float32"; ValueError where it is none."""
    found = getattr(torch, text.removeprefix("torch."), None) if isinstance(text, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{text!r:.80} is no dtype")
    return found


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which is at `path` once all is written: readers see all of it, or what was there;
    OSError where it cannot be written, and then the previous contents are still there."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())
