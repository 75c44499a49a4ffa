"""A pytest plugin: the stand-in is installed, and tensors are made on it where a test says nothing else."""

from collections.abc import Iterator

from workshop.standin import install

DEVICE = install()

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
