"""What the docs name is there: files, names of Python, options of calls and of commands, variables of the
environment, versions, passes, and the numbers that count rows of the same page."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import re
import shlex
import tomllib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attngraph
from attngraph import passes
from attngraph.api.compiled import CompiledModule
from attngraph.api.options import CompileOptions
from attngraph.api.torch_backend import _OF_THE_BACKEND
from attngraph.cli.arguments import parser
from attngraph.runtime.kv_cache import KVCache

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(p for p in (ROOT / "docs").rglob("*.md") if not p.is_symlink()), *ROOT.glob("*.md")])
FENCE = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
each_page_about_us = pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p.name not in ("steps.md", "found.md")],
    ids=lambda p: str(p.relative_to(ROOT)),
)
"""All but the pages that tell files and functions of other projects."""


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def spans(page: Path) -> list[str]:
    """What stands between backticks in the running text, each on one line."""
    return [" ".join(span.split()) for span in SPAN.findall(prose(page))]


# --- files -------------------------------------------------------------------------------------------

FILE = re.compile(r"[\w.-]+(/[\w.*-]+)*(/|\.(py|md|html|json|yml|toml|txt|c|h|svg))")
OF_THE_READER = {"example.py", "golden/name.txt", "card.json", "lm.py:LM"}
"""Files that a page tells its reader to write."""


@functools.cache
def tree() -> tuple[str, ...]:
    """Every file and folder of the repository, as `/folder/file`."""
    skipped = ("site", "build", "dist", "runs")
    return tuple(
        f"/{p.relative_to(ROOT)}" + "/" * p.is_dir()
        for top in ROOT.iterdir() if (top.name[0] != "." or top.name == ".github")
        and top.name not in skipped
        for p in (top, *(top.rglob("*") if top.is_dir() else ())) if "__pycache__" not in p.parts
    )  # fmt: skip


@functools.cache
def source() -> str:
    """The code of the package, in which the names of files stand that it writes."""
    rooms = [ROOT / room for room in ("attngraph", "passes", "codegen")]
    return "\n".join(p.read_text("utf-8") for room in rooms for p in sorted(room.rglob("*.py")))


@each_page_about_us
def test_a_file_that_a_page_names_is_there_or_is_written_by_the_code(page: Path) -> None:
    named = {s for s in spans(page) if FILE.fullmatch(s)} - OF_THE_READER
    missing = [
        name for name in sorted(named)
        if not any(path.rstrip("/").endswith(f"/{name.rstrip('/')}") for path in tree())
        and name.rpartition("/")[2].partition("*")[0] not in source()
    ]  # fmt: skip
    assert missing == []


# --- names and calls of Python -----------------------------------------------------------------------

STANDS_FOR: dict[str, Any] = {
    "attngraph": attngraph, "compiled": CompiledModule, "decoder": attngraph.Decoder,
    "report": attngraph.CompileReport, "engine": attngraph.Engine, "state": KVCache,
}  # fmt: skip
"""What the pages call things. Of an instance, its class."""
OF_THE_MODEL = {"compiled.generate", "compiled.unshard", "attngraph.backends"}
"""Methods that a compiled module has from its model, and a group of entry points."""


def resolved(name: str) -> Any:
    """What a dotted name stands for, None where nothing is known of it; raises AttributeError where there is
    no such name."""
    first, *rest = name.split(".")
    found = STANDS_FOR[first] if first in STANDS_FOR else getattr(attngraph, first)
    for part in rest:
        fields = {n for k in getattr(found, "__mro__", ()) for n in inspect.get_annotations(k)}
        if found is None or (part in fields and not hasattr(found, part)):
            return None
        if inspect.ismodule(found) and not hasattr(found, part):
            path = f"{found.__name__}.{part}"
            op = found is attngraph and hasattr(torch.ops.attngraph, part)
            found = getattr(torch.ops.attngraph, part) if op else importlib.import_module(path)
            continue
        found = getattr(found, part)
        if isinstance(found, property):
            found = typing.get_type_hints(found.fget)["return"]
    return found


def is_ours(name: str) -> bool:
    first, *rest = name.split(".")
    return name not in OF_THE_MODEL and (
        (first in STANDS_FOR and bool(rest)) or (not rest and first in attngraph.__all__)
    )


def calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """(dotted name, keywords) of each call in a piece of Python."""
    try:
        tree = ast.parse(text.replace("...", "0"))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if re.fullmatch(r"[\w.]+", name):
                yield name, [k.arg for k in node.keywords if k.arg]


def takes(function: Callable[..., Any]) -> set[str] | None:
    """The keywords of a call; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if function is attngraph.compile:
        return {"model", "cache", *CompileOptions.__annotations__}
    return None if any(p.kind == p.VAR_KEYWORD for p in parameters) else {p.name for p in parameters}


