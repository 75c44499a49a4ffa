"""Which weight of a candidate is which of the reference's: by name, by value, by shape and order."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.api.verify.calls import Call
from attngraph.api.verify.verdict import Difference, Incomparable
from attngraph.errors import first_line
from attngraph.runtime.verify import tensors_of


@dataclasses.dataclass(frozen=True)
class Matched:
    """Copies of both sides in eval mode, the candidate with the reference's weights, and `weights`, the pairs
    of names `(reference's, candidate's)` that are one tensor; `same`, those of every name of a parameter, of
    tied and transposed ones too."""

    reference: Any
    candidate: Any
    weights: tuple[tuple[str, str], ...] = ()
    same: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    trains: bool = False
    """Whether a side was given in training mode."""


def match(
    reference: Any, candidate: Any, rename: Mapping[str, str] | Callable[[str], str] | None = None
) -> Matched:
    """Match the weights of two modules. A candidate whose weights have the reference's values keeps them,
    transposed ones too: that they were converted rightly is part of what is compared, as are its buffers.
    Otherwise a copy of it is given the reference's.

    Raises:
        Incomparable: a weight of the candidate is none of the reference's.
    """
    trains = any(getattr(side, "training", False) for side in (reference, candidate))
    notes = list[str]()
    reference, candidate = (
        copy.deepcopy(side).eval() if isinstance(side, nn.Module) else side for side in (reference, candidate)
    )
    if not isinstance(reference, nn.Module) or not isinstance(candidate, nn.Module):
        return Matched(reference, candidate, trains=trains)
    mine, theirs = dict(reference.state_dict()), dict(candidate.state_dict())
    names = rename if callable(rename) else (rename or {}).get
    wanted = {name: names(name) or name for name in theirs}
    found = {n: w for n, w in wanted.items() if w in mine and mine[w].shape == theirs[n].shape}
    by_name = len(found)
    left = {n: t for n, t in mine.items() if n not in found.values()}
    turned: dict[str, str] = {}
    for name, tensor in ((n, t) for n, t in theirs.items() if n not in found):
        equal = next((n for n, t in left.items() if _same(t, tensor)), None)
        other = equal or next((n for n, t in left.items() if t.ndim == 2 and _same(t.T, tensor)), None)
        if other is not None:
            del left[other]
            (turned if equal is None else found)[name] = other
    missing = [n for n in theirs if n not in found and n not in turned]
    for shape in dict.fromkeys(theirs[n].shape for n in missing):
        ours, others = ([n for n in group if tensors[n].shape == shape] for group, tensors in
                        ((missing, theirs), (left, mine)))  # fmt: skip
        if len(ours) == len(others):
            found |= dict(zip(ours, others, strict=True))
    missing = [n for n in missing if n not in found]
    if missing:
        shapes = ", ".join(f"{n} {list(theirs[n].shape)}" for n in missing[:3])
        more = f" and {len(missing) - 3} more" * (len(missing) > 3)
        said = f"no weight of the reference is the candidate's {shapes}{more}; say which with `rename=`"
        raise Incomparable(Difference("weights", said, code="weights-unmatched"))
    trained, too = (dict(side.named_parameters()) for side in (reference, candidate))
    own = [_same(mine[other], theirs[name]) for name, other in found.items() if name in too]
    if all(own):  # buffers that are not the same were computed otherwise
        transposed = f", {len(turned)} transposed" * bool(turned)
        notes.append(f"{len(own) + len(turned)} weights have the reference's values{transposed}")
    else:
        candidate.load_state_dict({name: mine[other] for name, other in found.items()}, strict=False)
        how = f"{by_name} by name, {len(found) - by_name} by value or shape"
        notes.append(f"the candidate is compared with the reference's weights: {how}")
    pairs = tuple((a, b) for b, a in found.items() if a in trained and b in too)
    every = [dict(side.named_parameters(remove_duplicate=False)) for side in (reference, candidate)]
    same = tuple((a, b) for b, a in (found | turned).items() if a in every[0] and b in every[1])
    return Matched(reference, candidate, pairs, same, tuple(notes), trains)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def in_training(matched: Matched, call: Call, seed: int) -> str:
    """What is told of sides that were given in training mode, which are compared in eval mode: whether the
    results of a call are the same there as well, with one seed for both. Equal models may draw in other
    orders, so it is no difference if they are not."""
    sides, found = (matched.reference, matched.candidate), list[list[Tensor]]()
    modules = [side for side in sides if isinstance(side, nn.Module)]
    try:
        with torch.no_grad():
            for side in sides:
                one = copy.deepcopy(side).train() if isinstance(side, nn.Module) else side
                torch.manual_seed(seed)
                found.append(tensors_of(one(*call[0], **call[1])))
    except Exception as problem:
        return f"compared in eval mode: in training mode a side refuses the call: {first_line(problem)}"
    if len(found[0]) == len(found[1]) and all(map(_near, *found)):
        return "compared in eval mode; the given call is equal in training mode, too, with one seed for both"
    kept = [{n: m.p for n, m in side.named_modules() if isinstance(m, nn.Dropout)} for side in modules] or [
        {}
    ]
    both = [n for n in kept[0] if n in kept[-1] and kept[0][n] != kept[-1][n]]
    other = [f"{n} drops {kept[0][n]} in the reference, {kept[-1][n]} in the candidate" for n in both[:3]]
    return (
        "compared in eval mode; in training mode the given call's results differ with one seed for both: "
        + ("; ".join(other) or "they drop other elements, or draw in another order")
    )


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-4, 1e-5, equal_nan=True)
