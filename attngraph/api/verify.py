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
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attngraph.api.arguments import require_model
from attngraph.api.by_number import Numbers, tries, varied
from attngraph.api.compile import explain
from attngraph.api.entering import Call, tensors_in
from attngraph.api.matched import match
from attngraph.api.same_programs import by_meaning, paired
from attngraph.api.settings import settings_apart
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
        found = [
            attentions_of(n, s, calls[0]) for n, s in zip(("reference", "candidate"), sides, strict=True)
        ]
        entries, notes = [f[0] for f in found], [note for f in found for note in f[1]]
        pairs = paired(*entries)
        differing, said = by_meaning(pairs, [len(side) for side in entries], tensors_in(calls[0]))
        notes += said
        named = {int(n) for e in itertools.chain(*entries) for n in re.findall(r"\b\d+\b", e.program)}
        numbers = Numbers(matched, gradients, random.Random(seed))
        for call in calls:
            for wanted, manner in tries(call, named, numbers.chosen):
                first = not numbers.tried + numbers.skipped  # it is compared whatever the budget
                if numbers.difference is None and (first or time.monotonic() - start < budget):
                    numbers.compare(varied(call, wanted, manner, numbers.chosen), call, manner)
    if time.monotonic() - start >= budget:
        notes.append(f"the budget of {budget:g} s ended before every size was tried")
    differences = tuple(d for d in (numbers.difference, *differing) if d is not None)
    if not numbers.tried:
        return Verdict(
            "cannot be compared", (Difference("call", numbers.refused),), notes=tuple(notes), seed=seed
        )
    if differences:
        enters = next((d.enters for d in differences), "")
        differences += tuple(settings_apart(*sides, enters))
    word = "differs" if differences else "equal"
    told = (*matched.notes, *notes, *numbers.notes())
    return Verdict(word, differences, tuple(pairs), told, numbers.tried, numbers.worst, seed)


def _calls(inputs: Any) -> list[Call]:
    every = inputs if isinstance(inputs, list) else [inputs]
    if not every or not all(isinstance(one, (tuple, dict)) for one in every):
        raise TypeError(
            "attngraph.verify: `inputs` is a tuple of arguments, a dict of keyword arguments, or a list of "
            f"such, found {type(inputs).__name__}. One tensor is given as `(x,)`."
        )
    return [(one, {}) if isinstance(one, tuple) else ((), one) for one in every]


# --- by meaning ---


def attentions_of(name: str, side: Any, call: Call) -> tuple[list[AttentionEntry], list[str]]:
    """The attentions of a side, and why they are not known."""
    try:
        with torch.no_grad():
            report = explain(side, *call[0], **call[1])
    except (CaptureError, TypeError, RuntimeError) as problem:
        return [], [f"the {name} is compared by number alone: {first_line(problem)}"]
    entries = list(report.attention)
    return [_in_a_piece(e) for e in entries] if report.breaks else entries, []


def _in_a_piece(entry: AttentionEntry) -> AttentionEntry:
    return dataclasses.replace(entry, reads=tuple(f"{read} of a piece" for read in entry.reads))
