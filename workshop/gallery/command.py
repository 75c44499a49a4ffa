"""`python -m workshop gallery`: attention by its names: what fuses, what decodes, and the time beside eager.

    python -m workshop gallery --write        measures what is missing, and writes docs/gallery.md
    python -m workshop gallery --only causal  one of them, to look at

`variants.py` has the modules. Each is compiled, compared with eager, given a decoder that is compared token
by token, and timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import attngraph
from attngraph.meaning.check.comparison import compare, elementwise
from workshop.gallery.variants import VARIANTS, WORDS, model_of
from workshop.harness import Cell, Options, Row, Suite, in_one_cell, markdown, times
from workshop.processes import quietly
from workshop.tables import DOCS, run_of, written

FILE, PAGE = DOCS / "measured" / "gallery.json", DOCS / "gallery.md"
SIDE = 24
"""Tokens of a picture, and of the comparisons."""
TOLERANCE = 1e-4


def ids_of(tokens: int) -> Tensor:
    """Words, of which 0 ends documents; two of these end among the first two dozen."""
    ids = torch.randint(1, WORDS, (1, tokens), generator=torch.Generator().manual_seed(0))
    ids[:, [7, 15]] = 0
    return ids


def found_in(name: str) -> Row:
    """What a compilation makes of a variant, and a decoder at a few tokens.

    Raises:
        AssertionError: a result is not eager's.
    """
    model, ids, more = model_of(name), ids_of(SIDE), ids_of(VARIANTS[name].tokens)
    with torch.no_grad():
        expected = model(ids)
        compiled = attngraph.compile(model, min_scores=0)
        assert compare(compiled(more), model(more), elementwise(TOLERANCE)).holds, name
        report = compiled.report
        weights: Any = compiled.weights(ids) if report.attention else {}
        return {
            "fused": len(report.attention), "missed": [plain(m.reason) for m in report.missed],
            "done": [o.done for o in report.others if o.done],
            "left": [plain(o.reason) for o in report.others if o.reason],
            "masks": _masks(weights, [entry.mask for entry in report.attention]),
            "decodes": _decodes(name, model, ids, expected),
        }  # fmt: skip


def _masks(weights: Mapping[str, Tensor], words: Sequence[str]) -> list[list[str]]:
    """Each mask that is drawn: a line for each query, `#` where the first head sees a key."""
    drawn: dict[str, list[str]] = {}
    for told, one in zip(words, weights.values(), strict=True):
        if told != "none":
            drawn.setdefault(told, ["".join(".#"[int(w > 0)] for w in row) for row in one[0, 0]])
    return list(drawn.values())


def _decodes(name: str, model: nn.Module, ids: Tensor, expected: Tensor) -> str:
    """What a decoder keeps, in words; or why there is none."""
    try:
        decoder: Any = attngraph.compile(model, cache=True)
        logits, state = decoder.prefill(ids[:, : SIDE // 2])
    except attngraph.NoDecoderError as problem:
        return f"no: {plain(problem.reason)}"
    steps = [decoder.decode(ids[:, n : n + 1], state) for n in range(SIDE // 2, SIDE)]
    assert compare(torch.cat([logits, *steps], 1), expected, elementwise(TOLERANCE)).holds, name
    kept = decoder.report.cache
    each = sum(size // tokens for _, size, window, tokens in kept.stores if window is None)
    return ", ".join([
        *([f"{each:,} bytes a token"] if each else []),
        *([f"a state of {kept.bytes_per_row:,} bytes"] if kept.bytes_per_row else []),
    ])  # fmt: skip


def plain(reason: str) -> str:
    """A reason without lines of this gallery's own file, and without what every such reason ends in."""
    reason = re.sub(r" (\()?(at )?workshop/gallery/variants\.py:\d+(?(1)\))", "", " ".join(reason.split()))
    return reason.split(" A decoder needs every token")[0]


def measured(name: str) -> dict[str, Row]:
    """What was found, and the times at more tokens."""
    row, ids = found_in(name), ids_of(VARIANTS[name].tokens)
    model, compiled = model_of(name), attngraph.compile(model_of(name), min_scores=0)
    calls = {"eager": lambda: model(ids), "attngraph": lambda: compiled(ids)}
    taken = times(calls, rounds=9)
    return {"eager": taken["eager"], "attngraph": {**taken["attngraph"], **row}}


