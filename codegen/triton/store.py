"""Where emitted kernels are stored: one file per source in the user's cache, imported from there.

Triton reads a kernel's source from its file, and so can people, debuggers and tracebacks. The directory is
private (mode 0700, owner checked); if that is not possible, a temporary one is used for this process. A
file's name contains the kernel's name and identifies the source and Triton's version. It is written
atomically, and written again if its contents differ from the source.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import stat
import tempfile
from pathlib import Path
from types import ModuleType

from attngraph.ir import cache_folder


def import_source(source: str, name: str, version: str) -> ModuleType:
    """The module with this source, imported from a file. `name` is its kernel's name, made by
    `module.name_of`."""
    key = hashlib.sha256(f"{version}\n{source}".encode()).hexdigest()[:16]
    path = directory() / f"{name}_{key}.py"
    write(path, source)
    spec = importlib.util.spec_from_file_location(f"attngraph_emitted_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def directory() -> Path:
    """`triton` in the folder that attngraph keeps what it made in, if it can be private."""
    with contextlib.suppress(OSError, RuntimeError):
        found = cache_folder.wanted() / "triton"
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        if cache_folder.why_not_safe(found.parent) is None and (is_private(found) or _made_private(found)):
            return found
    return Path(tempfile.mkdtemp(prefix="attngraph-"))


def is_private(path: Path) -> bool:
    """Whether this is a directory (no link) owned by the user that nobody else may read or write."""
    status = path.lstat()
    mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return stat.S_ISDIR(status.st_mode) and mine and not status.st_mode & 0o077


def _made_private(path: Path) -> bool:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
        return False
    path.chmod(0o700)
    return is_private(path)


def write(path: Path, text: str) -> None:
    """Write the text to the file atomically: it is renamed into place."""
    wanted = text.encode()
    with contextlib.suppress(FileNotFoundError):
        if not path.is_symlink() and path.read_bytes() == wanted:
            return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(wanted)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
