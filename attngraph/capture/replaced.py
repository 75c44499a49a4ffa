"""Private names of torch, replaced for a while, where the torch at hand has them.

What is replaced this way makes a trace faster or tells more; without it a trace is the same, only slower or
with less to say. So a torch that has renamed something is no reason to fail.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any
from unittest import mock


def replaced(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    """Set an attribute of a class or a module (or of the module of that name) while the context lasts; do
    nothing where there is none of that name."""
    if isinstance(owner, str):
        try:
            owner = importlib.import_module(owner)
        except ImportError:
            return contextlib.nullcontext()
    return mock.patch.object(owner, name, value) if hasattr(owner, name) else contextlib.nullcontext()
