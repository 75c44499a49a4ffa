"""What a forward does besides returning values, which a graph of it would lose: found, named, and refused.

Changes of the model's attributes, of variables around it and of arguments are found, prints, hooks on
tensors, functions with gradients of their own, and what is done to the process: random numbers of Python or
numpy, seeds and defaults of torch, gradients that are computed. A changed attribute is named as the user
writes it, with the line that changes it.

A trace runs the forward once, so a number that Python or numpy draws would be a constant of the graph. That
is right only for one that can have no other value (`random.randrange(1)`). torch's own random numbers are
operations of the graph.
"""

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from attngraph.capture.attributes import Described, can_be_watched, holder_of
from attngraph.capture.instead import Row, instead
from attngraph.capture.lines import line_at, line_of, line_using, name_of, outside, refused, room_of
from attngraph.capture.state.fingerprint import fingerprint
from attngraph.capture.state.kinds import Place
from attngraph.capture.state.snapshot import Snapshot
from attngraph.errors import CaptureError

RETURN = "return what changes"
_OUTSIDE, _BY_TORCH = "do that outside of the model", "let torch draw them (torch.rand)"
_ASKS_FOR_GRADIENTS = {
    "register_hook": "forward() registers hooks on tensors",
    "register_post_accumulate_grad_hook": "forward() registers hooks on tensors",
    "retain_grad": "forward() asks for the gradient of a tensor (retain_grad)",
}
"""Methods of a tensor by which a forward has its gradient, which is no tensor of a graph."""
_OF_A_RANGE = "randrange", "randint", "uniform", "choice"
"""Functions of Python's random that may have one possible value."""
_SEEDS = 24
_BACKWARD = "_engine_run_backward"
"""What every function of torch.autograd that computes gradients calls."""
_DECORATORS = "torch.utils._contextlib"
"""Where torch's modes are entered that decorate a function of the user's."""
_DEFAULTS = {"dtype": torch.get_default_dtype, "device": torch.get_default_device}


def lost(what: str, line: str = "", advice: str = RETURN, lasting: bool = True, **facts: Any) -> CaptureError:
    """The refusal of a graph that would lose a side effect."""
    lead = "a graph of the model would lose a side effect: "
    return refused(what, line, advice, lead=lead, lasting=lasting, **facts)


