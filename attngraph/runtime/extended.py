"""Gives a module that stands for a model what a tool adds to the model's class.

Tools like `torch.distributed.fsdp.fully_shard` set the class of a module to one that they derive from it, with
methods of their own. A wrapper says that its class is the model's, so what it is given is derived from the
model's class: the wrapper takes what was added, and stays a wrapper.
"""

from __future__ import annotations

from typing import Any

from attngraph.runtime.wrapper import ModelWrapper

_OF_EVERY_CLASS = ("__module__", "__dict__", "__weakref__", "__doc__", "__qualname__", "__firstlineno__")


def extend(wrapper: ModelWrapper, kind: type, known: type) -> None:
    """Add to the class of a wrapper what `kind` adds to `known`, the class that the wrapper was said to have.

    Raises:
        TypeError: `kind` is not derived from `known`.
    """
    if not issubclass(kind, known):
        raise TypeError(f"{kind.__qualname__} is not derived from {known.__qualname__}.")
    added = [k for k in kind.__mro__ if k not in known.__mro__]
    mixins = tuple(k for k in added if not issubclass(k, known))
    own: dict[str, Any] = {}
    for derived in (k for k in reversed(added) if issubclass(k, known)):
        own.update({name: value for name, value in vars(derived).items() if name not in _OF_EVERY_CLASS})
    real = type(wrapper)
    made = type(real.__name__, (*mixins, real), own)
    _REAL_CLASS.__set__(wrapper, made)


_REAL_CLASS: Any = vars(object)["__class__"]
"""A wrapper's own `__class__` is a property."""
