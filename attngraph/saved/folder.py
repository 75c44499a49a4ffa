"""A folder of files with a manifest: written whole or not at all, and read only if no byte has changed.

`manifest.json` has the size and the SHA-256 digest of every other file, and a digest of itself. A folder is
written under another name and renamed into place.

Whoever wrote a folder, only plain files inside of it are read, by names of the form that `write_folder` gives
them, and only where they are as long as the manifest says: that is compared before anything is read.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attngraph.errors import SavedError, told_as

FORMAT = 2
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
MOST_BYTES, MOST_FILES = 1 << 29, 4096
"""Of any file but the weights, and in a folder."""
_NAME = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9_-]*/)?[A-Za-z0-9][A-Za-z0-9_.-]*")


def as_bytes(data: Any) -> bytes:
    """A JSON value in the one form in which it is written."""
    return json.dumps(data, separators=(",", ":"), sort_keys=True, allow_nan=True).encode() + b"\n"


def write_folder(path: Path, about: Mapping[str, Any], files: Mapping[str, bytes], replace: bool) -> None:
    """Write a folder of files and its manifest, at once. `about`: what the manifest says besides digests.
    `replace`: whether what is at `path`, another such folder, gives way. SavedError where it cannot be
    written, or something else is there."""
    with told_as(SavedError, OSError, before=f"cannot write {path}: ", after="."):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not (path / MANIFEST).is_file():
            raise SavedError(f"{path} is there already, and is no saved model; name another folder.")
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            for name, data in files.items():
                (work / name).parent.mkdir(exist_ok=True)
                (work / name).write_bytes(data)
            (work / MANIFEST).write_bytes(_manifest(about, files))
            work.chmod(0o755 if replace else 0o700)
            _rename(work, path, replace)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _manifest(about: Mapping[str, Any], files: Mapping[str, bytes]) -> bytes:
    listed = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in files.items()}
    content = {**about, "format": FORMAT, "files": listed}
    return as_bytes({"content": content, "digest": hashlib.sha256(as_bytes(content)).hexdigest()})


def _rename(work: Path, path: Path, replace: bool) -> None:
    if path.exists() and replace:
        aside = work.with_name(f"{work.name}.old")
        try:
            path.rename(aside)
            work.rename(path)
        except BaseException:
            if aside.exists() and not path.exists():
                aside.rename(path)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    else:
        try:
            work.rename(path)
        except OSError:
            if not path.exists():
                raise  # else another process was faster; what it wrote is as good


def read_manifest(path: Path) -> dict[str, Any]:
    """What the manifest of a folder says; SavedError where there is none, or it has changed, or it has
    another format, or it names what is no plain file of the folder."""
    data = _read(path, MANIFEST)
    try:
        found = json.loads(data)
        content, digest = found["content"], found["digest"]
        same = as_bytes(found) == data and hashlib.sha256(as_bytes(content)).hexdigest() == digest
    except (ValueError, KeyError, TypeError, RecursionError):
        same = False
    if not same or not isinstance(content, dict):
        raise _changed(path / MANIFEST)
    if content.get("format") != FORMAT:
        raise SavedError(
            f"{path} has the format {content.get('format')!r:.80}; this version of attngraph reads {FORMAT}. "
            "Save it again."
        )
    files = content.get("files")
    if not isinstance(files, dict) or len(files) > MOST_FILES:
        raise SavedError(f"{path / MANIFEST} has no list of files, or one of more than {MOST_FILES}.")
    for name, entry in files.items():
        if not _NAME.fullmatch(name) or name == MANIFEST:
            raise SavedError(f"{path / MANIFEST} names {name!r:.80}, which is no file of a saved model.")
        match entry:
            case [int() as size, str()] if size >= 0 and (size <= MOST_BYTES or name == WEIGHTS):
                continue
        raise SavedError(f"{path / MANIFEST} says of {name} {entry!r:.80}: that is no size and digest.")
    return content


def read_file(path: Path, manifest: Mapping[str, Any], name: str) -> bytes:
    """A file of a folder. `manifest`: as `read_manifest` gave it. SavedError where it is missing, it is no
    plain file, or it has changed."""
    if name not in manifest["files"]:
        raise SavedError(f"{path} has no {name}.")
    size, digest = manifest["files"][name]
    data = _read(path, name, size)
    if hashlib.sha256(data).hexdigest() != digest:
        raise _changed(path / name)
    return data


def _changed(path: Path) -> SavedError:
    return SavedError(f"{path} has changed since it was written, or is cut off. Save it again.")


def _read(path: Path, name: str, size: int | None = None) -> bytes:
    """A plain file inside of a folder, reached by no link. `size`: its bytes, if that is known."""
    with told_as(SavedError, OSError, before=f"cannot read {path / name}: ", after="."):
        for part in (*reversed((path / name).relative_to(path).parents[:-1]), Path(name)):
            if stat.S_ISLNK((path / part).lstat().st_mode):
                raise SavedError(
                    f"{path / part} is a link, and only files that lie in the folder itself are read. "
                    "Copy the folder with what its links point to (cp -rL)."
                )
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        flags |= getattr(os, "O_BINARY", 0)
        with open(os.open(path / name, flags), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise SavedError(f"{path / name} is no plain file.")
            if size is not None and found.st_size != size:
                raise _changed(path / name)
            if size is None and found.st_size > MOST_BYTES:
                raise SavedError(f"{path / name} is larger than {MOST_BYTES} bytes.")
            data = file.read(found.st_size + 1)
    if len(data) != found.st_size:
        raise _changed(path / name)
    return data


def size_of_folder(path: Path) -> int:
    """The bytes of the files in it."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(folder, name))
    return total