def cells(_: Options) -> Iterator[Cell]:
    """A cell for each variant."""
    quietly()
    for name in VARIANTS:
        yield Cell(name, functools.partial(measured, name))


# --- the page ---


def table() -> str:
    """The table of the page, from the file."""
    found: Row = json.loads(FILE.read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Row]] = {}
    for row in found["rows"]:
        rows.setdefault(row["cell"], {})[row["name"]] = row
    head = [
        "attention",
        "mask",
        "in attngraph",
        "decodes, keeping",
        "eager, ms",
        "attngraph, ms",
        "times as fast",
    ]
    lines = [head]
    for name, of in VARIANTS.items():
        mine, eager = rows[name]["attngraph"], rows[name]["eager"]
        note = f" ({of.tokens} tokens)" if of.tokens != 1024 else ""
        drawn = f'<img src="{_picture(name)}" alt="the mask" width="96">' if mine["masks"] else ""
        figures = [f"{1e3 * row['seconds']:.1f}" for row in (eager, mine)]
        lines.append([
            f"**{name}**{note}: {in_one_cell(of.about)}", drawn, in_one_cell(verdict(mine)),
            in_one_cell(mine["decodes"]), *figures, f"{eager['seconds'] / mine['seconds']:.2f}",
        ])  # fmt: skip
    ours = [rows[name]["attngraph"] for name in VARIANTS]
    whole = sum(bool(row["fused"]) and not row["missed"] for row in ours)
    summed = sum(bool(row["done"]) for row in ours)
    decode = sum(not row["decodes"].startswith("no: ") for row in ours)
    summary = (
        f"Of {len(ours)} variants {whole} fuse whole, {summed} without a softmax have sums over keys and "
        f"values taken first, and {decode} decode. {run_of(found)}"
    )
    return f"{summary}\n\n{markdown(lines)}"


def verdict(row: Row) -> str:
    """What becomes of a variant: fused, summed in another order, or left and why."""
    said = [] if not row["fused"] else ["fuses"] if not row["missed"] else [f"{row['fused']} fuse"]
    said += dict.fromkeys(row["done"])
    reasons = dict.fromkeys([*row["missed"], *row["left"]])
    said += [f"left: {reason}" for reason in reasons]
    return "; ".join(said or ["left: nothing in it looks like attention with a softmax"])


def _picture(name: str) -> str:
    return f"pictures/gallery/{re.sub(r'[^a-z0-9]+', '-', name.lower())}.svg"


def pictures() -> dict[str, str]:
    """The pictures of masks, by their files below docs/."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    return {_picture(row["cell"]): _svg(row["masks"]) for row in rows if row.get("masks")}


def _svg(masks: Sequence[Sequence[str]]) -> str:
    """Masks side by side, a square for each pair that is seen; queries from above, keys from the left."""
    parts = []
    for place, mask in enumerate(masks):
        left = place * (SIDE + 2)
        seen = "".join(
            f"M{left + run.start()} {y}h{len(run[0])}v1h-{len(run[0])}z"
            for y, row in enumerate(mask) for run in re.finditer("#+", row)
        )  # fmt: skip
        parts.append(f'<path d="{seen}" fill="#3b7dd8"/>')
        parts.append(
            f'<path d="M{left} 0h{SIDE}v{SIDE}h-{SIDE}z" fill="none" stroke="#888" stroke-width=".3"/>'
        )
    box = f"-.5 -.5 {len(masks) * (SIDE + 2) - 1} {SIDE + 1}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">{"".join(parts)}</svg>\n'


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="of what the file has not, and write the page")


def _after(options: Options, rows: Sequence[Row]) -> str:
    ours = [row for row in rows if row["name"] == "attngraph"]
    return "\n".join(f"{row['cell']}: {verdict(row)}; decodes: {row['decodes']}" for row in ours)


SUITE = Suite("gallery", __doc__, cells, _arguments, base="eager", after=_after)


def main(argv: Sequence[str]) -> int:
    """Measure, and with --write bring the file, the pictures and the page up to date."""
    is_written = "--write" in argv
    code = SUITE.main([*argv, *(["--json", str(FILE), "--resume"] if is_written else [])])
    if is_written:
        for name, picture in pictures().items():
            (DOCS / name).parent.mkdir(exist_ok=True)
            (DOCS / name).write_text(picture, encoding="utf-8")
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return code
