"""C as Python sees it: the headers in `c/`, the structs and numbers that they declare, their compiled
functions, and calls of these on as many threads as PyTorch uses.

A struct is described once, in its header; the ctypes class is made from there.
"""

import ctypes
import dataclasses
import functools
import keyword
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.cpu import toolchain
from attngraph.ir.ops.kernels import SHARED, SHARED_END
from attngraph.ir.ops.panels import PART, STRANDS

_log = logging.getLogger("attngraph.codegen.cpu")
FOLDER = Path(__file__).parent / "c"
ORDER = f"PART {PART}", f"STRANDS {STRANDS}"
"""The order of sums of a product, as c/weights.h is told it."""
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_STRUCT = re.compile(r"struct (\w*) ?\{([^{}]*)\} ?(\w*);")
_ENUM = re.compile(r"enum \{([^{}]*)\}")
_TYPES: Mapping[str, Any] = {
    "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float, "double": ctypes.c_double,
}  # fmt: skip


# --- headers ---


@functools.cache
def header(name: str) -> str:
    """The text of a file of `c/`, between comments that say so."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return f"// {name}{SHARED}\n{text}// {SHARED_END}{name}\n"


@functools.cache
def _code(name: str) -> str:
    return _COMMENT.sub("", (FOLDER / name).read_text(encoding="utf-8"))


@functools.cache
def numbers(name: str) -> Mapping[str, int]:
    """The numbers of a header's enums, as far as they are written out."""
    found: dict[str, int] = {}
    for body in _ENUM.findall(_code(name)):
        number: int | None = 0
        for part in body.split(","):
            word, is_given, value = map(str.strip, part.partition("="))
            if is_given:
                number = int(value) if value.isdigit() else None
            if number is not None:
                found[word] = number
                number += 1
    return found


@functools.cache
def struct(name: str, of: str) -> Any:
    """The ctypes class of a header's struct; all pointers are addresses. A field whose name is a word of
    Python's has an underscore behind it."""
    body = next(body for before, body, after in _STRUCT.findall(_code(name)) if of in (before, after))
    fields = [field for line in body.split(";") if line.strip() for field in _fields(line, name)]
    return type(of, (ctypes.Structure,), {"_fields_": fields})


def _fields(line: str, header: str) -> Iterator[tuple[str, Any]]:
    """The fields of a declaration such as `const float *a, b[2][3]`."""
    words = re.sub(r"\b(const|struct)\b", "", line).strip()
    pointer = re.match(r"\w+ \(\*(\w+)\)", words)
    if pointer is not None:
        yield pointer[1], ctypes.c_void_p
        return
    kind, _, declarators = words.partition(" ")
    for declarator in declarators.split(","):
        name, *counts = re.findall(r"\w+", declarator)
        found = ctypes.c_void_p if "*" in declarator else _TYPES.get(kind) or struct(header, kind)
        for count in reversed(counts):
            found = found * (int(count) if count.isdigit() else numbers(header)[count])
        yield name + "_" * keyword.iskeyword(name), found


@functools.cache
def functions(name: str, *defined: str, otherwise: str = "") -> Any:
    """The compiled functions of a header that needs `functions.h` alone; None where there is no compiler,
    which is logged once with what happens `otherwise`."""
    head = [f"#define {words}" for words in ("FLOAT32", *defined)]
    try:
        return toolchain.build("\n".join([*head, header("functions.h"), header(name)]))[0]
    except toolchain.CompilerError as error:
        if otherwise:
            _log.warning("%s: %s", otherwise, error)
        return None


# --- calls ---


@dataclasses.dataclass
class Link:
    """One call, ready to run.

    Attributes:
        function, argument: of the library, and what it gets.
        counters: addresses and bytes of what must be zero when it starts.
        results: where it writes.
        held: what must stay alive.
        bad: the address of a number that is not zero if the last run was not valid (an index was out of
            range); 0: all runs are. It is one of the counters.
        move_pages: makes it read keys and values from other pages: these, and their scales if they have any.
        carry: makes it read what is carried from this tensor, and write what is carried on to the one that
            is returned, in place of the last of its results.
        renew: makes it write a result, given by number, to new memory, which is returned; None if it cannot.
    """

    function: Any
    argument: Any
    counters: list[tuple[int, int]]
    results: list[Tensor]
    held: list[Any]
    bad: int = 0
    move_pages: Callable[..., None] | None = None
    carry: Callable[[Tensor], Tensor] | None = None
    renew: Callable[[int], Tensor | None] | None = None

    def run(self) -> list[Tensor]:
        """Run it on its own, which is its first run."""
        run(self.function, self.argument, torch.get_num_threads())
        return self.results


def address(function: Any) -> int | None:
    """Where a compiled function begins."""
    return ctypes.cast(function, ctypes.c_void_p).value


def counters(call: ctypes.Structure, *names: str) -> list[tuple[int, int]]:
    """The addresses and bytes of these fields of a call."""
    start = ctypes.addressof(call)
    return [(start + field.offset, field.size) for field in (getattr(type(call), name) for name in names)]


def run(function: Any, argument: ctypes.Structure | ctypes.Array[Any], members: int) -> None:
    """Call `function(&argument)` on `members` threads in parallel, and wait for all.

    Where PyTorch uses GNU OpenMP, its thread team runs it: GOMP's entry point is a plain function, so no
    second OpenMP is loaded, and threads that still spin after PyTorch's last loop start at once. Elsewhere
    Python's threads do; ctypes releases the interpreter's lock during the call.
    """
    address = ctypes.byref(argument)
    start = _start()
    if members == 1:
        function(address)
    elif start is not None:
        start(function, address, members, 0)
    else:
        list(_pool(members).map(function, [address] * members))


@functools.cache
def _start() -> Any:
    """GNU OpenMP's `GOMP_parallel`, if PyTorch loaded it into the process's global symbols."""
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if found is not None:
        found.restype = None
        found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return found


@functools.cache
def _pool(members: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(members, thread_name_prefix="attngraph")


class Chain:
    """Links that run one after another, many times, all of them by one call (`c/chain.h`). Raises
    CompilerError: there is no compiler."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = list(links)
        self.members = torch.get_num_threads()
        self._code = functions("chain.h")
        if self._code is None:
            raise toolchain.CompilerError("calls of compiled functions are not put together")
        calls = [(address(link.function), ctypes.addressof(link.argument)) for link in links]
        counters = [c for link in links for c in link.counters]
        bad = [link.bad for link in links if link.bad]
        self._tables = (
            (struct("chain.h", "Link") * len(calls))(*calls),
            (struct("chain.h", "Counters") * len(counters))(*counters),
            (ctypes.c_void_p * len(bad))(*bad),
        )
        places = map(ctypes.addressof, self._tables)
        self._call = struct("chain.h", "Chain")(len(links), len(counters), len(bad), self.members, 0, *places)
        self._address = ctypes.byref(self._call)

    def run(self) -> bool:
        """Run all links; False where one of them found an index out of range."""
        self._code.attngraph_clear(self._address)
        run(self._code.attngraph_chain, self._call, self.members)
        return not self._code.attngraph_failed(self._address)
