"""One harness for all measurements: cells by candidates, as a table, as JSON, as a picture.

A suite yields cells, and a cell gives figures for each candidate. The harness measures the cells that are
asked for and that the file of an earlier run has not, writes the file after each, and prints one table. A row
is a flat mapping: `cell`, `name` (the candidate), figures, or a `problem` in their place. `times` and
`in_turns` time calls that take turns within one run, because the speed of a machine drifts.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import platform
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attngraph.cli.arguments import POSITIVE, at_least
from attngraph.cli.terminal import Progress, TargetError, check_writable
from attngraph.ir.records import write_whole
from attngraph.runtime.measure import measure

Row = dict[str, Any]
Options = argparse.Namespace
Calls = Mapping[str, Callable[[], object]]


class Cell(NamedTuple):
    """What is measured at once: figures by the name of the candidate."""

    name: str
    measure: Callable[[], Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Suite:
    """What one command measures.

    Attributes:
        about: its docstring, which is the help. cells: of the options; models are made when a cell is
        measured. arguments: adds what this suite alone has. facts: of a run, besides the machine, for the
        file. base: the candidate beside which the times of the others are shown. bar: the figure that is
        drawn. after: what is said below the table, or, where `tabled` is False, in its place. fails: whether
        the exit code is 1. page: writes a page of the documentation to the file of --table. gradients:
        whether they are recorded.
    """

    name: str
    about: str | None
    cells: Callable[[Options], Iterable[Cell]]
    arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    facts: Callable[[Options], Mapping[str, Any]] = lambda options: {}
    base: str = ""
    bar: str = "seconds"
    after: Callable[[Options, Sequence[Row]], str] = lambda options, rows: ""
    fails: Callable[[Sequence[Row]], bool] = lambda rows: False
    page: Callable[[Path, Sequence[Row]], object] | None = None
    tabled: bool = True
    gradients: bool = False

    def main(self, argv: Sequence[str]) -> int:
        """Run the command; its exit code.

        Raises:
            TargetError: the options cannot be used together, or here.
        """
        options = self._parser().parse_args(argv)
        check_writable(options.json, "--json")
        check_writable(options.plot, "--plot")
        _check_picture(options.plot)
        torch.set_num_threads(options.threads)
        rows, found = known(options), False
        done, end = {row["cell"] for row in rows}, time.monotonic() + 60 * options.minutes
        tell, writing = Progress(), threading.Lock()

        def wanted() -> Iterable[Cell]:
            nonlocal found
            for cell in self.cells(options):
                if all(text in cell.name for text in options.only):
                    found = True
                    if cell.name not in done:
                        yield cell

        def measure(cell: Cell) -> None:
            if time.monotonic() > end:
                return
            tell(cell.name)
            with torch.set_grad_enabled(self.gradients):
                new = [{"cell": cell.name, "name": name, **each} for name, each in cell.measure().items()]
            with writing:
                rows.extend(new)
                self._keep(options, rows)

        if getattr(options, "at_once", 1) > 1:
            with ThreadPoolExecutor(options.at_once) as pool:
                list(pool.map(measure, wanted()))
        else:
            for cell in wanted():
                measure(cell)
        tell.done()
        if options.only and not found:
            raise TargetError(f"--only {' '.join(options.only)}: no cell has all of that in its name.")
        self._keep(options, rows)
        print(
            "\n\n".join(
                filter(None, (table(rows, self.base) if self.tabled else "", self.after(options, rows)))
            )
        )
        if options.plot:
            draw(
                rows,
                self.bar,
                f"{self.name}: {machine()['processor']}, torch {torch.__version__}",
                options.plot,
            )
        if getattr(options, "table", None) and self.page is not None:
            self.page(options.table, rows)
        return int(self.fails(rows))

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            f"python -m workshop {self.name}", description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.arguments(parser)
        common = parser.add_argument_group("of every suite")
        common.add_argument("--small", action="store_true", help="tiny cells, to see that it works")
        common.add_argument(
            "--only", nargs="+", default=[], metavar="TEXT", help="cells with all of these texts"
        )
        common.add_argument(
            "--minutes", type=at_least(0, float), default=math.inf, help="begin no cell after these"
        )
        common.add_argument(
            "--json", type=Path, metavar="FILE", help="write all figures here, after each cell"
        )
        common.add_argument(
            "--resume", action="store_true", help="go on from the cells in the file of --json"
        )
        common.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")
        common.add_argument("--threads", type=POSITIVE, default=torch.get_num_threads())
        if self.page is not None:
            common.add_argument(
                "--table", type=Path, metavar="FILE", help="write the page of the documentation here"
            )
        return parser

    def _keep(self, options: Options, rows: Sequence[Row]) -> None:
        if options.json:
            found = {**machine(), **self.facts(options), "rows": rows}
            write_whole(options.json, json.dumps(found, indent=1) + "\n")


def known(options: Options) -> list[Row]:
    """The rows of an earlier run."""
    if not options.resume or not options.json or not options.json.exists():
        return []
    try:
        rows: list[Row] = json.loads(options.json.read_text())["rows"]
        return [{"cell": row["cell"], **row} for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise TargetError(f"--resume: {options.json} holds no figures: {problem}") from problem


# --- times ---


def times(calls: Calls, rounds: int, seconds: float = 60.0) -> dict[str, Row]:
    """Time and peak memory of each call, after one to warm up."""
    for call in calls.values():
        call()
    return {name: asdict(found) for name, found in measure(calls, rounds=rounds, seconds=seconds).items()}


def in_turns(calls: Calls, rounds: int, skipped: int = 0) -> dict[str, Row]:
    """The median seconds of each call, but of its first ones; nothing else is called between them."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            spent[name].append(time.perf_counter() - start)
    return {name: {"seconds": statistics.median(each[skipped:])} for name, each in spent.items()}


