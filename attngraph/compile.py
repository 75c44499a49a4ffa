"""The composition root: from a model to a module that traces, rewrites and runs.

The only module that knows the passes and the backends. A call is served by a traced graph that is
valid for it, or traced anew; a small number of graphs is kept, the least used go first. Where
torch.export cannot capture the model, torch.compile captures it in pieces and hands each to us.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, fx, nn

from attngraph import capture as capturing
from attngraph import codegen, pipeline
from attngraph import report as reporting
from attngraph.capture import Captured, Structure
from attngraph.dump import Dump, write_breaks
from attngraph.entries import AttentionEntry, CacheEntry, KernelEntry
from attngraph.errors import CaptureError, NoDecoderError, NotFusedError, meant
from attngraph.ir.graph import ProgramGraph
from attngraph.ir.kernels import KERNELS
from attngraph.ir.nodes import parts
from attngraph.ir.parser import parse
from attngraph.passes import DEFAULT_PIPELINE, PASSES, decoder_pipeline
from attngraph.passes.absorb_mla import WAYS, AbsorbMLA
from attngraph.passes.insert_kv_cache import InsertKVCache
from attngraph.passes.select_kernels import CHOSEN_LATER, SelectKernels
from attngraph.pieces import Piece, Pieces
from attngraph.pipeline import Pass
from attngraph.report import CompileReport
from attngraph.runtime.decoder import Decoder
from attngraph.runtime.direct import shortened
from attngraph.runtime.executable import Executable
from attngraph.runtime.gate import GATE
from attngraph.runtime.guards import call_key
from attngraph.runtime.kv_cache import CacheConfig
from attngraph.runtime.proof import prove
from attngraph.runtime.step import Step
from attngraph.structure import flatten, unflatten

log = logging.getLogger(__name__)
MOST_GRAPHS = 8
ALWAYS = "always"
"""The key of a model that is captured in pieces whatever it is called with."""
BACKENDS = ("auto", "cpu", "triton", "reference")


@dataclasses.dataclass(frozen=True)
class Options:
    """How to compile; see `compile`."""

    backend: str = "auto"
    inductor: bool = False
    strict: bool = False
    dump: Path | None = None
    passes: tuple[Pass, ...] | None = None
    progress: Callable[[str], None] | None = None
    absorb: str = "auto"
    disable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        AbsorbMLA(self.absorb)  # says what is wrong with it, if anything is
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, found {self.backend!r}.")
        known = [step.name for step in (*(self.passes or ()), *PASSES)]
        for name in self.disable:
            if name not in known:
                raise ValueError(f"there is no pass {name!r} to disable; {meant(name, known)}")

    def pipeline(self) -> tuple[Pass, ...]:
        """The passes of a model that keeps nothing."""
        if self.passes is not None:
            return pipeline.without(self.passes, self.disable)
        family = "" if self.backend == "auto" else self.backend
        steps: list[Pass] = []
        for step in DEFAULT_PIPELINE:
            if isinstance(step, SelectKernels):
                step = SelectKernels(family)
            elif isinstance(step, AbsorbMLA):
                step = AbsorbMLA(self.absorb)
            steps.append(step)
        return pipeline.without(steps, self.disable)


@dataclasses.dataclass
class _Rewritten:
    """A captured call after the passes; `before` is the graph as it was captured, if it is kept."""

    captured: Captured
    result: pipeline.Result
    dump: Dump | None
    before: ProgramGraph | None


def _rewritten(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options,
    passes: Sequence[Pass], keep: bool = False,
) -> _Rewritten:  # fmt: skip
    """Capture one call and run the passes; where a symbolic size was in a pass's way, once more with that
    size as a number."""
    tell = options.progress or (lambda stage: None)

    def attempt(fixed: frozenset[tuple[int, int]] = frozenset()) -> _Rewritten:
        tell("capture")
        captured = capturing.capture(target, args, kwargs, fixed)
        before = captured.graph.copy() if keep else None
        dump = None if options.dump is None else Dump(options.dump)
        result = pipeline.run(captured.graph, passes, dump, options.progress)
        return _Rewritten(captured, result, dump, before)

    first = attempt()
    if not first.result.obstacles:
        return first
    second = attempt(first.captured.dimensions(first.result.obstacles))
    better = len(second.result.missed) < len(first.result.missed)
    kept, other = (second, first) if better else (first, second)
    if other.dump is not None:
        other.dump.discard()
    return kept


def compile_graph(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Executable:
    """Capture one call of `target`, run the passes, and make it executable.

    Raises:
        CaptureError: torch.export cannot follow it. NotFusedError: under `strict`, something that looks
            like attention was left alone. DumpError: the dump cannot be written.
    """
    start = time.perf_counter()
    made = _rewritten(target, args, kwargs, options, options.pipeline())
    result, graph = made.result, made.captured.graph
    entries = tuple(_entries(graph))
    run = _runner(options)(graph)
    seconds = time.perf_counter() - start
    report = CompileReport(
        entries, tuple(result.missed), tuple(result.records), (), seconds, captured=result.captured
    )
    if made.dump is not None:
        made.dump.finish(report)
    if options.strict and result.missed:
        first = result.missed[0]
        raise NotFusedError(
            f"{len(result.missed)} softmax-like place(s) were not fused; the first is at "
            f"{first.source or 'an unknown line'}: {first.reason}.\n"
            "What to do: rewrite that place, or compile without strict=True, which leaves it as it is."
        )
    return Executable(made.captured, _owner(target), run, report)


def _owner(target: Callable[..., Any]) -> nn.Module:
    """The module that parameter names are looked up in: the wrapper's names, without the wrapper."""
    holder = nn.Module()
    if isinstance(target, nn.Module):
        holder.model = target
    else:
        for place, module in enumerate(capturing.closed_over_modules(target)):
            holder.add_module(f"closure_{place}", module)
    return holder


