"""Two sides by number: calls of many sizes and values, in float64 where both can.

What two spellings of one formula may differ by is measured: by how far each side's own answer moves when its
operands move by 1e-12.
"""

import contextlib
import copy
import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.api import drawn
from attngraph.api.entering import Call, alike, apart, enters_at, enters_in, state_of, tensors_in
from attngraph.api.matched import Matched
from attngraph.api.recorded import stack_of
from attngraph.api.verdict import Difference
from attngraph.errors import first_line
from attngraph.runtime.verify import tensors_of

MOVED, ROUNDINGS, LEAST = 1e-12, 32.0, 1e-11
"""How far operands are moved, relatively, or half a unit in the last place of the narrowest dtype to which a
side rounds; how many times as far as that moves an answer two equal ones may lie apart; and at least so much
of the answer's largest element, or a unit of that dtype."""
SIZES = (1, 2, 3, 5, 8, 17, 130)
"""Extents that are tried beside those of the call."""
SMALL = {"numbers as small as 1e-3": 1e-3, "numbers as small as 1e-6": 1e-6}
"""Manners in which weights and floating arguments are smaller: an epsilon that is added to them counts."""
AS_GIVEN = "in the dtypes that are given"
"""The manner of the call itself, for sides that compute otherwise in float64."""
Results = list[tuple[str, Tensor]]


