"""Models of other packages, as their authors wrote them: what fused, what did not and why, what a first call
costs.

    python -m workshop packages --json rows.json --resume --table docs/packages.md

`models.py` is the list; each model has a process of its own with each compiler
(`examine.py`).
"""

from __future__ import annotations

import argparse
import functools
import platform
from collections.abc import Iterator, Mapping, Sequence

import torch

from workshop.bench.packages.examine import CLOSE, COMPILERS, work
from workshop.bench.packages.models import MODELS, Model
from workshop.harness import Cell, Options, Row, Suite, in_one_cell, installed, machine
from workshop.processes import Tasks, limits

TASKS = Tasks(work, "workshop.bench.packages.preload")

_HEAD = """# Models of other packages

{models} models of {packages} packages from PyPI, as their authors wrote them: small, with random weights, in
eval mode, float32, one thread. {summary}

One command makes this page, and goes on where it was cut off. The list of models is data
(`workshop/bench/packages/models.py`); a package that is not installed is named in its row.

    python -m workshop packages --json rows.json --resume --table docs/packages.md

- *fused*: of the softmax-like places, how many became attention. The others are listed with their reasons.
- *graph*: whole, or the number of pieces that torch.compile captured it in, with the reason.
- *difference*: of the result from the model's own, relative to its largest entry. If it is above
  {close:.0e}, both are compared with the model in float64.
- *attngraph*, *torch.compile*: seconds of CPU of the first call, which compiles (torch.compile: with
  Inductor), each in a process of its own whose caches of kernels are empty; after the plus sign, seconds of
  the C and C++ compilers that it started. What is done once per process, as imports, is not counted.

Machine: {machine}; Python {python}, PyTorch {torch}.
"""
_COLUMNS = (
    "\n| package | model | fused | graph | difference | attngraph, s | torch.compile, s |\n"
    "|---|---|---|---|---|---|---|\n"
)


def page(models: Sequence[Model], rows: Mapping[str, Row]) -> str:
    """The page: a line per model, in the order of the list, then each reason with the models that have it."""
    packages = list(dict.fromkeys(model.package for model in models))
    head = _HEAD.format(
        models=len(models), packages=len(packages), summary=" ".join(summary(models, rows).split("\n")),
        close=CLOSE, machine=_machine(), python=platform.python_version(), torch=torch.__version__,
    )  # fmt: skip
    versions = {package: installed(package) for package in packages}
    reasons: dict[str, list[str]] = {}
    for model in models:
        for reason in _notes(_rows(model, rows)[0]):
            reasons.setdefault(reason, []).append(in_one_cell(model.name))
    lines = [_line(model, versions[model.package], rows) for model in models]
    told = [f"- {reason}: {', '.join(names)}\n" for reason, names in reasons.items()]
    return "".join([head, _COLUMNS, *lines, "\n## Reasons\n\n", *told])


def _machine() -> str:
    here = machine()
    return ", ".join((here["processor"], *here["features"]))


def summary(models: Sequence[Model], rows: Mapping[str, Row]) -> str:
    """The counts, in sentences."""
    ours = [_rows(model, rows)[0] for model in models]
    ran = [row for row in ours if "fused" in row]
    places = sum(row["fused"] + _missed(row) for row in ran)
    far = [row for row in ran if verdict(row) == "wrong"]
    slower = [a for a, b in (_rows(m, rows) for m in models) if is_slow(a, b)]
    timed = sum("seconds" in _rows(model, rows)[1] for model in models)
    return (
        f"{len(ran)} of {len(models)} models ran with attngraph.\n"
        f"{sum(row['fused'] for row in ran)} of {places} softmax-like places are fused.\n"
        f"{sum(not row['pieces'] for row in ran)} models are one graph, "
        f"{sum(bool(row['pieces']) for row in ran)} are in pieces.\n"
        f"{len(far)} give a wrong result.\n"
        f"torch.compile was timed on {timed}; of these, {len(slower)} take attngraph over 20 s of CPU and "
        f"torch.compile less."
    )


