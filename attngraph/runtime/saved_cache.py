"""A decoder's state from a file, which may be damaged or anybody's: everything is checked before it is used.

Kernels read and write pages by the numbers in page tables, without looking at them again. So every number is
in range, every page belongs to one row unless rows of the paged layout share it, rows have the pages that
their lengths need, and tensors are what the plan says. What a file holds in bytes bounds what is allocated. A
digest finds damage that leaves a state possible, such as another length; it does not say who wrote a file.
"""

import ctypes
import hashlib
import math
import os
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attngraph.errors import CacheError
from attngraph.ir.ops.cached_attention import CachePlan
from attngraph.ir.records import made
from attngraph.runtime.cache_config import CacheConfig

MOST = 1 << 40
"""No size, length or number of rows is larger."""


def require(holds: Any, problem: str) -> None:
    if not holds:
        raise CacheError(f"a saved cache cannot be used: {problem}.")


def read(path: str | Path) -> Any:
    """What a file of `torch.save` holds, without any code in it, if it unpacks to no more than it is."""
    try:
        require(stat.S_ISREG(os.stat(path).st_mode), f"{path} is no plain file")
        with zipfile.ZipFile(path) as file:
            sizes = [(part.compress_type, part.file_size) for part in file.infolist()]
        packed = any(kind != zipfile.ZIP_STORED for kind, _ in sizes)
        require(not packed and sum(n for _, n in sizes) <= os.stat(path).st_size, f"{path} is packed")
        return torch.load(path, weights_only=True)
    except CacheError:
        raise
    except Exception as problem:
        raise CacheError(f"{path} holds no saved cache: {problem}") from problem


def digest(state: Any) -> str:
    """A digest of what `KVCache.__getstate__` gives."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(f"{value.dtype}{list(value.shape)}".encode())
            plain = value.detach().cpu().contiguous()
            if plain.numel():
                found.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
        elif isinstance(value, dict):
            add([part for name in sorted(value) for part in (name, value[name])])
        elif isinstance(value, (list, tuple)):
            found.update(b"[")
            for part in value:
                add(part)
            found.update(b"]")
        else:
            found.update(f"{value!r},".encode())

    add(state)
    return found.hexdigest()


def numbers(values: Any, name: str, least: int = 0, most: int = MOST) -> list[int]:
    """A list of whole numbers within bounds."""
    require(type(values) in (list, tuple), f"{name} is no list")
    found = [n for n in values if type(n) is not int or not least <= n <= most]
    require(not found, f"{name} holds {_shown(found)}, which is not from {least} to {most}")
    return list(values)


def number(value: Any, name: str, least: int = 0, most: int = MOST) -> int:
    return numbers([value], name, least, most)[0]


def _shown(values: Sequence[Any]) -> str:
    """The first of some values; of a number with thousands of digits that it has many."""
    first = values[0] if values else ""
    is_huge = type(first) is int and abs(first) >= 1 << 64
    return "a number of more than 64 bits" if is_huge else repr(first)[:40]


def device_of(text: Any) -> torch.device:
    """The device of a saved state, if memory can be had there."""
    require(type(text) is str, "its device is no text")
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
        return device
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        raise CacheError(f"a saved cache cannot be used: its device is {text!r:.40}: {problem}") from problem


def plan_of(state: Any) -> tuple[CachePlan, CacheConfig]:
    """The plan and the options of a saved state, if they are possible."""
    try:
        plan, config = made(CachePlan, state["plan"], "plan"), made(CacheConfig, state["config"], "config")
    except (ValueError, KeyError, TypeError) as problem:
        raise CacheError(f"a saved cache cannot be used: {problem!s:.300}.") from problem
    names = [value.name for value in (*plan.stores, *plan.fixed, *plan.carried)]
    require(len(set(names)) == len(names), "two of its values have one name")
    for value in (*plan.stores, *plan.carried):
        elements = math.prod(n or 1 for n in numbers(value.shape, f"the shape of {value.name}"))
        require(elements <= MOST, f"{value.name} has {_shown([elements])} elements")
    for store in plan.stores:
        dims = store.row_dim, store.token_dim
        within = all(0 <= dim < len(store.shape) for dim in dims) and dims[0] != dims[1]
        require(within and not any(store.shape[dim] for dim in dims), f"{store.name} has no rows or tokens")
        require(store.window is None or store.window >= 1, f"{store.name} has a window of {store.window}")
        require(store.team >= 1 and 0 <= store.member < store.team, f"{store.name} is of no member of a team")
        require(
            store.size >= 1 and (store.size == 1 or store.team == 1),
            f"{store.name} is of {store.size} tokens",
        )
    number(plan.begins, "begins")
    number(plan.beside, "beside")
    number(config.page, "page", 1)
    number(config.rollback, "rollback")
    return plan, config


def tensor(
    found: Any, name: str, shape: Sequence[int] | None, dtype: torch.dtype | None, device: Any
) -> Tensor:
    """A plain tensor of this shape, dtype and device (None: any)."""
    plain = type(found) is Tensor and found.layout is torch.strided and not found.is_quantized
    require(plain, f"{name} is no plain tensor")
    require(found.device.type == device.type, f"{name} is on {found.device}, the state on {device}")
    require(dtype in (None, found.dtype), f"{name} is of {found.dtype}, not of {dtype}")
    if shape is not None:
        same = list(found.shape) == list(shape) and found.is_contiguous()
        require(same, f"{name} is {tuple(found.shape)}, not {tuple(shape)}")
    last = sum((n - 1) * s for n, s in zip(found.shape, found.stride(), strict=True))
    end = (found.storage_offset() + last + 1) * found.itemsize
    inside = not found.numel() or end <= found.untyped_storage().nbytes()
    require(inside, f"{name} is larger than what the file holds of it")
    if found.dtype is torch.bool and found.numel():
        require(int(found.contiguous().view(torch.uint8).max()) <= 1, f"{name} has truths other than 0 and 1")
    return found  # type: ignore[no-any-return]