def tries(call: Call, named: set[int], chosen: random.Random) -> Iterator[tuple[dict[int, int], str]]:
    """Extents to be replaced, and by what, and in which manner masks and positions are drawn: first the call
    as it is given, then in each manner, then with one extent at a time, the most telling first."""
    tensors = tensors_in(call)
    manners = list(dict.fromkeys(m for t in tensors for m in drawn.manners_of(t)))
    small, smallest = SMALL
    yield from (({}, manner) for manner in ("", small, *manners, AS_GIVEN, smallest))
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
        self.difference: Difference | None = None
        self.tried, self.skipped, self.worst, self.refused = 0, 0, 0.0, ""
        self.exact, self.narrowest = True, 0.0
        self.apart = False
        """Whether the two differ at tokens that a mask hides, whose results are not compared then."""

    def notes(self) -> list[str]:
        skipped = (
            f"; the reference takes no other {self.skipped} size(s) that were tried" if self.skipped else ""
        )
        how = "in float64" if self.exact else "in the dtypes that are given, as one side takes no float64"
        apart = ["they differ at tokens that a mask hides, whose own results are not compared"] * self.apart
        return [f"{self.tried} call(s) compared {how}{skipped}", *apart]

    def compare(self, call: Call, example: Call, manner: str = "") -> None:
        """Compare a call. `example`: of what kind it is. `manner`: how it was drawn."""
        if manner in (*SMALL, AS_GIVEN) and not self.exact:
            return  # narrower numbers may vanish
        exact, narrowest = self.exact, self.narrowest
        self.exact = exact and manner != AS_GIVEN
        plain = self.matched.reference, self.matched.candidate
        with _scaled((*plain, *self.wide), SMALL.get(manner, 1.0)):
            self._compare(call, example)
        if manner == AS_GIVEN:
            self.exact, self.narrowest = exact, narrowest

    def _compare(self, call: Call, example: Call, real: Tensor | None = None) -> None:
        """`real`: the tokens whose results are compared, bool `[batch, tokens]`."""
        about = ", ".join(f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in tensors_in(call))
        try:
            wanted = self._run(0, call, real=real)
        except Exception as problem:
            if self.exact and not self.tried + self.skipped:  # a kernel may take no float64
                self.exact = False
                self._compare(call, example)
                return
            self.skipped += 1
            self.refused = f"the reference refuses the call: {first_line(problem)}"
            return
        try:
            found = self._run(1, call, real=real)
        except Exception as problem:
            if self.exact and not self.tried:  # a kernel may take no float64
                self.exact = False
                self._compare(call, example)
                return
            self.difference = Difference(
                "call", f"the candidate refuses a call with {about}: {first_line(problem)}"
            )
            return
        if not self.tried:
            self.difference = self._rounds(call)
        self.tried += 1
        if len(found) != len(wanted):
            said = f"it returns {len(found)} tensors instead of {len(wanted)}"
            self.difference = Difference("results", said)
            return
        if self.difference is not None:
            return
        worst, self.difference = self.worst, self._difference(call, about, wanted, found, real)
        if self.difference is not None and self.exact and self._is_finite_as_given(call, wanted, found):
            self.tried, self.difference, self.worst = self.tried - 1, None, worst
            self.compare(call, example, AS_GIVEN)
            return
        if self.difference is not None and real is None:
            maybe = drawn.hidden_by(tensors_in(call), tensors_in(example))
            hidden = next(
                (m[0] for m in maybe if self._hides(call, *m) or self._hides_turned(call, *m)), None
            )
            if hidden is not None:
                self.tried, self.difference, self.worst = self.tried - 1, None, worst
                self._compare(call, example, ~hidden)
                self.apart |= self.difference is None

    def _difference(
        self, call: Call, about: str, wanted: Results, found: Results, real: Tensor | None
    ) -> Difference | None:
        """The first result that is off by more than rounding."""
        moved: list[Results] = []  # both sides' with operands moved, if they are needed
        for n, ((name, a), (_, b)) in enumerate(zip(wanted, found, strict=True)):
            if a.shape != b.shape or not torch.equal(_not_finite(a), _not_finite(b)):
                what = "another shape" if a.shape != b.shape else "NaN or infinities in other places"
                return self._told(f"{name} has {what}, called with {about}", call)
            error, scale = apart(a, b), float(a[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0
            allowed = max(LEAST, self.narrowest) * scale
            if error > allowed:
                by = max(MOVED, self.narrowest / 2)
                moved = moved or [self._run(side, call, by, real) for side in (0, 1)]
                allowed += ROUNDINGS * sum(
                    apart(x, near[n][1]) for x, near in zip((a, b), moved, strict=True)
                )
            self.worst = max(self.worst, error / allowed if allowed else float(error > 0))
            if error > allowed:
                said = (
                    f"{name} is off by {error:.1e} (values up to {scale:.1e}, rounding up to {allowed:.0e})"
                )
                return self._told(f"{said}, called with {about}", call)
        return None

    def _rounds(self, call: Call) -> Difference | None:
        """Sees to which dtype the sides round, beside the calls that are compared (what is compiled does not
        run under a mode). A candidate that rounds to a narrower one than the reference, and than those that
        are given, differs."""
        given = pytree.tree_map_only(Tensor, self._operand(0.0), call)  # widening does not round
        met = _Narrowest(), _Narrowest()
        for side, one in enumerate(met):
            with one:
                self._run(side, given)
        self.narrowest = max(self.narrowest, *(one.unit for one in met))
        units = map(_unit, (*state_of(self.matched.reference), *tensors_in(call)))
        own = max((unit for unit in units if unit < 1.0), default=torch.finfo(torch.float32).eps)
        if met[1].unit <= max(met[0].unit, own):
            return None
        dtypes = {torch.finfo(d).eps: str(d).removeprefix("torch.") for d in (torch.bfloat16, torch.float16)}
        said = f"the candidate rounds to {dtypes.get(met[1].unit, 'a narrow dtype')}, the reference does not"
        return Difference("values", said, candidate=met[1].line)

    def _is_finite_as_given(self, call: Call, *wide: Results) -> bool:
        """Whether a side gives NaN or infinities in float64 alone: a fill of float64 is beyond the range of a
        softmax in float32, say."""
        if all(t.isfinite().all() for results in wide for _, t in results):
            return False
        self.exact, narrowest = False, self.narrowest
        plain = [self._run(side, call, gradients=False) for side in (0, 1)]
        self.exact, self.narrowest = True, narrowest
        return any(
            not torch.equal(a.isfinite(), b.isfinite())
            for one, other in zip(plain, wide, strict=True)
            for (_, a), (_, b) in zip(one, other, strict=False)
        )

    def _hides(
        self, call: Call, hidden: Tensor, mask: Tensor, none: Tensor, seen: bool = True
    ) -> bool:  # fmt: skip
        """Whether a mask hides these tokens: the reference's results for the others do not change with them,
        but do with a mask that hides nothing (`none`), and one that hides all is not the same as that. Of two
        documents that do not see each other, none is hidden. `seen`: whether others see them without it."""
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
        same = functools.partial(alike, close=max(1e-9, 8 * self.narrowest))
        found = changed and same(one, two) and not same(opened, shut)
        return found and not (seen and same(one, opened))

    def _hides_turned(self, call: Call, hidden: Tensor, mask: Tensor, none: Tensor) -> bool:
        """Whether a mask hides these tokens that no other sees anyway, as they are at the end of a causal
        sequence: in the other order it hides them, and in this one the others do not change with them."""
        if mask.ndim != 2:
            return False
        turned = mask.flip(-1)
        return self._hides(_with(call, mask, turned), hidden.flip(-1), turned, none) and self._hides(
            call, hidden, mask, none, seen=False
        )

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
        with torch.set_grad_enabled(self.gradients), _moved(weights.values(), by):
            results = [_kept(r, real) for r in tensors_of(model(*args, **kwargs))]
            self.narrowest = max(self.narrowest, *(u for u in map(_unit, results) if u < 1.0), 0.0)
            found = [(f"result {n}", r.detach().double()) for n, r in enumerate(results)]
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

    def _told(self, said: str, call: Call) -> Difference:
        """The difference, with the module and the lines at which it enters."""
        sides = self.wide if self.exact else (self.matched.reference, self.matched.candidate)
        given = pytree.tree_map_only(Tensor, self._operand(0.0), call)
        lines = enters_at(sides, given, self.narrowest)
        return Difference("values", said, *lines, enters=enters_in(sides, given, self.narrowest))


def _in_float64(side: Any) -> Any:
    return copy.deepcopy(side).double() if isinstance(side, nn.Module) else side


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


def _nudged(tensor: Tensor, by: float) -> Tensor:
    return tensor * (1 + by * (2 * torch.rand_like(tensor) - 1)) if by else tensor


class _Narrowest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meets what a call computes. `unit`: the last place of the narrowest dtype to which it rounds, first at
    `line`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit, self.line = 0.0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        units = [u for u in map(_unit, tensors_in((args, kwargs, result))) if u < 1.0]
        # it rounds to, or computes with what was rounded to, a narrower one
        if units and min(units) < max(units) > self.unit:
            stack = stack_of(sys._getframe(1))
            self.unit, self.line = max(units), stack[-1].line if stack else ""
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


@contextlib.contextmanager
def _scaled(sides: Sequence[Any], by: float) -> Iterator[None]:
    """Within, the matrices of modules are so many times as large."""
    weights = {w for side in sides if isinstance(side, nn.Module) for w in side.parameters() if w.ndim > 1}
    before = [(w, w.data) for w in weights if by != 1.0 and w.is_floating_point()]
    for weight, data in before:
        weight.data = data * by
    try:
        yield
    finally:
        for weight, data in before:
            weight.data = data


def varied(call: Call, sizes: Mapping[int, int], manner: str, chosen: random.Random) -> Call:
    """A call of other sizes and, where these are other ones or the manner asks for it, other values."""

    def other(tensor: Tensor) -> Tensor:
        plain = tensor.is_floating_point() and not drawn.is_mask_of_numbers(tensor)
        kept = tensor.ndim - 1 if plain else tensor.ndim
        shape = [sizes.get(n, n) if d < kept else n for d, n in enumerate(tensor.shape)]
        if not sizes and manner not in drawn.manners_of(tensor):
            return tensor * SMALL.get(manner, 1.0) if plain else tensor
        torch.manual_seed(chosen.randrange(1 << 30))
        return drawn.like(tensor, shape, manner)

    found: Call = pytree.tree_map_only(Tensor, other, call)
    return found
