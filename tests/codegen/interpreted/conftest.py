"""Fixtures of the tests in Triton's interpreter: no kernel fails in silence.

This folder is collected only where TRITON_INTERPRET is set (`tests/codegen/conftest.py`): the interpreter has
to be chosen before triton is imported, and it must not be chosen for the other tests, which run these in
processes of their own (`test_interpreted.py`). TRITON_INTERPRET=1 pytest tests/codegen/interpreted runs them.
"""

import sys
from pathlib import Path

import pytest

from attngraph.codegen.remarks import Remarks
from attngraph.codegen.triton import attempts, visits

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # for `frames` and `conformance`


@pytest.fixture(autouse=True)
def no_attempt_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not run is an error here, not a reason to try others."""

    def fail(*said: object) -> None:
        raise AssertionError(said)

    monkeypatch.setattr(attempts._log, "warning", fail)
    monkeypatch.setattr(attempts, "_said", Remarks())


@pytest.fixture
def all_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "WORTH", 1)
