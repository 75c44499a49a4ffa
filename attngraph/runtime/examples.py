"""Examples to derive a decoder's graph from, made from a call: two rows of a few tokens.

How many tokens an example has is ours to choose, but the model must take so many, and do with them what it
does with the call's. Where the trace depends on the number of tokens, that number is chosen such that it can
be told from every other number in the graph."""

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attngraph.capture.captured import Assumed
from attngraph.capture.compared import SIZES
from attngraph.capture.first_call import without_data
from attngraph.capture.pairs import rule_of
from attngraph.capture.structure import Laid, Layout, put_together
from attngraph.capture.trace import quiet
from attngraph.errors import AttnGraphError, DisagreementError, NoDecoderError
from attngraph.runtime.kv_cache import Call
from attngraph.runtime.packing import Packed
from attngraph.runtime.step import Step
from attngraph.runtime.verify import tensors_of

FAILURES = (RuntimeError, IndexError, ValueError)
"""How torch fails where a graph is called with sizes that do not go together."""
log = logging.getLogger(__name__)
ROWS, TOKENS = 2, 9
OTHERS = (8, 12, 16, 6, 5, 4, 3)
"""Numbers of tokens that are tried where the model takes no example of `TOKENS`."""


class Size(NamedTuple):
    """The size of an example, and whether the graph is to be for calls of a single sequence. `as_is`: it will
    do if it holds only for sequences of about so many tokens."""

    tokens: int = TOKENS
    rows: int = ROWS
    single: bool = False
    as_is: bool = False


@dataclasses.dataclass(frozen=True)
class Example:
    """What a graph is derived from.

    Attributes:
        name: the model's argument that has the tokens.
        calls: the arguments of a call; or of several, of the sizes `compared.SIZES`, where the graph is found
            by comparing traces.
        tokens: their number, if it is a size of nothing else: the trace may then be for this number alone.
        multiples: of that number, with which operations computed in a trace for another one.
        alone: whether the model is called with one sequence at a time.
        single: whether the graph is for calls of one sequence alone.
        as_is: whether it will do for sequences of about so many tokens alone.
    """

    name: str
    calls: tuple[dict[str, Any], ...]
    tokens: int = 0
    multiples: frozenset[int] = frozenset()
    alone: bool = False
    single: bool = False
    as_is: bool = False

    @property
    def assumed(self) -> Assumed:
        """What a trace takes for granted."""
        length, none = frozenset({(self.place, 1)}), frozenset[tuple[int, int]]()
        fixed, symbolic = (length, none) if self.tokens else (none, length)
        row = (self.place, 0) if self.single else None
        return Assumed(
            fixed=fixed, symbolic=symbolic, tokens=self.tokens, multiples=self.multiples,
            rows_alone=self.alone, one_row=row,
        )  # fmt: skip

    @property
    def arguments(self) -> dict[str, Any]:
        return self.calls[0]

    @property
    def given(self) -> tuple[dict[str, Any], ...]:
        """The calls as the model takes them."""
        return tuple(map(put_together, self.calls))

    @property
    def names(self) -> list[str]:
        """The argument that each tensor of the call belongs to."""
        return [name for name, value in self.arguments.items() for _ in tensors_of(value)]

    @property
    def place(self) -> int:
        """The number of the tokens among the tensors."""
        return self.names.index(self.name)

    @property
    def is_compared(self) -> bool:
        return len(self.calls) > 1


Derive = Callable[..., Step]
"""Derives a graph from an `Example`; with `fits`, which says whether one from another process will do."""


