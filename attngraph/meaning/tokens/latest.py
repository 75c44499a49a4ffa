"""Which tokens an element can follow from, whatever the data are: operations run with a shadow beside them.

Beside each tensor runs the latest token that an element can follow from: an abstract interpretation, whose
domain is that number. What an operation gives follows from all that it reads (`latest_rules.py`), but where a
known number decides: a product with zero, a choice by a known condition, a weight whose score is hidden.
A score is hidden beside one that no data make as low; a choice of the largest leaves one such.
Indices that data choose have the least and the largest value that they may have beside them, so that what is
chosen among the first places is known to be among these.

It is for one number of tokens, and needs no formulas: blocks that are padded, overlap or hang over the end,
hierarchies of them, sorts and choices are all the same to it (`many_lengths.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.ir.ops import nodes
from attngraph.ir.ops.kernels import KERNELS
from attngraph.meaning.masks.fold import CHOOSES, HIDES

CONSTANT, LOW, OF_WEIGHTS, ALL = -3.0, -2.0, -1.0, float("inf")
"""In the place of a token: a known number; a number far below all others, to which something is added; what
follows from weights, not from tokens; what may follow from anything."""

NEVER_LOW = frozenset({
    "sigmoid", "tanh", "_softmax", "_safe_softmax", "native_layer_norm", "_fused_rms_norm",
})  # fmt: skip
"""Operations that give no number far from zero, whatever they are given."""
_COPIES = frozenset({"to", "_to_copy", "clone", "cat", "stack", "gather", "index", "index_select"})


class Call(NamedTuple):
    """A call of an operation: its name without the overload, and its arguments, also by name."""

    func: Any
    name: str
    given: Mapping[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]


Rule = Callable[["Latest", Call], Any]
"""Runs a call and says of its results from which tokens they follow."""


class Latest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Under which all that follows from tensors that were `told` has its latest tokens.

    Args:
        rules: of operations, by name. others: of any other.
    """

    def __init__(self, rules: Mapping[str, Rule], others: Rule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rules, self.others = rules, others
        self._latest: dict[int, tuple[Tensor, Tensor]] = {}
        self._ranges: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._sums: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._some: dict[int, tuple[Tensor, Tensor, bool]] = {}
        self._lowered: dict[int, tuple[Tensor, Tensor]] = {}
        self._choices: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = (a.name for a in func._schema.arguments)
        kwargs = kwargs or {}
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        call = Call(func, func._schema.name.partition("::")[2], given, args, kwargs)
        if not any(id(t) in self._latest for t in call.tensors):
            return call()
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            raise NotImplementedError(f"{call.name} writes to what it is given")
        attention = nodes.called(func, args, kwargs)
        if isinstance(attention, (nodes.Attention, nodes.LatentAttention)):
            is_plain, about = isinstance(attention, nodes.Attention), [[*attention.reads], [*attention.sizes]]
            with self:  # type: ignore[attr-defined]
                k, v = (attention.k, attention.v) if is_plain else attention.expanded()  # type: ignore[union-attr]
                found = KERNELS["reference"].forward(attention.program, (attention.q, k, v), *about)
            return found if is_plain else found[0]
        if call.name not in self.rules and not func.is_view and torch.Tag.pointwise not in func.tags:
            with self:  # type: ignore[attr-defined]
                made_of_others = func.decompose(*args, **kwargs)
            if made_of_others is not NotImplemented:
                return made_of_others
        found = self.rules.get(call.name, self.others)(self, call)
        if self._is_choice(call):
            for each in pytree.tree_leaves(found):
                self.tell_chosen(each)
        if call.name not in NEVER_LOW and any(id(t) in self._lowered for t in call.tensors):
            for each in pytree.tree_leaves(found):
                if id(each) not in self._lowered:
                    self.tell_lowered(each, True)
        return found

    def tell(self, value: Tensor, latest: Tensor | float) -> Tensor:
        """Say of a tensor from which tokens its elements follow; gives the tensor."""
        latest = torch.as_tensor(latest).expand(value.shape)
        if bool((latest > CONSTANT).any()):
            self._latest[id(value)] = value, latest
        return value

    def forget_but(self, values: Iterable[Any]) -> None:
        """Drop what is known of all other tensors."""
        kept = {id(tensor) for value in values for tensor in pytree.tree_leaves(value)}
        known: tuple[dict[int, Any], ...] = (
            self._latest, self._ranges, self._sums, self._some, self._lowered, self._choices,
        )  # fmt: skip
        for about in known:
            for key in about.keys() - kept:
                del about[key]

    def tell_range(self, index: Tensor, least: Tensor, most: Tensor) -> None:
        """Say of indices that data choose between which values they are."""
        if not index.is_floating_point():
            least, most = (end.double().expand(index.shape) for end in (least, most))
            self._ranges[id(index)] = index, least, most

    def tell_sum(self, value: Tensor, total: Tensor, latest: Tensor) -> None:
        """Say of numbers, some of which stand for sums that they hide: the sums, and from which tokens these
        follow."""
        self._sums[id(value)] = value, total, latest

    def tell_lowered(self, value: Any, lowered: Tensor | bool) -> None:
        """Say which numbers data may make as low as those that hide, or their negatives."""
        lowered = torch.as_tensor(lowered)
        if isinstance(value, Tensor) and value.is_floating_point() and bool(lowered.any()):
            self._lowered[id(value)] = value, lowered.expand(value.shape)

    def is_lowered(self, value: Any) -> Tensor:
        """Which numbers data may make as low as those that hide."""
        if id(value) in self._lowered:
            return self._lowered[id(value)][1]
        return torch.tensor(False).expand(value.shape if isinstance(value, Tensor) else ())

    def _is_choice(self, call: Call) -> bool:
        """Whether data choose among numbers for the elements of a call's results."""
        elementwise = call.func.is_view or torch.Tag.pointwise in call.func.tags or call.name in _COPIES
        of_flags = (t for t in call.tensors if t.dtype == torch.bool and not bool(self.is_known(t).all()))
        is_made = call.name in CHOOSES or any(True for _ in of_flags)
        return elementwise and (is_made or any(map(self.is_chosen_number, call.tensors)))

    def tell_chosen(self, value: Any) -> None:
        """Say of numbers that data choose them, as by a flag that is computed with."""
        if isinstance(value, Tensor) and value.dtype != torch.bool:
            self._choices[id(value)] = value

    def is_chosen_number(self, value: Any) -> bool:
        return id(value) in self._choices

    def tell_some(self, value: Tensor, among: Tensor, truth: bool) -> None:
        """Say of truth values that, whatever the data are, one at least of those `among` in each line of the
        last dimension is `truth`; of numbers, that it is not low."""
        if bool(among.any(-1).all()):
            self._some[id(value)] = value, among, truth

    def some(self, value: Any) -> tuple[Tensor, bool] | None:
        """What was told of some elements, if anything."""
        return self._some[id(value)][1:] if id(value) in self._some else None

    def of(self, value: Any) -> Tensor:
        """From which tokens the elements of a tensor follow, or a number."""
        if id(value) in self._latest:
            return self._latest[id(value)][1]
        return torch.full((), CONSTANT).expand(value.shape if isinstance(value, Tensor) else ())

    def plain(self, value: Any) -> Tensor:
        """The same for an operation that may show what is added to a number far below all others."""
        latest = self.of(value)
        return latest.masked_fill(latest == LOW, ALL)

    def sum(self, value: Any) -> tuple[Any, Tensor]:
        """Numbers with what was added to those that hide it, and from which tokens they follow."""
        _, *about = self._sums.get(id(value), (value, value, self.plain(value)))
        return about[0], about[1]

    def is_known(self, value: Any) -> Tensor:
        return self.of(value) == CONSTANT

    def is_hidden(self, value: Tensor) -> Tensor:
        """Where a number is far below all others, whatever is added to it."""
        return (self.of(value) <= LOW) & (value <= -HIDES)

    def has_range(self, value: Any) -> bool:
        """Whether it is known between which values indices are, that data choose or that are known."""
        if id(value) in self._ranges:
            return True
        return not isinstance(value, Tensor) or bool(self.is_known(value).all())

    def is_chosen(self, value: Any) -> bool:
        """Whether data choose a value of which it is known between which values it is."""
        return id(value) in self._ranges

    def range(self, index: Any, extent: int = 0) -> tuple[Tensor, Tensor]:
        """The least and the largest value of each index: one of `extent`, if nothing else is known."""
        index = torch.as_tensor(index)
        if id(index) in self._ranges:
            _, least, most = self._ranges[id(index)]
        else:
            least, most = (torch.full((), float(n)).expand(index.shape) for n in (0, extent - 1))
        known, real = self.is_known(index), index.double()
        return torch.where(known, real, least.double()), torch.where(known, real, most.double())
