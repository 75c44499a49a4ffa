"""`attngraph::loop` by C (`c/steps.h`), where a step is one token program of the rows and nothing else.

All steps of a call are one call of C, and one step of each row is a link of a recorded step of the decoder
(`recording.py`). What else a step contains runs in PyTorch, step by step
(`ir/ops/loop.py`), with its token programs compiled.
"""

import ctypes
import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from attngraph.codegen.cpu import native
from attngraph.codegen.cpu.native import Link, struct
from attngraph.codegen.cpu.operands import rows_fit
from attngraph.codegen.cpu.tokens.run import FEW, TOKENS, Prepared
from attngraph.codegen.cpu.tokens.schedule import PLACES
from attngraph.ir.language.step_program import parse
from attngraph.ir.language.token_program import parse as parse_tokens
from attngraph.ir.ops.token_program import floating, memory_of_results

_Stream, _Slot, _Copied, _Loop, _One = (
    struct("steps.h", name) for name in ("Stream", "Slot", "Copied", "Loop", "One")
)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A step that is one token program. Each given tensor, and each result (the token's, and what is handed
    on), is a kind and a number: "t", "s", "c" as in the text, or a result "r" of the program."""

    program: str
    given: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int], ...]


@functools.lru_cache(maxsize=256)
def whole_step(text: str) -> Whole | None:
    """The step of a step program, if it is one token program; None if it is not."""
    body = parse(text).step
    kinds = dict(zip(body.graph.find_nodes(op="placeholder"), ("rows", "t", "s", "c"), strict=True))
    computed = [n for n in body.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    if len(computed) != 1 or computed[0].target is not torch.ops.attngraph.token_program.default:
        return None
    sources = {**kinds, computed[0]: "r"}

    def source(node: Any) -> tuple[str, int] | None:
        if isinstance(node, fx.Node) and node.target is operator.getitem and node.args[0] in sources:
            return sources[node.args[0]], cast("int", node.args[1])
        return None

    given, program = cast("tuple[list[fx.Node], str]", computed[0].args)
    taken = tuple(found for n in given if (found := source(n)) is not None)
    handed = cast("list[fx.Node]", body.graph.output_node().args[0])
    results = tuple(found for n in handed if (found := source(n)) is not None and found[0] != "s")
    parsed = parse_tokens(program)
    rows_first = all(g.token_dim in (None, 0) for g in parsed.given) and all(
        r.token_dim == 0 for r in parsed.results
    )
    if len(taken) < len(given) or len(results) < len(handed) or not rows_first:
        return None
    return Whole(program, taken, results)


def run_steps(
    text: str, tokens: Sequence[Tensor], shared: Sequence[Tensor], carried: Sequence[Tensor],
    begins: Sequence[int], counts: Sequence[int], out: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """`attngraph::loop`, as `RUNNERS` of `ir/ops/loop.py` says."""
    whole, code = whole_step(text), _code()
    if whole is None or code is None:
        return None
    rows = sorted((r for r, n in enumerate(counts) if n), key=lambda r: -counts[r])
    for first in range(0, len(rows), FEW):
        some = rows[first : first + FEW]
        call = _Call(whole, tokens, carried, some, [begins[r] for r in some], [counts[r] for r in some])
        found = call.run(code, shared)
        if found is None:
            return None  # the first rows say so: the others have the same types
        if out is None:
            out = found.new_empty((tokens[0].shape[0], *found.shape[1:]))
        out[call.order] = found
    return out


def step_of(
    tokens: Sequence[Tensor], shared: Sequence[Tensor], carried: Sequence[Tensor], starts: Tensor,
    first: Tensor, text: str,
) -> Link | None:  # fmt: skip
    """The call for one token of each row, ready to run; None if it is not supported. A run is not valid
    where a row has another number of tokens, or its first one."""
    whole, code = whole_step(text), _code()
    rows = len(first)
    if whole is None or code is None or any(len(t) != rows for t in tokens):
        return None
    of = {"t": tokens, "s": shared, "c": carried}
    step = TOKENS.link(whole.program, [of[kind][number] for kind, number in whole.given])
    if step is None or not all(t.is_cpu and t.is_contiguous() for t in (starts, first)):
        return None
    if len(starts) != rows + 1 or not rows_fit(int(starts[-1]), starts, first):
        return None
    results = [{**of, "r": step.results}[kind][number] for kind, number in whole.results]
    if not _are_alike(results[1:], carried):
        return None
    call = _One(
        native.address(step.function), ctypes.addressof(step.argument), starts.data_ptr(),
        first.data_ptr(), rows,
    )  # fmt: skip
    bad = native.counters(call, "bad")

    def renew(number: int) -> Tensor | None:
        kind, place = source = whole.results[number]
        alone = kind == "r" and whole.results.count(source) == 1
        return step.renew(place) if alone and step.renew is not None else None

    counters, held = [*step.counters, *bad], [step, *tokens, *shared, *carried, starts, first]
    return Link(code.attngraph_one_step, call, counters, results, held, bad[0][0], renew=renew)


def _are_alike(news: Sequence[Tensor], carried: Sequence[Tensor]) -> bool:
    """Whether what a step hands on has the types of what was handed to it."""
    return all(n.dtype == c.dtype and n.shape == c.shape for n, c in zip(news, carried, strict=True))


class _Call:
    """The steps of some rows, those with more tokens first: `counts` falls."""

    def __init__(
        self, whole: Whole, tokens: Sequence[Tensor], carried: Sequence[Tensor], rows: Sequence[int],
        begins: Sequence[int], counts: Sequence[int],
    ) -> None:  # fmt: skip
        self.whole, self.carried, self.counts = whole, carried, counts
        self.rows = torch.tensor(rows)
        taking = [sum(n > step for n in counts) for step in range(counts[0])]
        self.taking = (ctypes.c_int64 * len(taking))(*taking)
        places = [begins[row] + step for step, n in enumerate(taking) for row in range(n)]
        self.order = torch.tensor(places)
        self.tokens = [t[self.order] for t in tokens]
        self.before = [c[self.rows] for c in carried]
        self.after = [torch.empty_like(c) for c in self.before]
        self.streams: list[Any] = []
        self._of: dict[tuple[str, int], int] = {}
        for kind, pairs in (("t", zip(self.tokens, self.tokens, strict=True)),
                            ("c", zip(self.before, self.after, strict=True)),
                            ("next", zip(self.after, self.before, strict=True))):  # fmt: skip
            for number, (even, odd) in enumerate(pairs):
                self._add((kind, number), even, odd, moves=kind == "t")

    def _add(self, name: tuple[str, int], even: Tensor, odd: Tensor, moves: bool) -> None:
        self._of[name] = len(self.streams)
        self.streams.append(_Stream(even.data_ptr(), odd.data_ptr(), even[0].nbytes, moves))

    def run(self, code: Any, shared: Sequence[Tensor]) -> Tensor | None:
        """The results in the order of `order`; None if this is not supported."""
        whole, count = self.whole, self.taking[0]
        of = {"t": [t[:count] for t in self.tokens], "s": shared, "c": self.before}
        given = [of[kind][number] for kind, number in whole.given]
        prepared = TOKENS.prepared(whole.program)
        if prepared is None or not prepared.has_types(given):
            return None
        made = memory_of_results(prepared.program, count, floating(given))
        sources = [{**of, "r": made}[kind][number] for kind, number in whole.results]
        if not _are_alike(sources[1:], self.before):
            return None
        out = sources[0].new_empty((len(self.order), *sources[0].shape[1:]))
        self._add(("out", 0), out, out, moves=True)
        link = prepared.link(given, made, count)
        slots, copies = self._slots(prepared)
        members, phase = prepared.members(count), PLACES["PHASE"]
        link.argument[PLACES["MEMBERS"]] = members
        tables: list[ctypes.Array[Any]] = [
            (_Stream * len(self.streams))(*self.streams), (_Slot * len(slots))(*slots),
            (_Copied * len(copies))(*copies),
        ]  # fmt: skip
        call = _Loop(
            native.address(link.function), ctypes.addressof(link.argument),
            *map(ctypes.addressof, tables), ctypes.addressof(self.taking), len(self.taking), len(slots),
            len(copies), phase, prepared.facts.given_at - phase, members,
        )  # fmt: skip
        native.run(code.attngraph_loop, call, members)
        is_odd = torch.tensor(self.counts) % 2 == 1
        for own, before, after in zip(self.carried, self.before, self.after, strict=True):
            chosen = is_odd.view(-1, *(1,) * (before.ndim - 1))
            own[self.rows] = torch.where(chosen, after, before)  # what a row hands on after its last step
        return out

    def _slots(self, prepared: Prepared) -> tuple[list[Any], list[Any]]:
        """What a step is told anew, and what is copied after it: results that are not computed, and those
        whose memory another one has."""
        slots = [
            _Slot(prepared.facts.given_at + place, self._of[source])
            for place, source in enumerate(self.whole.given) if source[0] != "s"
        ]  # fmt: skip
        copies: list[Any] = []
        written: dict[int, int] = {}
        for place, source in enumerate(self.whole.results):
            to = self._of["next", place - 1] if place else self._of["out", 0]
            at = prepared.facts.place_of_result(source[1]) if source[0] == "r" else -1
            if source[0] == "r" and at not in written:
                written[at] = to
                slots.append(_Slot(at, to))
            else:
                copies.append(_Copied(written[at] if source[0] == "r" else self._of[source], to))
        return slots, copies


def _code() -> Any:
    """The compiled functions; None where there is no compiler."""
    return native.functions("steps.h", otherwise="loops over tokens are run by PyTorch")
