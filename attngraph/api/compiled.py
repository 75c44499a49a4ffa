"""The module that `attngraph.compile` returns: it selects a traced graph for each call, or traces a new one.

A limited number of graphs is kept; the least recently used are dropped. If torch.export cannot capture the
model, torch.compile captures it in pieces, and each is compiled by attngraph.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from attngraph.api.build import compile_graph
from attngraph.api.options import Options
from attngraph.capture.first_call import fills_a_table
from attngraph.capture.graph_breaks import GraphBreaks
from attngraph.capture.guards import call_key
from attngraph.capture.structure import flatten
from attngraph.capture.trace_lock import LOCK
from attngraph.errors import CaptureError
from attngraph.ir import budgets
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import KERNELS
from attngraph.ir.ops.weights import Places
from attngraph.report import report as reporting
from attngraph.report.dump import write_breaks
from attngraph.report.entries import AttentionEntry
from attngraph.report.report import CompileReport
from attngraph.runtime.executable import Executable
from attngraph.runtime.weights import chosen_names, names_of_attentions, weights_of

log = logging.getLogger(__name__)
ALWAYS = "always"
"""The key for a model that must be captured in pieces for every call."""


class _Settling(Exception):
    """The model fills a table in this call that later calls read: it runs this call as it is, and is traced
    after it."""


class CompiledModule(nn.Module):
    """What `attngraph.compile` returns: a module with the model's parameters, state dict, training flag
    and attributes, whose forward runs traced and rewritten graphs."""

    def __init__(self, target: Callable[..., Any], options: Options, pieces: bool = True) -> None:
        super().__init__()
        if isinstance(target, nn.Module):
            self._orig_mod = target
        object.__setattr__(self, "_target", target)
        self._options = options
        self._allow_pieces = pieces
        self._reset()
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]

    def _reset(self) -> None:
        self._graphs: collections.OrderedDict[Any, list[Executable]] = collections.OrderedDict()
        self._pieces: dict[Any, GraphBreaks] = {}
        self._settling = 0

    @property
    def report(self) -> CompileReport:
        """What was done, for all graphs kept (the latest graph's entries first)."""
        graphs = [g for kept in reversed(self._graphs.values()) for g in reversed(kept)]
        pieces = [p.report() for p in self._pieces.values()]
        latest = [graphs[0].report] if graphs else []
        found = _with_remarks(reporting.merge([*latest, *pieces]))
        return dataclasses.replace(found, graphs=len(graphs) + sum(p.graphs for p in pieces))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _is_transformed():
            return self._target(*args, **kwargs)
        leaves, spec = flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        with LOCK.call():
            pieces = self._pieces.get(ALWAYS)
            found = None if pieces is not None else self._find(leaves, spec)
            if found is not None:
                return self._run(found, tensors, args, kwargs)
            key = call_key(leaves, spec, self._target)
            pieces = pieces or self._pieces.get(key)
        if pieces is not None:
            return pieces(*args, **kwargs)
        try:
            found = self._trace(leaves, spec, args, kwargs)
        except _Settling:
            result = self._target(*args, **kwargs)
            self._trace(leaves, spec, args, kwargs, settled=True)
            return result
        if found is not None:
            with LOCK.call():
                return self._run(found, tensors, args, kwargs)
        where = ALWAYS if ALWAYS in self._pieces else key
        try:
            result = self._pieces[where](*args, **kwargs)
        except Exception:
            self._pieces.pop(where, None)  # the failure may be specific to this call
            raise
        if self._options.dump is not None:
            write_breaks(self._options.dump, self._pieces[where].report().breaks)
        return result

    def weights(
        self, *args: Any, at: str | Sequence[str] | None = None, rows: Places = None, queries: Places = None,
        **kwargs: Any,
    ) -> Tensor | dict[str, Tensor]:  # fmt: skip
        """The weights of fused attentions in a call, for looking at them; they are never in memory otherwise.

        The model runs up to the last of them, without gradients, and nothing of it is changed. Weights are
        those that the values are summed with (in training mode after dropout), computed a block of queries at
        a time: besides the result there is at most one block of scores in memory.

        Args:
            args, kwargs: the model's arguments.
            at: the name of an attention in the report, such as "h.0.attn" (a module with several has
                "attn#0", "attn#1"), or several names; None: all.
            rows: which entries of the batch, queries: which queries: a number, a slice, or numbers. The
                result has only these.

        Returns:
            `[rows, heads, queries, keys]`, or a dict of them by name where `at` is not one name.

        Raises:
            ValueError: there is no attention of that name; the message lists the names. IndexError: no such
                row or query. CaptureError: the model is captured in pieces.
        """
        leaves, spec = flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        with LOCK.call():
            key = call_key(leaves, spec, self._target)
            found = self._find(leaves, spec)
        try:
            found = found or self._trace(leaves, spec, args, kwargs)
        except _Settling:
            with torch.no_grad():
                self(*args, **kwargs)  # fills the model's table, as any first call does
            return self.weights(*args, at=at, rows=rows, queries=queries, **kwargs)
        if found is None:
            reason = (self._pieces.get(ALWAYS) or self._pieces[key]).breaks[0].reason
            raise CaptureError(
                f"weights can be shown of a model that is one graph, not of pieces: {reason}", reason
            )
        missed = {m.name or "attention": m.reason for m in found.report.missed}
        names = chosen_names(at, names_of_attentions(found.captured.graph), missed)
        with LOCK.call():
            weights = weights_of(found, tensors, names, rows, queries)
        return weights[at] if isinstance(at, str) else weights

    def _run(
        self, found: Executable, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        """The graph's result; where a check of values fails, the model itself raises its error."""
        try:
            return found(tensors)
        except Exception:
            if not found.asserts:
                raise
        return self._target(*args, **kwargs)

    def _find(self, leaves: Sequence[Any], spec: Any) -> Executable | None:
        """A graph for this call. A graph does not depend on the attributes that it sets, so they are not part
        of its key."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for left_out in dict.fromkeys(left_out for left_out, _ in reversed(self._graphs)):
            key = left_out, call_key(leaves, spec, self._target, left_out)
            for executable in reversed(self._graphs.get(key, ())):
                if executable.accepts(tensors):
                    return executable
        return None

    def _trace(
        self, leaves: Sequence[Any], spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        settled: bool = False,
    ) -> Executable | None:  # fmt: skip
        """Trace for this call and keep the graph; None if the model must be captured in pieces.

        Raises:
            _Settling: the model itself must run this call first; not where that was done (`settled`).
        """
        # The caller's saved-tensor hooks and modes must not see the tensors and the ops of the trace.
        unseen = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with LOCK.trace(), unseen, _disable_current_modes():
            found = self._find(leaves, spec)
            if found is not None:
                return found
            try:
                found = compile_graph(self._target, args, kwargs, self._options)
                if not found.accepts([leaf for leaf in leaves if isinstance(leaf, Tensor)]):
                    raise CaptureError(
                        "the traced graph does not accept the call it was traced for", "inconsistent guards"
                    )
            except CaptureError as problem:
                if problem.changes_state and not settled and self._settling < budgets.SETTLING_CALLS:
                    self._settling += 1
                    if fills_a_table(problem, self._target, args, kwargs):
                        raise _Settling from problem
                if self._options.strict or not self._allow_pieces:
                    raise
                log.warning("%s", problem)
                part = functools.partial(CompiledModule, options=self._options, pieces=False)
                key = ALWAYS if problem.lasting else call_key(leaves, spec, self._target)
                self._pieces[key] = GraphBreaks(self._target, part, problem)
                return None
            left_out = found.captured.left_out
            key = left_out, call_key(leaves, spec, self._target, left_out)
            kept = self._graphs.setdefault(key, [])
            kept.append(found)
            self._graphs.move_to_end(key)
            while sum(len(k) for k in self._graphs.values()) > budgets.GRAPHS_KEPT:
                oldest = next(iter(self._graphs))
                self._graphs[oldest].pop(0)
                if not self._graphs[oldest]:
                    del self._graphs[oldest]
            return found

    @property
    def training(self) -> bool:  # type: ignore[override]
        target = self.__dict__.get("_target")
        return bool(target.training) if isinstance(target, nn.Module) else self.__dict__.get("_mode", True)

    @training.setter
    def training(self, value: bool) -> None:
        target = self.__dict__.get("_target")
        if isinstance(target, nn.Module):
            target.training = value
        self.__dict__["_mode"] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "_orig_mod" in modules:
                return getattr(modules["_orig_mod"], name)
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles contain the model and the options; graphs are traced again."""
        state = dict(self.__dict__)
        for name in ("_graphs", "_pieces"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_orig_mod" in self._modules:
            object.__setattr__(self, "_target", self._modules["_orig_mod"])
        self._reset()


def _is_transformed() -> bool:
    """Whether the call is part of another trace, or of a transformation (vmap, jvp) that needs the model's
    own operations. The original model is then run instead."""
    if LOCK.traces_here():
        return True
    # Torch's flags are process-wide: while another thread traces, they tell nothing about this one.
    elsewhere = LOCK.is_tracing()
    return (
        (not elsewhere and (torch.compiler.is_exporting() or torch.compiler.is_compiling()))
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [k for k in state if k.startswith(f"{prefix}_orig_mod.")]:
        state[prefix + key[len(prefix) + len("_orig_mod.") :]] = state.pop(key)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if "_orig_mod" not in module._modules:
        return
    for key in [k for k in state if k.startswith(prefix)]:
        name = key[len(prefix) :]
        if not name.startswith("_orig_mod."):
            state[f"{prefix}_orig_mod.{name}"] = state.pop(key)


def _with_remarks(report: CompileReport) -> CompileReport:
    """The report, with the kernels' remarks from running since."""

    def told(entry: AttentionEntry) -> AttentionEntry:
        kernel = KERNELS.get(entry.kernel.name)
        remarks = () if kernel is None else kernel.remarks(parse(entry.program))
        return dataclasses.replace(entry, kernel=dataclasses.replace(entry.kernel, remarks=remarks))

    return dataclasses.replace(report, attention=tuple(told(entry) for entry in report.attention))