def short(problem: BaseException, length: int = 600) -> str:
    """An error in one line."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:length]


def machine() -> Row:
    """Where and with what a run was made: the processor, what it can do, versions, date and commit."""
    file = Path("/proc/cpuinfo")
    fields = dict(
        line.split(":", 1) for line in (file.read_text() if file.exists() else "").splitlines() if ":" in line
    )
    told = {name.strip(): value.strip() for name, value in fields.items()}
    wanted = (
        "avx2",
        "fma",
        "avx_vnni",
        "avx512f",
        "avx512_bf16",
        "avx512_vnni",
        "amx_tile",
        "amx_bf16",
        "asimd",
        "sve",
    )
    flags = (told.get("flags") or told.get("Features") or "").split()
    return {
        "processor": told.get("model name") or platform.processor() or platform.machine(),
        "features": [f for f in wanted if f in flags], "threads": torch.get_num_threads(),
        "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "commit": commit(),
    }  # fmt: skip


def installed(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Of this checkout; empty where git does not tell."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


# --- what is shown ---

FIGURES: Mapping[str, tuple[str, float]] = {
    "seconds": ("ms", 1e3), "peak_bytes": ("MiB", 2**-20), "first": ("first call, s", 1),
    "tflops": ("TFLOP/s", 1), "gbytes": ("GB/s", 1), "share": ("% of the limit", 100),
    "host": ("launch, us", 1e6), "floor": ("floor, ms", 1e3), "per_second": ("tokens/s", 1),
    "equal": ("% equal", 100), "flop": ("MFLOP", 1e-6), "formula": ("by formula", 1e-6),
}  # fmt: skip
"""How a figure is shown: its unit, and what it is multiplied by. Others are shown as they are."""
_LEFT_OUT = ("cell", "name", "problem", "least", "target", "who", "part", "edge_cycles")


def shown(value: Any) -> str:
    """A figure with as many digits as tell something."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 100 else 2}f}" if abs(value) >= 1 or not value else f"{value:.3g}"