def _runner(options: Options) -> Callable[[ProgramGraph], Callable[..., Any]]:
    """What computes a graph: itself, or what Inductor makes of it."""

    def run(graph: ProgramGraph) -> Callable[..., Any]:
        if not options.inductor:
            return graph.module
        if options.progress is not None:
            options.progress("inductor")
        compiled: Callable[..., Any] = torch.compile(graph.module, dynamic=True, fullgraph=True)
        return compiled

    return run


def derive_decoder(
    target: Callable[..., Any], options: Options, config: CacheConfig, name: str, arguments: dict[str, Any]
) -> Step:
    """Capture `target(**arguments)` and derive a decoder for its argument `name`.

    Raises:
        CaptureError: torch.export cannot follow the model. NoDecoderError: says what is in the way.
    """
    start = time.perf_counter()
    passes = pipeline.without(decoder_pipeline(options.backend, absorb=options.absorb), options.disable)
    place = next(n for n, step in enumerate(passes) if step.name == InsertKVCache.name)
    made = _rewritten(target, (), arguments, options, passes[:place], config.proof)
    captured, result, whole = made.captured, made.result, made.before
    names = [n for n, v in arguments.items() for leaf in flatten(v)[0] if isinstance(leaf, Tensor)]
    graph, logits = captured.graph, _place_of_logits(captured.structure)
    rest = (InsertKVCache(names.index(name), logits), *passes[place + 1 :])
    try:
        last = pipeline.run(graph, rest, made.dump, options.progress)
    except NoDecoderError as problem:
        if not result.missed:
            raise
        first = result.missed[0]
        raise NoDecoderError(
            f"{problem.reason}\n(The softmax at {first.source} was not recognised as attention: "
            f"{first.reason}.)"
        ) from problem
    assert graph.cache is not None
    report = CompileReport(
        tuple(_entries(graph)), tuple(result.missed), (*result.records, *last.records),
        captured=result.captured,
    )  # fmt: skip
    run = _runner(options) if options.inductor else (lambda g: shortened(g.module))
    step = Step(graph, _owner(target), name, names, report, run)
    error = None
    if whole is not None:
        if options.progress is not None:
            options.progress("proof")
        error = prove(whole, step, arguments, name, logits)
    cache = CacheEntry(
        graph.cache.bytes_per_token, graph.cache.expanded, graph.cache.attentions,
        tuple((s.label, s.bytes_per_token, s.window) for s in graph.cache.stores),
        len(graph.cache.fixed), step.limit, error,
    )  # fmt: skip
    step.report = dataclasses.replace(report, cache=cache, seconds=time.perf_counter() - start)
    if made.dump is not None:
        made.dump.finish(step.report)
    return step