def pieces(page: Path) -> list[str]:
    return [
        *spans(page),
        *(m["code"] for m in FENCE.finditer(page.read_text("utf-8")) if m["kind"] == "python"),
    ]


@each_page
def test_a_name_of_ours_that_a_page_uses_is_there(page: Path) -> None:
    names = {s for s in spans(page) if re.fullmatch(r"\w+(\.\w+)+", s) and is_ours(s)}
    names |= {name for piece in pieces(page) for name, _ in calls(piece) if is_ours(name)}
    names -= {name for name in names if FILE.fullmatch(name)}
    missing = []
    for name in sorted(names):
        try:
            resolved(name)
        except (AttributeError, ImportError):
            missing.append(name)
    assert missing == []


@each_page
def test_a_call_of_ours_that_a_page_shows_has_the_keywords_that_are_given(page: Path) -> None:
    wrong = []
    for name, keywords in (call for piece in pieces(page) for call in calls(piece) if is_ours(call[0])):
        try:
            function = resolved(name)
        except (AttributeError, ImportError):
            continue  # the test above
        known = takes(function) if callable(function) else None
        wrong += [f"{name}({word}=)" for word in keywords if known is not None and word not in known]
    assert wrong == []


OF_OTHERS = {
    "AutoTokenizer", "lambada_openai", "simple_evaluate", "torch_compile_backend", "present_key_values",
    "verb_object", "OLD_DIR", "logits_to_keep", "PagedAttentionCache", "generate_batch", "continuous_api",
    "continuous_batching", "init_continuous_batching", "switch_to_cb_friendly_attn", "_load_model",
    "add_fused_lm_head", "PeftModel",
}  # fmt: skip
"""Words of other packages, and words that stand for others."""


@functools.cache
def words_of_the_repository() -> frozenset[str]:
    rooms = ("attngraph", "passes", "codegen", "models", "workshop", "examples", "tests")
    files = [
        p for room in rooms for p in (ROOT / room).rglob("*") if p.suffix in (".py", ".h", ".pyi", ".js")
    ]
    found = {word for p in files for word in re.findall(r"\w+", p.read_text("utf-8"))}
    return frozenset(found | {p.stem for p in files} | OF_OTHERS)


@each_page_about_us
def test_a_word_of_code_that_a_page_uses_is_in_the_code_or_in_an_example_of_the_page(page: Path) -> None:
    here = set(re.findall(r"\w+", " ".join(m["code"] for m in FENCE.finditer(page.read_text("utf-8")))))
    used = {w for s in spans(page) for w in re.findall(r"[A-Za-z_]\w*", s)}
    names = {w for w in used if "_" in w or re.search("[a-z][A-Z]", w)}
    names |= {w for s in spans(page) for w in re.findall(r"\b[A-Z]\w*\.([a-z]\w*)", s)}
    assert sorted(names - here - words_of_the_repository()) == []


# --- commands ----------------------------------------------------------------------------------------


def commands() -> dict[str, set[str]]:
    (sub,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: {o for a in p._actions for o in a.option_strings} for name, p in sub.choices.items()}


def lines_of_shell(page: Path) -> Iterator[list[str]]:
    blocks = [m["code"] for m in FENCE.finditer(page.read_text("utf-8")) if m["kind"] in ("sh", "text", "")]
    for line in (line for text in (*blocks, *spans(page)) for line in text.replace("\\\n", " ").splitlines()):
        found = re.search(r"(?:^\s*|&& |bin/)attngraph ([a-z]+( .*)?)$", line)
        if found and not re.match(r"[a-z]+ [a-z]+ [a-z]+", found[1]):  # a sentence
            try:
                yield shlex.split(found[1].partition("   ")[0], comments=True)
            except ValueError:
                continue


@each_page
def test_a_command_that_a_page_shows_has_the_options_that_are_given(page: Path) -> None:
    wrong = []
    for name, *words in lines_of_shell(page):
        if name not in commands():
            wrong.append(name)
            continue
        options = {w.partition("=")[0] for w in words if re.match(r"--?[a-z]", w)}
        wrong += [f"{name} {option}" for option in sorted(options - commands()[name])]
    assert wrong == []


def test_every_command_and_every_option_of_compile_has_a_row_at_the_start() -> None:
    page = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert [c for c in commands() if f"| `attngraph {c}" not in page] == []
    options = sorted({*CompileOptions.__annotations__, "cache"})
    assert [name for name in options if not re.search(rf"^\|.*`{name}=", page, re.MULTILINE)] == []


def test_the_options_of_torch_compile_are_all_told() -> None:
    page = " ".join((ROOT / "docs" / "plugs.md").read_text("utf-8").split())
    (told,) = re.findall(r"`options` takes the keyword arguments .*? They are: (.*?)\.", page)
    assert set(SPAN.findall(told)) == set(_OF_THE_BACKEND)


