"""Which weight of a candidate is which of the reference's: by name, by value, by shape and order."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.api.verify.verdict import Difference, Incomparable


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
    notes = ["compared in eval mode: dropout is not"] * trains
    reference, candidate = (
        copy.deepcopy(side).eval() if isinstance(side, nn.Module) else side for side in (reference, candidate)
    )
    if not isinstance(reference, nn.Module) or not isinstance(candidate, nn.Module):
        return Matched(reference, candidate, notes=tuple(notes))
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
    return Matched(reference, candidate, pairs, same, tuple(notes))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
