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

from attngraph.api.apart import Apart, Ended, Failed, Process, code_of
from attngraph.api.arguments import require_model
from attngraph.api.by_number import SIDES, Numbers
from attngraph.api.calls import Call, tensors_in, tries, varied
from attngraph.api.compile import explain
from attngraph.api.difference import Difference
from attngraph.api.files import is_file_of_a_side, side_in
from attngraph.api.matched import match
from attngraph.api.same_programs import by_meaning, paired
from attngraph.api.settings import settings_apart
from attngraph.api.smallest import make_smallest
from attngraph.api.steps import Steps, as_sequences, is_decoder, rounded
from attngraph.api.verdict import UNKNOWN, Verdict
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
        first = _side(reference)
        try:
            second = _apart(candidate, seconds, memory, ending) if subprocess else _side(candidate)
        except (Ended, Failed) as problem:
            fails = "" if isinstance(problem, Ended) else "fails: "
            return _unknown("call", code_of(problem), f"the candidate {fails}{problem}", seed)
        start, steps = time.monotonic(), is_decoder(second)
        if steps and (why := rounded(second)):
            return _unknown("call", "cache-rounds", why, seed)
        matched = match(first, second, rename)
        if matched.problem:
            return _unknown("weights", "weights-unmatched", matched.problem, seed)
        sides = matched.reference, matched.candidate
        attentions = [attentions_of(name, one, calls[0]) for name, one in zip(SIDES, sides, strict=True)]
        entries, notes = [of for of, _ in attentions], [why for _, why in attentions if why]
        pairs, of_one = paired(*entries), bool(notes)
        differing, said = by_meaning(pairs, [len(side) for side in entries], tensors_in(calls[0]))
        notes += ["the candidate's steps are compared with whole sequences"] if steps else []
        notes += [] if of_one else said
        named = {int(n) for e in itertools.chain(*entries) for n in re.findall(r"\b\d+\b", e.program)}
        found = Numbers(
            as_sequences(matched) if steps else matched, gradients and not steps, random.Random(seed)
        )
        for call in calls:
            for wanted, manner in tries(call, named, found.chosen):
                first_call = not found.tried + found.skipped  # it is compared whatever the budget
                if found.difference is None and (first_call or time.monotonic() - start < budget):
                    found.compare(varied(call, wanted, manner, found.chosen), call, manner)
        if time.monotonic() - start >= budget:
            notes.append(f"the budget of {budget:g} s ended before every size was tried")
        make_smallest(found, start + budget)
    differences = [d for d in (found.difference, *differing) if d is not None]
    told = (*matched.notes, *notes, *found.notes())
    if not found.tried and not differences:
        return Verdict(UNKNOWN, (found.refused,), notes=told, seed=seed)
    word = "differs" if differences else "equal"
    word = UNKNOWN if [d.code for d in differences] == ["candidate-late"] else word
    if differences:
        mine, theirs = map(_looked_into, sides)
        differences += settings_apart(mine, theirs, differences[0].enters)
    code = code_at(line for d in differences for line in (d.reference, d.candidate))
    every = tuple(differences), tuple(pairs), told
    return Verdict(word, *every, found.tried, found.worst, seed, found.least, code)


def _unknown(kind: str, code: str, why: str, seed: int) -> Verdict:
    return Verdict(UNKNOWN, (Difference(kind, why, code=code),), seed=seed)


def _apart(name: Side, seconds: float, memory: int, ending: contextlib.ExitStack) -> Apart:
    if not isinstance(name, str):
        raise TypeError("attngraph.verify: with subprocess=True the candidate is a name, as 'port.py:LM'.")
    process = Process(name, seconds, memory)
    ending.callback(process.close)
    return Apart(process)


def _side(side: Side) -> Any:
    """What a side is, to be called.

    Raises:
        TypeError: it cannot be called, and is no file.
    """
    if isinstance(side, str | Path):
        if not is_file_of_a_side(side):
            raise TypeError(
                f"attngraph.verify: {str(side)!r} is no ONNX file and no folder that `save` wrote; another "
                "name is run with subprocess=True."
            )
        return side_in(side)
    if not is_decoder(side):
        require_model(side, "attngraph.verify")
    return side


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
            entries = list(report.attention)
            return [_in_a_piece(e) for e in entries] if report.breaks else entries, ""
        except Exception as problem:  # the user's own code runs on tensors without values
            why = first_line(problem)
    return [], f"the {name} is compared by number alone: {why}"


def _looked_into(side: Any) -> Any:
    """What a side runs, of a decoder its model; None if it cannot be looked into."""
    if not is_decoder(side):
        return None if getattr(side, "untraced", "") else side
    return side._model if isinstance(side, ModelWrapper) else None


def _in_a_piece(entry: AttentionEntry) -> AttentionEntry:
    return dataclasses.replace(entry, reads=tuple(f"{read} of a piece" for read in entry.reads))
