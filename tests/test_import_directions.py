"""The house: every room stands on a floor, and its files import only from floors below.

docs/design.md has the same table with what is in each room. A room is a folder or a file below `attngraph/`;
inside the larger rooms, folders stand on floors of their own.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent / "attngraph"
FLOORS = (
    {"models", "reasons"},
    {"errors"},
    {"ir"},
    {"meaning"},
    {"codegen", "report"},
    {"pipeline", "capture"},
    {"passes", "runtime"},
    {"hf", "saved"},
    {"api"},
    {"testing", "exporter"},
    {"pytest_plugin", "__init__"},
    {"cli"},
    {"__main__"},
)
"""Rooms from the ground up: a file may import from its own room and from lower floors, nothing else."""
FLOORS_INSIDE = {
    "ir": (
        {"budgets", "choices", "versions", "cache_folder", "records", "operations", "dtypes",
         "walk", "kept", "exactly", "in_order", "modes"},
        {"language"}, {"ops"}, {"graph"},
    ),
    "meaning": (
        {"rule"}, {"algebra"}, {"masks", "constants", "wrapping"}, {"element"},
        {"rules"}, {"attention"}, {"check"}, {"tokens", "placement"}, {"__init__"},
    ),
    "capture": (
        {"instead", "structure"}, {"state"}, {"lines", "sides"},
        {"asked", "attributes"}, {"captured", "guards", "program", "side_effects", "subgraphs"},
        {"compared", "faster", "first_call", "flat", "graph_breaks"}, {"trace"}, {"__init__"},
    ),
    "codegen": ({"remarks"}, {"scalar"}, {"cpu"}, {"triton"}, {"__init__"}),
    "passes": (
        {"attention_entries", "build", "proposal", "named", "look_later",
         "shared_scores", "canonicalize", "fuse_attention",
         "merge_heads", "absorb_mla", "reassociate_linear", "tabulate_scores", "skip_padding",
         "insert_kv_cache",
         "divide_cache", "tidy", "quantised_linear", "fuse_token_wise", "order_sums", "quantise_cache",
        "select_kernels",
         "convert_heads", "shard", "shard_heads", "shard_tokens"},
        {"__init__"},
    ),
}  # fmt: skip
"""The same inside a room. `triton` stands above `cpu`: what it cannot write is left to `cpu.tiled`."""
ONLY_FROM_THE_ROOT = {
    "passes": {"api", "cli", "exporter"}, "codegen": {"api", "cli", "hf"},
}  # fmt: skip
"""What is put together in one place: the others know of passes and kernels through the IR alone."""


def _modules() -> dict[str, Path]:
    """Every module of ours by its dotted name; top-level folders under the name they are imported by."""
    files = [p for p in ROOT.rglob("*.py") if "__pycache__" not in p.parts]
    for linked in ("passes", "codegen", "models"):
        files += (ROOT / linked).rglob("*.py")
    found = {}
    for path in files:
        parts = ("attngraph", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return dict(sorted(found.items()))


MODULES = _modules()


@functools.cache
def _imports(module: str) -> tuple[tuple[str, int], ...]:
    """Modules of ours that a file imports, with the line."""
    return tuple(_imported(MODULES[module]))


def _imported(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "attngraph":
                yield name if name in MODULES else name.rpartition(".")[0] or name, node.lineno


def _room(module: str, depth: int = 1) -> str:
    parts = module.split(".")
    return parts[depth] if len(parts) > depth else "__init__"


def _floor(room: str, floors: tuple[set[str], ...]) -> int:
    found = [number for number, rooms in enumerate(floors) if room in rooms]
    assert len(found) == 1, f"{room} stands on {len(found)} floors"
    return found[0]


def test_files_import_only_from_floors_below() -> None:
    for module in MODULES:
        room = _room(module)
        for imported, line in _imports(module):
            where, wanted = f"{module}:{line} imports {imported}", _room(imported)
            if wanted != room:
                assert _floor(wanted, FLOORS) < _floor(room, FLOORS), where
                assert room in ONLY_FROM_THE_ROOT.get(wanted, {room}), where
            elif room in FLOORS_INSIDE and _room(imported, 2) != _room(module, 2):
                floors = FLOORS_INSIDE[room]
                assert _floor(_room(imported, 2), floors) <= _floor(_room(module, 2), floors), where


def test_no_files_import_each_other_in_a_circle() -> None:
    """But for the rules of simplification, which call each other through their package."""
    graph = nx.DiGraph((m, imported) for m in MODULES for imported, _ in _imports(m) if imported != m)
    circles = [c for c in nx.strongly_connected_components(graph) if len(c) > 1]
    mutual = "attngraph.meaning.algebra.simplify"
    assert [c for c in circles if not all(m.startswith(mutual) for m in c)] == []


def test_the_product_does_not_know_the_workshop() -> None:
    """Which is not in the wheel."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    assert not [name for name, text in texts.items() if re.search(r"^ *(from|import) workshop", text, re.M)]


def test_every_room_is_there() -> None:
    assert {_room(m) for m in MODULES} == set().union(*FLOORS)


def test_no_file_imports_a_top_level_folder_by_its_bare_name() -> None:
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & {"passes", "codegen", "models"}, module


def test_every_file_says_what_it_is_for() -> None:
    texts = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    assert not [n for n, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))]
