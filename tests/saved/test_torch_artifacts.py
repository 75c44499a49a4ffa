"""What torch saves of a process (`save_cache_artifacts`, `aot_compile`) has attngraph's graphs in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attngraph.errors import SavedError
from attngraph.saved import disk as artifact
from attngraph.saved.disk import Disk

PROGRAM = """
import sys
from pathlib import Path
import torch
import attngraph
from attngraph.models import decoder_lm, targets

folder, loads = Path(sys.argv[1]), sys.argv[2] == "load"
torch.manual_seed(0)
model, (ids,) = targets.tiny_decoder_lm(tokens=9)
model.eval()
compile = attngraph.compile
if loads:
    torch.compiler.load_cache_artifacts((folder / "artifacts").read_bytes())
with torch.no_grad():
    compiled, expected = compile(model, min_scores=0), model(ids)
    torch.testing.assert_close(compiled(ids), expected)
    print("taken" if compiled.report.taken_from else "compiled")
    options = {"min_scores": 0}
    whole = torch.compile(model, backend="attngraph", fullgraph=True, options=options)
    if not hasattr(whole.forward, "aot_compile"):
        print("this torch does not compile ahead of time, or only where its configuration says so")
    elif loads:
        with open(folder / "graph", "rb") as file:
            loaded = torch.compiler.load_compiled_function(file, f_globals=vars(decoder_lm))
        torch.testing.assert_close(loaded(model, ids), expected)
    else:
        ahead = whole.forward.aot_compile(((ids,), {}))
        torch.testing.assert_close(ahead(model, ids), expected)
        ahead.save_compiled_function(str(folder / "graph"))
if not loads:
    content, info = torch.compiler.save_cache_artifacts()
    assert len(info.artifacts["attngraph"]) == 1
    (folder / "artifacts").write_bytes(content)
"""


def _run(folder: Path, what: str) -> str:
    environment = os.environ | {"ATTNGRAPH_CACHE": str(folder / f"cache-{what}")}
    command = [sys.executable, "-c", PROGRAM, str(folder), what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[0]


@pytest.mark.slow
def test_another_process_starts_from_what_torch_saved(tmp_path: Path) -> None:
    assert _run(tmp_path, "save") == "compiled"
    assert _run(tmp_path, "load") == "taken"


FILES = {"guards.json": b"{}\n", "graph.txt": bytes(range(256)), "empty": b""}


def test_a_changed_artifact_is_not_put_into_the_cache(tmp_path: Path) -> None:
    content = artifact.as_artifact(FILES)
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        with pytest.raises(SavedError, match="changed"):
            artifact.from_artifact(bytes(changed))
    artifact.put("key/name", content[:-1], tmp_path)
    assert not any(tmp_path.iterdir())
    artifact.put("key/name", content, tmp_path)
    assert [p.name for p in (tmp_path / "key").iterdir()] == ["name"]


@pytest.mark.parametrize("key", ["../name", "key/..", "key", "a/b/c", "/key"])
def test_artifacts_stay_in_the_cache(key: str, tmp_path: Path) -> None:
    artifact.put(key, artifact.as_artifact(FILES), tmp_path / "graphs")
    artifact.put("key/name", artifact.as_artifact({"../outside": b""}), tmp_path / "graphs")
    assert not any(tmp_path.iterdir())


def test_an_entry_that_was_kept_is_found_after_it_was_carried(tmp_path: Path) -> None:
    here, there = Disk(tmp_path / "here"), Disk(tmp_path / "there")
    here.keep({"a": 1}, FILES)
    (path,) = (p for p, _ in here.entries({"a": 1}))
    artifact.put(f"{path.parent.name}/{path.name}", artifact.as_artifact(FILES), there.root)
    assert [files for _, files in there.entries({"a": 1})] == [FILES]
