"""Mends the interpreters of older Tritons. Imported only where one is used."""

import numpy as np
import triton
from triton.runtime import interpreter


def mend() -> None:
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