def _figure(row: Row, key: str) -> str:
    value = row.get(key)
    if value is None or value == "":
        return ""
    return shown(value * FIGURES[key][1]) if key in FIGURES else shown(value)


def table(rows: Sequence[Row], base: str = "") -> str:
    """A line for each candidate below its cell, and why some have no figures, each reason once."""
    measured = [row for row in rows if not row.get("problem")]
    keys = dict.fromkeys(
        k
        for row in measured
        for k, v in row.items()
        if k not in _LEFT_OUT and not isinstance(v, list | dict | None)
    )
    beside = [f"of {base}"] if base and "seconds" in keys else []
    lines = [["", *(FIGURES.get(key, (key.replace("_", " "),))[0] for key in keys), *beside]]
    for cell, group in itertools.groupby(measured, key=lambda row: row["cell"]):
        own = list(group)
        whole = next((row.get("seconds") for row in own if row["name"] == base), None)
        lines.append([cell] + [""] * (len(lines[0]) - 1))
        for row in own:
            times = shown(row["seconds"] / whole) if whole and row.get("seconds") is not None else ""
            lines.append(
                [f"  {row['name']}", *(_figure(row, key) for key in keys), *([times] if beside else [])]
            )
    return "\n".join([*(aligned(lines) if measured else []), *_problems(rows)])


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            [line[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    ]


def _problems(rows: Sequence[Row]) -> list[str]:
    names: dict[str, dict[str, int]] = {}
    for row in rows:
        if row.get("problem"):
            counts = names.setdefault(row["problem"], {})
            counts[row["name"]] = counts.get(row["name"], 0) + 1
    told = [f"  {', '.join(by)} ({max(by.values())} cells): {problem}" for problem, by in names.items()]
    return ["", "not measured", *told] if told else []


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; the first line is its head."""
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rest))


def in_one_cell(text: str) -> str:
    """Text in one cell of a table of Markdown."""
    return re.sub(r"\s+", " ", text.strip()).replace("|", "\\|").replace("<", "&lt;")


# --- a picture ---


def formats() -> list[str]:
    """How the name of a picture may end, without the dot."""
    canvas = importlib.import_module("matplotlib.backend_bases").FigureCanvasBase
    return sorted(canvas.get_supported_filetypes())


def _check_picture(path: Path | None) -> None:
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise TargetError("--plot needs matplotlib: pip install matplotlib")
    if path.suffix.removeprefix(".").lower() not in formats():
        raise TargetError(f"--plot: {path}: the name of a picture may end in {', '.join(formats())}.")


def draw(rows: Sequence[Row], figure: str, title: str, path: Path) -> None:
    """Write one figure of all rows as bars, a group for each cell; the axis is logarithmic where it has to
    be."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    unit, factor = FIGURES.get(figure, (figure, 1))
    drawn = {(row["cell"], row["name"]): row[figure] * factor for row in rows if row.get(figure) is not None}
    cells, names = (list(dict.fromkeys(key[place] for key in drawn)) for place in (0, 1))
    picture, axes = pyplot.subplots(figsize=(10, 1.5 + 0.12 * len(cells) * (len(names) + 1)))
    height = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        at = [n for n, cell in enumerate(cells) if (cell, name) in drawn]
        axes.barh([n + place * height for n in at], [drawn[cells[n], name] for n in at], height, label=name)
    axes.set_yticks([n + 0.4 - height / 2 for n in range(len(cells))], cells, fontsize=7)
    axes.invert_yaxis()
    if drawn and max(drawn.values()) > 50 * min(drawn.values()) > 0:
        axes.set_xscale("log")
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7)
    picture.tight_layout()
    try:
        picture.savefig(path)
    except (OSError, ValueError) as problem:
        raise TargetError(f"cannot draw {path}: {problem}") from problem
    finally:
        pyplot.close(picture)
