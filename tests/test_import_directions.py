"""Who may import whom: the table of DESIGN.md section 1, held against the imports in the files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "attngraph"
CORE = {"pipeline", "entries", "errors", "ir", "meaning"}
MAY_IMPORT = {
    "errors": set(),
    "ir": {"errors", "ir"},
    "meaning": {"ir", "errors", "meaning"},
    "structure": set(),
    "replaced": set(),
    "entries": set(),
    "report": {"entries", "page"},
    "dump": {"entries", "report", "errors", "ir"},
    "pipeline": {"ir", "errors", "entries", "dump"},
    "picture": {"ir", "meaning"},
    "programs": set(),
    "files": set(),
    "page": {"files", "entries", "errors", "ir", "report", "picture"},
    "runtime": {"ir", "errors", "structure", "capture", "report", "runtime"},
    "exported": {"ir", "errors"},
    "functional": {"replaced", "ir", "exported"},
    "capture": {"replaced", "exported", "functional", "ir", "errors", "structure", "runtime"},
    "pieces": {"entries", "report", "errors"},
    "passes": CORE | {"passes"},
    "codegen": {"ir", "codegen"},
    "codegen/benchmark": {"__init__", "codegen", "models", "errors"},
    "models": {"models"},
    "fuzz": {"__init__"},
    "testing": {"__init__", "entries", "errors", "report", "runtime", "structure"},
    "pytest_plugin": {"testing"},
    "hf": {"__init__", "runtime"},
}
"""What each part may import of ours, besides itself. Parts that are not named may import anything,
except for what is only for the composition root. `report` imports `page`, which shows it, in a function."""
ONLY_FROM_THE_ROOT = {"passes", "codegen"}
ONLY_FROM_THE_COMMAND_LINE = {"fuzz"}
ROOTS = {"options", "lower", "convert", "cli"}
CODEGEN_MAY_ALSO = {"attngraph.meaning.tiles", "attngraph.meaning.causal"}


def _package(path: Path) -> str:
    """The part of the program that a file belongs to; benchmarks use it from outside, as anybody may."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "codegen/benchmark" if parts[:2] == ("codegen", "benchmark") else parts[0]


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of ours that a file imports, `attngraph.` and all, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] == "attngraph")


FILES = sorted(p for p in ROOT.rglob("*.py") if "__pycache__" not in p.parts)
for linked in ("passes", "codegen", "models"):
    FILES += sorted((ROOT / linked).rglob("*.py"))
FILES = sorted(set(FILES))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_linked_folders_are_among_the_files_looked_at() -> None:
    found = {_package(path) for path in FILES}
    assert {"passes", "codegen", "models", "ir", "meaning", "runtime"} <= found


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_a_file_imports_only_what_its_part_may(path: Path) -> None:
    part = _package(path)
    if part == "__init__":
        return
    for imported, line in _imports(path):
        wanted = imported.split(".")[1] if "." in imported else "__init__"
        if wanted == part:
            continue
        where = f"{_name(path)}:{line} imports {imported}"
        assert wanted not in ONLY_FROM_THE_COMMAND_LINE or part == "cli", f"{where}; only cli may"
        if wanted in ONLY_FROM_THE_ROOT:
            assert part in ROOTS or part.startswith(f"{wanted}/"), (
                f"{where}; only {', '.join(sorted(ROOTS))} may"
            )
        if part in MAY_IMPORT:
            also = part == "codegen" and imported.startswith(tuple(CODEGEN_MAY_ALSO))
            assert also or wanted in MAY_IMPORT[part], (
                f"{where}; {part} may import {sorted(MAY_IMPORT[part])}"
            )


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_file_imports_a_top_level_folder_by_its_bare_name(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        assert not {n.split(".")[0] for n in names} & {"passes", "codegen", "models"}, _name(path)


def test_every_file_says_what_it_is_for() -> None:
    silent = [
        _name(path)
        for path in FILES
        if path.read_text(encoding="utf-8").strip()
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent
