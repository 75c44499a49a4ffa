"""Where attngraph keeps what it made once and may use again: compiled kernels, and graphs."""

from __future__ import annotations

import os
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


def is_off() -> bool:
    """Whether graphs are not to be kept. (Kernels are: they are made from the same source in any case.)"""
    return os.environ.get(VARIABLE, "").lower() in _OFF
