"""Two sides by number: calls of many sizes and values, in float64 where both can.

What two spellings of one formula may differ by is measured: by how far each side's own answer moves when its
operands move by 1e-12.
"""

import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.api import drawn
from attngraph.api.apart import Ended, code_of
from attngraph.api.difference import Difference
from attngraph.api.matched import Matched
from attngraph.api.parting import parts_at
from attngraph.api.recorded import recorded
from attngraph.api.steps import ByWay, Sequences, Steps
from attngraph.errors import NoDecoderError, SavedError, first_line
from attngraph.runtime.verify import results_of, tensors_of

MOVED, ROUNDINGS, LEAST = 1e-12, 32.0, 1e-11
"""How far operands are moved, relatively, or half a unit in the last place of the narrowest dtype to which a
side rounds; how many times as far as that moves an answer two equal ones may lie apart; and at least so much
of the answer's largest element, or a unit of that dtype."""
SIZES = (1, 2, 3, 5, 8, 17, 130)
"""Extents that are tried beside those of the call."""
SIDES = ("reference", "candidate")
Call = tuple[tuple[Any, ...], dict[str, Any]]
Results = list[tuple[str, Tensor]]


def tries(call: Call, named: set[int], chosen: random.Random) -> Iterator[tuple[dict[int, int], str]]:
    """Extents to be replaced, and by what, and in which manner masks and positions are drawn: first the call
    as it is given, then each manner, then one extent at a time, the most telling first."""
    tensors = tensors_in(call)
    manners = list(dict.fromkeys(m for t in tensors for m in drawn.manners_of(t)))
    yield from (({}, manner) for manner in ("", *manners))
    extents = dict.fromkeys(n for t in tensors for n in t.shape[: -1 if t.is_floating_point() else None])
    near = sorted(n + more for n in named for more in (0, 1) if 1 < n + more <= 600)
    for other in dict.fromkeys((*SIZES, *near)):
        yield from (({n: other}, chosen.choice(["", *manners])) for n in extents if n != other)


