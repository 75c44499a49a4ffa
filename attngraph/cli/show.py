"""`attngraph show PROGRAM`: a score program normalised, its mask in words and as a picture, and its cost.

PROGRAM is a score program as text, a file that holds one ("-" is standard input), or the name of a well-known
one (`report/programs.py`). Tensors that a program reads are unknown here, except for well-known programs,
which have example tensors.
"""

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from attngraph.cli.terminal import TargetError
from attngraph.errors import meant, reason_of, told_as
from attngraph.ir.language import ProgramError, ScoreProgram, parse
from attngraph.ir.records import write_whole
from attngraph.report.picture import TileMap, marks, mask_map, tile_map, to_svg, to_text
from attngraph.report.programs import WELL_KNOWN

SMALL = 24
"""Queries, and keys, of the picture that shows every pair."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is shown: a program, with sizes and tensors for the whole picture and for the small one."""

    program: ScoreProgram
    about: str
    sizes: tuple[int, ...]
    reads: tuple[Tensor, ...]
    small_sizes: tuple[int, ...]
    small_reads: tuple[Tensor, ...]


def run(options: argparse.Namespace) -> int:
    no_value = told_as(TargetError, RuntimeError, before="the program has no value here: ")
    with no_value, told_as(TargetError, ProgramError, ValueError, IndexError):
        _show(options)
    return 0


def _show(options: argparse.Namespace) -> None:
    if min(options.head) < 0 or options.width < 1:
        raise TargetError("--head counts from 0 and --width must be at least 1.")
    queries, keys = (
        next(n for n in (mine, other, 1024) if n is not None)
        for mine, other in ((options.queries, options.keys), (options.keys, options.queries))
    )
    subject = _subject(options.program, queries, keys, _sizes(options.size))
    program, heads = subject.program, tuple(dict.fromkeys(options.head))
    whole = tile_map(program, queries, keys, options.tile, subject.reads, subject.sizes, heads=heads)
    sides = (min(queries, SMALL), min(keys, SMALL))
    first = mask_map(program, *sides, subject.small_reads, subject.small_sizes, heads=heads)
    if options.svg is not None:
        with told_as(TargetError, OSError, before=f"cannot write {options.svg}: ", words=_reason):
            write_whole(options.svg, to_svg(whole, subject.about))
    if options.json:
        print(json.dumps(_as_json(subject, whole, first, options.width), indent=2))
        return
    print(_as_text(subject, whole, first, options.width))


def _subject(text: str, queries: int, keys: int, sizes: dict[int, int]) -> Subject:
    known = WELL_KNOWN.get(text)
    program = parse(known.text if known else _read_program(text))
    unused = [n for n in sizes if n >= program.sizes]
    if unused:
        names = ", ".join(f"n{n}" for n in range(program.sizes)) or "no size"
        raise TargetError(f"--size n{unused[0]} is given, but the program names {names}.")
    if known is None:
        missing = [n for n in range(program.sizes) if n not in sizes]
        if missing:
            raise TargetError(f"the program names n{missing[0]}; say what it is: --size n{missing[0]}=128")
        chosen = tuple(sizes[n] for n in range(program.sizes))
        return Subject(program, "", chosen, (), chosen, ())
    chosen = tuple(sizes.get(n, value) for n, value in enumerate(known.sizes))
    small = chosen if sizes or max(queries, keys) <= SMALL else known.small
    sides = (min(queries, SMALL), min(keys, SMALL))
    reads, small_reads = known.reads(queries, keys, chosen), known.reads(*sides, small)
    return Subject(program, known.about, chosen, reads, small, small_reads)


def _read_program(text: str) -> str:
    """The text of a program: from standard input, from a file, or as given."""
    if text == "-":
        return sys.stdin.read()
    path = Path(text)
    if not re.fullmatch(r"[\w./~\\-]+", text):
        return text
    before = f"cannot read {path}: "
    with told_as(TargetError, OSError, UnicodeDecodeError, before=before, words=_reason):
        if path.exists():
            return path.read_text(encoding="utf-8")
    raise TargetError(
        f"{text!r} is no score program, no file, and no well-known program; {meant(text.lower(), WELL_KNOWN)}"
    )


