"""Writes the generated parts of the docs: dumps of real runs, and pictures of masks.

    python docs/make_dumps.py            write them anew, in all pages
    python docs/make_dumps.py --check    say which pages are not as a run of today would write them

A page asks for a dump by a comment before a block of text, `<!-- dump CASE PASS before -->` or `after`, and
for a picture by `<!-- picture PROGRAM -->` before an image; the picture is written to `pictures/`. CASES
are the runs: small models of `models/`, compiled with `dump=`. Behind `<!-- codes -->` stands the table
of the reasons' codes, and `llms.txt` lists the pages. Nothing of it is written by hand; tests hold it
against a run.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import attngraph
from attngraph.models.masked_attention import CausalAttention
from attngraph.models.targets import seeded
from attngraph.reasons import IN_PIECES, KINDS, OF_NUMBERS, OTHER
from attngraph.report.picture import mask_map, to_svg
from attngraph.report.programs import WELL_KNOWN

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(
    r"(<!-- dump (\S+) (\S+) (before|after) -->\n```text\n).*?(^```$)", re.DOTALL | re.MULTILINE
)
PICTURE = re.compile(r"(<!-- picture (\S+) -->\n)(!\[[^\n]*\n)?")
CODES = re.compile(r"(<!-- codes -->\n)(?:\|.*\n)*")
PICTURES = DOCS / "pictures"
LLMS = """# attngraph

> A compiler for attention in PyTorch: textbook attention in, fused attention out, with decoders that have a
> key/value cache, and checks that a port computes what the original does.

Each page is NAME.html here and docs/NAME.md in a clone. Coding agents begin with "For coding agents".
"""


VERSION = re.compile(r"(?<=`python docs/make_dumps.py` with torch )\d+\.\d+")


def causal(folder: Path) -> None:
    """Causal attention alone: queries, keys and values are given."""
    with torch.no_grad():
        attngraph.compile(CausalAttention(), dump=folder)(*torch.randn(3, 2, 4, 7, 8))


CASES: dict[str, Callable[[Path], None]] = {case.__name__: case for case in (causal,)}


@functools.cache
def dumps(case: str) -> tuple[tuple[str, str], ...]:
    """Each dump of a case as (what wrote it, text), in order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, seeded():
            CASES[case](Path(folder))
            files = sorted(Path(folder).glob("graph-*/*.txt"))
            return tuple((file.stem.partition("-")[2], file.read_text().rstrip()) for file in files)
    finally:
        torch.set_num_threads(threads)


def dump(case: str, step: str, when: str) -> str:
    """The graph before or after a pass of a case: its notes, and what is not the same in both."""
    found = dumps(case)
    places = [n for n, (name, _) in enumerate(found) if name == step]
    if len(places) != 1:
        raise SystemExit(
            f"case {case} dumped {', '.join(name for name, _ in found)}; a page asks for {step}."
        )
    texts = [found[places[0] - 1][1], found[places[0]][1]]
    return different(*(texts if when == "before" else texts[::-1]))


def different(text: str, other: str) -> str:
    """A graph's notes, and its lines without those that the other graph has too (whatever their numbers and
    comments)."""
    (notes, lines), (_, others) = _parts(text), _parts(other)
    alike = [[re.sub(r"%\d+|  # .*", "", line) for line in of] for of in (lines, others)]
    shown = notes
    for what, start, end, *_ in difflib.SequenceMatcher(None, *alike, autojunk=False).get_opcodes():
        same = lines[start:end]
        if what == "equal" and len(same) > 3:
            same = [*same[: start > 0], "  ...", *same[len(same) - (end < len(lines)) :]]
        shown = shown + same
    return "\n".join(shown)


def _parts(text: str) -> tuple[list[str], list[str]]:
    """The notes of a dump, and its lines from the first graph on."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.endswith("("))
    return [line for line in lines[:start] if line.startswith("# ")], lines[start:]


def title(name: str) -> str:
    """What a picture of a well-known program shows."""
    known = WELL_KNOWN[name]
    sizes = ", ".join(f"n{number} = {value}" for number, value in enumerate(known.small))
    return f"{name}: {known.about}{sizes and f'; here {sizes}'}"


def picture(name: str) -> str:
    """The mask of a well-known program for 24 tokens, as SVG."""
    known = WELL_KNOWN[name]
    return to_svg(mask_map(known.text, 24, 24, known.reads(24, 24, known.small), known.small), title(name))


def pictures(page: str) -> dict[Path, str]:
    """The pictures that a page asks for, by file."""
    return {PICTURES / f"{m[2]}.svg": picture(m[2]) for m in PICTURE.finditer(page)}


def written(page: str) -> str:
    """A page with its generated parts as they are today."""
    page = VERSION.sub(".".join(torch.__version__.split(".")[:2]), page)
    page = BLOCK.sub(lambda m: f"{m[1]}{dump(m[2], m[3], m[4])}\n{m[5]}", page)
    page = CODES.sub(lambda m: m[1] + codes(), page)
    return PICTURE.sub(lambda m: f"{m[1]}![{title(m[2])}](pictures/{m[2]}.svg)\n", page)


def codes() -> str:
    """The kinds of reasons as a table."""
    rows = [f"| `{kind.code}` | {kind.change} |" for kind in (*KINDS, IN_PIECES, OF_NUMBERS, OTHER)]
    return "\n".join(["| code | what to change |", "|---|---|", *rows, ""])


def index() -> str:
    """`llms.txt`: each page of the site, with the first sentence that it has."""
    lines = []
    for line in (DOCS.parent / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2].splitlines():
        found = re.fullmatch(r" +- (.*?): ?(\S*)", line)
        if found is None:
            break
        told, page = found.groups()
        lines.append(
            f"- [{told}]({page[:-3]}.html): {first_sentence(page)}".rstrip(": ") if page else f"\n## {told}\n"
        )
    return LLMS + "\n".join(lines) + "\n"


def first_sentence(page: str) -> str:
    """What a page begins with, below its title, in plain text."""
    text = (DOCS / page).read_text("utf-8")
    text = re.sub(r"\A---\n.*?^---\n|^```.*?^```\n", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = [part for part in text.split("\n\n") if re.match(r"\s*[\w`]", part)]
    sentence = re.split(r"(?<=\.)\s|:(?=\s|$)", " ".join("".join(prose[:1]).split()))[0]
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence)


def without_what_varies(page: str) -> str:
    """Neither rounding errors, nor torch's names of sizes, nor which of the CPU's kernels there is (one
    needs a C compiler)."""
    page = re.sub(r"max error \S+\)", "max error ...)", page)
    page = re.sub(r"\bs\d+=", "s=", page)  # torch's own numbers of sizes
    return re.sub(r"\bcpu\.\w+", "cpu...", page)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the dumps and pictures of the docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is old")
    options = parser.parse_args(argv)
    old, files = [], {DOCS / "llms.txt": index()}
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        files |= {path: written(page), **pictures(page)}
    for file, found in files.items():
        known = file.read_text(encoding="utf-8") if file.exists() else ""
        if without_what_varies(found) != without_what_varies(known):
            old.append(str(file.relative_to(DOCS.parent)))
            if not options.check:
                file.parent.mkdir(exist_ok=True)
                file.write_text(found, encoding="utf-8")
    print("\n".join(old) if old else "nothing to write")
    return 1 if old and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
