"""Weights laid out once for the registers of a machine.

A product with many rows copies a group of a weight's outputs at a time to panels (`codegen/cpu/c/gemm.h`).
Where the user says that weights stay as they are, all of a weight is kept so: `in_panels` gives `[panels, in,
wide]`, panel p of which has outputs `p * wide` on, with zeros behind the last, in the order in which products
add up their elements. Graphs of one model share what is made of a tensor, for as long as one of them has it.

Where the user does without the weight itself, a `GivenUp` takes its place in the model, which has the panels.
"""

import contextlib
from collections.abc import ItemsView, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from attngraph.errors import FrozenError
from attngraph.ir.ops.declare import INSTEAD, declare
from attngraph.ir.versions import version_of

_Made = dict[tuple[bool, int], tuple[Any, TensorWeakRef]]
_made: MutableMapping[Tensor, _Made] = WeakTensorKeyDictionary()  # type: ignore[no-untyped-call]
"""By the tensor that they were made from: its stamp then, and the panels."""


PART, STRANDS = 1024, 4
"""A product is added up by pieces of its depth, of so many elements, and each piece by so many strands, of
which the first has elements 0, 4, 8 and so on (`codegen/cpu/c/weights.h`)."""


def _in_strands(depth: int, device: torch.device) -> Tensor:
    """All elements of a depth, in the order in which they are added up."""
    pieces = torch.split(torch.arange(depth, device=device), PART)
    return torch.cat([piece[strand::STRANDS] for piece in pieces for strand in range(STRANDS)])


def panels_of(outs: int, wide: int) -> int:
    """How many panels there are."""
    return -(-outs // wide)


@declare(
    fake=lambda a: a.w.new_empty((panels_of(a.w.shape[a.turned], a.wide), a.w.shape[not a.turned], a.wide)),
    derivatives=INSTEAD,
)
def in_panels(w: Tensor, turned: bool, wide: int, alone: bool) -> Tensor:
    """`alone`: whether nothing else in the graph reads the weight, and the model may do without it."""
    known = _made.setdefault(w, {})
    stamp, found = known.get((turned, wide), (None, None))
    kept = None if found is None else found()
    if kept is None or stamp != stamp_of(w):
        kept = _panels(w.T if turned else w, wide)
        if not w.is_inference():  # its writes are not counted
            known[turned, wide] = stamp_of(w), TensorWeakRef(kept)
    return kept


def _panels(w: Tensor, wide: int) -> Tensor:
    outs, depth = w.shape
    count = panels_of(outs, wide)
    whole = w.new_zeros(count, depth, wide)
    full = outs // wide
    w = w[:, _in_strands(depth, w.device)]
    whole[:full] = w[: full * wide].view(full, wide, depth).transpose(1, 2)
    if full < count:
        whole[full, :, : outs - full * wide] = w[full * wide :].T
    return whole


def from_panels(panels: Tensor, outs: int) -> Tensor:
    """The weight `[outs, in]`."""
    rows = panels.transpose(1, 2).reshape(-1, panels.shape[1])[:outs]
    return torch.empty_like(rows).index_copy_(1, _in_strands(rows.shape[1], rows.device), rows)


# --- without the weight itself ---


class GivenUp(Tensor):
    """Stands for a parameter whose memory was given up: it has its shape and dtype, and every operation that
    would read it is a FrozenError, but for the one that gives the panels.

    Attributes:
        stamp: what told the parameter from one that has changed.
    """

    label: str
    panels: Tensor
    turned: bool
    stamp: Any

    @staticmethod
    def of(weight: Tensor, name: str, panels: Tensor, turned: bool) -> "GivenUp":
        made: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            GivenUp, weight.shape, strides=weight.stride(), dtype=weight.dtype, device=weight.device,
            requires_grad=weight.requires_grad,
        )  # fmt: skip
        made.label, made.panels, made.turned, made.stamp = name, panels, turned, stamp_of(weight)
        made._is_param = True
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        (own, *_) = (t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, cls))
        if op is in_panels and args[1] == own.turned and args[2] == own.panels.shape[2]:
            return own.panels
        raise own._refusal()

    def _refusal(self, *_: Any) -> FrozenError:
        name = self.__dict__.get("label", "a weight")
        return FrozenError(
            f"the memory of {name} was given up, because its model was compiled with freeze='release'.\n"
            "What to do: call what attngraph.compile returned, or compile with freeze=True."
        )

    def _refuse(self, *_: Any, **more: Any) -> Any:
        raise self._refusal()

    data = property(_refuse, _refuse)  # type: ignore[assignment]
    data_ptr = untyped_storage = numpy = tolist = __deepcopy__ = __reduce_ex__ = _refuse  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GivenUp({self.label}, {list(self.shape)})"

    def restored(self) -> nn.Parameter:
        """The parameter, with memory of its own."""
        rows = from_panels(self.panels, self.shape[self.turned])
        found = nn.Parameter((rows.T if self.turned else rows).contiguous(), self.requires_grad)
        found.__dict__["stamp"] = self.stamp
        return found


def stamp_of(weight: Tensor) -> Any:
    """What is another thing when a tensor has been written to or replaced; writes through `.data` do not
    show."""
    known = weight.__dict__.get("stamp") if type(weight) in (GivenUp, nn.Parameter) else None
    if known is not None:
        return known
    return weight.data_ptr(), version_of(weight), weight.dtype, weight.device, weight.shape


def give_up(owner: nn.Module, name: str, weight: Tensor, panels: Tensor, turned: bool) -> None:
    """Replace a parameter of a module by what stands for it, if it has one name there."""
    holders = [
        (module._parameters, own)
        for module in owner.modules() for own, found in module._parameters.items() if found is weight
    ]  # fmt: skip
    if type(weight) is nn.Parameter and len(holders) == 1:
        ((store, own),) = holders
        store[own] = GivenUp.of(weight, name, panels, turned)  # type: ignore[assignment]


@contextlib.contextmanager
def whole(owner: nn.Module) -> Iterator[None]:
    """In this block, weights that were given up have memory again: for a trace, or to save them."""
    given_up = [
        (module._parameters, name, found)
        for module in owner.modules() for name, found in _parameters(module) if isinstance(found, GivenUp)
    ]  # fmt: skip
    for store, name, found in given_up:
        store[name] = found.restored()
    try:
        yield
    finally:
        for store, name, found in given_up:
            store[name] = found  # type: ignore[assignment]


def _parameters(module: nn.Module) -> ItemsView[str, Any]:
    return module._parameters.items()
