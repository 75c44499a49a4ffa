"""`cpu.tokens`: token programs computed by C.

Few tokens are computed by one call, in which all threads read every weight once. Many tokens are computed in
blocks, by one call as well, or with PyTorch's products between calls that compute everything else: whichever
took less time for such products on this machine (`chosen.py`).
"""

import contextlib
import ctypes
import functools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.cpu import chosen, native, toolchain
from attngraph.codegen.cpu.native import Link
from attngraph.codegen.cpu.tokens import source
from attngraph.codegen.cpu.tokens.indices import RANKS
from attngraph.codegen.cpu.tokens.products import preamble
from attngraph.codegen.cpu.tokens.schedule import PLACES, arranged, facts
from attngraph.codegen.remarks import Remarks, UnsupportedError
from attngraph.ir.dtypes import NAMED
from attngraph.ir.language.token_program import Given, TokenProgram, parse
from attngraph.ir.ops import memory
from attngraph.ir.ops.panels import panels_of
from attngraph.ir.ops.token_program import floating, memory_of_results, tokens_in, weight_rows

_log = logging.getLogger("attngraph.codegen.cpu")
_remarks = Remarks()
FEW = 32
"""The most tokens whose products are limited by the memory, MOST_ROWS of c/product.h."""
LARGE = 1 << 28
"""Multiplications of a call from which it is measured who computes them sooner."""
WIDENED = 1 << 20
"""Elements of a weight of integers that are made floating at a time, where PyTorch multiplies."""
AT_ONCE, AT_LEAST, IN_BETWEEN = 1024, 128, 32 << 20
"""Tokens of a block where there are many: so many rows keep our products efficient. Fewer, if the values in
between would take more bytes than that. (PyTorch's are the faster the more rows they have.)"""
OURS, PYTORCH = "cpu.tokens", "PyTorch"


class Tokens:
    """`cpu.tokens`."""

    name, device = "cpu.tokens", "cpu"

    def __init__(self) -> None:
        self._known: dict[str, Prepared | None] = {}
        self._begun: set[str] = set()
        self._lock = threading.Lock()

    def panel(self) -> int:
        names = ("functions", "elements", "tile", "weights")
        text = "\n".join([preamble(False, False), *(native.header(f"{name}.h") for name in names)])
        try:
            code, _ = toolchain.build(f"{text}\nint64_t attngraph_panel(void) {{ return PANEL; }}\n")
        except toolchain.CompilerError:
            return 0
        return _integer(code.attngraph_panel)

    def source(self, program: TokenProgram) -> str:
        try:
            toolchain.compiler()
            return source.write(program.text)
        except (UnsupportedError, toolchain.CompilerError):
            return ""

    def prepare(self, text: str, given: Sequence[Tensor]) -> None:
        if text in self._known or text in self._begun or not all(t.is_cpu for t in given):
            return
        self._begun.add(text)
        with contextlib.suppress(UnsupportedError, toolchain.CompilerError):  # told when it runs
            for kind in source.kinds_of_products(parse(text)):
                toolchain.begin(kind.source)  # takes longest
            toolchain.begin(source.write(text))

    def run(self, text: str, given: Sequence[Tensor]) -> list[Tensor] | None:
        made = self._known.get(text) or self.prepared(text)
        return None if made is None else made.run(given)

    def link(self, text: str, given: Sequence[Tensor]) -> Link | None:
        """A call that computes everything at once, ready to run; None if it is not supported, or if it is not
        known that this is the fastest way."""
        made = self.prepared(text)
        if made is None or not made.has_types(given):
            return None
        tokens = tokens_in(made.program, given)
        if not made.is_one_call(tokens) or any(not made.is_usable(n, t) for n, t in enumerate(given)):
            return None
        return made.link(given, memory_of_results(made.program, tokens, floating(given)), tokens)

    def remarks(self, text: str) -> tuple[str, ...]:
        return _remarks.of(text)

    def prepared(self, text: str) -> "Prepared | None":
        """A program and its library; None if it is not supported."""
        with self._lock:
            if text not in self._known:
                try:
                    self._known[text] = Prepared(parse(text), _code(text))
                except (UnsupportedError, toolchain.CompilerError) as error:
                    _log.warning("not compiled, PyTorch's operations instead: %s\n%s", error, text)
                    self._known[text] = None
            return self._known[text]


def _code(text: str) -> ctypes.CDLL:
    """The library of a program, which is given the addresses of its products."""
    code, _ = toolchain.build(source.write(text))
    for kind in source.kinds_of_products(parse(text)):
        product, _ = toolchain.build(kind.source)
        address = ctypes.cast(product.attngraph_product, ctypes.c_void_p)
        ctypes.c_void_p.in_dll(code, kind.name).value = address.value
    return code


def _integer(function: Any) -> int:
    """What a function of no arguments gives."""
    function.restype = ctypes.c_int64
    found: int = function()
    return found