class Examples:
    """Derives graphs of one model for calls like one that was made, with a prompt.

    Args:
        name: the model's argument that has the tokens. packed, inputs: the tokens, and the other arguments.
        rows: of how many sequences the call is to the model.
    """

    def __init__(
        self, model: Callable[..., Any], derive: Derive, signature: inspect.Signature, name: str,
        packed: Packed, inputs: Mapping[str, Any], rows: int,
    ) -> None:  # fmt: skip
        self._model, self._derive, self._signature = model, derive, signature
        self._name, self._packed, self._inputs, self.rows = name, packed, inputs, rows
        self.longest = max(packed.counts, default=0)

    def _laid(self, others: bool = False, one: bool = False) -> dict[str, Any]:
        """The inputs, and which are in another layout. `others`: also those that have the prompt's number of
        rows or of tokens in another place, which may be a coincidence. `one`: of one token, whether what
        looks like an entry of a pair of tokens is one."""
        rows, width = self._packed.shape
        found = dict[str, Any](self._inputs)
        for name, value in self._inputs.items():
            if not isinstance(value, Tensor):
                continue
            layout = _layout(value, rows, width, others)
            rule = rule_of(value, self._packed.mask, one)
            if rule is not None:
                found[name] = Laid(torch.ones_like(self._packed.mask), Layout.of_pairs(rule))
            elif layout is not None:
                found[name] = Laid(layout.taken(value, rows), layout)
        return found

    def fault(self, step: Step, rows: int = 0) -> str:
        """Why a step is not right for the call, or for one of so many rows; "" if it is."""
        others = step.sizes.of_inputs(self._inputs, *self._packed.shape)
        if others is None:
            return "the graph is for inputs of other sizes"
        for name, layout in step.sizes.layouts.items():
            if layout.pairs is not None and not layout.pairs.holds(self._inputs[name], self._packed.mask):
                return f"the graph is for {name} by another rule ({layout.pairs.text})"
        lengths = frozenset(n for n in self._packed.counts if n)
        return step.sizes.fault(Call(rows or self.rows, lengths, others))

    def is_too_long(self, step: Step) -> bool:
        """Whether the model takes no more tokens in any graph: a table of positions ends, or it says so."""
        return step.limit is not None and step.limit < self.longest and step.sizes.is_final

    def towards(self, step: Step, size: Size) -> list[Size]:
        """The example that is on the call's side of a branch, where a step from one of this size is not."""
        rows = step.graph.hints.get(step.sizes.rows, size.rows)
        if not self.fault(step, 1 if step.sizes.single else rows):
            return [self.of_rows(size.tokens)]
        here = Call(self.rows, frozenset([self.longest]))
        sizes = step.sizes.alike(here, TOKENS), self.longest if self.longest > 1 else None
        return [Size(n, size.rows, size.single) for n in sizes if n is not None]

    def of_rows(self, tokens: int = TOKENS) -> Size:
        """An example with as many sequences as the call."""
        return Size(tokens, ROWS if self.rows == 1 else self.rows, self.rows == 1)

    def own_size(self, problem: AttnGraphError) -> list[Size]:
        """The call's own size, where the model asked for sizes before it was refused."""
        if not isinstance(problem, NoDecoderError):
            return []
        by_rows = [self.of_rows()] if problem.fixes_rows else []
        return [*by_rows, *([Size(self.longest)] if problem.asked and self.longest > 1 else [])]

    def refusal(self, step: Step, problems: Sequence[AttnGraphError]) -> str:
        """Why there is no graph for the call, though there is one for others."""
        many = len(set(self._packed.counts)) > 1
        advice = "give rows of other lengths in calls of their own" if many else "call the model itself"
        why = f": {getattr(problems[-1], 'reason', problems[-1])}" if problems else "."
        return f"{self.fault(step)}. No decoder can be derived for that{why}\nWhat to do: {advice}."

    def others(self) -> Iterator[Size]:
        """Sizes from which a call like this one may be derived, if the model takes no example of `TOKENS`, or
        of a few more: multiples of the call's number of tokens and others, of those that it takes."""
        if all(self._accepts(self._call(self._inputs, n)) for n in (TOKENS, TOKENS + 2)):
            return
        own = {n: None for n in (self.longest * -(-TOKENS // (self.longest + 1)), self.longest) if n > 2}
        for count in dict.fromkeys((*own, *OTHERS)):
            if count != TOKENS and self._accepts(self._call(self._inputs, count)):
                yield Size(count)

    def _accepts(self, call: Mapping[str, Any]) -> bool:
        """Whether the model runs with these arguments, found without data."""
        given = {n: v.layout.given(v.tensor) if isinstance(v, Laid) else v for n, v in call.items()}
        try:
            with quiet(), without_data(self._model, (), put_together(given)) as (run, _), torch.no_grad():
                run()
        except Exception:  # it takes no so many, or needs data
            return False
        return True

    def derived(self, size: Size) -> Step:
        """A step from an example of this size, or of another process if it is right for the call. Inputs as
        long as the prompt are cut to its length. They may be that long by coincidence, so if deriving fails,
        it is tried again with an example as long as the prompt, or where that has one token, with inputs as
        they are."""
        tokens, rows, single, as_is = size
        rows += rows == tokens  # sizes that are equal would be one symbol
        derive = functools.partial(self._derive, fits=lambda step: not self.fault(step))
        width = self._packed.shape[1]
        tensors = {n: v for n, v in self._inputs.items() if isinstance(v, Tensor)}

        def example(tokens: int) -> Example:
            return Example(self._name, (self._call(self._laid(), tokens, rows),), single=single, as_is=as_is)

        try:
            return derive(example(tokens))
        except DisagreementError:
            raise
        except AttnGraphError as problem:
            if isinstance(problem, NoDecoderError) and problem.fixes_tokens:
                try:
                    return self._of_one_length(problem.extents, derive, single)
                except NoDecoderError as other:
                    return self._compared(other, derive)
            if isinstance(problem, NoDecoderError) and problem.fixes_rows:
                return self._compared(problem, derive)
            as_long = any(v.shape[1:2] == (width,) for v in tensors.values())
            if as_long and width not in (1, tokens):
                with contextlib.suppress(AttnGraphError):
                    return derive(example(width))
            for laid in (self._laid(), self._laid(one=True)) if width == 1 else ():
                if as_long or any(isinstance(v, Laid) for v in laid.values()):
                    own, is_plain = self._packed.shape[0], [n for n in laid if isinstance(laid[n], Tensor)]
                    call = self._call({n: v for n, v in laid.items() if n not in is_plain}, tokens, rows)
                    for n in is_plain:  # what has one entry in the place of tokens may have no more
                        value = laid[n]
                        places = torch.arange(rows, device=value.device) % own
                        call[n] = value[places] if value.shape[:1] == (own,) else value
                    with contextlib.suppress(AttnGraphError):
                        return derive(Example(self._name, (call,), single=single, as_is=as_is))
            ruled = [v for v in self._laid().values() if isinstance(v, Laid) and v.layout.pairs]
            pairs = [n for n, v in tensors.items() if _is_of_pairs(v, width)]
            if pairs and not ruled:
                shape = list(tensors[pairs[0]].shape)
                raise NoDecoderError(
                    f"its argument {pairs[0]} is {shape}, with an entry for each pair of tokens, which "
                    "follows no rule of their places (as k <= q is one) that is the same for every sequence. "
                    "What belongs to a token a decoder takes as [B, T] or [B, 1, 1, T]: give it so, and let "
                    "the model combine it with its causal mask."
                ) from problem
            if isinstance(problem.__cause__, FAILURES) and (name := self._of_other_layout()):
                with contextlib.suppress(AttnGraphError, *FAILURES):
                    call = self._call(self._laid(others=True), tokens, rows)
                    self._require_shared(call)
                    return derive(Example(self._name, (call,), single=single))
                raise NoDecoderError(
                    f"its argument {name} has the number of tokens, {width}, in another place than a decoder "
                    "takes it: what belongs to tokens is a tensor [B, T, ...] or [B, 1, 1, T]. Give it so."
                ) from problem
            raise

    def _require_shared(self, call: Mapping[str, Any]) -> None:
        """Raise ValueError if the model computes something else with what every row has in common than
        with the same for each row."""
        laid = {n: v for n, v in call.items() if isinstance(v, Laid)}
        if not any(v.layout.is_shared for v in laid.values()):
            return
        every = {n: v.layout.given(v.tensor) for n, v in laid.items()}
        own = {n: v.layout.given(v.tensor[:1]) for n, v in laid.items() if v.layout.is_shared}
        own = {n: v if v.ndim == len(laid[n].layout.axes) else v[0] for n, v in own.items()}
        with torch.no_grad():
            calls = (put_together({**call, **every, **given}) for given in (own, {}))
            ways = (tensors_of(self._model(**given)) for given in calls)
            if not all(torch.allclose(a, b) for a, b in zip(*ways, strict=True)):
                raise ValueError("what all rows have in common is not computed for each alike")

    def _of_other_layout(self) -> str | None:
        """The argument that has the prompt's number of tokens where none is expected."""
        rows, width = self._packed.shape
        for name, given in self._laid().items():
            for value in () if isinstance(given, Laid) else tensors_of(given):
                is_expected = value is given and value.shape[:2] == (rows, width)
                if width in value.shape and not is_expected:
                    return name
        return None

    def _of_one_length(self, extents: frozenset[int], derive: Derive, single: bool) -> Step:
        """A step of a graph for one number of tokens, which can be told from every other number in it. Where
        that takes a trace for another number as well, this one is told what the first computed with."""
        multiples = frozenset[int]()
        while True:
            count = self._distinct(extents)
            call = self._call(self._laid(), count)
            try:
                return derive(Example(self._name, (call,), count, multiples, single=single))
            except NoDecoderError as problem:
                found = frozenset(n // count for n in problem.extents if n % count == 0)
                if found <= multiples:
                    raise
                multiples, extents = multiples | found, extents | problem.extents

    def _compared(self, problem: NoDecoderError, derive: Derive) -> Step:
        """A step of a graph that is found by comparing traces of several sizes, at last of calls with one
        sequence at a time. If there is none either, `problem` is raised."""
        if any(isinstance(v, (Tensor, Laid)) for v in self._laid().values()):
            raise problem  # what belongs to other sizes cannot be made up
        calls = [self._call(self._laid(), tokens, rows) for rows, tokens in SIZES]
        for alone in (False, True) if problem.fixes_rows else (False,):
            try:
                return derive(Example(self._name, tuple(calls), alone=alone))
            except AttnGraphError as other:
                log.info("no decoder by comparing traces either: %s", other)
        raise problem

    def _distinct(self, extents: frozenset[int]) -> int:
        """A number of tokens that divides no size of the model's tensors but 0, and none of `extents`;
        smaller ones where the model takes no larger ones."""
        model = self._model
        tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
        sizes = ({n for t in tensors for n in t.shape} | extents) - {0}
        primes = (p for p in range(11, 200, 2) if all(p % n for n in (3, 5, 7, 11, 13) if n != p))
        found = next((p for p in primes if all(n % p for n in sizes)), 29)
        tried = (found, *(p for p in (7, 5, 3) if all(n % p for n in sizes)))
        return next((n for n in tried if self._accepts(self._call(self._laid(), n))), found)

    def _call(self, inputs: Mapping[str, Any], tokens: int, rows: int = ROWS) -> dict[str, Any]:
        """Arguments to trace with: `rows` of `tokens` tokens; two, because torch.export fixes sizes of 1."""
        ids, (own, width) = self._packed.ids, self._packed.shape
        if ids.shape[1] == 0:
            raise ValueError("there are no tokens.")
        places = torch.arange(rows * tokens, device=ids.device) % ids.shape[1]
        call: dict[str, Any] = {self._name: ids[0, places].reshape(rows, tokens, *ids.shape[2:])}
        for other, given in inputs.items():
            value = given.tensor if isinstance(given, Laid) else given
            if isinstance(value, Tensor) and value.ndim >= 1 and value.shape[0] == own:
                value = value[torch.arange(rows, device=value.device) % own]
                if value.ndim >= 2 and value.shape[1] == width:
                    value = value[:, torch.arange(tokens, device=value.device) % width]
            call[other] = Laid(value, given.layout) if isinstance(given, Laid) else value
        if "use_cache" in self._signature.parameters and "use_cache" not in inputs:
            call["use_cache"] = False
        return call


def _layout(value: Tensor, rows: int, tokens: int, others: bool) -> Layout | None:
    """Where an argument has rows and tokens, if it is not as `[B, T, ...]` is. `others`: anywhere; else only
    in the last dimension behind others of size 1, as in a mask `[B, 1, 1, T]`."""
    shape = list(value.shape)
    if value.ndim >= 3 and [shape[0], shape[-1]] == [rows, tokens] and all(n == 1 for n in shape[1:-1]):
        return Layout("B" + "1" * (value.ndim - 2) + "T")
    if not others or shape[:2] == [rows, tokens] or shape.count(tokens) != 1 or tokens == rows:
        return None
    axes = "".join("T" if n == tokens else "1" if n == 1 else "." for n in shape)
    if shape.count(rows) == 1:
        at = shape.index(rows)
        return Layout(f"{axes[:at]}B{axes[at + 1 :]}")
    return Layout(axes)


def _is_of_pairs(value: Tensor, tokens: int) -> bool:
    """Whether this has an entry for each pair of tokens, as a mask `[B, 1, T, T]` has."""
    return value.ndim >= 2 and tokens > 1 and value.shape[-2:] == (tokens, tokens)
