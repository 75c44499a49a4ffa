"""What the README and the docs show is true: their examples run and print what the pages say, their dumps and
pictures are those of a run of today, every reason that the compiler gives is explained, links lead somewhere,
and the site builds offline and loads nothing from outside."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import attngraph
from attngraph.cli import main

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted([*(p for p in DOCS.rglob("*.md") if not p.is_symlink()), README, ROOT / "CHANGELOG.md"])
FENCE = re.compile(r"^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(page: Path) -> list[tuple[int, str, str]]:
    """(line, what the fence says behind `python`, code) of each example, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, m.start("code")), m["info"].strip(), m["code"]) for m in FENCE.finditer(text)
    ]


def reason_not_to_run(info: str) -> str:
    """What `{ title="not run: ..." }` says, or the script of which the example is a part; a reader sees it
    above the example."""
    found = re.search(r'title="(?:not run: )?([^"]+)"', info)
    return found[1] if found else ""


RUN_ELSEWHERE = {"plugs.md": "test_plugs_examples.py", "testing.md": "test_testing.py"}
"""Pages whose examples need files or packages of their own: which tests run them."""
WITH_EXAMPLES = [page for page in PAGES if examples(page) and page.name not in RUN_ELSEWHERE]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_as_a_reader_does(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A file in a new process with default settings, but for a cache on disk of its own."""
    (folder / "example.py").write_text(code, encoding="utf-8")
    settings = {name: value for name, value in os.environ.items() if not name.startswith("ATTNGRAPH_")}
    settings |= {"ATTNGRAPH_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "example.py"],
        cwd=folder, env=settings, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_the_examples_of_a_page_run_in_order_as_a_reader_runs_them(page: Path, tmp_path: Path) -> None:
    """All in one file. The code keeps its lines, so that an error names those of the page."""
    pasted = ""
    for line, info, code in examples(page):
        if not reason_not_to_run(info):
            pasted += "\n" * (line - pasted.count("\n")) + code
    done = run_as_a_reader_does(pasted, tmp_path)
    assert done.returncode == 0, f"{name_of(page)}, whose lines are those of example.py:\n{done.stderr}"


def without_measurements(report: str) -> str:
    """A report without times, rounding errors, and the name of the CPU's kernel (one needs a C compiler)."""
    report = re.sub(r"^ +the C compiler took .*\n", "", report, flags=re.MULTILINE)
    report = re.sub(r" +[\d.]+ m?s(?=$|,)", " TIME", report, flags=re.MULTILINE)
    return re.sub(r"\(error \S+\)|\bcpu\.\w+", "...", report).strip()


@pytest.mark.parametrize("page", [README, DOCS / "index.md"], ids=name_of)
def test_the_example_at_the_start_of_a_page_runs_when_pasted_and_prints_the_report_below_it(
    page: Path, tmp_path: Path
) -> None:
    """In a file of its own and a new process: the page's code up to the first that prints the report."""
    pasted = []
    for _, _, code in examples(page):
        pasted.append(code)
        if "print(compiled.report)" in code:
            break
    done = run_as_a_reader_does("".join(pasted), tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.search(r"^```text\n(attngraph: .*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert shown, f"{page.name} shows no report"
    assert without_measurements(shown[1]) == without_measurements(done.stdout), f"paste this:\n{done.stdout}"


def test_the_picture_of_the_readme_is_the_mask_of_its_report_as_show_draws_it(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    command = re.search(r"^attngraph show (.+ --svg) (docs/\w+\.svg)$", text, re.MULTILINE)
    assert command, "README.md does not say which command drew its picture"
    drawn = tmp_path / "drawn.svg"
    assert main(["show", *shlex.split(command[1]), str(drawn)]) == 0
    assert (ROOT / command[2]).read_text("utf-8") == drawn.read_text("utf-8"), f"run {command[0]}"
    assert f"]({command[2]})" in text
    program = shlex.split(command[1])[0]
    assert all(f"      | {line}\n" in text for line in program.split("; ")), "the report is of another mask"


def test_the_docs_count_the_spellings_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "fusion")
    spellings = importlib.import_module("spellings")
    fused, known = len(spellings.MUST_FUSE), len(spellings.MUST_FUSE) + len(spellings.NOT_YET)
    readme, benchmarks, coverage = (
        " ".join(page.read_text("utf-8").split())
        for page in (README, DOCS / "benchmarks.md", DOCS / "coverage.md")
    )
    assert f"{fused} of the {known} ways to write attention" in readme
    assert f"{fused} of {known} fuse, all equal to eager" in benchmarks
    assert f"{known} ways to write attention" in coverage
    assert f"of which {fused} fuse" in coverage


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_an_example_says_nothing_behind_its_language_but_why_it_is_not_run(page: Path) -> None:
    for line, info, _ in examples(page):
        assert not info or reason_not_to_run(info), f"{page}:{line + 1}: {info}"


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_a_part_of_a_script_is_in_the_script_which_a_test_runs(page: Path) -> None:
    run = (ROOT / "tests" / "test_examples.py").read_text(encoding="utf-8")
    for line, info, code in examples(page):
        script = re.search(r'title="examples/(\w+\.py)"', info)
        if script:
            assert code in (ROOT / "examples" / script[1]).read_text("utf-8"), f"{page}:{line + 1}"
            assert f'"{script[1]}"' in run
        else:
            assert "title=" not in info or 'title="not run: ' in info


@pytest.mark.parametrize("page", [p for p in PAGES if p.name in RUN_ELSEWHERE], ids=name_of)
def test_a_page_that_is_not_run_here_is_run_by_a_test_of_its_own(page: Path) -> None:
    assert page.name in (ROOT / "tests" / RUN_ELSEWHERE[page.name]).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def make_dumps() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("make_dumps", DOCS / "make_dumps.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATED = [
    p for p in PAGES if re.search("<!-- (dump|picture|codes) |make_dumps.py", p.read_text(encoding="utf-8"))
]


def version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


@pytest.mark.parametrize("page", GENERATED, ids=name_of)
def test_dumps_and_pictures_are_those_of_a_run_of_today(
    page: Path, make_dumps: types.ModuleType, golden: Callable[..., None]
) -> None:
    """An older torch captures some operations differently; for a newer one dumps have to be written anew."""
    written_with = make_dumps.VERSION.search((DOCS / "passes" / "index.md").read_text(encoding="utf-8"))
    assert written_with
    if version(torch.__version__) < version(written_with[0]):
        pytest.skip(f"the dumps were written with torch {written_with[0]}")
    text = page.read_text(encoding="utf-8")
    for file, found in {page: make_dumps.written(text), **make_dumps.pictures(text)}.items():
        golden(file, found, make_dumps.without_what_varies)


def test_the_index_for_language_models_lists_the_pages(
    make_dumps: types.ModuleType, golden: Callable[..., None]
) -> None:
    golden(DOCS / "llms.txt", make_dumps.index())


def test_every_picture_of_the_folder_is_shown_by_a_page() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = [p.relative_to(DOCS).as_posix() for p in (DOCS / "pictures").rglob("*.*")]
    assert [p for p in pictures if f"]({p})" not in shown and f'src="{p}"' not in shown] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_picture_is_a_file_of_its_own(page: Path) -> None:
    assert "<svg" not in prose(page), "markup that nobody can read: `<!-- picture NAME -->` before an image"


TELLS = ("Refusal", "_Refused", "NoDecoderError")


def reasons() -> Iterator[tuple[str, str]]:
    """(file, longest piece of fixed text) of every reason in the code that a report or an error shows."""
    folders = [ROOT / "attngraph", ROOT / "passes"]
    for path in sorted(p for folder in folders for p in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.func, ast.Name):
                continue
            silent = any(k.arg == "tell" and getattr(k.value, "value", 1) is False for k in node.keywords)
            if node.func.id not in TELLS or silent:
                continue
            pieces = [n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)]
            texts = [line for p in pieces if isinstance(p, str) for line in p.split("\n")]
            texts = [t.strip(" :(.") for t in texts if len(t.strip(" :(.")) > 8]
            if texts:
                yield path.name, max(texts, key=len)


def test_every_reason_that_the_compiler_gives_is_explained() -> None:
    page = " ".join((DOCS / "when-it-will-not-fuse.md").read_text(encoding="utf-8").split())
    missing = [f"{file}: {text}" for file, text in reasons() if " ".join(text.split()) not in page]
    assert not missing, "\n".join(missing)


class Asked(HTMLParser):
    """What a page loads by itself: scripts, styles, pictures, frames. Links that a reader follows are not."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed", "object", "use"):
            self.found += [values.get(name, "") for name in ("src", "srcset", "data", "href")]
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next", "edit"):
            self.found.append(values.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly by a process to which no other machine answers."""
    pytest.importorskip("zensical", reason='the documentation needs pip install -e ".[docs]"')
    folder = tmp_path_factory.mktemp("docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(DOCS, folder / "docs")
    (folder / "attngraph").symlink_to(ROOT / "attngraph")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=folder, env={**os.environ, **nowhere}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    assert "griffe" not in done.stdout + done.stderr, done.stdout + done.stderr
    return folder / "site"


@pytest.mark.slow
def test_the_site_has_every_page_and_the_reference(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).exists(), page
    reference = (site / "api.html").read_text(encoding="utf-8")
    for name in attngraph.__all__:
        assert name in reference, f"{name} is public and not in docs/api.md"


@pytest.mark.slow
def test_no_page_of_the_site_loads_anything_from_outside(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        asked = Asked()
        asked.feed(page.read_text(encoding="utf-8"))
        outside = [url for url in asked.found if re.match(r"(https?:)?//", url)]
        assert not outside, f"{page.name}: {outside}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import", style.read_text(encoding="utf-8")), style


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [name_of(p) for p in DOCS.rglob("*.md") if f" {p.relative_to(DOCS)}\n" not in nav]
    assert not missing


def test_every_entry_of_the_navigation_has_a_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [entry for entry in re.findall(r"[\w/-]+\.md", nav) if not (DOCS / entry).exists()] == []


LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What links may name behind `#`: the headings of a page, as GitHub and the site write them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_link_or_a_picture_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    for found in LINK.finditer(prose(page)):
        target, heading = found[1], found[2]
        if target.startswith(("http:", "https:")):
            continue
        file = page.parent / target if target else page
        assert file.exists(), found[0]
        assert not heading or heading in anchors(file), found[0]
