"""Two sides by number: calls of many sizes and values, in float64 where both can.

What two spellings of one formula may differ by is measured: by how far each side's own answer moves when its
operands move by 1e-12.
"""

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.api.verify.calls import AS_GIVEN, SMALL, Call, described, mapped, tensors_in
from attngraph.api.verify.entering import distance, enters_at, enters_in, state_of
from attngraph.api.verify.hidden import hidden_tokens
from attngraph.api.verify.matched import Matched
from attngraph.api.verify.recorded import Narrowest, units_of
from attngraph.api.verify.sides import Ended, code_of
from attngraph.api.verify.steps import ByWay, Sequences
from attngraph.api.verify.verdict import Difference
from attngraph.errors import CaptureError, NoDecoderError, SavedError, first_line
from attngraph.runtime.verify import results_of, tensors_of

MOVED, ROUNDINGS, LEAST = 1e-12, 32.0, 1e-11
"""How far operands are moved, relatively, or half a unit in the last place of the narrowest dtype to which a
side rounds; how many times as far as that moves an answer two equal ones may lie apart; and at least so much
of the answer's largest element, or a unit of that dtype."""
SIDES = ("reference", "candidate")
Results = list[tuple[str, Tensor]]


class Numbers:
    """Compares calls of both sides. Stops at the first difference."""

    def __init__(self, matched: Matched, gradients: bool, chosen: random.Random) -> None:
        self.matched, self.gradients, self.chosen = matched, gradients, chosen
        self.plain = [matched.reference, matched.candidate]
        self.wide = [copy.deepcopy(s).double() if isinstance(s, nn.Module) else s for s in self.plain]
        modules = [m for m in (*self.plain, *self.wide) if isinstance(m, nn.Module)]
        for weight in (w for m in modules for w in m.parameters() if w.is_floating_point()):
            weight.requires_grad_(gradients)
        self.scalable = [w for sides in (self.plain, self.wide) for w in _paired(sides, matched)]
        modes = ((exact, flow) for exact in (True, False) for flow in (gradients, False))
        self.modes = tuple(dict.fromkeys(modes))
        self.difference: Difference | None = None
        self.last: tuple[Call, Call, str] | None = None
        """The call that was compared last, the example of its kind, and how it was drawn."""
        self.least: Any = None
        """The smallest call found, as `attngraph.verify` takes it."""
        self.arrays = self.probing = self.unserved = self.narrows = False
        """Whether a side returns arrays, of numpy say; whether only that they differ is asked; whether the
        candidate is a folder without a graph for some call; and whether it rounds to a narrower dtype."""
        self.calling, self.no_gradients = False, ""
        """Whether a side's forward is running, and why gradients cannot be asked for, if they cannot."""
        self.tried, self.skipped, self.worst = 0, 0, 0.0
        self.refused = Difference("call", "no call was compared", code="reference-refuses")
        self.exact, self.narrowest = True, 0.0
        self.apart = False
        """Whether the two differ at tokens that a mask hides, whose results are not compared then."""

    def notes(self) -> list[str]:
        whose = "the candidate's graphs are not for" if self.unserved else "the reference takes no"
        skipped = f"; {whose} other {self.skipped} size(s) that were tried" if self.skipped else ""
        how = "in float64" if self.exact else "in the dtypes that are given, as one side takes no float64"
        why = self.no_gradients or "a side returns none: arrays, or what another process computed"
        flow = f"gradients are not compared, as {why}"
        apart = "they differ at tokens that a mask hides, whose own results are not compared"
        return [
            f"{self.tried} call(s) compared {how}{skipped}",
            *[flow] * (self.arrays or bool(self.no_gradients)),
            *[apart] * self.apart,
        ]

    def compare(self, call: Call, example: Call, manner: str = "") -> None:
        """Compare a call. `example`: of what kind it is. `manner`: how it was drawn."""
        if manner in (*SMALL, AS_GIVEN) and not self.exact:
            return  # narrower numbers may vanish
        if manner in SMALL and not self.scalable and not units_of(tensors_in(call)):
            return  # nothing in it is smaller
        self.last, before = (call, example, manner), (self.exact, self.narrowest)
        self.exact &= manner != AS_GIVEN
        with _scaled(self.scalable, SMALL.get(manner, 1.0)):
            self._compare(call, example, manner)
        if manner == AS_GIVEN:
            self.exact, self.narrowest = before

    def _compare(self, call: Call, example: Call, manner: str, real: Tensor | None = None) -> None:
        """`real`: the tokens whose results are compared, bool `[batch, tokens]`."""
        about, worst = ", ".join([*described(call), *[manner] * bool(manner)]), self.worst
        off: Difference | None = None
        try:
            wanted, found = self._both(call, real, manner)
            if not self.tried or self.narrows:
                self.difference = self._narrower(call)
            if len(found) != len(wanted):
                said = f"it returns {len(found)} tensors instead of {len(wanted)}"
                self.difference = Difference("results", said, code="number-of-results")
            elif self.difference is None:
                self.difference = off = self._difference(call, about, wanted, found, real)
        except _Refused as refusal:
            side, problem = refusal.args
            self._refuse(side, problem, about)
            return
        self.tried += 1
        if off is None:
            return
        as_given = self.exact and self._is_finite_as_given(call, wanted, found)
        hidden = None if as_given or real is not None else self._hidden(call, example)
        if as_given or hidden is not None:
            self.tried, self.difference, self.worst = self.tried - 1, None, worst
        if as_given:
            self.compare(call, example, AS_GIVEN)
        elif hidden is not None:
            self._compare(call, example, manner, ~hidden)
            self.apart |= self.difference is None

    def _refuse(self, side: int, problem: Exception, about: str) -> None:
        """Note that a side takes no such call: a difference, if the reference does and a graph should."""
        is_unserved = side == 1 and isinstance(problem, SavedError | NoDecoderError | CaptureError)
        self.unserved |= is_unserved
        if side == 0 or is_unserved:
            self.skipped += 1
            said = f"the {SIDES[side]} refuses the call: {first_line(problem)}"
            self.refused = Difference("call", said, code=f"{SIDES[side]}-refuses")
            return
        refuses = f"refuses a call with {about}: {first_line(problem)}"
        said = f"{problem}, called with {about}" if isinstance(problem, Ended) else refuses
        self.difference = Difference("call", f"the candidate {said}", code=code_of(problem))

    def _sides(
        self, call: Call, real: Tensor | None, by: float = 0.0, gradients: bool = True
    ) -> list[Results]:
        """The results of both sides; `_Refused` says which one raises an exception."""
        found: list[Results] = []
        try:
            for side in (0, 1):
                found.append(self._run(side, call, by, real, gradients))
        except Exception as problem:
            raise _Refused(len(found), problem) from problem
        return found

    def _both(self, call: Call, real: Tensor | None, manner: str) -> list[Results]:
        """The results of both sides. The first call decides in what they are compared: in float64 if both
        take it, with gradients unless a side returns arrays, or its forward refuses a call that asks for them
        and no other. `_Refused`: a side raises, whatever is asked."""
        is_first = not self.tried and manner != AS_GIVEN
        modes = self.modes if is_first else ((self.exact, self.gradients), (self.exact, False))
        refusal: _Refused | None = None
        for exact, gradients in dict.fromkeys(modes):
            self.exact, self.gradients = exact, gradients
            self.arrays = bool(self.tried) and self.arrays
            try:
                found = self._sides(call, real)
            except _Refused as problem:
                refusal = problem
                if isinstance(problem.args[1], Ended):
                    break
                if gradients and self.calling:
                    side, said = problem.args
                    self.no_gradients = (
                        f"the {SIDES[side]} refuses a call that asks for them: {first_line(said)}"
                    )
                continue
            if gradients:
                self.no_gradients = ""
            if self.gradients != (self.arrays or bool(self.no_gradients)) or not self.modes[0][1]:
                return found
        self.exact, self.gradients = modes[0]
        raise refusal or _Refused(1, TypeError("it returns arrays for some calls, and tensors for others"))

    def _difference(
        self, call: Call, about: str, wanted: Results, found: Results, real: Tensor | None
    ) -> Difference | None:
        """The first result that is off by more than rounding."""
        spreads: list[float] = []  # if they are needed
        for n, ((name, a), (_, b)) in enumerate(zip(wanted, found, strict=True)):
            if a.shape != b.shape:
                return self._told("shape", f"{name} has another shape, called with {about}", call)
            if not torch.equal(_not_finite(a), _not_finite(b)):
                said = f"{name} has NaN or infinities in other places, called with {about}"
                return self._told("not-finite", said, call)
            error, scale = distance(a, b), float(a[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0
            allowed = max(LEAST, self.narrowest) * scale
            if error > allowed:
                spreads = spreads or self._spreads(call, real, wanted, found)
                allowed += ROUNDINGS * spreads[n]
            self.worst = max(self.worst, error / allowed if allowed else float(error > 0))
            if error > allowed:
                code = "gradients" if name.startswith("the gradient") else "values"
                far = f"(values up to {scale:.1e}, rounding up to {allowed:.0e})"
                return self._told(code, f"{name} is off by {error:.1e} {far}, called with {about}", call)
        return None

    def _spreads(self, call: Call, real: Tensor | None, *results: Results) -> list[float]:
        """How far each result moves on both sides with operands that are moved; the most for other ways of a
        decoder's steps, of which one is run."""
        near = self._sides(call, real, max(MOVED, self.narrowest / 2))
        moves = [
            [distance(a, b) for (_, a), (_, b) in zip(*pair, strict=False)]
            for pair in zip(results, near, strict=True)
        ]
        found = [sum(both) for both in zip(*moves, strict=True)]
        return found + [max(found, default=0.0)] * (len(results[0]) - len(found))

    def _narrower(self, call: Call) -> Difference | None:
        """Learns to which dtypes the sides round, beside the calls that are compared (what is compiled does
        not run under a mode). A candidate that rounds to a narrower one than the reference, and than those
        that are given, differs."""
        given = mapped(call, self._operand(0.0))  # widening does not round
        met = Narrowest(), Narrowest()
        for side, one in enumerate(met):
            if not getattr(self.plain[side], "untraced", ""):  # what cannot be looked into
                with one:
                    self._run(side, given)
        self.narrowest = max(self.narrowest, *(one.unit for one in met))
        own = units_of([*state_of(self.plain[0]), *tensors_in(call)]) or [torch.finfo(torch.float32).eps]
        if met[1].unit <= max(met[0].unit, *own):
            return None
        self.narrows = True
        dtypes = {torch.finfo(d).eps: str(d).removeprefix("torch.") for d in (torch.bfloat16, torch.float16)}
        said = f"the candidate rounds to {dtypes.get(met[1].unit, 'a narrow dtype')}, the reference does not"
        return Difference("values", said, candidate=met[1].line, code="rounds-narrower")

    def _is_finite_as_given(self, call: Call, *wide: Results) -> bool:
        """Whether a side gives NaN or infinities in float64 alone: a fill of float64 is beyond the range of a
        softmax in float32, say."""
        if all(t.isfinite().all() for results in wide for _, t in results):
            return False
        before = self.narrowest
        self.exact = False
        try:
            plain = self._sides(call, None, gradients=False)
        except _Refused:  # it takes float64 alone
            return False
        finally:
            self.exact, self.narrowest = True, before
        return any(
            not torch.equal(a.isfinite(), b.isfinite())
            for one, other in zip(plain, wide, strict=True)
            for (_, a), (_, b) in zip(one, other, strict=False)
        )

    def _hidden(self, call: Call, example: Call) -> Tensor | None:
        def run(given: Call, real: Tensor) -> list[Tensor]:
            return [t for _, t in self._run(0, given, real=real, gradients=False)]

        return hidden_tokens(run, call, example, self.narrowest, self.chosen)

    def _run(
        self, side: int, call: Call, by: float = 0.0, real: Tensor | None = None, gradients: bool = True
    ) -> Results:
        """The results of one side, and gradients, by name. `by`: how far operands are moved. `real`: tokens
        that alone are kept of results that have them."""
        model: Any = self._models()[side]
        args, kwargs = mapped(call, self._operand(by))
        given = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        weights = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
        if isinstance(model, Sequences):
            model.most = 1 if by else None  # ways round alike
        with torch.set_grad_enabled(self.gradients), _moved(weights.values(), by):
            self.calling = True
            answer = model(*args, **kwargs)
            self.calling = False
            ways = list(answer) if isinstance(answer, ByWay) else []
            answer = list(answer.values()) if ways else answer
            results = [_kept(r, real) for r in results_of(answer)]
            self.arrays |= not getattr(model, "has_gradients", len(tensors_of(answer)) == len(results))
            self.narrowest = max(self.narrowest, *units_of(results), 0.0)
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

    def _models(self) -> list[Any]:
        return self.wide if self.exact else self.plain

    def _operand(self, by: float) -> Callable[[Tensor], Tensor]:
        def operand(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            wide = tensor.detach().to(torch.float64 if self.exact else tensor.dtype)
            return _nudged(wide, by).requires_grad_(self.gradients)

        return operand

    def _told(self, code: str, said: str, call: Call) -> Difference:
        """The difference, with the module and the lines at which it enters."""
        if self.probing:
            return Difference("values", said, code=code)
        about = self._models(), mapped(call, self._operand(0.0)), self.narrowest
        enters, given = enters_in(*about)
        return Difference("values", said, *enters_at(*about), enters=enters, given=given, code=code)


class _Refused(Exception):
    """A side, 0 or 1, raises an exception."""


def _paired(sides: Sequence[Any], matched: Matched) -> list[Tensor]:
    """The weights of both sides that hold the same numbers."""
    modules = [side.side if isinstance(side, Sequences) else side for side in sides]
    if not matched.same:
        return []
    every = [dict(module.named_parameters(remove_duplicate=False)) for module in modules]
    return [own[name] for names in matched.same for own, name in zip(every, names, strict=True)]


def _nudged(tensor: Tensor, by: float) -> Tensor:
    """Each number moved by at most so much, relatively."""
    return tensor * (1 + by * (2 * torch.rand_like(tensor) - 1)) if by else tensor


def _moved(weights: Iterable[Tensor], by: float) -> contextlib.AbstractContextManager[None]:
    """Within, weights are moved by a relative amount."""
    return _with_other(weights if by else (), lambda weight: _nudged(weight, by))


def _scaled(weights: Iterable[Tensor], by: float) -> contextlib.AbstractContextManager[None]:
    """Within, matrices are so many times as large."""
    matrices = (w for w in set(weights) if by != 1.0 and w.ndim > 1 and w.is_floating_point())
    return _with_other(matrices, lambda weight: weight * by)


@contextlib.contextmanager
def _with_other(weights: Iterable[Tensor], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    before = [(w, w.data) for w in weights]
    for weight, data in before:
        weight.data = change(data)
    try:
        yield
    finally:
        for weight, data in before:
            weight.data = data


def _kept(result: Tensor, real: Tensor | None) -> Tensor:
    """A result with 0 for the tokens that are not real."""
    if real is None or result.ndim < 2 or result.shape[:2] != real.shape:
        return result
    return torch.where(real.view(*real.shape, *[1] * (result.ndim - 2)), result, 0)


def _not_finite(tensor: Tensor) -> Tensor:
    """NaN and infinities as they are, and 0 for numbers."""
    return torch.where(tensor.isfinite(), 0.0, tensor).nan_to_num(nan=0.5, posinf=1.0, neginf=-1.0)