class SideEffects:
    """The side effect that one trace of a target found; empty if there is none."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target
        self.problem: CaptureError | None = None
        """The refusal of a graph that would lose it: the last one that was noted."""

    def note(
        self, what: str, line: str = "", advice: str = RETURN, *, of_arguments: bool = False,
        of_state: bool = False, splits: bool = True,
    ) -> None:  # fmt: skip
        """Note one. `of_arguments`: only this call's arguments are changed, so that other calls may be
        captured. `of_state`: nothing but attributes of the model or values around it are. `splits`: whether
        torch.compile notices it; else the model runs as it is."""
        before = self.problem
        lasting = not of_arguments or (before is not None and before.lasting)
        splits = splits and (before is None or before.splits)
        changes_state = of_state and before is None
        self.problem = lost(what, line, advice, lasting, changes_state=changes_state, splits=splits)

    def note_change(self, place: Place | None, splits: bool = True) -> None:
        """Note that the target changes its state; `place` is where, if it is known. `splits`: whether
        torch.compile notices how the target uses it."""
        what, line = "attributes of the model, or values around it", ""
        if place is not None:
            what, line = name_of(place, self.target), line_of(place, self.target)
        self.note(f"forward() changes {what}", line, of_state=True, splits=splits)

    @contextlib.contextmanager
    def watch(self, arguments: Sequence[Any], weights: Callable[[], dict[int, int]]) -> Iterator[Snapshot]:
        """Note what the body changes in the target's state or the arguments', and undo it. `weights`: from
        the identity of each current parameter and buffer to that of the model's own. Yields the snapshot of
        the target, to which is added what other code can read."""
        kept = Snapshot([self.target])
        theirs = Snapshot(arguments)
        given, held = fingerprint(arguments), weights()
        try:
            with (
                instead(*self._of_gradients(), *self._of_process()), self._process_kept(),
                kept.iterators_refused(self._note_iterator), theirs.iterators_refused(self._note_iterator),
            ):  # fmt: skip
                yield kept
        except BaseException:
            kept.restore()
            theirs.restore()
            raise
        if given != fingerprint(arguments):
            place = theirs.first_change()
            named = "" if place is None else f": {name_of(place, self.target)}"
            self.note(f"forward() changes an argument's attributes{named}", of_arguments=True)
        changed = kept.first_change(weights())
        is_refused = self.problem is not None and self.problem.lasting
        if not is_refused and (changed is not None or held != weights()):
            places = list(kept.changed_attributes())
            # torch.compile loses which of two equal objects an attribute is, and repeats what was drawn.
            is_drawn = changed is not None and kept.is_generator(changed)
            self.note_change(changed, not kept.swapped and not is_drawn)
            if self.problem is not None and self.problem.changes_state and all(map(can_be_watched, places)):
                self.problem.settings = {p: Described.of(holder_of(*p).get(p.name)) for p in places}
        if self.problem is not None:
            kept.restore()
            theirs.restore()

    def _note_iterator(self, place: Place) -> None:
        """Note that the target advances an iterator, which torch.compile does not notice either."""
        what = f"forward() advances an iterator, {name_of(place, self.target)}"
        self.note(what, line_using(place.name, self.target), splits=False)

    # --- gradients of its own ---

    def _of_gradients(self) -> Iterator[Row]:
        """What notes where the model defines gradients itself, which a graph of its forward would lose."""
        if not torch.is_grad_enabled():
            return
        checkpoint: Any = CheckpointFunction._backward_cls  # type: ignore[attr-defined]

        def applying(apply: Callable[..., Any]) -> Any:
            def applied(cls: Any, run: Callable[..., Any], preserve: Any, *given: Any) -> Any:
                if any(isinstance(a, Tensor) and a.requires_grad for a in given):
                    return run(*given)  # a graph for training keeps no scores, and computes them again itself
                return apply(run, preserve, *given)

            return classmethod(applied)

        def made(node: Any) -> None:
            """Is called by every `apply`, wherever the user keeps it."""
            if not node._forward_cls.__module__.startswith("torch.") or isinstance(node, checkpoint):
                self.note(f"{node._forward_cls.__name__} has a backward of its own")

        yield CheckpointFunction, "apply", applying
        yield BackwardCFunction, "__init__", lambda _: made

        def noting(what: str) -> Callable[[Any], Any]:
            return lambda _: lambda tensor, *args, **kwargs: self.note(what)

        for name, what in _ASKS_FOR_GRADIENTS.items():
            yield Tensor, name, noting(what)

    # --- the process ---

    def _of_process(self) -> Iterator[Row]:
        """What notes seeds that are set, gradients that are computed, and inference mode. Python's functions
        that have one possible value draw nothing."""
        for owner in (torch, torch.random):
            for name in ("manual_seed", "seed", "set_rng_state"):
                splits = "seed" not in name  # torch.compile repeats what was drawn
                yield owner, name, self._telling(f"forward() calls torch.{name}", splits)
        yield torch.autograd, _BACKWARD, self._telling("forward() computes gradients")
        yield torch.inference_mode, "__enter__", self._entering
        for name in _OF_A_RANGE:
            yield random, name, _of_one_value

    def _telling(self, what: str, splits: bool = True) -> Callable[[Any], Any]:
        def told(function: Any) -> Any:
            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                caller = sys._getframe(1)
                by_torch = room_of(caller) == "torch" and function.__name__ != _BACKWARD
                frame = outside(caller, lambda f: room_of(f) in ("torch", "attngraph"))
                if frame is not None and not by_torch:  # else an operation of torch's own puts it back
                    self.note(what, line_at(frame), _OUTSIDE, splits=splits)
                return function(*args, **kwargs)

            return run

        return told

    def _entering(self, enter: Callable[[Any], None]) -> Callable[[Any], None]:
        def entered(mode: torch.inference_mode) -> None:
            before = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
            enter(mode)
            frame = sys._getframe(1)
            of_torch = room_of(frame) == "torch" and frame.f_globals["__name__"] != _DECORATORS
            if not of_torch and before != (torch.is_inference_mode_enabled(), torch.is_grad_enabled()):
                line = line_using("inference_mode", self.target)
                self.note("forward() enters torch.inference_mode", line, _OUTSIDE, splits=False)

        return entered

    @contextlib.contextmanager
    def _process_kept(self) -> Iterator[None]:
        """Note what the body changes of the process's state, and undo what it draws."""
        numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        draws, draws_of_numpy = random.getstate(), None if numpy is None else numpy.get_state()
        defaults, gradients = {name: get() for name, get in _DEFAULTS.items()}, torch.is_grad_enabled()
        yield
        changed = [name for name, get in _DEFAULTS.items() if get() != defaults[name]]
        found = [(f"changes torch's default {n}", f"set_default_{n}", _OUTSIDE) for n in changed]
        if torch.is_grad_enabled() != gradients:
            torch.set_grad_enabled(gradients)
            found.append(("switches gradients on or off for its caller", "set_grad_enabled", _OUTSIDE))
        if random.getstate() != draws:
            random.setstate(draws)
            found.append(("draws random numbers from Python's random", "random", _BY_TORCH))
        if numpy is not None and _as_values(numpy.get_state()) != _as_values(draws_of_numpy):
            numpy.set_state(draws_of_numpy)
            found.append(("draws random numbers from numpy", "random", _BY_TORCH))
        for what, name, advice in found:
            self.note(f"forward() {what}", line_using(name, self.target), advice, splits=name != "random")


def _of_one_value(draw: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which draws nothing where all draws are equal."""

    @functools.wraps(draw)
    def run(*args: Any, **kwargs: Any) -> Any:
        before, found = random.getstate(), []
        for seed in range(_SEEDS):
            random.seed(seed)
            found.append(draw(*args, **kwargs))
        random.setstate(before)
        first = found[0]
        return first if all(each is first or each == first for each in found) else draw(*args, **kwargs)

    return run


def _as_values(state: Any) -> tuple[Any, ...]:
    """numpy's state, of which a part is an array."""
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)
