"""Whether two models, functions or kernels compute the same: a port, say, and what was ported.

First by meaning: the attentions of both are compared as score programs, at sizes that no call has, too. Then
by number: in float64 where both can, for sizes around those of the call and around every number that a
program names (`by_number`).
"""

import contextlib
import dataclasses
import itertools
import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from attngraph.api.compile import explain
from attngraph.api.verify.calls import Call, tensors_in, tries, varied
from attngraph.api.verify.matched import Matched, in_training, match
from attngraph.api.verify.numbers import SIDES, Numbers
from attngraph.api.verify.programs import by_meaning, paired
from attngraph.api.verify.settings import settings_apart
from attngraph.api.verify.sides import called, in_a_process
from attngraph.api.verify.smallest import make_smallest
from attngraph.api.verify.steps import Steps, as_sequences, is_decoder, require_exact
from attngraph.api.verify.verdict import UNKNOWN, Incomparable, Verdict
from attngraph.errors import first_line
from attngraph.report.entries import AttentionEntry
from attngraph.report.user_code import code_at
from attngraph.runtime.wrapper import ModelWrapper

Side = Callable[..., Any] | str | Path


def verify(
    reference: Side, candidate: Side, inputs: Any, *,
    rename: Mapping[str, str] | Callable[[str], str] | None = None, gradients: bool = True, seed: int = 0,
    budget: float = 60.0, subprocess: bool = False, seconds: float = 60.0, memory: int = 4 << 30,
) -> Verdict:  # fmt: skip
    """Whether `candidate` computes what `reference` does.

    Args:
        reference, candidate: modules or functions that take the same arguments, or the names of an ONNX
            file or of a folder that `save` wrote. Neither is changed. A candidate with `prefill` and
            `decode`, as a decoder has, or of `attngraph.hf.stepwise`, is compared step by step with whole
            sequences.
        inputs: a tuple of arguments, a dict of keyword arguments, or a list of such: examples of shapes and
            dtypes; other sizes and values are tried as well.
        rename: the name of a weight of the reference, for each name of the candidate's that differs.
        gradients: compare them too, with respect to floating arguments and weights.
        seed: repeats a run. budget: seconds after which nothing new is tried.
        subprocess: `candidate` is a name, as the command line takes it ("package.module:NAME",
            "port.py:NAME"), and is run in a process of its own, which has so many `seconds` for a call, and
            so many bytes of `memory` besides what torch takes.

    Returns:
        a verdict, which is true where everything that was compared is equal.

    Raises:
        TypeError: what is given cannot be called. SavedError: a file or a folder cannot be read.
    """
    calls = _calls(inputs)
    with torch.random.fork_rng(devices=[]), contextlib.ExitStack() as ending:
        torch.manual_seed(seed)
        try:
            first = called(reference)
            second = in_a_process(candidate, seconds, memory, ending) if subprocess else called(candidate)
            ends = time.monotonic() + budget
            require_exact(second)
            matched = match(first, second, rename)
        except Incomparable as problem:
            return Verdict(UNKNOWN, problem.args, seed=seed)
        return _compared(matched, calls, gradients, seed, budget, ends)


def _compared(
    matched: Matched, calls: list[Call], gradients: bool, seed: int, budget: float, ends: float
) -> Verdict:
    """The verdict on two sides: by meaning, and then by number until `ends`."""
    sides, steps = (matched.reference, matched.candidate), is_decoder(matched.candidate)
    attentions = [attentions_of(name, one, calls[0]) for name, one in zip(SIDES, sides, strict=True)]
    entries, unknown = [of for of, _ in attentions], [why for _, why in attentions if why]
    pairs = paired(*entries)
    differing, said = by_meaning(pairs, [len(side) for side in entries], tensors_in(calls[0]), sides)
    notes = [*matched.notes, *unknown]
    notes += ["the candidate's steps are compared with whole sequences"] * steps
    notes += [] if unknown else said
    named = {int(n) for e in itertools.chain(*entries) for n in re.findall(r"\b\d+\b", e.program)}
    found = Numbers(as_sequences(matched) if steps else matched, gradients and not steps, random.Random(seed))
    for call in calls:
        for wanted, manner in tries(call, named, found.chosen):
            first_call = not found.tried + found.skipped  # it is compared whatever the budget
            if found.difference is None and (first_call or time.monotonic() < ends):
                found.compare(varied(call, wanted, manner, found.chosen), call, manner)
    if time.monotonic() >= ends:
        notes.append(f"the budget of {budget:g} s ended before every size was tried")
    make_smallest(found, ends)
    notes += found.notes()
    if matched.trains:
        notes.append(in_training(matched, calls[0], seed))
    differences = [d for d in (found.difference, *differing) if d is not None]
    if not found.tried and not differences:
        return Verdict(UNKNOWN, (found.refused,), notes=tuple(notes), seed=seed)
    word = "differs" if differences else "equal"
    word = UNKNOWN if [d.code for d in differences] == ["candidate-late"] else word
    if differences:
        mine, theirs = map(_looked_into, sides)
        differences += settings_apart(mine, theirs, differences[0].enters)
    code = code_at(line for d in differences for line in (d.reference, d.candidate))
    every = tuple(differences), tuple(pairs), tuple(notes)
    return Verdict(word, *every, found.tried, found.worst, seed, found.least, code)


def _calls(inputs: Any) -> list[Call]:
    every = inputs if isinstance(inputs, list) else [inputs]
    if not every or not all(isinstance(one, (tuple, dict)) for one in every):
        raise TypeError(
            "attngraph.verify: `inputs` is a tuple of arguments, a dict of keyword arguments, or a list of "
            f"such, found {type(inputs).__name__}. One tensor is given as `(x,)`."
        )
    return [(one, {}) if isinstance(one, tuple) else ((), one) for one in every]


# --- by meaning ---


def attentions_of(name: str, side: Any, call: Call) -> tuple[list[AttentionEntry], str]:
    """The attentions of a side, and why they are not known."""
    seen, why = _looked_into(side), getattr(side, "untraced", Steps.untraced)
    if seen is not None:
        try:
            with torch.no_grad():
                report = explain(seen, *call[0], **call[1])
            piece = " of a piece" if report.breaks else ""
            reads = ((e, tuple(f"{read}{piece}" for read in e.reads)) for e in report.attention)
            return [dataclasses.replace(e, reads=names) for e, names in reads], ""
        except Exception as problem:  # the user's own code runs on tensors without values
            why = first_line(problem)
    return [], f"the {name} is compared by number alone: {why}"


def _looked_into(side: Any) -> Any:
    """What a side runs, of a decoder its model; None if it cannot be looked into."""
    if not is_decoder(side):
        return None if getattr(side, "untraced", "") else side
    return side._model if isinstance(side, ModelWrapper) else None
