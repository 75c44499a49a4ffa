"""What the tests of the runtime share, as fixtures; the rest is in small.py."""

import pytest
from torch import Tensor

from tests.runtime.small import sequence


@pytest.fixture
def x() -> Tensor:
    """`[2, 5, 8]`."""
    return sequence()
