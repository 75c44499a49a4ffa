"""Tables of the docs from the files in docs/measured: `python -m workshop tables [--write]`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; a test compares the pages with what this
prints. No figure is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workshop.harness import Row, markdown

DOCS = Path(__file__).parents[1] / "docs"
PAGES = tuple(
    DOCS / f"{name}.md" for name in ("gpu", "benchmarks", "same-bits", "gallery", "packages", "mechanisms")
)
Cells = Mapping[str, Mapping[str, Row]]
COLUMNS = {
    "attngraph": "attngraph", "flex": "FlexAttention", "sdpa flash": "flash", "sdpa cudnn": "cuDNN",
    "sdpa efficient": "efficient", "unfused": "unfused",
}  # fmt: skip
_NAMES = {"window": "window of 1024", "alibi": "ALiBi"}


def measured(file: str) -> tuple[Row, Cells]:
    """What a run of `card` says of the machine, and its measurements by cell and candidate."""
    found = json.loads((DOCS / "measured" / file).read_text(encoding="utf-8"))
    cells: dict[str, dict[str, Row]] = {}
    for name, task in found["tasks"].items():
        if name.startswith("measure: "):
            for row in task.get("rows", ()):
                cells.setdefault(row["cell"], {})[row["name"]] = row
    return found["about"], cells


def about(file: str) -> str:
    """The card, the versions and the day of a run, and what it reached in a product and in a copy."""
    said, _ = measured(file)
    versions = f"torch {said['torch'].partition('+')[0]}, Triton {said['triton']}"
    product, copy = said["limits"]["flops"] / 1e12, said["limits"]["bytes"] / 1e9
    reached = f"a matrix product reached {product:.0f} TFLOP/s, a copy {copy:.0f} GB/s"
    dtype, link = said["dtype"].removeprefix("torch."), f"[{file}](measured/{file})"
    return f"{said['date']}: {said['device']}, {versions}, {dtype}; {reached} ({link})."


def attention(file: str, backward: bool) -> str:
    """Milliseconds of whole sequences, TFLOP/s, and the times of cuDNN and FlexAttention beside ours."""
    lines = [["tokens, width", *COLUMNS.values(), "TFLOP/s", "beside cuDNN", "beside FlexAttention"]]
    for (case, tokens, width), row in sorted(
        _attention(measured(file)[1], backward), key=lambda one: _order(one[0])
    ):
        ours = row["attngraph"]
        times = [_milliseconds(row.get(name, {})) for name in COLUMNS]
        cudnn, flex = (_beside(row.get(name, {}), ours) for name in ("sdpa cudnn", "flex"))
        beside = [cudnn, _bold(flex, float(flex) < 1)]
        lines.append(
            [f"{_NAMES.get(case, case)}, {tokens}, {width}", *times, f"{ours['tflops']:.0f}", *beside]
        )
    return markdown(lines)


def _attention(cells: Cells, backward: bool) -> Iterator[tuple[tuple[str, int, int], Mapping[str, Row]]]:
    shape = re.compile(r"(\w+), \d+ heads, (\d+) tokens, width (\d+)" + ", backward" * backward)
    for cell, row in cells.items():
        if found := shape.fullmatch(cell):
            yield (found[1], int(found[2]), int(found[3])), row


def _order(key: tuple[str, int, int]) -> tuple[int, int, int]:
    return ("causal", "full", "window", "softcap", "alibi").index(key[0]), *key[1:]


def decoding(file: str) -> str:
    """Milliseconds of a new token of each row, bold where others take least; GB/s, share of the copy."""
    lines = [["rows, tokens kept", "attngraph", "SDPA", "FlexAttention", "GB/s", "share"]]
    for cell, row in sorted(measured(file)[1].items(), key=lambda one: one[0].startswith("mla")):
        if found := re.match(r"(decode|mla), (\d+) rows, (\d+) kept, (\d+) heads", cell):
            latents = f"latents of {found[4]} heads: " if found[1] == "mla" else ""
            ours = row["attngraph"]
            others = [row.get(name, {}) for name in ("sdpa", "flex")]
            least = min(one["seconds"] for one in (ours, *others) if one.get("seconds"))
            times = [_bold(_milliseconds(one), one.get("seconds") == least) for one in others]
            speed = [f"{ours['gbytes']:.0f}", f"{ours['share']:.2f}"]
            lines.append([f"{latents}{found[2]}, {found[3]}", _milliseconds(ours), *times, *speed])
    return markdown(lines)


def whole(file: str) -> str:
    """Milliseconds of whole models on the CPU, and of ours beside the best that keeps weights changeable."""
    found = json.loads((DOCS / "measured" / file).read_text(encoding="utf-8"))
    cells: dict[str, dict[str, Row]] = {}
    for row in found["rows"]:
        cells.setdefault(row["cell"], {})[row["name"]] = row
    known = ("eager", "torch.compile", "torch.compile, frozen", "OpenVINO", "onnxruntime", "attngraph",
             "attngraph, frozen", "floor")  # fmt: skip
    names = [n for n in known if any(n in rows for rows in cells.values())]
    lines = [["model", *names, "attngraph / best of the first two", "first seven calls, s"]]
    for cell, rows in cells.items():
        times = [f"{1e3 * rows[n]['seconds']:.0f}" if "seconds" in rows.get(n, {}) else "-" for n in names]
        ours, others = rows["attngraph"], [rows[n]["seconds"] for n in names[:2] if "seconds" in rows[n]]
        beside = f"{ours['seconds'] / min(others):.2f}" if "seconds" in ours else "-"
        firsts = " / ".join(f"{rows[n]['first']:.0f}" for n in names if "first" in rows.get(n, {}))
        lines.append([cell, *times, beside, firsts])
    return f"{run_of(found).removesuffix('.')}; medians in ms.\n\n{markdown(lines)}"


def order(file: str) -> str:
    """What one order of sums costs: milliseconds by default and with it, and where weights are frozen too."""
    found = json.loads((DOCS / "measured" / file).read_text(encoding="utf-8"))
    cells: dict[str, dict[str, float]] = {}
    for row in found["rows"]:
        cells.setdefault(row["cell"], {})[row["name"]] = row["seconds"]
    names = list(next(iter(cells.values())))
    lines = [
        ["model", *(f"{name}, ms" for name in names), *(f"{n} / default" for n in names if n != "default")]
    ]
    for cell, times in cells.items():
        ratios = (times[name] / times["default"] for name in names if name != "default")
        lines.append([cell, *(f"{1e3 * times[n]:.1f}" for n in names), *(f"{r:.2f}" for r in ratios)])
    return f"{run_of(found)}\n\n{markdown(lines)}"


def bits(file: str) -> str:
    """How many tokens had other bits in a drawn way of computing them."""
    found = json.loads((DOCS / "measured" / file).read_text(encoding="utf-8"))
    rows: dict[str, list[Row]] = {"consistent": [], "default": []}
    for row in found["rows"]:
        rows[row["name"]].append(row)
    models, ways = len(rows["consistent"]), sum(row["runs"] for row in rows["consistent"])
    tokens, differing = (sum(row[n] for row in rows["consistent"]) for n in ("tokens", "differing"))
    otherwise, of = (sum(row[n] for row in rows["default"]) for n in ("differing", "tokens"))
    named = sum(row["in no order"] != "none" for row in rows["consistent"])
    return (
        f"{models} models in {ways} drawn ways ([same_bits.json](measured/{file})): of {tokens:,} tokens "
        f"{differing} had other bits, and {named} models have something without an order; by default "
        f"{otherwise:,} of {of:,} had."
    )


def mechanisms() -> str:
    """What decoders keep, and whether they give the model's tokens."""
    from workshop import mechanisms  # which needs this file

    return mechanisms.table()


