"""The smallest call at which two sides still differ: fewer tokens, rows or heads, each as few as do.

A call is cut: tensors keep their values, and lose the last places of every dimension that has as many. Widths
of features stay.
"""

import copy
import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping

from torch import Tensor

from attngraph.api.verify.calls import Call, described, is_plain, mapped, tensors_in
from attngraph.api.verify.numbers import Numbers

Place = tuple[int, int]
"""A tensor of a call, and one of its dimensions."""


def make_smallest(numbers: Numbers, until: float) -> None:
    """Cut the call at which a comparison stopped while it still differs in the same way, until a time."""
    found, last = numbers.difference, numbers.last
    if found is None or last is None or found.code in ("candidate-ended", "candidate-late"):
        return
    (call, example, manner), probe = last, copy.copy(numbers)
    probe.probing = True

    def differs(smaller: Call) -> bool:
        probe.difference = None
        if time.monotonic() < until:
            probe.compare(smaller, example, manner)
        return probe.difference is not None and probe.difference.code == found.code

    shapes = enumerate(t.shape[: t.ndim - is_plain(t)] for t in tensors_in(call))  # of what may be cut
    counts = {(number, d): n for number, shape in shapes for d, n in enumerate(shape)}
    for group in _groups(counts):
        fewest, below = counts[group[0]], 0  # it differs at `fewest`, and not at `below`
        while fewest - below > 1:
            count = (fewest + below) // 2 if below else 1
            is_enough = differs(_cut(call, counts | dict.fromkeys(group, count)))
            fewest, below = (count, below) if is_enough else (fewest, count)
        counts |= dict.fromkeys(group, fewest)
    call = _cut(call, counts)
    numbers.difference = dataclasses.replace(found, smallest=described(call))
    numbers.least = call[0] or call[1]


def _groups(counts: dict[Place, int]) -> Iterator[list[Place]]:
    """Dimensions that are cut together: those of one extent, the largest first; then, where others had that
    extent too, those at one place among the dimensions."""
    extents = sorted({n for n in counts.values() if n > 1}, reverse=True)
    alike = [[place for place, n in counts.items() if n == extent] for extent in extents]
    yield from alike
    for group in alike:
        dims = sorted({d for _, d in group})
        yield from ([place for place in group if place[1] == d] for d in dims if len(dims) > 1)


def _cut(call: Call, counts: Mapping[Place, int]) -> Call:
    numbers = itertools.count()

    def cut(tensor: Tensor) -> Tensor:
        number = next(numbers)
        for d in range(tensor.ndim):
            tensor = tensor.narrow(d, 0, counts.get((number, d), tensor.shape[d]))
        return tensor.contiguous()

    return mapped(call, cut)
