"""`python -m workshop alarms`: equal forms of one model, which `attngraph.verify` must not call different.

    python -m workshop alarms --json alarms.json --resume

Each stock class as transformers computes it ("eager") is compared with its other spellings (PyTorch's
`scaled_dot_product_attention` and FlexAttention), with what attngraph compiles, with the decoder that it
derives, and with an exported ONNX file.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import attngraph
from workshop.bench.stock.decoders import classes
from workshop.faults.command import Late, limited
from workshop.faults.targets import STOCK, Target, target
from workshop.harness import Cell, Options, Row, Suite, installed, short
from workshop.processes import quietly

LIMIT = 150
"""Seconds after which a comparison is given up."""


def _spelt(spelling: str, made: Target) -> nn.Module:
    config = copy.deepcopy(made.config)
    config._attn_implementation = spelling
    return made.candidate(config)


def _onnx(made: Target) -> str:
    file = str(Path(tempfile.mkdtemp()) / "model.onnx")
    attngraph.export(attngraph.compile(made.reference, min_scores=0), file, (), made.inputs)
    return file


FORMS: dict[str, Callable[[Target], Any]] = {
    "sdpa": functools.partial(_spelt, "sdpa"),
    "flex": functools.partial(_spelt, "flex_attention"),
    "compiled": lambda made: attngraph.compile(made.reference, min_scores=0),
    "decoder": lambda made: attngraph.compile(made.reference, cache=True),
    "onnx": _onnx,
}
"""Forms of a model that compute the same."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this suite."""
    parser.add_argument("--budget", type=float, default=5, help="seconds of a verification (default 5)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=[*FORMS], help="of these (default: all)")


def cells(options: Options) -> Iterator[Cell]:
    """A cell for each class."""
    quietly()
    for name in dict.fromkeys((*STOCK, *classes())):
        yield Cell(name, functools.partial(rows_of, name, options.budget, options.forms))


def rows_of(name: str, budget: float, forms: Sequence[str]) -> dict[str, Row]:
    """The verdict for each form of a class: "equal", "differs", "cannot be compared", "refused" (the form
    itself cannot be made or called), "failed" or "out of time"; or "not built"."""
    with torch.enable_grad():
        try:
            made = target(name)
        except Exception as problem:
            return {form: {"verdict": "not built", "about": short(problem, 100)} for form in forms}
        return {form: row_of(made, form, budget) for form in forms}


def row_of(made: Target, form: str, budget: float) -> Row:
    # FlexAttention compiles itself anew for each size.
    stance: Literal["force_eager", "default"] = "force_eager" if form == "flex" else "default"
    try:
        with limited(LIMIT), torch.compiler.set_stance(stance):
            try:
                other = FORMS[form](made)
                if isinstance(other, nn.Module) and not isinstance(other, attngraph.Decoder):
                    with torch.no_grad():
                        other(**made.inputs)
            except Exception as problem:
                return {"verdict": "refused", "about": short(problem, 100)}
            verdict = attngraph.verify(made.reference, other, made.inputs, budget=budget)
    except Late:
        return {"verdict": "out of time", "about": ""}
    except Exception as problem:
        return {"verdict": "failed", "about": short(problem, 200)}
    about = "; ".join(str(d) for d in verdict.differences)[:400]
    return {"verdict": verdict.status, "about": about, "tried": verdict.tried, "worst": verdict.worst}


def _after(_: Options, rows: Sequence[Row]) -> str:
    found = collections.Counter((row["name"], row["verdict"]) for row in rows)
    told = [f"{count:>5} {form}: {verdict}" for (form, verdict), count in sorted(found.items())]
    alarms = [f"{row['cell']}, {row['name']}: {row['about']}" for row in rows if row["verdict"] == "differs"]
    return "\n".join([*told, *alarms])


def _facts(options: Options) -> Row:
    return {
        "versions": {name: installed(name) for name in ("torch", "transformers")},
        "budget": options.budget,
    }


MAIN = Suite(
    "alarms", __doc__, cells, arguments, facts=_facts, after=_after, tabled=False,
    fails=lambda rows: any(row["verdict"] == "differs" for row in rows),
).main  # fmt: skip
