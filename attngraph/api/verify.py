"""Whether two models, functions or kernels compute the same: a port, say, and what was ported.

First by meaning: the attentions of both are compared as score programs, at sizes that no call has, too. Then
by number: in float64 where both can, for sizes around those of the call and around every number that a
program names (`by_number`).
"""

import dataclasses
import itertools
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attngraph.api.arguments import require_model
from attngraph.api.by_number import Call, Numbers, tensors_in, tries, varied
from attngraph.api.compile import explain
from attngraph.api.matched import match
from attngraph.api.same_programs import by_meaning, paired
from attngraph.api.verdict import Difference, Verdict
from attngraph.errors import CaptureError, first_line
from attngraph.report.entries import AttentionEntry


def verify(
    reference: Callable[..., Any], candidate: Callable[..., Any], inputs: Any, *,
    rename: Mapping[str, str] | Callable[[str], str] | None = None, gradients: bool = True, seed: int = 0,
    budget: float = 60.0,
) -> Verdict:  # fmt: skip
    """Whether `candidate` computes what `reference` does.

    Args:
        reference, candidate: modules or functions that take the same arguments. Neither is changed.
        inputs: a tuple of arguments, a dict of keyword arguments, or a list of such: examples of shapes and
            dtypes; other sizes and values are tried as well.
        rename: the name of a weight of the reference, for each name of the candidate's that differs.
        gradients: compare them too, with respect to floating arguments and weights.
        seed: repeats a run. budget: seconds after which nothing new is tried.

    Returns:
        a verdict, which is true where everything that was compared is equal.

    Raises:
        TypeError: what is given cannot be called.
    """
    for side in (reference, candidate):
        require_model(side, "attngraph.verify")
    start, calls = time.monotonic(), _calls(inputs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        matched = match(reference, candidate, rename)
        if matched.problem:
            return Verdict("cannot be compared", (Difference("weights", matched.problem),), seed=seed)
        sides = matched.reference, matched.candidate
        entries, notes = _attentions(sides, calls[0])
        pairs = paired(*entries)
        differing, said = by_meaning(pairs, [len(side) for side in entries], tensors_in(calls[0]))
        notes += said
        named = {int(n) for e in itertools.chain(*entries) for n in re.findall(r"\b\d+\b", e.program)}
        found = Numbers(matched, gradients, random.Random(seed))
        for call in calls:
            for wanted, manner in tries(call, named, found.chosen):
                first = not found.tried + found.skipped  # it is compared whatever the budget
                if found.difference is None and (first or time.monotonic() - start < budget):
                    found.compare(varied(call, wanted, manner, found.chosen), call)
    if time.monotonic() - start >= budget:
        notes.append(f"the budget of {budget:g} s ended before every size was tried")
    differences = tuple(d for d in (found.difference, *differing) if d is not None)
    if not found.tried:
        return Verdict(
            "cannot be compared", (Difference("call", found.refused),), notes=tuple(notes), seed=seed
        )
    word = "differs" if differences else "equal"
    told = (*matched.notes, *notes, *found.notes())
    return Verdict(word, differences, tuple(pairs), told, found.tried, found.worst, seed)


def _calls(inputs: Any) -> list[Call]:
    every = inputs if isinstance(inputs, list) else [inputs]
    if not every or not all(isinstance(one, (tuple, dict)) for one in every):
        raise TypeError(
            "attngraph.verify: `inputs` is a tuple of arguments, a dict of keyword arguments, or a list of "
            f"such, found {type(inputs).__name__}. One tensor is given as `(x,)`."
        )
    return [(one, {}) if isinstance(one, tuple) else ((), one) for one in every]


# --- by meaning ---


def _attentions(sides: Sequence[Any], call: Call) -> tuple[list[list[AttentionEntry]], list[str]]:
    found: list[list[AttentionEntry]] = []
    notes: list[str] = []
    for name, side in zip(("reference", "candidate"), sides, strict=True):
        entries: list[AttentionEntry] = []
        try:
            with torch.no_grad():
                report = explain(side, *call[0], **call[1])
            entries = list(report.attention)
            if report.breaks:  # a piece has arguments of its own
                entries = [_in_a_piece(e) for e in entries]
        except (CaptureError, TypeError, RuntimeError) as problem:
            notes.append(f"the {name} is compared by number alone: {first_line(problem)}")
        found.append(entries)
    return found, notes


def _in_a_piece(entry: AttentionEntry) -> AttentionEntry:
    return dataclasses.replace(entry, reads=tuple(f"{read} of a piece" for read in entry.reads))