class Prepared:
    """A program and its library."""

    def __init__(self, program: TokenProgram, code: ctypes.CDLL) -> None:
        self.program, self.facts = program, facts(program)
        self.whole, self.part, self.sums = code.attngraph_tokens, code.attngraph_part, code.attngraph_sums
        self.dtypes = [None if g.packed is not None else NAMED[g.dtype].torch for g in program.given]
        self.shared = [about.token_dim is None for about in program.given]
        elsewhere = self.facts.local.union(r.number for r in program.results if r.dtype == "float32")
        between = {n: size for n, size in self.facts.rows.items() if n not in elsewhere}
        self.between, self.total = arranged(program, between)
        self.products = self.facts.products
        fitting = IN_BETWEEN // (4 * max(self.total, 1)) // FEW * FEW
        self.most = max(fitting, AT_LEAST)
        self.at_once = min(self.most, AT_ONCE) if self.products else self.most
        weights = [program.given[f.weight] for f in self.products.values()]
        self.multiplications = sum(math.prod(n or 1 for n in w.shape) for w in weights)
        self.sums.argtypes, self.sums.restype = (ctypes.c_int64, ctypes.c_int64), ctypes.c_int64
        self.room, self.arranged = _integer(code.attngraph_room), code.attngraph_arranged
        self.arranged.argtypes, self.arranged.restype = (ctypes.c_int64,), ctypes.c_int64
        self.panel = _integer(code.attngraph_panel)
        self.in_panels = any(w.in_panels for w in weights)

    def run(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        if not self.has_types(given):
            return None
        tokens = tokens_in(self.program, given)
        results = memory_of_results(self.program, tokens, floating(given))
        if not tokens:
            return results

        def ours() -> None:
            self._in_blocks(lambda *block: self.link(*block).run(), self.at_once, given, results, tokens)

        def with_pytorch() -> None:
            self._in_blocks(self._around_products, self.most, given, results, tokens)

        if not self._is_measured(tokens):
            ours()
            return results
        kind, ways = self._kind(tokens), {OURS: ours, PYTORCH: with_pytorch}
        if chosen.known(kind) is None:
            chosen.measure(kind, ways)
        chosen.fastest(kind, ways, _remarks, self.program.text)
        return results

    def _in_blocks(
        self, compute: Callable[[Sequence[Tensor], Sequence[Tensor], int], Any], most: int,
        given: Sequence[Tensor], results: Sequence[Tensor], tokens: int,
    ) -> None:  # fmt: skip
        """Compute blocks of at most so many tokens, each of about as many."""
        if tokens <= most:
            compute(given, results, tokens)
            return
        each = -(-tokens // -(-tokens // most))
        for start in range(0, tokens, each):
            count = min(each, tokens - start)
            parts = [
                t if about.token_dim is None else t.narrow(about.token_dim, start, count)
                for t, about in zip(given, self.program.given, strict=True)
            ]
            compute(parts, [o.narrow(r.token_dim, start, count) for o, r in
                            zip(results, self.program.results, strict=True)], count)  # fmt: skip

    def _is_measured(self, tokens: int) -> bool:
        """Whether the products of a call are large enough to be computed by whoever takes less time. PyTorch
        reads no panels."""
        is_large = tokens > FEW and tokens * self.multiplications >= LARGE
        return is_large and not self.in_panels and not self.program.in_order

    def is_one_call(self, tokens: int) -> bool:
        """Whether so many tokens are computed by one call of C: they are one block, and where there is a
        choice it has been made."""
        if not 0 < tokens <= self.at_once:
            return False
        if not self._is_measured(tokens):
            return True
        times = chosen.known(self._kind(tokens))
        return times is not None and chosen.best(times) == OURS

    def _kind(self, tokens: int) -> str:
        """What calls have in common that are taken to be served best by the same products."""
        about = f"{1 << (tokens - 1).bit_length()} tokens, {torch.get_num_threads()} threads"
        return f"products of {self._sizes}, {about}"

    @functools.cached_property
    def _sizes(self) -> str:
        weights = (self.program.given[f.weight] for f in self.products.values())
        return ", ".join(dict.fromkeys(f"{' x '.join(map(str, w.shape))} {w.dtype}" for w in weights))

    def has_types(self, given: Sequence[Tensor]) -> bool:
        """Whether the given tensors are on the CPU, with the elements that the C reads, and as many."""
        kinds = all(
            t.is_cpu and (t.dtype is dtype or (dtype is None and not t.is_floating_point()))
            for t, dtype in zip(given, self.dtypes, strict=True)
        )
        if not kinds:
            return False
        tokens = tokens_in(self.program, given)
        return all(
            2 * t.nbytes == math.prod(n or 0 for n in about.shape) if about.packed is not None
            else t.shape == self._shape(about, tokens)
            for t, about in zip(given, self.program.given, strict=True)
        )  # fmt: skip

    def _shape(self, about: Given, tokens: int) -> tuple[int, ...]:
        if about.in_panels:
            outs, depth = (n or 0 for n in about.shape)
            return panels_of(outs, self.panel), depth, self.panel
        return tuple(tokens if n is None else n for n in about.shape)

    def is_usable(self, number: int, tensor: Tensor) -> bool:
        """Whether the C can read a given tensor where it lies."""
        return tensor.is_contiguous() if self.shared[number] else tensor.stride(-1) == 1

    def _call(self, given: Sequence[Tensor], tokens: int, members: int) -> tuple[list[int], list[Tensor]]:
        """The numbers of a call without the addresses of values, and the tensors that it needs kept alive."""
        held: list[Tensor] = []
        places = [tokens, members, *([0] * (PLACES["COUNTERS"] + len(self.facts.phases) - 2))]
        strides: list[int] = []
        for number, (tensor, shared) in enumerate(zip(given, self.shared, strict=True)):
            if not self.is_usable(number, tensor):
                tensor = tensor.contiguous()
                held.append(tensor)
            places.append(tensor.data_ptr())
            strides += _NO_STRIDES if shared else [*tensor.stride(), *_NO_STRIDES][:RANKS]
        return places + strides, held

    def link(self, given: Sequence[Tensor], results: Sequence[Tensor], tokens: int) -> Link:
        """A call that computes everything, ready to run."""
        members = torch.get_num_threads()
        places, held = self._call(given, tokens, members)
        facts = self.facts
        where = [facts.place_of_result(number) for number in range(len(results))]
        few = tokens <= FEW
        room = (self.arranged(tokens) if few else self.room) * members
        size = self.total * tokens + room
        sums = self.sums(tokens, members) if few else 0
        scratch = torch.empty(size + sums) if few else memory.workspace(size)
        if room:
            places[PLACES["ARRANGED" if few else "PANELS"]] = scratch.data_ptr() + self.total * tokens * 4
        places[PLACES["SUMS"]] = scratch.data_ptr() + size * 4
        call = (ctypes.c_int64 * facts.length)(*places)
        for place, result in zip(where, results, strict=True):
            call[place] = result.data_ptr()
        for number, at in self.between.items():
            call[facts.place_of(number)] = scratch.data_ptr() + at * tokens * 4
        first = PLACES["PHASE"]
        counters = (ctypes.addressof(call) + first * 8, (facts.given_at - first) * 8)

        layouts = [(r.shape, r.stride(), r.dtype, r.device) for r in results]

        def renew(number: int) -> Tensor | None:
            if where.count(where[number]) > 1:
                return None  # shared with another result
            made = memory.empty_strided(*layouts[number])
            call[where[number]] = made.data_ptr()
            return made

        return Link(self.whole, call, [counters], list(results), [scratch, *held], renew=renew)

    def members(self, tokens: int) -> int:
        """The most threads that have something to do: those without products share tokens alone."""
        most = torch.get_num_threads()
        return most if self.products else min(most, tokens)

    def _around_products(self, given: Sequence[Tensor], results: Sequence[Tensor], tokens: int) -> None:
        members = torch.get_num_threads()
        places, held = self._call(given, tokens, members)
        values: dict[int, Tensor] = {}
        short: list[tuple[Tensor, int]] = []
        for result, about in zip(results, self.program.results, strict=True):
            own = result.movedim(about.token_dim, 0).view(tokens, -1)
            if about.dtype == "float32":
                values[about.number] = own
            else:
                short.append((own, about.number))
        scratch = memory.workspace(self.total * tokens)
        for number, at in self.between.items():
            row = self.facts.rows[number]
            whole = scratch[at * tokens : (at + row) * tokens].view(tokens, row)
            values[number] = whole[:, : self.facts.widths[number]]
        call = (ctypes.c_int64 * self.facts.length)(*places)
        for number, value in values.items():
            call[self.facts.place_of(number)] = value.data_ptr()
        for number, phase in enumerate(self.facts.phases):
            for group in phase.groups:
                for product in group.products:
                    self._multiply(product, values[self.products[product].left], given, values[product])
            if phase.definitions or any(group.following for group in phase.groups):
                call[PLACES["PHASE"]], call[PLACES["MEMBER"]] = number, 0
                native.run(self.part, call, members)
        for rounded, number in short:  # to 16 bits
            rounded.copy_(values[number])
        del held

    def _multiply(self, product: int, left: Tensor, given: Sequence[Tensor], out: Tensor) -> None:
        """A product by PyTorch, in the weight's own floating dtype. Integers are widened some rows at a time,
        for all tokens of the block."""
        factors = self.products[product]
        weight, about = given[factors.weight], self.program.given[factors.weight]
        if weight.dtype in (torch.bfloat16, torch.float16):
            out.copy_(torch.mm(left.to(weight.dtype), weight if factors.turned else weight.T))
            return
        if weight.is_floating_point() or factors.turned:
            whole = weight_rows(self.program, product, given, left.dtype)
            torch.mm(left, whole if factors.turned else whole.T, out=out)
            return
        outs, depth = (n or 1 for n in about.shape)
        step = max(1, WIDENED // depth)
        for start in range(0, outs, step):
            rows = slice(start, start + step)
            part = weight_rows(self.program, product, given, left.dtype, rows)
            torch.mm(left, part.T, out=out[:, rows])


_NO_STRIDES = [0] * RANKS

TOKENS = Tokens()
