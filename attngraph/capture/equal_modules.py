"""Within one trace, equal calls of equal modules are traced twice, and repeated after that.

The layers of a model do the same with weights of their own. What a module's forward does follows from the
module, its arguments, and what its code reads besides (`module_state.py`). Where all of that is equal to an
earlier call's, and two earlier calls recorded the same operations, these operations are copied with the other
tensors in their places, as a trace of the call would have recorded them (`repeated.py`). A call that changes
something, reads something that a key cannot describe, or records anything but plain operations on its
operands is always traced. Used by `flat.py`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import _AttrProxy, _ModuleStackTracer

from attngraph.capture.differing import Differing, Reads
from attngraph.capture.executed import Ran
from attngraph.capture.module_state import Call, Surroundings
from attngraph.capture.repeated import NotRepeatable, Recording, Start
from attngraph.capture.replaced import replaced
from attngraph.capture.stack_traces import user_lines

log = logging.getLogger(__name__)

_FEWEST_OPERATIONS = 12
"""Copying fewer takes as long as tracing them."""
_MOST_DIFFERENT = 6
"""Different calls of one class after which its calls are traced."""


@contextlib.contextmanager
def equal_modules_traced_twice(root: nn.Module, ran: Ran, noted: Callable[[], Any]) -> Iterator[None]:
    """Let the trace of `root` in the body repeat what it knows. `noted`: what the trace has noted so far
    that is no operation; a call that adds to it is not repeated."""
    trace: Any = _ModuleStackTracer.call_module
    with Reads() as reads:
        modules = _EqualModules(root, ran, noted, reads)

        def called(tracer: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
            return modules.call(
                tracer, module, lambda: trace(tracer, module, forward, args, kwargs), args, kwargs
            )

        with replaced(_ModuleStackTracer, "call_module", called):
            yield


@dataclasses.dataclass
class _Known:
    """Calls with equal keys: what the last one recorded, and whether two recorded the same. `read`: the
    attributes that differ between modules and that they read; `around`: what `surroundings` were."""

    key: Any
    read: frozenset[tuple[str, str]]
    recording: Recording
    surroundings: Surroundings
    around: Any
    is_confirmed: bool = False


@dataclasses.dataclass
class _Kind:
    """What is known of the calls of one class of modules. `changes`: how many of them changed something.
    `given_up`: all are traced."""

    differing: Differing
    known: list[_Known] = dataclasses.field(default_factory=list)
    changes: int = 0
    given_up: bool = False


class _EqualModules:
    """The calls of modules in one trace."""

    def __init__(self, root: nn.Module, ran: Ran, noted: Callable[[], Any], reads: Reads) -> None:
        self.root, self.ran, self.noted, self.reads = root, ran, noted, reads
        self.modules: dict[type, list[nn.Module]] = collections.defaultdict(list)
        for module in root.modules():
            self.modules[type(module)].append(module)
        self.kinds: dict[type, _Kind] = {}
        self.mode = torch._guards.detect_fake_mode(())

    def call(self, tracer: Any, module: nn.Module, trace: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """The result of a call of a module, which `trace` traces."""
        if not self._may_repeat(tracer, module):
            return trace()
        kind = self.kinds.get(type(module))
        if kind is None:
            kind = self.kinds[type(module)] = _Kind(self.reads.of(self.modules[type(module)]))
        if kind.given_up:
            return trace()
        lines = user_lines(sys._getframe(1))
        calls: dict[frozenset[tuple[str, str]], Call | None] = {}
        for known in kind.known:
            if known.read not in calls:
                left_out = kind.differing.left_out(module, known.read)
                calls[known.read] = Call.of(module, args, kwargs, self.mode, left_out)
            call = calls[known.read]
            if (
                call is not None
                and (call.key, lines) == known.key
                and known.surroundings.now() == known.around
            ):
                if known.is_confirmed:
                    return known.recording.repeat(tracer, module, call)
                return self._traced(tracer, module, trace, args, kwargs, kind, known)
        return self._traced(tracer, module, trace, args, kwargs, kind, None)

    def _may_repeat(self, tracer: Any, module: nn.Module) -> bool:
        kind = type(module)
        if isinstance(module, _AttrProxy) or module is self.root or self.mode is None:
            return False
        if not module._modules and (not module._parameters or kind.__module__.startswith("torch.")):
            return False
        path = getattr(tracer, "submodule_paths", {}).get(module)
        several = len(self.modules.get(kind, ())) > 2 or tracer.num_calls.get(path, 0) > 0
        has_hooks: Any = nn.modules.module._has_any_global_hook
        return path is not None and several and not has_hooks()

    def _traced(
        self, tracer: Any, module: nn.Module, trace: Callable[[], Any], args: Any, kwargs: Any, kind: _Kind,
        equal: _Known | None,
    ) -> Any:  # fmt: skip
        """Trace a call and note what it recorded; `equal` is an equal call, if there is one."""
        everything = kind.differing.left_out(module, frozenset())
        start, lines = Start(tracer, module), user_lines(sys._getframe(1))
        before, ran, noted = (
            Call.of(module, args, kwargs, self.mode, everything),
            self.ran.counts(),
            self.noted(),
        )
        since = self.reads.now()
        result = trace()
        try:
            if before is None or ran is None:
                raise NotRepeatable("it depends on something that cannot be compared")
            after = Call.of(module, args, kwargs, self.mode, everything)
            if after is None or after.key != before.key or noted != self.noted():
                kind.changes += 1  # the first one may have made a number of a size
                if kind.changes == 1:
                    return result
                raise NotRepeatable("it changes something")
            found = self._noted(tracer, module, args, kwargs, kind, start, lines, ran, since, result)
            if len(found.recording.nodes) < _FEWEST_OPERATIONS:
                raise NotRepeatable("it is short")
            self._add(kind, found, equal)
        except NotRepeatable as reason:
            log.debug("%s: every call is traced, since %s", type(module).__name__, reason)
            kind.given_up = True
        return result

    @staticmethod
    def _add(kind: _Kind, found: _Known, equal: _Known | None) -> None:
        """Add what a call recorded to what is known; `equal` is an equal call, if there is one."""
        if equal is None:
            kind.known.append(found)
            if len(kind.known) > _MOST_DIFFERENT:
                raise NotRepeatable("they all differ")
            return
        if found.key != equal.key or equal.surroundings.now() != equal.around:
            raise NotRepeatable("equal calls read different attributes")
        if not equal.recording.agrees(found.recording):
            raise NotRepeatable("equal calls recorded different operations")
        kind.known[kind.known.index(equal)] = dataclasses.replace(found, is_confirmed=True)

    def _noted(
        self, tracer: Any, module: nn.Module, args: Any, kwargs: Any, kind: _Kind, start: Start, lines: Any,
        ran: Any, since: int, result: Any,
    ) -> _Known:  # fmt: skip
        """What a call that was traced recorded.

        Raises:
            NotRepeatable: what its code reads is not known, or the operations do not say all that it did.
        """
        now = self.ran.counts() or {}
        codes = [code for code, count in now.items() if count != ran.get(code)]
        surroundings = Surroundings(codes, module)
        around = surroundings.now()
        if around is None:
            raise NotRepeatable(f"it is not known what {surroundings.unknown} reads")
        read = kind.differing.read(module, since, surroundings.looks_inside)
        call = Call.of(module, args, kwargs, self.mode, kind.differing.left_out(module, read))
        if call is None:
            raise NotRepeatable("it depends on something that cannot be compared")
        recording = Recording.of(tracer, start, call, (args, kwargs), result)
        return _Known((call.key, lines), read, recording, surroundings, around)
