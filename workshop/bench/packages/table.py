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
from workshop.tables import TABLES

TASKS = Tasks(work, "workshop.bench.packages.preload")

_HEAD = """# Models of other packages

{models} models of {packages} packages from PyPI, as their authors wrote them: small, with random weights, in
eval mode, float32, one thread. {summary}

One command makes this page, and goes on where it was cut off. The list of models is data
(`workshop/bench/packages/models.py`); a package that is not installed is named in its row.

    python -m workshop packages --json rows.json --resume --table docs/packages.md

- *models*: behind a name, how many of its softmax-like places are fused if not all are, and the number of
  pieces that torch.compile captured it in if it is not one graph. The reasons stand below.
- *fused*: of the softmax-like places of all models of the package, how many became attention.
- *difference*: the largest of a result from the model's own, relative to its largest entry. If it is above
  {close:.0e}, both are compared with the model in float64.
- *attngraph*, *torch.compile*: seconds of CPU of the models' first calls, which compile (torch.compile: with
  Inductor), each in a process of its own whose caches of kernels are empty; after the plus sign, seconds of
  the C and C++ compilers that it started. What is done once per process, as imports, is not counted.

Machine: {machine}; Python {python}, PyTorch {torch}.
"""
_COLUMNS = (
    "\n| package | models | fused | difference | attngraph, s | torch.compile, s |\n"
    "|---|---|---|---|---|---|\n"
)


_FOLDING = """
## Pair bias and its gradient

Attention in models that fold proteins adds a bias to each pair of tokens, which is computed from the pairs,
so that it gets a gradient. These are modules of Boltz and OpenFold3 at their own widths, in training steps
(forward and backward): how far results and all gradients are from eager's, relative to the largest; time and
peak memory. `python -m workshop folding --json docs/measured/folding.json` measures them.

<!-- table: folding -->

{}

<!-- end -->
"""


def page(models: Sequence[Model], rows: Mapping[str, Row]) -> str:
    """The page: a line per package, in the order of the list, then each reason with its models."""
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
    lines = [
        _line(package, versions[package], [m for m in models if m.package == package], rows)
        for package in packages
    ]
    told = [f"- {reason}: {', '.join(names)}\n" for reason, names in reasons.items()]
    parts = [head, _COLUMNS, *lines, _FOLDING.format(TABLES["folding"]()), "\n## Reasons\n\n", *told]
    return "".join(parts)


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


def _line(package: str, version: str | None, models: Sequence[Model], rows: Mapping[str, Row]) -> str:
    pairs = [_rows(model, rows) for model in models]
    titles = "; ".join(_title(model, ours, version) for model, (ours, _) in zip(models, pairs, strict=True))
    cells = [" ".join(filter(None, (package, version))), titles]
    if ran := [ours for ours, _ in pairs if "fused" in ours]:
        fused = sum(row["fused"] for row in ran)
        furthest = max(ran, key=lambda row: row["difference"])
        cells += [f"{fused} of {fused + sum(map(_missed, ran))}", _difference(furthest)]
        cells += [_seconds(ran), _seconds([theirs for _, theirs in pairs])]
    else:
        cells += ["", "", "", ""]
    return "| " + " | ".join(cells) + " |\n"


def _title(model: Model, ours: Row, version: str | None) -> str:
    """The name of a model, and what is not as it is for most."""
    if version is None:
        said = ["not installed here, so not run"]
    elif "fused" not in ours:
        said = [ours.get("outcome", "not run")]
    else:
        said = [f"{ours['fused']} of {ours['fused'] + _missed(ours)}"] * bool(_missed(ours))
        said += [f"{ours['graphs']} pieces"] * bool(ours["pieces"])
    return in_one_cell(model.name) + (f" ({', '.join(said)})" if said else "")


def _difference(row: Row) -> str:
    said = {"close": "", "random": ", as two calls of the model itself", "wrong": ", **wrong**"}
    near = f", to float64 {row.get('ours to float64', 0):.0e}; eager's {row.get('eager to float64', 0):.0e}"
    return f"{row['difference']:.0e}" + said.get(verdict(row), near)


def _seconds(rows: Sequence[Row]) -> str:
    """Of all rows that were timed, together, and how many were not."""
    timed = [row for row in rows if "seconds" in row]
    built = sum(row["building"] for row in timed)
    text = f"{sum(row['seconds'] for row in timed):.1f}" + (f" + {built:.0f}" if built >= 0.5 else "")
    return text + (f", {len(rows) - len(timed)} failed" if len(timed) < len(rows) else "")


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
