"""The module that `attngraph.compile` returns: it selects a traced graph for each call, or traces a new one.

A limited number of graphs is kept; the least recently used are dropped. If torch.export cannot capture the
model, torch.compile captures it in pieces, and each is compiled by attngraph.
"""

import dataclasses
import functools
import logging
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from attngraph.api import saving
from attngraph.api.arguments import is_transformed, require_fit
from attngraph.api.build import compile_graph
from attngraph.api.consistent import Alone, consistently, decoded, ordered
from attngraph.api.methods import (
    Generate,
    bound,
    decoder_of,
    generate,
    is_generated_by_transformers,
    with_signature_of,
)  # fmt: skip
from attngraph.api.options import Options
from attngraph.api.progress_line import progress_line
from attngraph.capture.first_call import fills_a_table
from attngraph.capture.graph_breaks import GraphBreaks
from attngraph.capture.guards import call_key
from attngraph.capture.instead import LOCK
from attngraph.capture.state.scope import EVERYTHING
from attngraph.capture.structure import flatten
from attngraph.errors import CaptureError, NoDecoderError, SavedError
from attngraph.ir import budgets
from attngraph.ir.ops.weights import Places
from attngraph.report import report as reporting
from attngraph.report.account import Times
from attngraph.report.dump import write_breaks
from attngraph.report.report import CompileReport, with_remarks
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.decoder import Decoder
from attngraph.runtime.executable import Executable
from attngraph.runtime.graphs import Fingerprints, Graphs, KeyOf, Paces, SmallCalls
from attngraph.runtime.interpret import chosen_names, names_of_attentions, times_of, weights_of
from attngraph.runtime.wrapper import ModelWrapper
from attngraph.saved.weights import Skeleton

log = logging.getLogger(__name__)
ALWAYS = "always"
"""The key for a model that must be captured in pieces for every call."""


class _Settling(Exception):
    """The model fills a table in this call that later calls read: it runs this call as it is, and is traced
    after it."""


