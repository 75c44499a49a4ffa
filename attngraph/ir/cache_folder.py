"""Where attngraph keeps what it made once and may use again: compiled kernels, and graphs."""

import os
import stat
from pathlib import Path

VARIABLE = "ATTNGRAPH_CACHE"
_ON, _OFF = ("", "1", "on", "yes", "true"), ("0", "off", "no", "false")


def wanted() -> Path:
    """The folder: `$ATTNGRAPH_CACHE` if that is one, else `attngraph` in `$XDG_CACHE_HOME` or `~/.cache`."""
    asked = os.environ.get(VARIABLE, "")
    if asked.lower() not in (*_ON, *_OFF):
        return Path(asked).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return base / "attngraph"


def why_not_safe(path: Path) -> str | None:
    """Why what lies in a folder may be somebody else's; None if it is the user's own."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        return "it belongs to another user"
    if os.name == "posix" and found.st_mode & 0o022:
        return "other users may write to it"
    return None


def is_off() -> bool:
    """Whether graphs are not to be kept. (Kernels are: they are made from the same source in any case.)"""
    return os.environ.get(VARIABLE, "").lower() in _OFF
