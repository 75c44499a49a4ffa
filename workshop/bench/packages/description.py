"""How a model of a package is described: the class, its arguments, and the tensors that it is called with.

A description imports nothing until it is built, so the list can be read where its packages are missing.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Noise:
    """A normal random tensor."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Numbers:
    """A tensor of random integers from `low` to below `high`."""

    shape: tuple[int, ...]
    high: int
    low: int = 0


@dataclass(frozen=True)
class Given:
    """A tensor of these values."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Named:
    """What `path` ("module:name") names."""

    path: str


class Made:
    """What `path` ("module:name") gives when it is called with these arguments, which may be `Made` too."""

    def __init__(self, path: str, *args: Any, **kwargs: Any) -> None:
        self.path, self.args, self.kwargs = path, args, kwargs


@dataclass(frozen=True)
class Model:
    """A row of the table.

    Attributes:
        package: the name of the distribution.
        name: unique within the package.
        made: the model.
        inputs: positional arguments of a call, named: the others.
    """

    package: str
    name: str
    made: Made
    inputs: Sequence[Any]
    named: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.package} {self.name}"


def build(value: Any) -> Any:
    """The object or the tensor of a description; anything else is itself."""
    match value:
        case Named(path):
            module, _, name = path.partition(":")
            return operator.attrgetter(name)(importlib.import_module(module))
        case Made():
            return build(Named(value.path))(*map(build, value.args), **build(value.kwargs))
        case Noise(shape):
            return torch.randn(shape)
        case Numbers(shape, high, low):
            return torch.randint(low, high, shape)
        case Given(values):
            return torch.tensor(values)
        case dict():
            return {name: build(part) for name, part in value.items()}
        case list() | tuple():
            return type(value)(map(build, value))
    return value