class _Call:
    """One call of a model, and what it is compared by."""

    __slots__ = ("args", "is_on_cpu", "key_of", "kwargs", "leaves", "shapes", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], fingerprints: Fingerprints) -> None:
        self.args, self.kwargs = args, kwargs
        self.leaves, spec = flatten((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.shapes = spec, tuple(t.shape for t in self.tensors)
        self.is_on_cpu = all(t.is_cpu for t in self.tensors)
        self.key_of: KeyOf = functools.partial(call_key, self.leaves, spec, fingerprints)


class CompiledModule(ModelWrapper):
    """What `attngraph.compile` returns: the model, with a forward that runs traced and rewritten graphs.

    Its parameters, state dict, training flag and attributes are the model's, and it counts as an instance of
    the model's class. The model's own methods run compiled code where they call the model
    (`api/methods.py`).
    """

    _options: Options
    _allow_pieces: bool
    _saved: saving.Folder | None
    _graphs: Graphs
    _fingerprints: Fingerprints
    _pieces: dict[Any, GraphBreaks]
    _small: SmallCalls
    _paces: Paces
    _settling: int
    _waited: float
    _forward: Callable[..., Any]
    _generate: Generate | None
    _decoder: Decoder | None
    _alone: Alone
    _ordered: set[Any]

    def __init__(
        self, target: Callable[..., Any], options: Options, pieces: bool = True,
        saved: saving.Folder | None = None,
    ) -> None:  # fmt: skip
        """`pieces`: whether it may be captured in pieces; if not it is one, or serves other code that is
        compiled, and none of its results may wait until somebody looks at them."""
        super().__init__(target)
        kept = options.freeze and "keep"
        self._options = options if pieces else dataclasses.replace(options, later=(), freeze=kept)
        self._allow_pieces = pieces and options.devices.is_one
        self._saved = saved
        self._reset()

    def _reset(self) -> None:
        self._graphs = Graphs()
        self._fingerprints = Fingerprints(self._model)
        self._pieces = {}
        self._small, self._paces = SmallCalls(), Paces()
        self._settling, self._waited = 0, 0.0
        self._forward = with_signature_of(self._model, self._run)
        self._generate = None
        object.__setattr__(self, "_decoder", None)
        self._alone, self._ordered = {}, set()

    def _said_class(self) -> type:
        """The model's class, by which libraries tell what they can do with a model."""
        model = self.__dict__.get("_model")
        return model.__class__ if isinstance(model, nn.Module) else CompiledModule

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The compiled forward, with the signature of the model's."""
        return self._forward

    @forward.setter
    def forward(self, value: Callable[..., Any]) -> None:
        self._forward = value

    @property
    def report(self) -> CompileReport:
        """What was done, for all graphs kept (the latest graph's entries first)."""
        graph = self._graphs.latest()
        pieces = [p.report() for p in self._pieces.values()]
        latest = [] if graph is None else [graph.report]
        derived = None if self._generate is None else self._generate.decoder._derived.latest
        if derived is not None and not latest and not pieces:
            return with_remarks(derived.report)  # type: ignore[return-value]  # nothing but generate was called
        found = with_remarks(reporting.merge([*latest, *pieces]))
        return dataclasses.replace(
            found, graphs=len(self._graphs) + sum(p.graphs for p in pieces),
            retraces=tuple(self._graphs.retraces.items()), small_calls=found.small_calls + self._small.count,
            slower=self._paces.slower(), waited=self._waited,
        )  # fmt: skip

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if is_transformed():
            return self._model(*args, **kwargs)
        compute = functools.partial(self._computed, *args, **kwargs)
        if not self._options.consistent:
            return compute()
        kind = _Call(args, kwargs, self._fingerprints).key_of(EVERYTHING)
        if kind not in self._ordered:
            try:
                logits, mask = decoded(self._own_decoder, args, kwargs)
            except NoDecoderError as problem:
                log.info("consistent=True: results of such calls are the graph's, because %s", problem)
                self._ordered.add(kind)
            else:
                return consistently(self._model, logits, mask, compute, self._alone, kind)
        return ordered(self._model, compute)

    @property
    def _own_decoder(self) -> Decoder:
        """The decoder of this model and these options, derived at its first call."""
        if self._decoder is None:
            self.take_decoder(decoder_of(self, self._options, CacheConfig()))
        assert self._decoder is not None
        return self._decoder

    def take_decoder(self, decoder: Decoder) -> Decoder:
        """Let this be its decoder. It is no submodule: its weights are the model's."""
        object.__setattr__(self, "_decoder", decoder)
        return decoder

    def _computed(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a call by the graph, the model itself, or pieces."""
        call = _Call(args, kwargs, self._fingerprints)
        self._options.devices.agree_on_call(self._model, call.leaves, call.tensors)
        with LOCK.call():
            if call.shapes in self._small:
                return self._itself(call)
            pieces = self._pieces.get(ALWAYS)
            found = None if pieces is not None else self._graphs.find(call.key_of, call.tensors)
            if found is not None:
                return self._served(found, call)
            pieces = pieces or self._pieces.get(call.key_of(EVERYTHING))
        if pieces is not None:
            return pieces(*args, **kwargs)
        try:
            require_fit(self._model, args, kwargs)
        except TypeError:
            return self._model(*args, **kwargs)  # raises the error that users know
        start = time.perf_counter()
        result = self._first(call)
        self._waited = time.perf_counter() - start
        return result

    def _first(self, call: _Call) -> Any:
        """The result of a call for which a graph is made, or pieces."""
        self._options.devices.require_filled(self._model)
        try:
            found = self._trace(call)
        except _Settling:
            result = self._model(*call.args, **call.kwargs)
            self._trace(call, settled=True)
            return result
        if found is None:
            return self._in_pieces(call)
        with LOCK.call():
            return self._served(found, call)

    def _in_pieces(self, call: _Call) -> Any:
        """The result of a call for which there are pieces now."""
        where = ALWAYS if ALWAYS in self._pieces else call.key_of(EVERYTHING)
        try:
            result = self._pieces[where](*call.args, **call.kwargs)
        except Exception:
            self._pieces.pop(where, None)  # the failure may be specific to this call
            raise
        log.warning("%s", _said_of_pieces(self._pieces[where].problem))
        if self._options.dump is not None:
            write_breaks(self._options.dump, self._pieces[where].report().breaks)
        return result

    def place(self, *args: Any, **kwargs: Any) -> None:
        """Let each rank keep its part of the parameters as this call needs them, without computing it.

        Parameters on `meta` get memory for the rank's part, which is not filled: `attngraph.load_weights` or
        `torch.distributed.checkpoint.load` do that. Every rank makes the same call.

        Raises:
            PlacementError: ranks do not divide the parameters of this model.
        """
        self._options.devices.require_placeable(self._model)
        call = _Call(args, kwargs, self._fingerprints)
        self._options.devices.agree_on_call(self._model, call.leaves, call.tensors)
        self._trace(call)

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
        found, call = self._whole(args, kwargs, "weights")
        missed = {m.name or "attention": m.reason for m in found.report.missed}
        names = chosen_names(at, names_of_attentions(found.captured.graph), missed)
        with LOCK.call():
            weights = weights_of(found, call.tensors, names, rows, queries)
        return weights[at] if isinstance(at, str) else weights

    def times(self, *args: Any, rounds: int = 5, **kwargs: Any) -> Times:
        """What each operation of the graph takes in a call, measured one by one: `print` it, or give it to
        `report.to_html(path, times=...)`.

        The graph is run without gradients, and nothing of the model is changed.

        Args:
            args, kwargs: the model's arguments.
            rounds: how often the call is measured, after once to warm up; medians are told.

        Raises:
            CaptureError: the model is captured in pieces, or runs on several ranks.
        """
        found, call = self._whole(args, kwargs, "times")
        with LOCK.call():
            return times_of(found, call.tensors, rounds)

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> tuple[Executable, _Call]:
        """The one graph that serves a call, traced if need be, and the call; `what` is asked of it.

        Raises:
            TypeError: the model takes other arguments. CaptureError: there is no such graph.
        """
        require_fit(self._model, args, kwargs)
        call = _Call(args, kwargs, self._fingerprints)
        with LOCK.call():
            found = self._graphs.find(call.key_of, call.tensors)
        try:
            found = found or self._trace(call)
        except _Settling:
            with torch.no_grad():
                self(*args, **kwargs)  # fills the model's table, as any first call does
            return self._whole(args, kwargs, what)
        if found is None:
            pieces = self._pieces.get(ALWAYS) or self._pieces[call.key_of(EVERYTHING)]
            reason = pieces.breaks[0].reason
            told = f"{what} can be shown of a model that is one graph, not of pieces: {reason}"
            raise CaptureError(told, reason)
        if found.captured.graph.ranks is not None:
            told = f"{what} are shown on one device: compile the model without a mesh for that."
            raise CaptureError(told, "several ranks")
        return found, call

    def _served(self, found: Executable, call: _Call) -> Any:
        """The graph's result, or the model's own where a call is small, or the model is faster; where a check
        of values fails, the model itself raises its error."""
        if self._may_run_itself(found):
            assert found.scores is not None
            scores = found.scores(call.tensors)
            if scores < self._options.fused_from:
                return self._itself(call)
            if not found.captured.graph.gradients and scores <= budgets.TIMED_SCORES and call.is_on_cpu:
                return self._paces.serve(
                    (id(found), call.shapes), lambda: self._by_graph(found, call),
                    lambda: self._model(*call.args, **call.kwargs),
                )  # fmt: skip
        return self._by_graph(found, call)

    def _by_graph(self, found: Executable, call: _Call) -> Any:
        try:
            return found(call.tensors, (call.args, call.kwargs))
        except Exception:
            if not found.asserts:
                raise
        return self._model(*call.args, **call.kwargs)

    def _may_run_itself(self, found: Executable) -> bool:
        """Whether the model itself may serve calls of a graph. A model that contains compiled ones may not:
        they may trace, for which the lock must be free."""
        if not self._options.fused_from or found.scores is None:
            return False
        if isinstance(self._model, Skeleton):
            return False  # it has weights, and no forward
        parts = self._model.modules() if isinstance(self._model, nn.Module) else ()
        return not any(isinstance(child, ModelWrapper) for part in parts for child in part.children())

    def _itself(self, call: _Call) -> Any:
        """The model's own result. The shapes are remembered: whatever else may change, it stays right."""
        self._small.add(call.shapes)
        return self._model(*call.args, **call.kwargs)

    def _trace(self, call: _Call, settled: bool = False) -> Executable | None:
        """Trace for this call and keep the graph; None if the model must be captured in pieces.

        Raises:
            _Settling: the model itself must run this call first; not where that was done (`settled`).
        """
        # The caller's saved-tensor hooks and modes must not see the tensors and the ops of the trace.
        unseen = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with LOCK.trace(), unseen, _disable_current_modes():
            found = self._graphs.find(call.key_of, call.tensors)
            if found is not None:
                return found
            try:
                with progress_line(self._options) as options:
                    found = self._compiled(call, options)
                if not found.accepts(call.tensors):
                    told = "the traced graph does not accept the call it was traced for"
                    raise CaptureError(told, "inconsistent guards")
            except CaptureError as problem:
                if problem.changes_state and not settled and self._settling < budgets.SETTLING_CALLS:
                    self._settling += 1
                    if fills_a_table(problem, self._model, call.args, call.kwargs):
                        raise _Settling from problem
                if self._options.strict or not self._allow_pieces:
                    raise
                part = functools.partial(CompiledModule, options=self._options, pieces=False)
                where = ALWAYS if problem.lasting else call.key_of(EVERYTHING)
                self._pieces[where] = GraphBreaks(self._model, part, problem)
                return None
            self._graphs.tell_why(call.key_of, found.captured.scope, self._model, call.leaves, call.tensors)
            self._graphs.keep(call.key_of, found)
            return found

    def _compiled(self, call: _Call, options: Options) -> Executable:
        """The graph of a call: one that was compiled before, or compiled now. A part of a model, which
        torch.compile made, has no name by which it could be found again. Where a rank has no graph, no rank
        has one."""
        if options.devices.is_one and self._allow_pieces:
            return saving.executable_for(self._model, call.args, call.kwargs, options, self._saved)
        make = functools.partial(compile_graph, self._model, call.args, call.kwargs, options)
        found: Executable = options.devices.compiled(make)
        return found

    def save(self, path: str | Path, weights: bool = False) -> Path:
        """Write what was compiled into a folder, for `attngraph.load`.

        Args:
            path: a new folder, or one of an earlier `save`, which is replaced. weights: also the model's
                weights, as safetensors.

        Raises:
            SavedError: nothing has been compiled yet, it has no form in files (a model that is captured in
                pieces, or divided among ranks, has none), or they cannot be written.
        """
        if self._pieces:
            told = "the model is captured in pieces, which torch.compile makes; they cannot be saved."
            raise SavedError(told)
        self._options.devices.require_savable("model")
        found = [graph for graphs in self._graphs.values() for graph in graphs]
        return saving.save(path, self._model, found, self._options, None, weights)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if not isinstance(found, types.MethodType):
            return found
        if name == "generate" and is_generated_by_transformers(self._model):
            if self._generate is None:
                self._generate = generate(self._own_decoder)
            return self._generate
        return bound(self, self._model, found)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles contain the model and the options; graphs are traced again."""
        derived = (
            "_saved", "_graphs", "_fingerprints", "_pieces", "_small", "_paces", "_forward", "_generate",
            "_decoder", "_alone", "_ordered",
        )  # fmt: skip
        state = {name: value for name, value in self.__dict__.items() if name not in derived}
        return _unmade, (type(self),), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._saved = None
        self._reset()


def _unmade(kind: type[CompiledModule]) -> CompiledModule:
    """A compiled module without its state, which unpickling sets."""
    return kind.__new__(kind)


def _said_of_pieces(problem: CaptureError) -> str:
    at = f" at {problem.source}" if problem.source else ""
    if not problem.splits:
        return f"the model cannot be captured: {problem.reason}{at}. It runs as it is."
    return (
        f"the model cannot be captured as one graph: {problem.reason}{at}. Continuing in pieces, which "
        "torch.compile captures and attngraph compiles; answers are the same. compiled.report has more."
    )
