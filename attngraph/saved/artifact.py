"""Entries of the cache on disk as artifacts of torch's caches.

`torch.compiler.save_cache_artifacts()` gives what a process compiled as bytes, and
`load_cache_artifacts(bytes)` puts it into the caches of another process or machine. Here attngraph's
graphs take part: an artifact is the files of one entry, with a digest over all of them. Where the
installed torch has no such artifacts, nothing happens. An artifact that has changed is not put into the
cache; whether an entry fits a model is decided when it is looked up.
"""

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attngraph.errors import SavedError
from attngraph.saved.folder import MANIFEST, MOST_FILES, write_folder

try:
    from torch.compiler import _cache as torchs
except ImportError:
    torchs = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
TYPE = "attngraph"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


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
    """The files of an artifact.

    Raises:
        SavedError: its bytes have changed, or what it says of its files is not true of them.
    """
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
