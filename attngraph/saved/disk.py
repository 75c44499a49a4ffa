"""The cache on disk: graphs that were compiled before, by what they were compiled from.

    <cache>/graphs/<key>/<entry>/    a folder with a manifest, as `folder.py` writes

The key is a digest of what is plain before anything is looked at: versions, options, the model's class and
the arguments. Entries of one key differ in the model's state, or in code. Nothing in the cache is trusted: an
entry whose bytes have changed is removed, one that does not fit is passed over. What lies in a folder to
which others may write is neither used nor added to: each folder on the way is looked at, whatever umask made
it. Several processes may use one cache: entries appear at once and whole, and one that goes away meanwhile is
a miss.

Entries are also artifacts of torch's caches: `torch.compiler.save_cache_artifacts()` gives what a process
compiled as bytes, and `load_cache_artifacts(bytes)` puts it into the caches of another process or machine. An
artifact is the files of one entry, with a digest over all of them. Where the installed torch has no such
artifacts, nothing happens. One that has changed is not put into the cache; whether an entry fits a model is
decided when it is looked up.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attngraph.errors import SavedError
from attngraph.ir import cache_folder

from attngraph.saved.folder import (  # isort: skip
    MANIFEST, MOST_FILES, as_bytes, read_file, read_manifest, size_of_folder, write_folder,
)  # fmt: skip

try:
    from torch.compiler import _cache as torchs
except ImportError:
    torchs = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
TYPE = "attngraph"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
BYTES, ENTRIES, OF_A_KEY = 1 << 29, 1024, 8
"""Bound of the cache, and of entries that differ in state alone; the least recently used are removed."""


class Disk:
    """The graphs in one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root / "graphs"

    def entries(self, key: Mapping[str, Any]) -> Iterator[tuple[Path, dict[str, bytes]]]:
        """The entries of a key, the latest first."""
        for path in _by_use(self.root / _digest(key)):
            if not _are_own(self.root, path.parent, path):
                continue
            try:
                manifest = read_manifest(path)
                yield path, {name: read_file(path, manifest, name) for name in manifest["files"]}
            except SavedError as problem:
                log.info("removed from the cache: %s", problem)
                shutil.rmtree(path, ignore_errors=True)

    def used(self, path: Path, files: Mapping[str, bytes]) -> None:
        """Note that an entry was used."""
        record(path.parent.name, path.name, files)
        with contextlib.suppress(OSError):
            os.utime(path / MANIFEST)

    def keep(self, key: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Keep an entry. That this fails, for want of room or of rights, changes nothing else."""
        name = hashlib.sha256(b"".join(files[n] for n in ("guards.json", "graph.txt"))).hexdigest()[:16]
        folder = self.root / _digest(key)
        try:
            for made in (self.root.parent, self.root, folder):
                made.mkdir(mode=0o700, exist_ok=True, parents=made == self.root.parent)
            if not _are_own(self.root, folder):
                return
            write_folder(folder / name, {"kind": "cached"}, files, replace=False)
            record(folder.name, name, files)
            for path in _by_use(folder)[OF_A_KEY:]:
                shutil.rmtree(path, ignore_errors=True)
            self.make_room()
        except (SavedError, OSError) as problem:
            log.info("not kept in the cache: %s", problem)

    def make_room(self, most: int = BYTES, entries: int = ENTRIES) -> None:
        """Remove the least recently used entries, until the bounds hold."""
        paths = sorted(self._all(), key=_used, reverse=True)
        total = 0
        for number, path in enumerate(paths):
            total += size_of_folder(path)
            if total > most or number >= entries:
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):
                    path.parent.rmdir()  # fails where other entries are left

    def clear(self) -> None:
        """Remove all entries."""
        shutil.rmtree(self.root, ignore_errors=True)

    def usage(self) -> tuple[int, int]:
        """The number of entries, and their bytes."""
        paths = self._all()
        return len(paths), sum(map(size_of_folder, paths))

    def _all(self) -> list[Path]:
        return [p.parent for p in self.root.glob(f"*/*/{MANIFEST}")]


def _are_own(*folders: Path) -> bool:
    """Whether nobody but the user can have written to these."""
    for path in folders:
        try:
            reason = cache_folder.why_not_safe(path)
        except OSError as problem:
            reason = str(problem)
        if reason is not None:
            log.warning("graphs are neither taken from %s nor kept there: %s", path, reason)
            return False
    return True


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(as_bytes(key)).hexdigest()[:32]


def _by_use(folder: Path) -> list[Path]:
    return sorted((p.parent for p in folder.glob(f"*/{MANIFEST}")), key=_used, reverse=True)


def _used(path: Path) -> float:
    try:
        return (path / MANIFEST).stat().st_mtime
    except OSError:
        return time.time()


# --- artifacts of torch's caches ---


def record(key: str, name: str, files: Mapping[str, bytes]) -> None:
    """Note an entry that was made or used, for whoever asks torch for artifacts."""
    if torchs is not None and TYPE in torchs.CacheArtifactFactory._artifact_types:
        torchs.CacheArtifactManager.record_artifact(TYPE, f"{key}/{name}", as_artifact(files))


def as_artifact(files: Mapping[str, bytes]) -> bytes:
    """Files as bytes: a digest, a line with their names and lengths, and their contents."""
    named = json.dumps({name: len(data) for name, data in files.items()}).encode()
    body = b"\n".join((named, b"".join(files.values())))
    return b"\n".join((hashlib.sha256(body).hexdigest().encode(), body))


def from_artifact(content: bytes) -> dict[str, bytes]:
    """The files of an artifact; SavedError where its bytes have changed, or what it says of its files is not
    true of them."""
    digest, _, body = content.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise SavedError("an artifact has changed since it was made.")
    named, _, rest = body.partition(b"\n")
    try:
        lengths = json.loads(named)
        if not isinstance(lengths, dict) or any(type(n) is not int or n < 0 for n in lengths.values()):
            raise ValueError("no lengths by name")
    except (ValueError, RecursionError) as problem:
        raise SavedError("an artifact does not say which files it has.") from problem
    if sum(lengths.values()) != len(rest) or len(lengths) > MOST_FILES:
        raise SavedError("an artifact has other files than it says.")
    files: dict[str, bytes] = {}
    place = 0
    for name, length in lengths.items():
        if not _NAME.fullmatch(name) or name == MANIFEST:
            raise SavedError(f"an artifact has a file of the name {name!r:.80}.")
        files[name] = rest[place : place + length]
        place += length
    return files


def put(key: str, content: bytes, root: Path) -> None:
    """Put an artifact into the cache in a folder; one that has changed is passed over."""
    try:
        parts = key.split("/")
        if len(parts) != 2 or not all(map(_NAME.fullmatch, parts)):
            raise SavedError(f"an artifact has the key {key!r}.")
        files = from_artifact(content)
        for folder in (root, root / parts[0]):
            folder.mkdir(mode=0o700, exist_ok=True, parents=folder == root)
        write_folder(root / parts[0] / parts[1], {"kind": "cached"}, files, replace=False)
    except (SavedError, OSError) as problem:
        log.info("not put into the cache: %s", problem)


def register(where: Callable[[], Path | None]) -> None:
    """Tell torch about these artifacts. `where` gives the folder of the cache; None if it is turned off."""
    if torchs is None or TYPE in torchs.CacheArtifactFactory._artifact_types:
        return

    @dataclasses.dataclass(frozen=True)
    class Artifact(torchs.CacheArtifact):
        def populate_cache(self) -> None:
            root = where()
            if root is not None:
                put(self.key, self.content, root)

        @staticmethod
        def type() -> str:
            return TYPE

    made: Any = Artifact
    torchs.CacheArtifactFactory.register(made)
