"""What other machines lack: links in a clone of Windows, and a C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import attngraph, attngraph.codegen.cpu, torch
from attngraph.models.targets import tiny_decoder_lm
model, (ids,) = tiny_decoder_lm(tokens=16)
compiled = attngraph.compile(model, min_scores=0)
torch.testing.assert_close(compiled(ids), model(ids))
logits, state = attngraph.compile(model, cache=True).prefill(ids)
torch.testing.assert_close(logits, model(ids))
print(attngraph.passes.__file__, *(entry.kernel.name for entry in compiled.report.attention))
"""


def said(folder: Path, root: Path, **settings: str) -> list[str]:
    """What the program prints in a process of its own, with the package of a folder."""
    settings = {**os.environ, "PYTHONPATH": str(root), "ATTNGRAPH_CACHE": str(folder / "cache"), **settings}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_a_clone_in_which_links_are_files_works(tmp_path: Path) -> None:
    """As git makes them on Windows. `attngraph.passes` is then `passes` beside the package."""
    package, skipped = tmp_path / "attngraph", shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "attngraph", package, symlinks=True, ignore=skipped)
    links = [path for path in package.iterdir() if path.is_symlink()]
    assert {link.name for link in links} == {"passes", "codegen", "models"}
    for link in links:
        link.unlink()
        link.write_text(f"../{link.name}")
        shutil.copytree(ROOT / link.name, tmp_path / link.name, ignore=skipped)
    assert said(tmp_path, tmp_path)[0] == str(tmp_path / "passes" / "__init__.py")


@pytest.mark.skipif(sys.platform == "win32", reason="hides the compiler as PATH is searched on Unix")
def test_a_model_and_its_decoder_run_where_no_compiler_is_found(tmp_path: Path) -> None:
    _, *names = said(tmp_path, ROOT, PATH="/nowhere", CC="")
    assert len(names) == 2 and set(names) <= {"cpu.flash", "cpu.tiled"}
