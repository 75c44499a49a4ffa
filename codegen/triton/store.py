"""Where emitted kernels live: files of the user's own, one for each source, imported from there.

Triton reads a kernel's source from its file, and so can a person, a debugger and a traceback. The
directory is private (mode 0700, owner checked); where that cannot be had, a temporary one serves for
this process. A file is named for its kernel, its source and Triton's version, written atomically, and
written again if it does not hold exactly the source that is asked for.
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


def import_source(source: str, name: str, version: str) -> ModuleType:
    """The module with this source, imported from a file. `name` is its kernel's name, of our making."""
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
    """`attngraph/triton` in the user's cache home (XDG_CACHE_HOME, else ~/.cache), if it can be private."""
    home = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(OSError, RuntimeError):
        base = Path(home) if home and os.path.isabs(home) else Path.home() / ".cache"
        found = base / "attngraph" / "triton"
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(found) or _made_private(found):
            return found
    return Path(tempfile.mkdtemp(prefix="attngraph-"))


def is_private(path: Path) -> bool:
    """Whether this is a real directory of the user's that nobody else may read or write."""
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
    """Make the file hold the text. Readers see all of it or none: it is renamed into place."""
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
