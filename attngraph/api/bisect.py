"""Finds the pass that changes a model's results: compiles it with more and more passes, and compares each.

For use when a compiled model and the eager one disagree. It compiles in the same way as `compile`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attngraph.api.arguments import require_fit, require_model
from attngraph.api.build import compile_graph
from attngraph.api.options import Options
from attngraph.capture.first_call import once_settled
from attngraph.capture.instead import LOCK
from attngraph.capture.structure import flatten
from attngraph.errors import PassError
from attngraph.runtime.verify import Agreement, compare


@dataclasses.dataclass(frozen=True)
class BisectionStep:
    """The model compiled up to the pass `name` ("capture": no pass): how its results compare with eager, or
    how the pass failed."""

    name: str
    agreement: Agreement | None
    failure: str = ""

    @property
    def holds(self) -> bool:
        return self.agreement is not None and self.agreement.holds

    def __str__(self) -> str:
        return f"{self.name:<20} {self.agreement or self.failure}"


@dataclasses.dataclass(frozen=True)
class Bisection:
    """The steps up to the first that disagrees with eager or fails, the `culprit` ("" if there is none)."""

    steps: tuple[BisectionStep, ...]

    @property
    def culprit(self) -> str:
        return "" if self.steps[-1].holds else self.steps[-1].name

    def __str__(self) -> str:
        verdict = f"the first that does not hold is {self.culprit}"
        verdict = verdict if self.culprit else "the model answers as eager does after every pass"
        return "\n".join([*(f"  {step}" for step in self.steps), "", verdict])


@LOCK.trace()  # the model itself is run as well, and must not meet a trace of another thread
def bisect(
    model: Callable[..., Any], *args: Any, options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> Bisection:  # fmt: skip
    """Find the first pass after which `model(*args)` differs from eager.

    For each pass the model is captured again and run with the passes up to it, in its current mode (eval or
    train), without gradients. Results are compared by the rule of `runtime/verify.py`.

    Raises:
        TypeError: `model` is not callable, or takes other arguments.
        CaptureError: the model cannot be captured whole.
    """
    require_model(model, "attngraph.bisect")
    require_fit(model, args, {})
    options = options or Options()
    passes = options.pipeline()
    steps: list[BisectionStep] = []
    for count in range(len(passes) + 1):
        name = passes[count - 1].name if count else "capture"
        if progress is not None:
            progress(name)
        chosen = dataclasses.replace(options, passes=passes[:count], disable=(), dump=None, strict=False)
        steps.append(_step(name, model, args, chosen))
        if not steps[-1].holds:
            break
    return Bisection(tuple(steps))


def _step(name: str, model: Callable[..., Any], args: Sequence[Any], options: Options) -> BisectionStep:
    try:
        made = once_settled(lambda: compile_graph(model, tuple(args), {}, options), model, tuple(args), {})
    except PassError as problem:
        return BisectionStep(name, None, str(problem))

    def run(*given: Any) -> Any:
        return made([leaf for leaf in flatten((given, {}))[0] if isinstance(leaf, Tensor)])

    return BisectionStep(name, compare(run, model, tuple(args)))
