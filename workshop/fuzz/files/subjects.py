"""What is edited, and what a stranger's victim does with it: a function for each kind of file.

A subject is made once. `trial` makes an edit of it in an empty folder and uses the result as anybody would;
it gives "equal" or "other" by the answer, and raises what is raised.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import attngraph
from attngraph.errors import AttnGraphError
from attngraph.ir.cache_folder import VARIABLE
from attngraph.ir.graph.printer import format_file
from attngraph.ir.graph.verify import verify
from attngraph.report.dump import read_dump, read_graph_file
from attngraph.runtime import saved_cache
from attngraph.runtime.kv_cache import SAVED, KVCache
from attngraph.saved import disk as artifact
from attngraph.saved.folder import read_file, read_manifest, write_folder
from workshop.fuzz.files import edits

IDS = torch.arange(34).reshape(2, 17) % 13


class Model(nn.Module):
    """A language model with a window, a running mean and a mask in a buffer, small."""

    def __init__(self, width: int = 32, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain
        self.embed, self.norm = nn.Embedding(13, width), nn.LayerNorm(width)
        self.qkv, self.up, self.head = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.Linear(width, 13),
        )
        self.register_buffer("order", torch.ones(64, 64).tril().bool())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        n = x.shape[1]
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        seen: Any = self.order[:n, :n]  # type: ignore[index]
        if not self.plain:
            i = torch.arange(n)
            seen = seen & (i > i[:, None] - 9)
        x = x + ((q @ k.mT / 3).masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
        if not self.plain:
            x = x + x.cumsum(1) / (torch.arange(n)[:, None] + 1)
        found: Tensor = self.head(x + nn.functional.gelu(self.up(x)))
        return found


class Subject(NamedTuple):
    """One kind of files: how often it is tried among others, and a trial."""

    name: str
    weight: int
    trial: Callable[[random.Random, Path, str], str]


def _verdict(answer: Any, known: Tensor) -> str:
    same = isinstance(answer, Tensor) and answer.shape == known.shape
    return "equal" if same and torch.allclose(answer.float(), known, atol=1e-4, rtol=1e-4) else "other"


def _edited(rng: random.Random, files: dict[str, bytes], canary: str) -> dict[str, bytes]:
    made = dict(files)
    heavy = [n for n in files if n.endswith(("graph.txt", "graph.json"))]
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(heavy) if heavy and rng.random() < 0.8 else rng.choice(sorted(files))
        with contextlib.suppress(ValueError):  # an earlier edit made it no JSON
            made[name] = edits.any_file(rng, name, made[name]).replace(edits.CANARY.encode(), canary.encode())
    return made


FOLDERS: dict[str, tuple[int, bool, attngraph.CacheConfig | None]] = {
    "module": (4, False, None), "decoder": (6, False, attngraph.CacheConfig(proof=False)),
    "paged decoder": (3, True, attngraph.CacheConfig(layout="paged", page=4, proof=False)),
    "rounded decoder": (2, True, attngraph.CacheConfig(dtype=torch.int8, proof=False)),
}  # fmt: skip
CACHES = {
    "contiguous": (False, attngraph.CacheConfig(proof=False, snapshots=2)),
    "paged": (True, attngraph.CacheConfig(layout="paged", page=4, proof=False)),
}
"""By name how often they are tried, whether the model is plain, and the options of a decoder."""


def folder(base: Path, name: str) -> Subject:
    """A saved folder of a module or of a decoder."""
    weight, plain, config = FOLDERS[name]
    torch.manual_seed(0)
    model = Model(plain=plain).eval()
    made: Any = attngraph.compile(model, min_scores=0) if config is None else attngraph.compile(
        model, cache=config)  # fmt: skip
    known = _use(made, config is not None)
    path = made.save(base / name.replace(" ", "-"), weights=True)
    said = read_manifest(path)
    files = {n: read_file(path, said, n) for n in said["files"]}
    about = {key: value for key, value in said.items() if key not in ("files", "format")}
    return Subject(f"folder of a {name}", weight, _folder_trial(files, about, known, config is not None))


def _use(made: Any, decodes: bool) -> Tensor:
    """An answer: of a module, or of a decoder after a prompt and several steps, some of them recorded."""
    with torch.no_grad():
        if not decodes:
            return made(IDS)  # type: ignore[no-any-return]
        logits, state = made.prefill(IDS[:, :9])
        steps = [made.decode(IDS[:, n : n + 1], state) for n in range(9, 15)]
        return torch.cat([logits[:, -1:], *steps], 1)


def _folder_trial(
    files: dict[str, bytes], about: dict[str, Any], known: Tensor, decodes: bool
) -> Callable[[random.Random, Path, str], str]:  # fmt: skip
    def trial(rng: random.Random, work: Path, canary: str) -> str:
        said, made = copy.deepcopy(about), files
        if rng.random() < 0.1:
            said = edits.tree(rng, said)
        else:
            made = _edited(rng, files, canary)
        write_folder(work / "m", said if isinstance(said, dict) else {}, made, replace=True)
        try:
            loaded = attngraph.load(work / "m")
        except AttnGraphError:
            raise
        except Exception as problem:
            raise AssertionError(f"loading raised {type(problem).__name__}: {problem}") from problem
        return _verdict(_use(loaded, decodes), known)

    return trial


def dump(base: Path) -> Subject:
    """Graphs of a dump, as `attngraph opt` reads them, and a dump, as `attngraph inspect` reads it."""
    attngraph.compile(Model().eval(), min_scores=0, dump=base / "dump")(IDS)
    folder = base / "dump" / "graph-0"
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    texts = sorted(name for name in files if name[:2].isdigit())

    def trial(rng: random.Random, work: Path, canary: str) -> str:
        here = work / "d" / "graph-0"
        here.mkdir(parents=True)
        name = rng.choice([*texts, *texts, *files])
        for other, data in files.items():
            (here / other).write_bytes(data)
        with contextlib.suppress(ValueError):
            changed = (
                edits.any_file(rng, name, files[name]) if name.endswith((".json", ".txt")) else files[name]
            )
            (here / name).write_bytes(changed.replace(edits.CANARY.encode(), canary.encode()))
        if name not in texts:
            report = read_dump(work / "d")[0]
            report.to_html(work / "page.html", "d")
        graph = read_graph_file(here / rng.choice(texts))
        verify(graph)
        return "equal" if "".join(format_file(graph)) else "other"

    return Subject("dump", 4, trial)


def cache(name: str) -> Subject:
    """A saved state of a decoder: its numbers edited, or the bytes of the file."""
    plain, config = CACHES[name]
    torch.manual_seed(0)
    decoder: Any = attngraph.compile(Model(plain=plain).eval(), cache=config)
    with torch.no_grad():
        _, state = decoder.prefill(IDS[:, :9])
        decoder.decode(IDS[:, 9:10], state)
    return Subject(f"{name} cache", 3, _cache_trial(decoder, copy.deepcopy(state.__getstate__())))


def _cache_trial(decoder: Any, saved: Any) -> Callable[[random.Random, Path, str], str]:
    with torch.no_grad():
        whole = KVCache.__new__(KVCache)
        whole.__setstate__(copy.deepcopy(saved))
        known = torch.cat([decoder.decode(IDS[:, n : n + 1], whole) for n in range(10, 14)], 1)

    def trial(rng: random.Random, work: Path, _: str) -> str:
        state = copy.deepcopy(saved)
        by_bytes = rng.random() < 0.3
        if not by_bytes:
            state = edits.tree(rng, state)
        digest = "0" * 64
        with contextlib.suppress(Exception):  # signed, if it is a state at all
            edited = KVCache.__new__(KVCache)
            edited.__setstate__(copy.deepcopy(state))
            digest = saved_cache.digest(edited.__getstate__())
        torch.save({"format": SAVED, "state": state, "digest": digest}, work / "s")
        if by_bytes:
            (work / "s").write_bytes(edits.raw(rng, (work / "s").read_bytes()))
        try:
            loaded = KVCache.load(work / "s")
        except AttnGraphError:
            raise
        except Exception as problem:
            raise AssertionError(f"loading raised {type(problem).__name__}: {problem}") from problem
        with torch.no_grad():
            return _verdict(
                torch.cat([decoder.decode(IDS[:, n : n + 1], loaded) for n in range(10, 14)], 1), known
            )

    return trial


def artifacts(base: Path) -> Subject:
    """Artifacts of torch's caches, put into an empty cache on disk that a compilation then looks into."""
    torch.manual_seed(0)
    model = Model().eval()
    outside = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(base / "cache")
    try:
        with torch.no_grad():
            known = attngraph.compile(model, min_scores=0)(IDS)
    finally:
        os.environ.update({} if outside is None else {VARIABLE: outside})
        if outside is None:
            del os.environ[VARIABLE]
    (manifest,) = (base / "cache" / "graphs").glob("*/*/manifest.json")
    said = read_manifest(manifest.parent)
    files = {n: read_file(manifest.parent, said, n) for n in said["files"]}
    key = "/".join(manifest.parts[-3:-1])

    def trial(rng: random.Random, work: Path, canary: str) -> str:
        content = artifact.as_artifact(_edited(rng, files, canary))
        if rng.random() < 0.2:
            content = edits.raw(rng, content)
        os.environ[VARIABLE] = str(work / "cache")  # of this process alone
        artifact.put(key, content, work / "cache" / "graphs")
        with torch.no_grad():
            return _verdict(attngraph.compile(model, min_scores=0)(IDS), known)

    return Subject("artifact", 1, trial)


def all_of(base: Path, only: str = "") -> list[Subject]:
    """The subjects in whose names `only` is."""
    makers: dict[str, Callable[[], Subject]] = {
        **{f"folder of a {name}": functools.partial(folder, base, name) for name in FOLDERS},
        "dump": functools.partial(dump, base),
        **{f"{name} cache": functools.partial(cache, name) for name in CACHES},
        "artifact": functools.partial(artifacts, base),
    }
    return [make() for name, make in makers.items() if only in name]