def _sizes(given: list[str]) -> dict[int, int]:
    found: dict[int, int] = {}
    for text in given:
        match = re.fullmatch(r"n(\d+)=(\d+)", text)
        if match is None:
            raise TargetError(f"--size takes n0=128 and the like, found {text!r}.")
        found[int(match[1])] = int(match[2])
    return found


def _reason(problem: BaseException) -> str:
    return reason_of(problem) if isinstance(problem, OSError) else "it is not text in UTF-8"


def _as_text(subject: Subject, whole: TileMap, first: TileMap, width: int) -> str:
    lines = [subject.about, ""] if subject.about else []
    lines += [f"  | {line}" for line in str(subject.program).splitlines() or ["(nothing: s = dot)"]]
    lines += [f"  {f'n{number}':<7} {value}" for number, value in enumerate(subject.sizes)]
    for number, read in enumerate(subject.reads):
        what = f"{str(read.dtype).removeprefix('torch.')} {list(read.shape)}"
        lines.append(f"  {f'r{number}':<7} an example: {what}")
    sizes = ", ".join(f"n{n} = {v}" for n, v in enumerate(subject.small_sizes))
    sizes = f", with {sizes}" if subject.small_sizes != subject.sizes else ""
    heading = f"  {first.queries} queries and {first.keys} keys, pair by pair{sizes}"
    lines += [f"  mask    {whole.mask}", "", heading, to_text(first)]
    if (whole.queries, whole.keys) != (first.queries, first.keys):
        lines += ["", f"  {whole.queries} queries and {whole.keys} keys, by tiles", to_text(whole)]
    shares = ", ".join(f"{share:.1%} {state}" for state, share in whole.shares.items() if share)
    return "\n".join([*lines, "", f"  in tiles of {whole.tile}: {shares}", *_cost(whole, width)])


def _operations(whole: TileMap, width: int) -> dict[str, int]:
    """Floating-point operations of both products: for all pairs, and the least and most that are computed."""
    pairs, each = whole.pairs, 4 * width
    least = (pairs["full"] + pairs["partial"]) * each
    more = (pairs["filled"] + pairs["unknown"]) * each
    return {"all": sum(pairs.values()) * each, "least": least, "most": least + more}


def _cost(whole: TileMap, width: int) -> list[str]:
    """Lines of text with the operations that the tiles take."""
    operations = _operations(whole, width)
    total, least, most = (operations[name] for name in ("all", "least", "most"))
    heads = sum(len(panel.heads) for panel in whole.panels)
    of = f"{_flops(total)} ({heads} head{'s' if heads > 1 else ''} of width {width}, {4 * width} for a pair)"
    counts, shares = _flops(most), f"{most / total:.1%}"
    if least != most:
        counts, shares = f"{_flops(least)} to {counts}", f"{least / total:.1%} to {shares}"
    found = [f"  computed: {counts} of {of}, {shares}"]
    if whole.pairs["filled"]:
        found.append("  filled tiles are left out where a run shows that their weights underflow to zero")
    if whole.looked:
        bounds = "kernels go by bounds in a tile, and may compute more"
        found.append(f"  tensors were read pair by pair here; {bounds}")
    return found


def _flops(count: int) -> str:
    for unit, size in (("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,} FLOP"


def _as_json(subject: Subject, whole: TileMap, first: TileMap, width: int) -> dict[str, Any]:
    return {
        "program": str(subject.program), "mask": whole.mask, "sizes": list(subject.sizes),
        "legend": {mark: state for state, mark in marks().items()},
        "pairs": {**_picture_json(first), "sizes": list(subject.small_sizes)},
        "tiles": {**_picture_json(whole), "evaluated": whole.looked},
        "operations": {"head_width": width, **_operations(whole, width)},
    }  # fmt: skip


def _picture_json(drawn: TileMap) -> dict[str, Any]:
    signs = marks()
    return {
        "queries": drawn.queries, "keys": drawn.keys, "tile": drawn.tile, "shares": drawn.shares,
        "fills": list(drawn.fills), "decided_by": list(drawn.unknown),
        "heads": [
            {"heads": list(panel.heads), "rows": ["".join(signs[s] for s in row) for row in panel.rows]}
            for panel in drawn.panels
        ],
    }  # fmt: skip
