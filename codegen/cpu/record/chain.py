"""Calls of compiled functions, run many times, all of them by one call (`c/chain.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from attngraph.codegen.cpu import native
from attngraph.codegen.cpu.native import Link, struct
from attngraph.codegen.cpu.toolchain import CompilerError

_Link, _Counters, _Chain = (struct("chain.h", name) for name in ("Link", "Counters", "Chain"))


class Chain:
    """Links that run one after another.

    Raises:
        CompilerError: there is no compiler.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = list(links)
        self.members = torch.get_num_threads()
        self._code = native.functions("chain.h")
        if self._code is None:
            raise CompilerError("calls of compiled functions are not put together")
        calls = [(native.address(link.function), ctypes.addressof(link.argument)) for link in links]
        counters = [c for link in links for c in link.counters]
        bad = [link.bad for link in links if link.bad]
        self._tables = (
            (_Link * len(calls))(*calls),
            (_Counters * len(counters))(*counters),
            (ctypes.c_void_p * len(bad))(*bad),
        )
        places = map(ctypes.addressof, self._tables)
        self._call = _Chain(len(links), len(counters), len(bad), self.members, 0, *places)
        self._address = ctypes.byref(self._call)

    def run(self) -> bool:
        """Run all links; False where one of them found an index out of range."""
        self._code.attngraph_clear(self._address)
        native.run(self._code.attngraph_chain, self._call, self.members)
        return not self._code.attngraph_failed(self._address)