def _entries(graph: ProgramGraph) -> Iterator[AttentionEntry]:
    """What the report says of each attention."""
    for part in (g for g in (graph.prelude, graph) if g is not None):
        for node in (n for n in part.graph.nodes if "attention" in n.meta):
            chosen_later = node.target in CHOSEN_LATER
            kernel = KernelEntry("chosen by the number of new tokens") if chosen_later else _kernel(node)
            yield dataclasses.replace(node.meta["attention"], kernel=kernel)


def _kernel(node: fx.Node) -> KernelEntry:
    """The kernel of an attention, with what is emitted for it."""
    found, name = parts(node), str(node.args[6])
    if not name:
        return KernelEntry()
    q, k, v = (n.meta["val"] for n in (found.q, *found.keys))
    reads = [r.meta["val"] for r in found.reads]
    return KernelEntry(name, KERNELS[name].source(parse(found.program), (q, k, v), reads))


def _with_remarks(report: CompileReport) -> CompileReport:
    """The report, with what came up in running the kernels since."""

    def told(entry: AttentionEntry) -> AttentionEntry:
        kernel = KERNELS.get(entry.kernel.name)
        remarks = () if kernel is None else kernel.remarks(parse(entry.program))
        return dataclasses.replace(entry, kernel=dataclasses.replace(entry.kernel, remarks=remarks))

    return dataclasses.replace(report, attention=tuple(told(entry) for entry in report.attention))


def _place_of_logits(structure: Structure) -> int:
    """The number, among the tensors that a model returns, of its logits: the entry of that name, else the
    first."""
    places = [value if kind == "tensor" else None for kind, value in structure.leaves]
    result = unflatten(places, structure.tree)
    named = getattr(result, "logits", None)
    if named is None and isinstance(result, Mapping):
        named = result.get("logits")
    found = named if isinstance(named, int) else next((p for p in places if p is not None), None)
    if found is None:
        raise NoDecoderError("the model returns no tensor.")
    return found


