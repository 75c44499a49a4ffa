"""Temporarily replaces private attributes of torch, if the installed version has them.

The replacements only make a trace faster or its reports more detailed. So a torch version that has renamed
one of them is no reason to fail.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any
from unittest import mock


def replaced(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    """Set an attribute of a class or a module (or of the module of that name) while the context is active; do
    nothing if it has no such attribute."""
    if isinstance(owner, str):
        try:
            owner = importlib.import_module(owner)
        except ImportError:
            return contextlib.nullcontext()
    return mock.patch.object(owner, name, value) if hasattr(owner, name) else contextlib.nullcontext()
