"""Calls of compiled functions, made once and run many times, all of them by one call (`c/chain.h`)."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.cpu import team, toolchain
from attngraph.codegen.cpu.source import header


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


class Chain:
    """Links that run one after another.

    Raises:
        CompilerError: there is no compiler.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = list(links)
        self.members = torch.get_num_threads()
        code = _library()
        self._run, self._clear, self._failed = (
            code.attngraph_chain, code.attngraph_clear, code.attngraph_failed,
        )  # fmt: skip
        addresses = [ctypes.cast(link.function, ctypes.c_void_p).value for link in links]
        self._table = (_Link * len(links))(
            *(_Link(a, ctypes.addressof(link.argument)) for a, link in zip(addresses, links, strict=True))
        )
        counters = [c for link in links for c in link.counters]
        self._counters = (_Counters * len(counters))(*(_Counters(*place) for place in counters))
        bad = [link.bad for link in links if link.bad]
        self._bad = (ctypes.c_void_p * len(bad))(*bad)
        self._call = _Chain(
            len(links), len(counters), len(bad), self.members, 0,
            *(ctypes.addressof(array) for array in (self._table, self._counters, self._bad)),
        )  # fmt: skip
        self._address = ctypes.byref(self._call)

    def run(self) -> bool:
        """Run all links; False where one of them found an index out of range."""
        self._clear(self._address)
        team.run(self._run, self._call, self.members)
        return not self._failed(self._address)


class _Link(ctypes.Structure):
    _fields_ = (("run", ctypes.c_void_p), ("argument", ctypes.c_void_p))


class _Counters(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("bytes", ctypes.c_int64))


class _Chain(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("links", "counters", "flags", "members", "arrived")),
        *((name, ctypes.c_void_p) for name in ("link", "counter", "flag")),
    )  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    return toolchain.build("\n".join(["#define FLOAT32", header("functions.h"), header("chain.h")]))[0]