class CompiledModule(nn.Module):
    """What `attngraph.compile` returns: a module with the model's parameters, state dict, training flag
    and attributes, whose forward runs traced and rewritten graphs."""

    _own = frozenset({"_options", "_graphs", "_lock", "_pieces", "_target", "_no_pieces"})

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
        self._pieces: dict[Any, Pieces] = {}

    @property
    def report(self) -> CompileReport:
        """What was done, over all graphs kept (the latest graph's entries first)."""
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
        with GATE.call():
            key = call_key(leaves, spec, self._target)
            pieces = self._pieces.get(ALWAYS) or self._pieces.get(key)
            found = None if pieces is not None else self._find(key, tensors)
            if found is not None:
                return found(tensors)
        if pieces is not None:
            return pieces(*args, **kwargs)
        found = self._trace(key, tensors, args, kwargs)
        if found is not None:
            with GATE.call():
                return found(tensors)
        where = ALWAYS if ALWAYS in self._pieces else key
        try:
            result = self._pieces[where](*args, **kwargs)
        except Exception:
            self._pieces.pop(where, None)  # a call that fails says nothing about the next one
            raise
        if self._options.dump is not None:
            write_breaks(self._options.dump, self._pieces[where].report().breaks)
        return result

    def _find(self, key: Any, tensors: Sequence[Tensor]) -> Executable | None:
        for executable in reversed(self._graphs.get(key, ())):
            if executable.accepts(tensors):
                return executable
        return None

    def _trace(
        self, key: Any, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Executable | None:
        """Trace for this call and keep the graph; None where the model must be captured in pieces."""
        # The trace is no part of the computation that saved-tensor hooks around us watch.
        with GATE.trace(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            found = self._find(key, tensors)
            if found is not None:
                return found
            try:
                found = compile_graph(self._target, args, kwargs, self._options)
                if not found.accepts(tensors):
                    raise CaptureError(
                        "the traced graph does not accept the call it was traced for", "inconsistent guards"
                    )
            except CaptureError as problem:
                if self._options.strict or not self._allow_pieces:
                    raise
                log.warning("%s", problem)
                part = functools.partial(CompiledModule, options=self._options, pieces=False)
                self._pieces[ALWAYS if problem.lasting else key] = Pieces(self._target, part, problem)
                return None
            kept = self._graphs.setdefault(key, [])
            kept.append(found)
            self._graphs.move_to_end(key)
            while sum(len(k) for k in self._graphs.values()) > MOST_GRAPHS:
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
        """Copies and pickles carry the model and the options; graphs are traced anew."""
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
    """Whether the call is part of another trace, or of a transformation (vmap, jvp) that needs the
    model's own operations. The model then runs as it is, inside that."""
    if GATE.traces_here():
        return True
    # Torch's flags are for the whole process: while another thread traces they say nothing about us.
    elsewhere = GATE.is_tracing()
    return (
        (not elsewhere and (torch.compiler.is_exporting() or torch.compiler.is_compiling()))
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
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


_OF_THE_BACKEND: dict[str, tuple[tuple[type, ...], str]] = {
    "backend": ((str,), f"one of {', '.join(BACKENDS)}"),
    "inductor": ((bool,), "True or False"),
    "dump": ((str, Path, type(None)), "a directory"),
    "passes": ((list, tuple, type(None)), "a list of passes"),
    "absorb": ((str,), f"one of {', '.join(WAYS)}"),
    "disable": ((list, tuple), "a list of names of passes"),
}
"""What `torch.compile(model, backend="attngraph", options={...})` takes: types, and the same in words."""


def dynamo_backend(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **kwargs: Any
) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="attngraph")`.

    Args:
        options: the keyword arguments of `attngraph.compile`, except `strict` and `cache`.

    Raises:
        TypeError, ValueError: an option that there is not, or a value that it does not take.
    """
    chosen = make_options(**_checked({**(options or {}), **kwargs}))
    return Piece(module, functools.partial(CompiledModule, options=chosen, pieces=False))


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """The options of the torch.compile backend, or an error that says which is wrong and what there is."""
    accepted = "; ".join(f"{name}: {words}" for name, (_, words) in _OF_THE_BACKEND.items())
    for name, value in options.items():
        if name not in _OF_THE_BACKEND:
            advice = _ELSEWHERE.get(name) or meant(name, _OF_THE_BACKEND)
            raise TypeError(
                f'torch.compile(backend="attngraph") has no option {name!r}; {advice} '
                f"Accepted are {accepted}."
            )
        types, words = _OF_THE_BACKEND[name]
        if not isinstance(value, types):
            raise TypeError(
                f'torch.compile(backend="attngraph"): option {name!r} must be {words}, found {value!r}.'
            )
    return options


_ELSEWHERE = {
    "strict": "give fullgraph=True to torch.compile, or compile with attngraph.compile(model, strict=True).",
    "cache": "a decoder is derived by attngraph.compile(model, cache=True).",
    "mode": "a mode is Inductor's; options={'inductor': True} compiles the rest with Inductor.",
}


@overload
def compile(
    model: Callable[..., Any], *, backend: str = ..., inductor: bool = ..., strict: bool = ...,
    dump: str | Path | None = ..., passes: Sequence[Pass] | None = ..., absorb: str = ...,
    disable: Sequence[str] = ..., cache: Literal[False] = ...,
) -> CompiledModule: ...  # fmt: skip
@overload
def compile(
    model: Callable[..., Any], *, backend: str = ..., inductor: bool = ..., strict: bool = ...,
    dump: str | Path | None = ..., passes: Sequence[Pass] | None = ..., absorb: str = ...,
    disable: Sequence[str] = ..., cache: Literal[True] | CacheConfig,
) -> Decoder: ...  # fmt: skip
def compile(
    model: Callable[..., Any], *, backend: str = "auto", inductor: bool = False, strict: bool = False,
    dump: str | Path | None = None, passes: Sequence[Pass] | None = None, absorb: str = "auto",
    disable: Sequence[str] = (), cache: bool | CacheConfig = False,
) -> CompiledModule | Decoder:  # fmt: skip
    """A module with the same answers as `model`, in which every attention runs as one fused op.

    Nothing is traced yet: the first call traces, and so does a later one that no graph at hand serves.

    Args:
        model: any nn.Module or function of tensors.
        backend: "auto" (the best kernel for the device), "cpu", "triton" or "reference".
        inductor: compile what is not attention with Inductor as well.
        strict: raise where the model cannot be captured whole, or where something that looks like
            attention is left alone.
        dump: a directory for the graph after each pass (also: the environment variable ATTNGRAPH_DUMP).
        passes: the passes to run instead of `attngraph.passes.DEFAULT_PIPELINE`.
        absorb: for attention whose keys and values are made from one narrow value per token (MLA): "auto"
            writes keys and values out or multiplies queries and results instead, whichever is cheaper at each
            call; "always" and "never" do one of the two.
        disable: names of passes that are not to run, such as "merge-heads".
        cache: True or a `CacheConfig`: also derive a decoder, which computes token by token and keeps what
            later tokens need.

    Returns:
        An nn.Module that shares the model's parameters; `.report` says what was done. With `cache`, a
        `Decoder`: prefill, decode and generate.

    Raises:
        TypeError: `model` is not callable. ValueError: an unknown backend or value of `absorb`.
    """
    if not callable(model):
        raise TypeError(f"attngraph.compile takes an nn.Module or a function, found {type(model).__name__}.")
    options = make_options(backend, inductor, strict, dump, passes, absorb=absorb, disable=disable)
    compiled = CompiledModule(model, options)
    if cache is False:
        return compiled
    config = CacheConfig() if cache is True else cache
    if not isinstance(config, CacheConfig):
        raise TypeError(f"cache must be True, False or a CacheConfig, found {type(cache).__name__}.")
    if passes is not None:
        raise ValueError("passes and cache do not go together: a decoder has its own order of passes.")
    if InsertKVCache.name in options.disable:
        raise ValueError(f"cache asks for what {InsertKVCache.name} does; it cannot be disabled.")
    return Decoder(model, config, compiled, functools.partial(derive_decoder, model, options, config))


def make_options(
    backend: str = "auto", inductor: bool = False, strict: bool = False, dump: str | Path | None = None,
    passes: Sequence[Pass] | None = None, progress: Callable[[str], None] | None = None,
    absorb: str = "auto", disable: Sequence[str] = (),
) -> Options:  # fmt: skip
    folder = dump or os.environ.get("ATTNGRAPH_DUMP") or None
    chosen = None if passes is None else tuple(passes)
    if isinstance(disable, str):
        raise ValueError(f"disable takes names of passes, as in disable=({disable!r},).")
    return Options(
        backend, inductor, strict, Path(folder) if folder else None, chosen, progress, absorb, tuple(disable)
    )


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> CompileReport:
    """The report of compiling `model` for this call; nothing is run on it afterwards, nothing kept.

    Raises:
        CaptureError: the model cannot be captured whole and running it in pieces failed too.
    """
    with _saved_generator():
        try:
            return compile_graph(model, args, kwargs, Options()).report
        except CaptureError:
            compiled = CompiledModule(copy.deepcopy(model), Options())
            compiled(*args, **kwargs)
            return compiled.report


@contextlib.contextmanager
def _saved_generator() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


assert codegen  # imported for what it registers
