"""`python -m workshop faults`: write faults into models by rule, verify each, and count what is noticed.

    python -m workshop faults --json docs/measured/faults.json --resume

A class at a time; the file is written after each. Faults are written into lines that the call or the
construction runs, and into each setting of the configuration.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import attngraph
from attngraph.api import verify as verifying
from attngraph.runtime.verify import tensors_of
from workshop.faults.rules import Fault, faults
from workshop.faults.settings import Setting, settings
from workshop.faults.targets import NAMES, Target, changed, ran, source, target
from workshop.harness import Cell, Options, Row, Suite, installed, short
from workshop.processes import quietly

LIMIT = 90
"""Seconds after which a fault is given up."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this suite."""
    parser.add_argument("--count", type=int, default=30, help="callable faults of a source (default 30)")
    parser.add_argument("--settings", type=int, default=12, help="faults of a configuration (default 12)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=3, help="seconds of a verification (default 3)")


def cells(options: Options) -> Iterator[Cell]:
    """A cell for each class."""
    quietly()
    for name in NAMES:
        yield Cell(name, functools.partial(_numbered, name, options))


def _numbered(name: str, options: Options) -> dict[str, Row]:
    return {str(n): row for n, row in enumerate(rows_of(name, options))}


def rows_of(name: str, options: Options) -> Iterator[Row]:
    """What comes of the faults of a class; one row of the verdict "not built" if it cannot be built."""
    with torch.enable_grad():
        try:
            made = target(name)
            with ran(made.modules) as lines:
                made.candidate()
                call(made.reference, made.inputs)
        except Exception as problem:
            yield {"verdict": "not built", "about": short(problem, 100)}
            return
        done = 0
        with explained_once():
            for module, fault in drawn(made, options.seed, lines):
                if done == options.count:
                    break
                row = row_of(made, fault, options.budget, module)
                done += row["verdict"] not in ("refused", "cannot be compared")
                yield row
            for setting in settings(made.config, options.settings):
                yield row_of(made, setting, options.budget)


def call(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The results of a call."""
    with torch.no_grad():
        return tensors_of(model(**inputs) if isinstance(inputs, dict) else model(*inputs))


@contextlib.contextmanager
def explained_once() -> Iterator[None]:
    """Within, the attentions of the reference, which is the same for all faults, are found only once."""
    plain, kept = verifying.attentions_of, dict[str, Any]()

    def once(name: str, side: Any, given: Any) -> Any:
        if name != "reference":
            return plain(name, side, given)
        if name not in kept:
            kept[name] = plain(name, side, given)
        return kept[name]

    verifying.attentions_of = once  # type: ignore[assignment]
    try:
        yield
    finally:
        verifying.attentions_of = plain


def drawn(made: Target, seed: int, lines: set[tuple[str, int]]) -> list[tuple[str, Fault]]:
    """Faults in lines that run, by the module: of each rule in turn, in an order that the seed decides."""
    chosen, by_rule = random.Random(f"{seed} {made.name}"), collections.defaultdict(list)
    for module in made.modules:
        for fault in faults(source(module)):
            if any((module, line) in lines for line in range(fault.statement[0], fault.statement[1] + 1)):
                by_rule[fault.rule].append((module, fault))
    for rule in by_rule.values():
        chosen.shuffle(rule)
    turns = [(n, one) for of in by_rule.values() for n, one in enumerate(of)]
    return [one for _, one in sorted(turns, key=lambda turn: turn[0])]


def row_of(made: Target, fault: Fault | Setting, budget: float, module: str = "") -> Row:
    """What comes of a fault: "noticed"; "not noticed" (`about` says how far results are apart); "refused"
    (the changed model cannot be built or called); "cannot be compared"; "no fault" (a bias is left out where
    there is none); "failed" and "out of time", which are ours. `names`: as `named` says."""
    row: Row = {"rule": fault.rule, "before": fault.before[:90], "after": fault.after[:90], "names": ""}
    row |= {"module": module.rpartition(".")[2], "line": fault.line} if isinstance(fault, Fault) else {}
    start = time.monotonic()
    reference = made
    try:
        with limited(LIMIT):
            try:
                if isinstance(fault, Setting):
                    reference, candidate = fault.models(made)
                else:
                    with changed(module, fault.text):
                        candidate = made.candidate()
                call(candidate, made.inputs)
            except Late:
                raise
            except Exception as problem:
                return {**row, "verdict": "refused", "about": short(problem, 90)}
            if fault.rule == "no bias" and _names(candidate) == _names(made.reference):
                return {**row, "verdict": "no fault", "about": "there is none"}
            verdict = attngraph.verify(reference.reference, candidate, made.inputs, budget=budget)
            row["seconds"] = round(time.monotonic() - start, 1)
            if verdict.status == "cannot be compared":
                return {**row, "verdict": verdict.status, "about": verdict.differences[0].about[:90]}
            if verdict:
                return {
                    **row,
                    "verdict": "not noticed",
                    "about": apart(reference.reference, candidate, made.inputs),
                }
            return {**row, "verdict": "noticed", "names": named(verdict, fault, module, made.reference),
                    "about": verdict.differences[0].kind}  # fmt: skip
    except Late:
        return {**row, "verdict": "out of time", "about": ""}
    except Exception as problem:
        return {**row, "verdict": "failed", "about": short(problem, 200)}


def _names(model: nn.Module) -> set[str]:
    return {*model.state_dict()}


class Late(BaseException):
    """A fault took too long."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises `Late` within after so many seconds."""

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def apart(reference: nn.Module, candidate: nn.Module, inputs: Any) -> str:
    """How far the results of two are apart, relative to the largest, in float64 and in three calls: as it is
    given, with its rows in another order, of longer sequences."""
    wide, other = (copy.deepcopy(side).double() for side in (reference, candidate))
    worst = 0.0

    def longer(t: Tensor) -> Tensor:
        return torch.cat([t, t.flip(1)], 1) if t.ndim == 2 and not t.is_floating_point() else t

    changes: tuple[Callable[[Tensor], Tensor], ...] = (lambda t: t, lambda t: t.flip(0), longer)
    wider = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)
    for change in changes:
        given = pytree.tree_map_only(Tensor, change, wider)
        try:
            for a, b in zip(call(wide, given), call(other, given), strict=True):
                scale = float(a.abs().max()) or 1.0
                worst = max(worst, float((a.double() - b.double()).abs().max()) / scale)
        except Exception:  # a model that takes no longer ones
            continue
    return f"results are {worst:.0e} apart"


def named(verdict: attngraph.Verdict, fault: Fault | Setting, module: str, model: nn.Module) -> str:
    """What the verdict names. Of a source, "line" where a line of either side lies in the statement with the
    fault, "function" where it lies in its function, "module" where a module is named in which the difference
    enters. Of a configuration, "setting" where the setting is named or its value, "line" where a line is."""
    if isinstance(fault, Setting):
        about = " ".join(d.about for d in verdict.differences if d.kind == "setting")
        if fault.name in about:
            return "setting"
        return "line" if any(d.candidate for d in verdict.differences) else ""
    file = f"{module.rpartition('.')[2]}.py:"
    lines = [
        int(place.rpartition(":")[2]) for d in verdict.differences for place in (d.reference, d.candidate)
        if place.rpartition("/")[2].startswith(file)
    ]  # fmt: skip
    for name, (first, last) in (("line", fault.statement), ("function", fault.function)):
        if any(first <= line <= last for line in lines):
            return name
    return "module" if any(d.enters for d in verdict.differences) else ""


ALIKE = ", results less than 1e-6 apart"


def is_alike(row: Row) -> bool:
    """Whether a fault that was not noticed changes results by less than numbers of float32 round."""
    return row["verdict"] == "not noticed" and float(row["about"].split()[2]) < 1e-6


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """How many faults there are of each verdict, and of those noticed how many are named how: of sources,
    and of configurations."""
    found = collections.Counter[str]()
    for row in rows:
        kind = "source" if "line" in row else "configuration"
        found[f"{kind}: {row['verdict']}{ALIKE * is_alike(row)}"] += 1
        if row["verdict"] == "noticed":
            found[f"{kind}: names {row['names'] or 'nothing'}"] += 1
    return dict(sorted(found.items()))


def _after(_: Options, rows: Sequence[Row]) -> str:
    told = "\n".join(f"{count:>5} {what}" for what, count in counts(rows).items())
    return f"{len({row['cell'] for row in rows})} classes\n{told}"


def _facts(options: Options) -> Row:
    versions = {name: installed(name) for name in ("torch", "transformers")}
    return {"versions": versions, "seed": options.seed, "budget": options.budget, "named": named.__doc__}


MAIN = Suite("faults", __doc__, cells, arguments, facts=_facts, after=_after, tabled=False).main
