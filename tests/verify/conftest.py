"""A clock for verdicts that does not depend on what else the machine does."""

import importlib
import itertools
import types

import pytest


@pytest.fixture(autouse=True)
def a_clock_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of a budget is twenty looks at the clock; there is one before each call that is compared."""
    looks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: next(looks) / 20)
    for name in ("attngraph.api.verify", "attngraph.api.verify.smallest"):
        monkeypatch.setattr(importlib.import_module(name), "time", clock)