def verdict(row: Row) -> str:
    """ "close", "rounding" (far from eager, but float64 is no nearer to eager), "random" or "wrong"."""
    if row["difference"] <= CLOSE:
        return "close"
    if row.get("repeated", 0.0) > CLOSE:
        return "random"
    ours, eager = row.get("ours to float64"), row.get("eager to float64")
    return "rounding" if ours is not None and eager is not None and ours <= 2 * eager else "wrong"


def is_slow(ours: Row, theirs: Row) -> bool:
    """Whether attngraph takes over 20 s, and longer than torch.compile."""
    if "seconds" not in ours:
        return ours.get("outcome") == "out of time" and "seconds" in theirs
    return "seconds" in theirs and _cpu(ours) > max(20.0, _cpu(theirs))


def _cpu(row: Row) -> float:
    return float(row["seconds"] + row["building"])


def _rows(model: Model, rows: Mapping[str, Row]) -> tuple[Row, Row]:
    """The rows of attngraph and of torch.compile; empty if there are none."""
    ours, theirs = (rows.get(f"{compiler}: {model.title}", {}) for compiler in COMPILERS)
    return ours, theirs


def _missed(row: Row) -> int:
    found: int = sum(row["missed"].values())
    return found


def _line(model: Model, version: str | None, rows: Mapping[str, Row]) -> str:
    ours, theirs = _rows(model, rows)
    if version is None:
        cells = ["not installed here, so not run", "", "", "", ""]
    elif "fused" not in ours:
        cells = [ours.get("outcome", "not run"), "", "", "", _seconds(theirs)]
    else:
        graph = f"{ours['graphs']} pieces" if ours["pieces"] else "whole"
        cells = [
            f"{ours['fused']} of {ours['fused'] + _missed(ours)}", graph, _difference(ours), _seconds(ours),
            _seconds(theirs),
        ]  # fmt: skip
    named = [" ".join(filter(None, (model.package, version))), in_one_cell(model.name)]
    return "| " + " | ".join([*named, *cells]) + " |\n"


def _difference(row: Row) -> str:
    said = {"close": "", "random": ", as two calls of the model itself", "wrong": ", **wrong**"}
    near = f", to float64 {row.get('ours to float64', 0):.0e}; eager's {row.get('eager to float64', 0):.0e}"
    return f"{row['difference']:.0e}" + said.get(verdict(row), near)


def _seconds(row: Row) -> str:
    if "seconds" not in row:
        return str(row.get("outcome", "not run"))
    built = f" + {row['building']:.0f}" if row["building"] >= 0.5 else ""
    return f"{row['seconds']:.1f}{built}"


def _notes(row: Row) -> list[str]:
    """Why something is not fused, in pieces, or does not run."""
    if "fused" not in row:
        return [in_one_cell(row["reason"])] if "reason" in row else []
    missed = [f"not fused: {in_one_cell(reason)}" for reason in row["missed"]]
    return missed + [f"in pieces: {in_one_cell(reason)}" for reason in row["pieces"]]


def cells(options: Options) -> Iterator[Cell]:
    def measure(title: str) -> dict[str, Row]:
        return {compiler: TASKS.one(f"{compiler}: {title}", options.seconds) for compiler in options.of}

    for model in MODELS:
        if installed(model.package) is not None:
            yield Cell(model.title, functools.partial(measure, model.title))


def _arguments(parser: argparse.ArgumentParser) -> None:
    limits(parser)
    parser.add_argument("--of", nargs="+", choices=COMPILERS, default=COMPILERS, help="default: both")


def _by_task(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["task"]: row for row in rows}


def _chosen(rows: Sequence[Row]) -> list[Model]:
    titles = {row["cell"] for row in rows}
    return [m for m in MODELS if m.title in titles or installed(m.package) is None]


MAIN = Suite(
    "packages", __doc__, cells, _arguments, after=lambda _, rows: summary(_chosen(rows), _by_task(rows)),
    page=lambda file, rows: file.write_text(page(_chosen(rows), _by_task(rows))), tabled=False,
).main  # fmt: skip
