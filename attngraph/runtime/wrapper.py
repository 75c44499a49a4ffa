"""A module that stands for a model: it has its own forward and what its class declares, and all else is the
model's.

Weights, submodules, the training flag and attributes are read and written in the model, so that an optimiser,
a state dict or an outer module sees no difference. torch.nn.Module keeps weights and submodules in three
dictionaries; a wrapper shares its model's."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from attngraph.ir.modes import hooks_of_all_modules
from attngraph.runtime.parallel.fully_sharded import require_whole_again

OWN_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_SHARED = ("_parameters", "_buffers", "_modules")
_OF_THE_MODEL = (
    "_apply", "_load_from_state_dict", "_register_load_state_dict_pre_hook", "_register_state_dict_hook",
    "_save_to_state_dict", "add_module", "apply", "bfloat16", "buffers",
    "children", "cpu", "cuda", "double", "eval", "float", "get_buffer", "get_parameter", "get_submodule",
    "half", "modules", "named_buffers", "named_children", "named_modules", "named_parameters", "parameters",
    "register_buffer", "register_load_state_dict_post_hook", "register_load_state_dict_pre_hook",
    "register_module", "register_parameter", "register_state_dict_post_hook",
    "register_state_dict_pre_hook", "requires_grad_", "set_submodule", "share_memory", "state_dict", "to",
    "to_empty", "train", "type", "zero_grad",
)  # fmt: skip
"""The methods of torch.nn.Module that read or change weights, submodules and modes, and what runs before and
after state dicts: models may override them."""


class ModelWrapper(nn.Module):
    """Stands for `model`. A wrapper of a function has no weights, and attributes of its own."""

    _model: Callable[..., Any]
    _mode: bool
    _kind: type

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)
        self._share()

    def _share(self) -> None:
        if isinstance(self._model, nn.Module):
            self.__dict__.update({name: self._model.__dict__[name] for name in _SHARED})

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return self.__dict__.get("_kind") or self._said_class()

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Take what a tool adds to the class that this module is said to have, as `fully_shard` does."""
        _REAL_CLASS.__set__(self, _extended(type(self), kind, self.__class__))
        self._kind = kind
        require_whole_again(self)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Hooks of all modules run around the model, and not around what stands for it."""
        own = any(self.__dict__[name] for name in OWN_HOOKS)
        call: Callable[..., Any] = super()._call_impl if own or not hooks_of_all_modules() else self.forward
        return call(*args, **kwargs)

    def _said_class(self) -> type:
        """What `__class__` says, by which `isinstance` also goes."""
        return type(self)

    @property
    def _orig_mod(self) -> nn.Module:
        """The model, by the name that torch.compile's modules have for theirs."""
        if not isinstance(self._model, nn.Module):
            raise AttributeError("a compiled function has no module")
        return self._model

    @property
    def training(self) -> bool:  # type: ignore[override]
        model = self.__dict__.get("_model")
        return model.training if isinstance(model, nn.Module) else self.__dict__.get("_mode", True)

    @training.setter
    def training(self, value: bool) -> None:
        model = self.__dict__.get("_model")
        if isinstance(model, nn.Module):
            model.training = value
        self.__dict__["_mode"] = value

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_model")
        if not isinstance(model, nn.Module):
            return super().__getattr__(name)
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    def _is_own(self, name: str) -> bool:
        """Whether an attribute is the wrapper's, not the model's."""
        if not isinstance(self.__dict__.get("_model"), nn.Module):
            return True
        return name in self.__dict__ or name in own_names(type(self))  # type: ignore[arg-type]

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *dir(self._model)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._model!r})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share()

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into the model; one of torch.compile's modules has a prefix, which is removed."""
        if not isinstance(self._model, nn.Module):
            return super().load_state_dict(state_dict, *args, **kwargs)
        prefix = "_orig_mod."
        if state_dict and all(name.startswith(prefix) for name in state_dict):
            state_dict = {name.removeprefix(prefix): value for name, value in state_dict.items()}
        return self._model.load_state_dict(state_dict, *args, **kwargs)


@functools.cache
def own_names(kind: Any) -> frozenset[str]:
    """What the class of a wrapper and its bases declare."""
    declared = ((*vars(k), *inspect.get_annotations(k)) for k in kind.__mro__ if k is not object)
    return frozenset(name for names in declared for name in names)


class _Extended:
    """Finds a wrapper that a tool extended among the modules, in place of the model, where the tool looks."""

    def modules(self) -> Iterator[nn.Module]:
        return (module for _, module in self.named_modules())

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        wrapper: Any = self
        for name, module in wrapper._model.named_modules(*args, **kwargs):
            yield name, wrapper if module is wrapper._model else module


def _extended(real: type, kind: type, known: type) -> type:
    """The class of a wrapper, with what `kind` adds to `known`, the class that it is said to have."""
    if not issubclass(kind, known):
        raise TypeError(f"{kind.__qualname__} is not derived from {known.__qualname__}.")
    added = [k for k in kind.__mro__ if k not in known.__mro__]
    mixins = [k for k in added if not issubclass(k, known)]
    own: dict[str, Any] = {}
    for derived in (k for k in reversed(added) if issubclass(k, known)):
        own.update({name: value for name, value in vars(derived).items() if name not in _OF_EVERY_CLASS})
    return type(real.__name__, (*mixins, _Extended, real), own)


_OF_EVERY_CLASS = ("__module__", "__dict__", "__weakref__", "__doc__", "__qualname__", "__firstlineno__")
_REAL_CLASS: Any = vars(object)["__class__"]
"""A wrapper's own is a property."""


def _of_the_model(name: str) -> Callable[..., Any]:
    """The model's method as one of the wrapper, which returns itself where the model does."""
    plain = getattr(nn.Module, name)

    @functools.wraps(plain)
    def method(self: ModelWrapper, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self._model, nn.Module):
            return plain(self, *args, **kwargs)
        found = getattr(self._model, name)(*args, **kwargs)
        return self if found is self._model else found

    return method


for _name in _OF_THE_MODEL:
    setattr(ModelWrapper, _name, _of_the_model(_name))
