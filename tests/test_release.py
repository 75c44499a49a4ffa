"""What PyPI would show and install: the README with absolute links, addresses, no name that is not ours."""

from __future__ import annotations

import importlib.util
import re
import tomllib
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
URL = "https://example.org/owner/attngraph"


@pytest.fixture(scope="module")
def release() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_and_picture_that_pypi_shows_is_absolute_and_names_a_file(
    release: types.ModuleType,
) -> None:
    shown = release.absolute((ROOT / "README.md").read_text("utf-8"), URL, "v1")
    targets = re.findall(r"\]\(([^)]*)\)", shown)
    assert len(targets) > 15
    assert [t for t in targets if not t.startswith(("https://", "#"))] == []
    own = [re.fullmatch(rf"{URL}/(raw|blob)/v1/([^#]*)(#.*)?", t) for t in targets if t.startswith(URL)]
    assert [m and m[2] for m in own if not (m and (ROOT / m[2]).exists())] == []
    assert any(m and m[1] == "raw" for m in own)


def test_the_project_has_an_author_and_at_a_release_its_addresses(release: types.ModuleType) -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    project = tomllib.loads(text + release.addresses(URL, "v1"))["project"]
    assert project["authors"] and project["urls"]["Repository"] == URL


def test_a_release_of_another_version_or_of_an_unreleased_one_is_refused(release: types.ModuleType) -> None:
    with pytest.raises(SystemExit, match="the tag is v999"):
        release.main(URL, "v999")


def test_nobody_is_told_to_install_a_name_that_is_not_on_pypi() -> None:
    """Until a release anybody may take it. An extra is installed from a checkout, as `.[NAME]`."""
    told = re.compile(r"""pip install (?:-\w+ )*["']?attngraph\b""")
    rooms = ("attngraph", "passes", "codegen", "models", "workshop", "docs", "examples")
    files = [p for room in rooms for p in (ROOT / room).rglob("*") if p.suffix in (".py", ".md")]
    files += ROOT.glob("*.md")
    assert len(files) > 300
    assert [str(p.relative_to(ROOT)) for p in files if told.search(p.read_text("utf-8"))] == []