class Numbers:
    """Compares calls of both sides. Stops at the first difference."""

    def __init__(self, matched: Matched, gradients: bool, chosen: random.Random) -> None:
        self.matched, self.gradients, self.chosen = matched, gradients, chosen
        self.wide = [_in_float64(side) for side in (matched.reference, matched.candidate)]
        modules = [m for m in (matched.reference, matched.candidate, *self.wide) if isinstance(m, nn.Module)]
        for weight in (w for m in modules for w in m.parameters() if w.is_floating_point()):
            weight.requires_grad_(gradients)
        self.modes = tuple(
            dict.fromkeys((exact, flow) for exact in (True, False) for flow in (gradients, False))
        )
        self.difference: Difference | None = None
        self.last: tuple[Call, Call] | None = None
        """The call that was compared last, and the example of its kind."""
        self.least: Any = None
        """The smallest call found, as `attngraph.verify` takes it."""
        self.arrays = self.probing = self.unserved = False
        """Whether a side returns arrays, of numpy say; whether only that they differ is asked; and whether
        the candidate is a folder without a graph for some call."""
        self.tried, self.skipped, self.worst = 0, 0, 0.0
        self.refused = Difference("call", "no call was compared", code="reference-refuses")
        self.exact, self.narrowest = True, 0.0
        self.apart = False
        """Whether the two differ at tokens that a mask hides, whose results are not compared then."""

    def notes(self) -> list[str]:
        whose = "the candidate's graphs are not for" if self.unserved else "the reference takes no"
        skipped = f"; {whose} other {self.skipped} size(s) that were tried" if self.skipped else ""
        how = "in float64" if self.exact else "in the dtypes that are given, as one side takes no float64"
        flow = [
            "gradients are not compared, as a side returns none: arrays, or what another process computed"
        ] * self.arrays
        apart = ["they differ at tokens that a mask hides, whose own results are not compared"] * self.apart
        return [f"{self.tried} call(s) compared {how}{skipped}", *flow, *apart]

    def compare(self, call: Call, example: Call, real: Tensor | None = None) -> None:
        """Compare a call. `example`: of what kind it is. `real`: the tokens whose results are compared, bool
        `[batch, tokens]`."""
        about, self.last = ", ".join(described(call)), (call, example)
        try:
            wanted, found = self._both(call, real)
            if not self.tried:
                self._meet(call)
            moved = self._sides(call, real, max(MOVED, self.narrowest / 2))
        except _Refused as refusal:
            side, problem = refusal.args
            self._refuse(side, problem, about)
            return
        self.tried += 1
        if len(found) != len(wanted):
            said = f"it returns {len(found)} tensors instead of {len(wanted)}"
            self.difference = Difference("results", said, code="number-of-results")
            return
        worst, self.difference = self.worst, self._difference(call, about, wanted, found, moved)
        if self.difference is not None and real is None:
            maybe = drawn.hidden_by(tensors_in(call), tensors_in(example))
            hidden = next((m[0] for m in maybe if self._hides(call, *m)), None)
            if hidden is not None:
                self.tried, self.difference, self.worst = self.tried - 1, None, worst
                self.compare(call, example, ~hidden)
                self.apart |= self.difference is None

    def _refuse(self, side: int, problem: Exception, about: str) -> None:
        """Note that a side takes no such call: a difference, if the reference does and a graph should."""
        is_unserved = side == 1 and isinstance(problem, SavedError | NoDecoderError)
        self.unserved |= is_unserved
        if side == 0 or is_unserved:
            self.skipped += 1
            said = f"the {SIDES[side]} refuses the call: {first_line(problem)}"
            self.refused = Difference("call", said, code=f"{SIDES[side]}-refuses")
            return
        refuses = f"refuses a call with {about}: {first_line(problem)}"
        said = f"{problem}, called with {about}" if isinstance(problem, Ended) else refuses
        self.difference = Difference("call", f"the candidate {said}", code=code_of(problem))

    def _meet(self, call: Call) -> None:
        """Learn to which dtypes the sides round, beside the calls that are compared: a compiled side does not
        compile under a mode."""
        given = pytree.tree_map_only(Tensor, self._operand(0.0), call)  # widening does not round
        with _Narrowest() as met:
            for side in (0, 1):
                if not getattr(self.wide[side], "untraced", ""):  # what cannot be looked into
                    self._run(side, given)
        self.narrowest = max(self.narrowest, met.unit)

    def _sides(self, call: Call, real: Tensor | None, by: float = 0.0) -> list[Results]:
        """The results of both sides.

        Raises:
            _Refused: one raises an exception.
        """
        found: list[Results] = []
        try:
            for side in (0, 1):
                found.append(self._run(side, call, by, real))
        except Exception as problem:
            raise _Refused(len(found), problem) from problem
        return found

    def _both(self, call: Call, real: Tensor | None) -> list[Results]:
        """The results of both sides. The first call decides in what they are compared: in float64 if both
        take it, with gradients unless a side returns arrays.

        Raises:
            _Refused: a side raises, whatever is asked of it.
        """
        modes = (
            self.modes
            if not self.tried
            else dict.fromkeys(((self.exact, self.gradients), (self.exact, False)))
        )
        refusal: _Refused | None = None
        for exact, gradients in modes:
            self.exact, self.gradients = exact, gradients
            self.arrays = bool(self.tried) and self.arrays
            try:
                found = self._sides(call, real)
            except _Refused as problem:
                refusal = problem
                if isinstance(problem.args[1], Ended):
                    break
                continue
            if self.gradients != self.arrays or not self.modes[0][1]:
                return found
        self.exact, self.gradients = next(iter(modes))
        raise refusal or _Refused(1, TypeError("it returns arrays for some calls, and tensors for others"))

    def _difference(
        self, call: Call, about: str, wanted: Results, found: Results, moved: Sequence[Results]
    ) -> Difference | None:
        """The first result that is off by more than rounding. `moved`: both sides' with operands moved."""
        near = zip(wanted, found, *moved, strict=False)
        spreads = [_apart(a, x) + _apart(b, y) for (_, a), (_, b), (_, x), (_, y) in near]
        spreads += [max(spreads, default=0.0)] * (
            len(found) - len(spreads)
        )  # other ways of a decoder's steps
        for (name, a), (_, b), spread in zip(wanted, found, spreads, strict=True):
            if a.shape != b.shape or not torch.equal(_not_finite(a), _not_finite(b)):
                what = "another shape" if a.shape != b.shape else "NaN or infinities in other places"
                code = "shape" if a.shape != b.shape else "not-finite"
                return Difference("values", f"{name} has {what}, called with {about}", code=code)
            error, scale = _apart(a, b), float(a[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0
            allowed = ROUNDINGS * spread + max(LEAST, self.narrowest) * scale
            self.worst = max(self.worst, error / allowed if allowed else float(error > 0))
            if error > allowed:
                said = (
                    f"{name} is off by {error:.1e} (values up to {scale:.1e}, rounding up to {allowed:.0e})"
                )
                said = f"{said}, called with {about}"
                code = "gradients" if name.startswith("the gradient") else "values"
                enters, given = self._enters(call)
                return Difference("values", said, *self._lines(call), enters=enters, given=given, code=code)
        return None

    def _hides(self, call: Call, hidden: Tensor, mask: Tensor, none: Tensor) -> bool:
        """Whether a mask hides these tokens: the reference's results for the others do not change with them,
        but do with a mask that hides nothing (`none`), and one that hides all is not the same as that. Of two
        documents that do not see each other, none is hidden."""
        changed = False

        def other(tensor: Tensor) -> Tensor:
            nonlocal changed
            if drawn.manners_of(tensor) or tensor.ndim < 2 or tensor.shape[:2] != hidden.shape:
                return tensor
            torch.manual_seed(self.chosen.randrange(1 << 30))
            changed = True
            place = hidden.view(*hidden.shape, *[1] * (tensor.ndim - 2))
            return torch.where(place, drawn.like(tensor, list(tensor.shape), ""), tensor)

        again = pytree.tree_map_only(Tensor, other, call)
        closed = mask.flatten()[(mask != none).flatten()][0]
        masked = [_with(call, mask, m) for m in (none, torch.full_like(mask, closed.item()))]
        try:
            one, two, opened, shut = (
                [t for _, t in self._run(0, c, real=~hidden, gradients=False)] for c in (call, again, *masked)
            )
        except Exception:  # the reference takes no such mask: nothing is known of it
            return False
        return changed and _alike(one, two) and not _alike(opened, shut) and not _alike(one, opened)

    def _run(
        self, side: int, call: Call, by: float = 0.0, real: Tensor | None = None, gradients: bool = True
    ) -> Results:
        """The results of one side, and gradients, by name. `by`: how far operands are moved. `real`: tokens
        that alone are kept of results that have them."""
        plain = self.matched.reference, self.matched.candidate
        model: Any = self.wide[side] if self.exact else plain[side]
        args, kwargs = pytree.tree_map_only(Tensor, self._operand(by), call)
        given = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        weights = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
        if isinstance(model, Sequences):
            model.most = 1 if by else None  # ways round alike
        with torch.set_grad_enabled(self.gradients), _moved(weights.values(), by):
            answer = model(*args, **kwargs)
            ways = list(answer) if isinstance(answer, ByWay) else []
            answer = list(answer.values()) if ways else answer
            results = [_kept(r, real) for r in results_of(answer)]
            self.arrays |= not getattr(model, "has_gradients", len(tensors_of(answer)) == len(results))
            self.narrowest = max(self.narrowest, *(u for u in map(_unit, results) if u < 1.0), 0.0)
            called = ways or [f"result {n}" for n in range(len(results))]
            found = [(name, r.detach().double()) for name, r in zip(called, results, strict=True)]
            flows = [r for r in results if r.requires_grad]
            total = [(r * torch.linspace(-1, 1, r.numel(), dtype=r.dtype).view(r.shape)).sum() for r in flows]
            names = [w for w in self.matched.weights if self.gradients and gradients]
            leaves = [*(given if gradients else []), *(weights[w[side]] for w in names)]
            grads: Sequence[Tensor | None] = [None] * len(leaves)
            if flows and leaves:
                grads = torch.autograd.grad(total, leaves, allow_unused=True)
        said = [*(f"argument {n}" for n in range(len(leaves) - len(names))), *(w[0] for w in names)]
        zeros = (torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True))
        return found + [
            (f"the gradient of {n}", g.detach().double()) for n, g in zip(said, zeros, strict=True)
        ]

    def _operand(self, by: float) -> Callable[[Tensor], Tensor]:
        def operand(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            wide = tensor.detach().to(torch.float64 if self.exact else tensor.dtype)
            return _nudged(wide, by).requires_grad_(self.gradients)

        return operand

    def _enters(self, call: Call) -> tuple[str, str]:
        """The first module of the same name whose result differs although what it was given is equal; and of
        steps, the first one and its argument, if it is given other values."""
        if not self.exact or self.probing:
            return "", ""
        seen = [recorded(side, pytree.tree_map_only(Tensor, self._operand(0.0), call)) for side in self.wide]
        steps = isinstance(self.wide[1], Steps)
        for name, (given, result) in ((n, c) for n, c in seen[0].items() if n in seen[1]):
            others = seen[1][name]
            if steps:  # a token's values are compared where both sides have them for every token
                other = next((n for n in given if _unlike(given[n], others[0].get(n))), "")
                if other or any(map(_unlike, result, others[1])):
                    return name, other
            elif _alike([*given.values()], [*others[0].values()]) and not _alike(result, others[1]):
                return name, ""
        return "", ""

    def _lines(self, call: Call) -> tuple[str, str]:
        """The line of each side at which values part."""
        if not self.exact or self.probing or isinstance(self.wide[1], Steps):
            return "", ""
        args, kwargs = pytree.tree_map_only(Tensor, self._operand(0.0), call)
        reference, candidate = (functools.partial(side, *args, **kwargs) for side in self.wide)
        return parts_at(reference, candidate, self.narrowest)


class _Refused(Exception):
    """A side, 0 or 1, raises an exception."""


def _in_float64(side: Any) -> Any:
    return copy.deepcopy(side).double() if isinstance(side, nn.Module) else side


def described(call: Call) -> tuple[str, ...]:
    """The dtypes and shapes of a call's tensors."""
    return tuple(f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in tensors_in(call))


def tensors_in(call: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]


def _with(call: Call, old: Tensor, new: Tensor) -> Call:
    """A call with a tensor in place of another."""
    found: Call = pytree.tree_map_only(Tensor, lambda tensor: new if tensor is old else tensor, call)
    return found


def _kept(result: Tensor, real: Tensor | None) -> Tensor:
    """A result with 0 for the tokens that are not real."""
    if real is None or result.ndim < 2 or result.shape[:2] != real.shape:
        return result
    return torch.where(real.view(*real.shape, *[1] * (result.ndim - 2)), result, 0)


def _not_finite(tensor: Tensor) -> Tensor:
    """NaN and infinities as they are, and 0 for numbers."""
    return torch.where(tensor.isfinite(), 0.0, tensor).nan_to_num(nan=0.5, posinf=1.0, neginf=-1.0)


def _apart(a: Tensor, b: Tensor) -> float:
    both = a.isfinite() & b.isfinite()
    return float((a - b)[both].abs().max()) if both.any() else 0.0


def _nudged(tensor: Tensor, by: float) -> Tensor:
    return tensor * (1 + by * (2 * torch.rand_like(tensor) - 1)) if by else tensor


class _Narrowest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meets what a call computes. `unit`: the last place of the narrowest dtype to which it rounds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        units = [u for u in map(_unit, tensors_in((args, kwargs, result))) if u < 1.0]
        if units and min(units) < max(
            units
        ):  # it rounds to, or computes with what was rounded to, a narrower one
            self.unit = max(self.unit, *units)
        return result


def _unit(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 1.0


class _moved:
    """Weights moved by a relative amount within the block."""

    def __init__(self, weights: Any, by: float) -> None:
        self.weights, self.by = list(weights) if by else [], by

    def __enter__(self) -> None:
        self.before = [w.detach().clone() for w in self.weights]
        for weight in self.weights:
            weight.data = _nudged(weight.data, self.by)

    def __exit__(self, *_: object) -> None:
        for weight, before in zip(self.weights, self.before, strict=True):
            weight.data = before


def varied(call: Call, sizes: Mapping[int, int], manner: str, chosen: random.Random) -> Call:
    """A call of other sizes and, where these are other ones or the manner asks for it, other values."""

    def other(tensor: Tensor) -> Tensor:
        plain = tensor.is_floating_point() and not drawn.is_mask_of_numbers(tensor)
        kept = tensor.ndim - 1 if plain else tensor.ndim
        shape = [sizes.get(n, n) if d < kept else n for d, n in enumerate(tensor.shape)]
        if not sizes and manner not in drawn.manners_of(tensor):
            return tensor
        torch.manual_seed(chosen.randrange(1 << 30))
        return drawn.like(tensor, shape, manner)

    found: Call = pytree.tree_map_only(Tensor, other, call)
    return found


def _alike(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    pairs = [(a.detach(), b.detach()) for a, b in zip(mine, theirs, strict=False)]
    return len(mine) == len(theirs) and all(
        a.shape == b.shape
        and (_apart(a, b) <= 1e-9 * float(a.abs().max()) if _rounds(a) else torch.equal(a, b))
        for a, b in pairs
        if a.numel()
    )


def _rounds(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _unlike(a: Tensor, b: Tensor | None) -> bool:
    """Whether the second has other values for the same tokens, of each row or of all, or more tokens."""
    if b is None or a.ndim != b.ndim or a.ndim < 2 or a.shape[2:] != b.shape[2:]:
        return False
    if a.shape[1] != b.shape[1] or 1 not in (len(a), len(b), len(a) == len(b)):
        return b.shape[1] > a.shape[1] and len(a) == len(b)
    rows = max(len(a), len(b))
    return not _alike([a.expand(rows, *a.shape[1:])], [b.expand(rows, *b.shape[1:])])