def gallery() -> str:
    """Attention by its names."""
    from workshop.gallery import command  # which needs this file

    return command.table()


def folding(file: str) -> str:
    """Training steps of modules of folding models beside eager."""
    from workshop.bench.packages.folding import rows_of_page

    found = json.loads((DOCS / "measured" / file).read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    rows = found["rows"]
    beside = [ours["seconds"] / eager["seconds"] for eager, ours in zip(rows[::2], rows[1::2], strict=True)]
    said = f"A step takes {min(beside):.1f} to {max(beside):.1f} times as long as eager's"
    return f"{said} ({run_of(found).removesuffix('.')}; {versions}).\n\n{markdown(rows_of_page(rows))}"


def groups(file: str) -> str:
    """What the scorecard says of kernels with groups of warps, beside those without and FlexAttention's."""
    found = json.loads((DOCS / "measured" / file).read_text(encoding="utf-8"))
    kernels: dict[str, dict[str, list[Row]]] = {}
    for row in found["rows"]:
        if not row["problem"]:
            kernels.setdefault(row["cell"].rpartition(" on ")[0], {}).setdefault(row["who"], []).append(row)
    head = ["", "TFLOP/s", "before", "FlexAttention", "EX2 beside HGMMA", "other instructions", "before"]
    lines = [[*head, "barriers", "spilled", "before", "shared, KB"]]
    for cell, rows in kernels.items():
        for ours in rows.get("groups of warps", ()):
            before, flex = rows["attngraph"], rows.get("flex", [])
            speeds = [f"{row['predicted']:.0f}" for row in (ours, before[0], *flex[:1])]
            others = [f"{n:.1f}" for n in (ours["others"], sum(row["others"] for row in before))]
            spilled = [str(n) for n in (ours["spilled"], max(row["spilled"] for row in before))]
            used = [str(ours["barriers"]), *spilled, f"{ours['shared'] / 1e3:.0f}"]
            lines.append([cell, *speeds, *[""] * (3 - len(speeds)), f"{ours['beside']:.2f}", *others, *used])
    return f"{found['date']}, Triton {found['triton']} ([{file}](measured/{file})).\n\n{markdown(lines)}"


def run_of(found: Row) -> str:
    """When, where and with what a run was made."""
    threads = f"{found['threads']} thread{'s' * (found['threads'] != 1)}"
    return (
        f"{found['date']}, commit {found['commit']}, {threads}, "
        f"torch {found['torch'].partition('+')[0]}, {', '.join(found['features'])}."
    )


def _milliseconds(row: Row) -> str:
    if row.get("problem"):
        return "out of memory" if row["problem"].startswith("OutOfMemoryError") else "does not compile"
    return f"{row['seconds'] * 1e3:.3f}" if row else ""


def _beside(other: Row, ours: Row) -> str:
    return f"{other['seconds'] / ours['seconds']:.2f}" if other.get("seconds") else ""


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


TABLES: Mapping[str, Callable[[], str]] = {
    "about h100": lambda: about("h100.json"),
    "forward h100": lambda: attention("h100.json", False),
    "backward h100": lambda: attention("h100.json", True),
    "decoding h100": lambda: decoding("h100.json"),
    "groups of warps": lambda: groups("scorecard.json"),
    "whole models": lambda: whole("whole.json"),
    "whole models with AMX": lambda: whole("whole_amx.json"),
    "cost of order": lambda: order("cost_of_order.json"),
    "same bits": lambda: bits("same_bits.json"),
    "gallery": gallery,
    "folding": lambda: folding("folding.json"),
    "mechanisms": mechanisms,
}  # fmt: skip
_PLACE = re.compile(r"(<!-- table: ([\w ]+) -->\n\n)(.*?)(\n\n<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    """The page with its tables as the files have them."""

    def again(found: re.Match[str]) -> str:
        return found[1] + TABLES[found[2]]() + found[4]

    return _PLACE.sub(again, page)


def names(page: str) -> list[str]:
    """The tables that a page has."""
    return [found[2] for found in _PLACE.finditer(page)]


def main(argv: Sequence[str]) -> int:
    """Print every table, or write them into the page."""
    parser: Any = argparse.ArgumentParser("python -m workshop tables", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write them into the pages")
    if parser.parse_args(argv).write:
        for page in PAGES:
            page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(f"{name}\n\n{make()}" for name, make in TABLES.items()))
    return 0
