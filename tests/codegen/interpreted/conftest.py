"""Fixtures of the tests in Triton's interpreter: a cache of their own, and no kernel that fails in silence.

This folder is collected only where TRITON_INTERPRET is set (`tests/codegen/conftest.py`): the interpreter has
to be chosen before triton is imported, and it must not be chosen for the other tests, which run these in
processes of their own (`test_interpreted.py`). TRITON_INTERPRET=1 pytest tests/codegen/interpreted runs them.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import triton
from triton.runtime import interpreter

from attngraph.codegen.remarks import Remarks
from attngraph.codegen.triton import attempts, store, visits

sys.path.insert(0, str(Path(__file__).parent))  # for `frames`, which is no test

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    # Older interpreters make an index of an array of one element, which numpy forbids from 2.4 on.
    _patch = interpreter._patch_lang_tensor

    def _patch_tensor(tensor, scope):
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = _patch_tensor

    # And they round a fused multiply-add twice. Products of float32 are exact in float64.
    def _fma(self, x, y, z):
        a, b, c = (t.data.astype(np.float64) for t in (x, y, z))
        return interpreter.TensorHandle((a * b + c).astype(x.data.dtype), x.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = _fma


@pytest.fixture(autouse=True, scope="session")
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    store.directory.cache_clear()


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
