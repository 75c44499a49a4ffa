"""The main entry points: `attngraph.compile`, `attngraph.explain` and `attngraph.load`."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import torch

from attngraph.api import saving
from attngraph.api.arguments import require_fit, require_model
from attngraph.api.build import compile_graph
from attngraph.api.compiled import CompiledModule
from attngraph.api.methods import decoder_of
from attngraph.api.options import CompileOptions, Options, make_options
from attngraph.errors import CaptureError
from attngraph.report.report import CompileReport
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.decoder import Decoder
from attngraph.saved.weights import load_skeleton


@overload
def compile(
    model: Callable[..., Any], *, cache: Literal[False] = ..., **options: Unpack[CompileOptions]
) -> CompiledModule: ...
@overload
def compile(
    model: Callable[..., Any], *, cache: Literal[True] | CacheConfig, **options: Unpack[CompileOptions]
) -> Decoder: ...
@overload
def compile(
    model: None = ..., *, cache: bool | CacheConfig = ..., **options: Unpack[CompileOptions]
) -> Callable[[Callable[..., Any]], Any]: ...
def compile(
    model: Callable[..., Any] | None = None,
    *,
    cache: bool | CacheConfig = False,
    **options: Unpack[CompileOptions],
) -> Any:
    """Returns a module with the same results as `model`, in which attention runs as fused ops.

    Nothing is traced yet: the first call traces, and so does every call that no existing graph accepts.

    Args:
        model: any nn.Module or function of tensors; without one, a decorator is returned, as in
            `@attngraph.compile(strict=True)`.
        backend: "auto" (the best kernel for the device), "cpu", "triton", "reference", or one that another
            package brings.
        inductor: compile everything except attention with Inductor.
        strict: raise if the model cannot be captured whole, or if something that may be attention is not
            fused.
        dump: a directory for the graph after each pass (also: the environment variable ATTNGRAPH_DUMP).
        passes: the passes to run instead of `attngraph.passes.DEFAULT_PIPELINE`, themselves or by name; or a
            function that gives them from the default order, of a decoder too.
        absorb: for attention whose keys and values are projected up from one narrow vector per token (MLA):
            "always" applies the projections to queries and results instead, "never" to keys and values,
            "auto" does whichever is cheaper at each call.
        disable: names of passes that are skipped, such as "merge-heads".
        min_scores: calls whose attentions have fewer scores (queries times keys, of all heads and rows) run
            the model itself, because fusing gains nothing there. None: about a million on the CPU with the
            default options, where the first larger calls of a size without gradients are timed by turns, and
            the model itself serves that size if it is faster (both answer, and round differently); else 0.
            0: every call runs the graph.
        consistent: a token's logits are the same numbers, bit for bit, whatever batch, padding, chunk, page
            or state it is computed in, by this module and by a decoder of it, with any number of threads. The
            report names what cannot be; with `strict` that is an error. On one CPU or GPU. A model without a
            decoder has the bits of each sequence alone, in every batch and with padding on the right.
        freeze: True: the model's weights will not change, so linear layers keep a copy that is laid out for
            the machine. A change that can be seen is a FrozenError (one through `.data` cannot). Calls in
            which gradients may flow read the model's own weights, and the report says so. "release":
            parameters that only such layers read are given up after the first call; a `GivenUp` stands for
            each in the model, and whatever else reads it (the model itself, its state dict) is a FrozenError.
        padding: "unused": nobody uses what `model` returns of tokens that a mask hides from all others, as
            padding; then such tokens are not computed, and their results are anything (zeros mostly).
            "computed": they are what the model computes, so tokens are left out only where no result needs
            them: a pooled embedding, the logits of a class. On the CPU, on one device, without a cache.
        cache: True or a `CacheConfig`: also derive a decoder, which computes token by token and caches what
            later tokens need.
        mesh: a DeviceMesh with named axes (or a `SimulatedMesh`): along its axis `tensor`, heads, units and
            vocabulary are divided, along its axis `context` tokens. Every rank makes the same calls with the
            same arguments.
        shard: a `ShardConfig`: other names of axes, and how parameters are held.

    Returns:
        An nn.Module that shares the model's parameters; `.report` says what was done. With `cache`, a
        `Decoder`: prefill, decode and generate.

    Raises:
        TypeError: `model` is not callable. ValueError: an unknown backend or value of `absorb`.
        PlacementError: the model's parameters are divided along another mesh already.
    """
    chosen = make_options(**options)
    if model is None:
        return functools.partial(compile, cache=cache, **options)
    require_model(model, "attngraph.compile")
    chosen.devices.take(model)
    compiled = CompiledModule(model, chosen)
    if cache is False:
        return compiled
    config = CacheConfig() if cache is True else cache
    if not isinstance(config, CacheConfig):
        raise TypeError(f"cache must be True, False or a CacheConfig, found {type(cache).__name__}.")
    chosen.decoder_pipeline(config.rounded)  # raises for options that cannot be combined with a cache
    return compiled.take_decoder(decoder_of(compiled, chosen, config))


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> CompileReport:
    """The report of compiling `model` for this call; the compiled graph is discarded.

    Raises:
        TypeError: `model` is not callable, or takes other arguments.
        CaptureError: the model cannot be captured whole and running it in pieces failed too.
    """
    require_model(model, "attngraph.explain")
    require_fit(model, args, kwargs)
    with torch.random.fork_rng(devices=[]):
        try:
            return compile_graph(model, args, kwargs, Options()).report
        except CaptureError:
            compiled = CompiledModule(copy.deepcopy(model), Options())
            compiled(*args, **kwargs)
            return compiled.report


def load(
    path: str | Path, model: Callable[..., Any] | None = None, *, strict: bool = False
) -> CompiledModule | Decoder:
    """A compiled model, or a decoder, from the folder that its `save` wrote.

    Every file is compared with its digest. Whether a graph still fits is looked at when a call needs it: the
    model's structure and attributes, the code that was traced, buffers whose values were read, versions, the
    processor. Where something does not fit, it is named in a warning, and the model is traced anew.

    Args:
        model: the model, with its weights. None: the weights that were saved with `weights=True`; then the
            model's code is not needed, and only calls are served for which there is a graph.
        strict: raise where something does not fit, instead of tracing anew.

    Raises:
        SavedError: a file is missing or has changed, nothing was saved with weights, or, with `strict`,
            something does not fit.
    """
    folder = saving.Folder(Path(path), strict or model is None)
    target = load_skeleton(folder.path, folder.about) if model is None else model
    options, said = folder.options(), folder.said
    compiled = CompiledModule(target, options, saved=folder if said.config is None else None)
    if said.config is None:
        return compiled
    return compiled.take_decoder(decoder_of(compiled, options, said.config, folder))
