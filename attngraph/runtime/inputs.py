"""Where the tensors of a graph come from: the arguments and the state of a call, or the model it serves."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from attngraph.ir.graph.program_graph import Input, ProgramGraph, Rate
from attngraph.runtime.parallel.fully_sharded import collected

Fetch = Callable[[Any], Tensor]


class Inputs:
    """Collects the tensors of a call in the order of a graph's inputs.

    The model's own tensors, of which there are hundreds, are looked up by functions of C: what Python does
    for each of them is a noticeable part of a token's time.
    """

    __slots__ = ("_elsewhere", "_names", "_order", "_own", "_passed", "_stores")

    def __init__(self, graph: ProgramGraph, owner: nn.Module, names: Sequence[str] | None) -> None:
        self._own: list[Fetch] = []
        """How the tensors in `_stores`, by `_names`, are looked up where they are no plain tensors."""
        self._stores: list[dict[str, Tensor | None]] = []
        self._names: list[str] = []
        self._elsewhere: list[Fetch] = []
        """How the model's other tensors are looked up: constants, and tensors inside of others."""
        self._passed: list[tuple[int, Fetch]] = []
        """Which source of a call has each other input, and the function that gets it from there."""
        kinds: list[list[int]] = [[], [], []]
        for number, given in enumerate(graph.inputs):
            passed = _passed(given, names)
            if passed is not None:
                self._passed.append(passed)
                kinds[2].append(number)
                continue
            fetch, place = own_tensor(given, owner, graph.constants), _place(given, owner)
            if place is None:
                self._elsewhere.append(fetch)
                kinds[1].append(number)
            else:
                self._own.append(fetch)
                self._stores.append(place[0])
                self._names.append(place[1])
                kinds[0].append(number)
        numbers = [number for kind in kinds for number in kind]
        self._order = sorted(range(len(numbers)), key=numbers.__getitem__)

    def own(self) -> list[Any]:
        """The model's tensors, as it has them now."""
        found: list[Any] = list(map(dict.get, self._stores, self._names))
        if type(None) in map(type, found):  # parametrized, say
            found = [fetch(None) for fetch in self._own]
        return found + [fetch(None) for fetch in self._elsewhere]

    def __call__(self, *sources: Any) -> list[Tensor]:
        """The inputs of a call with these arguments, this state and these values of the weights stage."""
        found: list[Any] = list(map(dict.get, self._stores, self._names))
        if not _PLAIN.issuperset(map(type, found)):
            found = [fetch(None) for fetch in self._own]
        found += [fetch(None) for fetch in self._elsewhere]
        found += [fetch(sources[source]) for source, fetch in self._passed]
        return [found[place] for place in self._order]


_ARGUMENTS, _STATE, _OF_WEIGHTS = range(3)


def _passed(given: Input, names: Sequence[str] | None) -> tuple[int, Fetch] | None:
    """Which source of a call has the input, and the function that gets it from there; None for a tensor of
    the model."""
    if given.kind == "argument":
        place = int(given.name)
        return _ARGUMENTS, operator.itemgetter(place if names is None else names[place])
    if given.kind == Rate.WEIGHTS.value:
        return _OF_WEIGHTS, operator.itemgetter(given.name)
    if given.kind not in ("constant", "parameter", "buffer"):
        return _STATE, operator.itemgetter(given.name)
    return None


def _holder(given: Input, owner: nn.Module) -> tuple[nn.Module, list[str]]:
    """The module that has a parameter or a buffer, and the name there; then names inside of the tensor."""
    module, names = owner, given.name.split(".")
    while names[0] in module._modules:
        module = module.get_submodule(names.pop(0))
    return module, names


def _place(given: Input, owner: nn.Module) -> tuple[dict[str, Tensor | None], str] | None:
    """The dict that has a parameter or a buffer, and its name there; None for what has no such place."""
    if given.kind == "constant":
        return None
    module, (name, *inside) = _holder(given, owner)
    store: Any = module._parameters if given.kind == "parameter" else module._buffers
    return None if inside else (store, name)


def own_tensor(
    given: Input, owner: nn.Module, constants: Mapping[str, Tensor], axis: Any = None
) -> Fetch:  # fmt: skip
    """The function that looks up a constant, a parameter or a buffer, or a tensor inside of one that wraps
    others: its name follows that of the weight. Of a DTensor it is what this rank has along `axis`, a mesh of
    one dimension, which must be all of it along others."""
    if given.kind == "constant":
        constant = constants[given.name]
        return lambda _: constant
    module, (name, *inside) = _holder(given, owner)
    store = module._parameters if given.kind == "parameter" else module._buffers

    def fetch(_: Any) -> Tensor:
        tensor = store.get(name)
        tensor = getattr(module, name) if tensor is None else tensor
        return tensor if type(tensor) in _PLAIN else collected(tensor, given.name, axis)

    return functools.partial(_inside, fetch, inside) if inside else fetch


def require_own(given: Input, owner: nn.Module, constants: Mapping[str, Tensor], wanted: Any) -> None:
    """Check that a model has the tensor that an input names, by nothing but names of weights: no other
    attribute is looked up because a file says so.

    Args:
        wanted: a tensor of the type that the graph says, whose symbolic sizes may be any.

    Raises:
        ValueError: it has not, or one of another type.
    """
    if given.kind != "constant":
        module, (name, *inside) = _holder(given, owner)
        store: Mapping[str, Any] = module._parameters if given.kind == "parameter" else module._buffers
        known = store.get(name) is not None or parametrize.is_parametrized(module, name)
        found: Any = getattr(module, name) if known else None
        for part in inside:
            parts = found.__tensor_flatten__()[0] if hasattr(found, "__tensor_flatten__") else ()
            found = getattr(found, part) if part in parts else None
        if not isinstance(found, Tensor):
            raise ValueError(f"the model has no {given.kind} {given.label!r:.80}")
    elif given.name not in constants:
        raise ValueError(f"there is no constant {given.name!r:.80}")
    found = own_tensor(given, owner, constants)(None)
    if wanted is None:
        return
    sizes = zip(found.shape, wanted.shape, strict=False)
    same = found.ndim == wanted.ndim and all(n == m for n, m in sizes if isinstance(m, int))
    if not same or found.dtype != wanted.dtype:
        types = (f"{t.dtype}{list(t.shape)}" for t in (found, wanted))
        raise ValueError(f"{given.label} is {', not '.join(types)}")


def _inside(fetch: Fetch, names: Sequence[str], source: Any) -> Tensor:
    return functools.reduce(getattr, names, fetch(source))


_PLAIN = frozenset({Tensor, nn.Parameter})
