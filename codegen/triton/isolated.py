"""Compilations that may crash their process run in a separate one, before the first launch.

Triton's warp specialisation is new: the compiler may fail, abort, or silently leave the loop undivided. So a
warp-specialised kernel is first compiled in another Python process (`compiler.py`), for the types and
alignments of the call. The outcome is stored beside the emitted kernels, so each kernel is tried once per
machine; Triton's own cache keeps the binary, so the compilation is not repeated either.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.triton import compiler, device, store
from attngraph.codegen.triton.compiler import Request, Usage

SECONDS = 300
"""A compilation that takes longer is given up."""
_POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip


class CompilationError(RuntimeError):
    """A kernel did not compile, or is not warp-specialised as requested."""


def require_specialised(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Check that a kernel compiles for these arguments into a warp-specialised one that fits the GPU.

    Args:
        kernel: a Triton function. arguments: those of the coming launch, with tensors on its GPU.

    Raises:
        CompilationError: it does not; says why.
    """
    where = next(a.device for a in arguments if isinstance(a, Tensor))
    facts = tuple(
        _fact(a, n in kernel.do_not_specialize) for n, a in zip(kernel.arg_names, arguments, strict=True)
    )
    problem = _problem(kernel, facts, tuple(options.items()), where)
    if problem is not None:
        raise CompilationError(problem)


@functools.lru_cache(maxsize=1024)
def _problem(
    kernel: Any,
    facts: tuple[tuple[str, bool], ...],
    options: tuple[tuple[str, Any], ...],
    where: torch.device,
) -> str | None:
    major, minor = torch.cuda.get_device_capability(where)
    request = Request(
        kernel.fn.__code__.co_filename, kernel.__name__,
        tuple((name, kind) for name, (kind, _) in zip(kernel.arg_names, facts, strict=True)),
        tuple(place for place, (_, is_aligned) in enumerate(facts) if is_aligned),
        "cuda", 10 * major + minor, 32, options,
    )  # fmt: skip
    try:
        usage = compile_isolated(request)
    except CompilationError as problem:
        return str(problem)
    room = device.shared_memory(where)
    if usage.shared > room:
        return f"it takes {usage.shared} bytes of shared memory, of which there are {room}"
    return None if usage.specialised else "it compiled, but its warps all do the same"


def _fact(argument: Any, is_fixed: bool) -> tuple[str, bool]:
    """An argument as Triton's launcher sees it: its type, and whether it is a multiple of 16."""
    if isinstance(argument, Tensor):
        return _POINTERS[argument.dtype], argument.data_ptr() % 16 == 0
    if argument == 1 and not is_fixed:
        return "constexpr", False
    return "i32" if -(1 << 31) <= argument < 1 << 31 else "i64", argument % 16 == 0 and not is_fixed


def compile_isolated(request: Request) -> Usage:
    """Compile in another process, or return the stored outcome of an earlier one.

    Raises:
        CompilationError: it failed, crashed or took too long; says which.
    """
    path = store.directory() / f"compiled_{_key(request)}.json"
    known = _read(path)
    if known is None:
        known = _compile(request)
        if not known.pop("may_pass", False):
            store.write(path, json.dumps(known))
    if "problem" in known:
        raise CompilationError(known["problem"])
    return Usage(**known)


def _compile(request: Request) -> dict[str, Any]:
    command = [sys.executable, str(Path(compiler.__file__).resolve())]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(
            command, input=json.dumps(dataclasses.asdict(request)), capture_output=True, text=True,
            env=environment, timeout=SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as problem:
        return {"problem": f"compiling it apart did not end: {problem}", "may_pass": True}
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
    may_pass = -done.returncode == signal.SIGKILL  # perhaps for lack of memory: may succeed later
    return {"problem": f"its compilation {how}: {last}", "may_pass": may_pass}


def _key(request: Request) -> str:
    """A key that is equal for equal compilations: the file's name identifies its source."""
    told = [Path(request.path).name, importlib.metadata.version("triton"), dataclasses.astuple(request)[1:]]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        Usage(**found) if "problem" not in found else str(found["problem"])
    except (OSError, ValueError, TypeError):
        return None
    return dict(found)