# --- variables, versions, passes, the reference --------------------------------------------------------


def test_variables_of_the_environment_are_those_of_the_code() -> None:
    told = {v for page in PAGES for v in re.findall(r"\bATTNGRAPH_[A-Z_]+\b", page.read_text("utf-8"))}
    (ci,) = {(ROOT / ".ci" / "run").read_text("utf-8")}
    used = set(re.findall(r"\bATTNGRAPH_[A-Z_]+\b", source()))
    assert told - used - set(re.findall(r"\bATTNGRAPH_[A-Z_]+\b", ci)) == set()
    assert used - told == set()


@each_page
def test_the_versions_that_are_needed_are_those_of_the_project(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [
        project["requires-python"].replace(">=", "Python>="),
        *project["dependencies"],
        *extras["transformers"],
    ]
    least = dict(re.match(r"(\w+)>=([\d.]+)", n).groups() for n in needed)  # type: ignore[union-attr, misc]
    text = " ".join(prose(page).split())
    told = re.findall(r"\b(torch|Python|transformers|triton) ([\d.]*\d) or newer", text)
    assert [(name, v) for name, v in told if least[name] != v] == []
    assert set(re.findall(r"\bversion (\d+\.\d+\.\d+), not yet released", text)) <= {attngraph.__version__}


def names_of(page: str, pattern: str) -> list[str]:
    text = (ROOT / "docs" / "passes" / page).read_text("utf-8")
    return re.findall(pattern, text, re.MULTILINE)


def test_the_pages_tell_the_passes_in_their_order() -> None:
    whole = [step.name for step in passes.order()]
    assert names_of("index.md", r"^\| \[([\w-]+)\]\(") == whole
    drawn = (
        (ROOT / "docs" / "design.md").read_text("utf-8").partition("passes/")[2].partition("Executable")[0]
    )
    assert re.findall(r"[a-z]+(?:-[a-z]+)+|canonicalize", drawn) == whole
    decoder = [step.name for step in passes.order(decoder=True)]
    (told,) = names_of("index.md", r"^A decoder runs ((?:.|\n)*?)\.\s(?=[A-Z])")
    told = re.sub(r"\]\(.*?\)", "]", told)
    assert re.findall(r"[a-z]+(?:-[a-z]+)+|canonicalize|tidy", told) == decoder


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    told = re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)
    missing = []
    for name in attngraph.__all__:
        value = getattr(attngraph, name)
        place = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', name)}"
        if not any(t == place or t == getattr(value, "__module__", None) for t in told):
            missing.append(place)
    assert missing == []
    for name in told:
        resolved(name)


# --- counts ------------------------------------------------------------------------------------------


@each_page
def test_a_heading_that_counts_has_as_many_rows_below_it(page: Path) -> None:
    """`### Decoders: 24 of 24 equal`: the last column says `equal` of so many names in the first."""
    for heading in re.finditer(r"^#+ .*?: (\d+) of (\d+) (\w+)\n(.*?)(?=^#|\Z)", prose(page), re.M | re.S):
        rows = re.findall(r"^\|(.*)\|$", heading[4], re.MULTILINE)[2:]
        cells = [row.split("|") for row in rows]
        said = [last.strip() for first, *_, last in cells for _ in first.split(", ")]
        assert (len([s for s in said if s == heading[3]]), len(said)) == (int(heading[1]), int(heading[2]))


def test_the_outcomes_of_the_classes_add_up_and_are_listed() -> None:
    text = (ROOT / "docs" / "transformers.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\w ]+) \| (\d+) of (\d+) \|", text, re.MULTILINE)
    assert len({total for _, _, total in rows}) == 1
    assert sum(int(n) for _, n, _ in rows) == int(rows[0][2])
    for outcome, count, _ in rows:
        section = text.partition(f"\n## {outcome}\n")[2].partition("\n## ")[0]
        rows_below = re.findall(r"^\| \w+ \|", section, re.MULTILINE)[1:]
        listed = rows_below or section.strip().split("\n\n")[0].split(", ")
        assert len(listed) == int(count), outcome


def test_the_floors_of_the_design_are_those_that_hold() -> None:
    spec = importlib.util.spec_from_file_location("floors", ROOT / "tests" / "test_import_directions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = re.findall(
        r"^\| (\d+) \| (.*?) \|", (ROOT / "docs" / "design.md").read_text("utf-8"), re.MULTILINE
    )
    told = [set(re.findall(r"`(\w+)(?:\.py|/)`", rooms)) - {"workshop"} for _, rooms in reversed(rows)]
    assert [int(n) for n, _ in reversed(rows)] == list(range(1, len(module.FLOORS) + 1))
    assert told == [set(floor) for floor in module.FLOORS]
