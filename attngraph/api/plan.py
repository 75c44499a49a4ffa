"""Which ways there are to run a model on many ranks, and what each rank would hold, send and compute.

The model is captured once for whole sequences, and once more for its decoder. On copies of these graphs the
passes that divide them run for each number of ranks, with their proofs, as they do in `attngraph.compile`;
what a rank holds, sends and computes is counted on what they make. No rank is run and no weight is read, so
weights without contents will do (`plan_memory.py`). What is too large for a proof here, and groups of many
ranks, are derived by the rules alone. Groups larger than asked for are not derived. The plan says both.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from attngraph.api.arguments import require_fit, require_model, require_sequence
from attngraph.api.build import capture_call, rewritten
from attngraph.api.derive import dividing
from attngraph.api.options import Options
from attngraph.api.plan_memory import KeptForBackward, bytes_of, fetched_at_once, without_memory
from attngraph.capture.captured import Assumed
from attngraph.capture.instead import LOCK
from attngraph.errors import CaptureError, NoDecoderError, PassError
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops import nodes
from attngraph.ir.ops.collectives import ALL_GATHER, ALL_REDUCE, bytes_sent
from attngraph.meaning.check.region import numbers_at, shape_at
from attngraph.meaning.masks.tiles import pairs_of_ranks
from attngraph.passes import order, waiting_at_most
from attngraph.passes.divide_cache import DivideCache
from attngraph.passes.insert_kv_cache.insert import InsertKVCache
from attngraph.passes.shard_heads.shard import ShardHeads
from attngraph.passes.shard_tokens.shard import ShardTokens, one_run
from attngraph.passes.tabulate_scores import TabulateScores
from attngraph.pipeline import run as run_passes
from attngraph.pipeline import split_at
from attngraph.report.plan import Machine, Plan, Share, Way
from attngraph.report.ranks import ContextEntry, RanksEntry
from attngraph.runtime.cache_config import CacheConfig

GROUP = 8
"""The largest group of ranks that divide one model, unless more is asked for, and the largest for which parts
are proved: a proof simulates all of them."""
PROOF_BYTES = 1 << 28
"""Bytes of the proof of one part above which a plan has none."""
H100 = Machine(989e12, 3.35e12, 450e9, 80e9)
"""An H100 SXM by its data sheet: dense bfloat16, HBM3, NVLink in one direction."""


def plan(
    model: Callable[..., Any], inputs: Sequence[Any], ranks: int, machine: Machine = H100, group: int = GROUP,
    progress: Callable[[str], None] = lambda stage: None, training: bool = False,
) -> Plan:  # fmt: skip
    """The ways to run `model(*inputs)` on so many ranks.

    Args:
        inputs: an example, whose number of tokens the figures are for.
        ranks: how many devices there are. machine: what one of them is.
        group: the largest group of ranks that divide one model; the ranks are as many such groups as fit.
        progress: called with the name of each stage as it starts.
        training: plan steps of training, with gradients, AdamW's state and activations, and no cache.

    Raises:
        CaptureError: the model cannot be captured as one graph. ValueError: it has no attention.
        TypeError: an argument is of another kind.
    """
    require_model(model, "attngraph.plan")
    if not isinstance(machine, Machine):
        raise TypeError(f"machine takes an attngraph.Machine, found {type(machine).__name__}.")
    require_sequence(inputs, "inputs")
    require_fit(model, inputs, {})
    for name, number in (("ranks", ranks), ("group", group)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, found {number!r}.")
    with torch.set_grad_enabled(training), LOCK.trace():
        planner = Planner(model, tuple(inputs), progress, decodes=not training, trains=training)
        return planner.plan(ranks, machine, group)


class Planner:
    """What one rank of a group holds, sends and computes, derived on the graph of one call.

    `proves`, `decodes`, `trains`: whether parts are proved, whether a decoder is derived too, and whether
    what a backward pass keeps is counted. `by_heads`: the graph as ranks that divide heads have it, by their
    number; those that divide tokens too begin with it.
    """

    def __init__(
        self, model: Callable[..., Any], inputs: tuple[Any, ...], progress: Callable[[str], None],
        proves: bool = True, decodes: bool = True, trains: bool = False,
    ) -> None:  # fmt: skip
        self.progress, self.proves, self.trains = progress, proves, trains
        self.by_heads: dict[int, ProgramGraph] = {}
        steps, _ = split_at(waiting_at_most(order()), TabulateScores.name)
        progress("capture")
        self.graph = rewritten(
            functools.partial(capture_call, model, inputs, {}), Options(), steps
        ).captured.graph
        self.remarks: list[str] = []
        attentions = [view for node in self.graph.graph.nodes if (view := nodes.view(node)) is not None]
        if not attentions:
            raise ValueError("no attention was found in the model, so a plan cannot tell what a token is.")
        sizes = [shape_at(view.q.meta["val"], self.graph.hints) for view in attentions]
        self.tokens = max(s[2] for s in sizes)
        self.call = max(s[0] * s[2] for s in sizes)
        self.decoder = self._decoder(model, inputs) if decodes else None

    def _decoder(self, model: Callable[..., Any], inputs: tuple[Any, ...]) -> ProgramGraph | None:
        """The graph from which a decoder is derived; None if there is none."""
        ids = inputs[0] if len(inputs) == 1 else None
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            self.remarks.append("no cache: a plan derives one where ids [B, T] are the only input")
            return None
        ids = ids.repeat(2, 1) if len(ids) == 1 else ids  # one row might be taken for a fixed number
        steps, _ = split_at(order(decoder=True), InsertKVCache.name)
        try:
            tokens = Assumed(symbolic=frozenset({(0, 1)}))
            capture = functools.partial(capture_call, model, (ids,), {}, tables=True)
            made = rewritten(capture, Options(), steps, tokens, only_logits=True)
            found = made.captured.graph
            run_passes(found.copy(), (InsertKVCache(),))
        except (CaptureError, NoDecoderError) as problem:
            self.remarks.append(f"no cache: {str(problem).splitlines()[0]}")
            return None
        return found

    def plan(self, ranks: int, machine: Machine, group: int) -> Plan:
        ways = [Way("data", 1, ranks, self.share(1, 1))]
        counts = [n for n in range(1, ranks + 1) if ranks % n == 0]
        alone = [*((n, 1) for n in counts[1:]), *((1, n) for n in counts[1:])]
        both = [(heads, n) for heads in counts[1:] for n in counts[1:] if ranks % (heads * n) == 0]
        for heads, tokens in (*alone, *(pair for pair in both if math.prod(pair) <= group)):
            axis = "tensor" if tokens == 1 else "context" if heads == 1 else "both"
            count = heads * tokens
            found = functools.partial(Way, axis, count, ranks // count, tokens=tokens)
            if count > group:
                ways.append(found(None, f"more than {group} ranks in a group (--group)"))
                continue
            self.progress(found(None).name)
            try:
                ways.append(found(self.share(heads, tokens)))
            except (_NotDividedError, PassError) as problem:
                ways.append(found(None, str(problem).splitlines()[0]))
        remarks = tuple(dict.fromkeys(self.remarks))
        return Plan(ranks, self.tokens, self.call, machine, tuple(ways), remarks, self.trains)

    def share(self, heads: int, tokens: int) -> Share:
        """What one of `heads` x `tokens` ranks holds and does."""
        if heads not in self.by_heads:
            self.by_heads[heads] = _divided(self.graph, heads, 1, self.proves)
        graph, words = self.by_heads[heads], list[str]()
        attending, sent, received = sum(_of_attention(node, graph) for node in graph.attentions()), 0.0, 0.0
        if heads > 1:
            words.append(_words(graph.ranks.entry))  # type: ignore[union-attr]
        if tokens > 1:
            graph = _divided(graph, 1, tokens, self.proves)
            entry: ContextEntry = graph.ranks.context  # type: ignore[union-attr]
            sent, received = _busiest(entry)
            attending = self._busiest_attending(entry, attending)
            more = f"; {len(entry.whole)} place(s) computed whole" if entry.whole else ""
            words.append(f"{entry.axes[0].tokens:,} tokens{more}")
        summed = [n for n in graph.graph.nodes if n.target in (ALL_REDUCE, ALL_GATHER)]  # in rings
        sums = sum(bytes_sent(n.target, bytes_of(n.args[0], graph), heads) for n in summed)
        if graph.ranks is not None and graph.ranks.unproved:
            self.remarks.append(
                "parts whose proof is large, or would simulate many ranks, are divided by the rules alone; "
                "when the model is compiled they are proved, or else not divided"
            )
        products, failed = _of_products(graph)
        if failed:
            self.remarks.append(f"operations of {', '.join(sorted(failed))} are not counted")
        cache, sequence, sent_new = self._decoding(heads, tokens)
        kept, unknown = KeptForBackward(graph).count() if self.trains else (0, set[str]())
        if unknown:
            self.remarks.append(f"what a backward pass keeps of {', '.join(sorted(unknown))} is not counted")
        return Share(
            _held(graph, "parameter", "shard"), _held(graph, "buffer"), cache, sequence,
            (sums + sent) / self.call, (sums + received) / self.call, sent_new,
            (products + attending) / self.call, "; ".join(words), fetched_at_once(graph), kept,
        )  # fmt: skip

    def _busiest_attending(self, entry: ContextEntry, whole: float) -> float:
        """Operations of attention of the rank with most pairs; all have `whole`. (What masks leave is
        counted before tokens are divided: on a rank's graph queries and keys are different tokens.)"""
        if sum(axis.attentions for axis in entry.axes) < len(self.graph.attentions()):
            self.remarks.append("where context divides some attentions only, all of them are counted whole")
            return whole
        return whole * max(max(axis.pairs) / sum(axis.pairs) for axis in entry.axes)

    def _decoding(self, heads: int, tokens: int) -> tuple[int | None, int, int]:
        """Bytes that a rank of a decoder keeps of a token, and of a sequence, and sends for a new token."""
        if self.decoder is None or tokens > 1:
            return None, 0, 0
        try:
            graph = _divided(self.decoder, heads, 1, self.proves)
            run_passes(graph, (InsertKVCache(), *dividing([DivideCache()], CacheConfig())))
        except (_NotDividedError, NoDecoderError) as problem:
            self.remarks.append(f"no cache on tensor {heads}: {str(problem).splitlines()[0]}")
            return None, 0, 0
        assert graph.state is not None
        each = sum(store.bytes_in(None) for store in graph.state.stores)
        sent = 0 if graph.ranks is None else graph.ranks.entry.sent_per_token
        return each, sum(value.bytes_per_row for value in graph.state.carried), sent


class _NotDividedError(Exception):
    """Nothing is divided; says why."""


def _divided(graph: ProgramGraph, heads: int, tokens: int, proves: bool) -> ProgramGraph:
    """A copy of the graph, divided among ranks; `proves`: with proofs, as far as these are small."""
    graph, before = graph.copy(), 1 if graph.ranks is None else graph.ranks.count
    trusts = PROOF_BYTES if proves and before * heads * tokens <= GROUP else 0
    if heads > 1:
        run_passes(graph, (ShardHeads(heads, trusts=trusts),))
        assert graph.ranks is not None
        if not graph.ranks.entry.divided:
            reasons = [reason for *_, reason in graph.ranks.entry.whole]
            raise _NotDividedError(f"nothing is divided among {heads}: {next(iter(reasons), 'no weights')}")
    if tokens > 1:
        run_passes(graph, (ShardTokens(tokens, trusts=trusts),))
        assert graph.ranks is not None
        if not graph.ranks.context.axes:
            raise _NotDividedError(next(iter(w.reason for w in graph.ranks.context.whole), "no tokens"))
    return graph


def _words(entry: RanksEntry) -> str:
    """What ranks divide, and what stays whole."""
    found = Counter((d.what, d.count) for d in entry.divided)
    divided = ", ".join(f"{times} x {count:,} {what}" for (what, count), times in found.items())
    whole = sum(elements for _, elements, _ in entry.whole)
    more = f"; {whole:,} values of {len(entry.whole)} matrices whole on every rank" if entry.whole else ""
    return divided + more


# --- what is counted on a graph ---


def _held(graph: ProgramGraph, *kinds: str) -> int:
    """Bytes that a rank holds of the inputs of these kinds."""
    return sum(bytes_of(node, graph) for node, told in graph.given().items() if told.kind in kinds)


def _busiest(entry: ContextEntry) -> tuple[int, int]:
    """Bytes that the ranks that send, and that receive, most do in a call. What a rank is sent backward of
    fetched keys is what it sends forward; all tokens of a value go round in a ring."""
    sent = [0] * entry.count
    for fetched in entry.fetched:
        forward = fetched.back if any(fetched.back) else fetched.bytes
        sent = [a + b for a, b in zip(sent, forward, strict=True)]
    return max(sent), max(entry.received)


def _of_products(graph: ProgramGraph) -> tuple[int, set[str]]:
    """Operations of a rank's products in a call, as torch counts them, and what could not be counted."""
    total, failed = 0, set[str]()
    for node in graph.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("aten."):
            try:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: without_memory(n, graph))
                with FlopCounterMode(display=False) as counter:
                    node.target(*args, **kwargs)
                total += int(counter.get_total_flops())
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                failed.add(str(node.target))
    return total, failed


def _of_attention(node: fx.Node, graph: ProgramGraph) -> float:
    """Two products over the pairs that the mask leaves, and the projections of latents, where there are."""
    view: Any = nodes.view(node)
    batch, heads, queries, width = shape_at(view.q.meta["val"], graph.hints)
    keys = shape_at(view.keys[0].meta["val"], graph.hints)[2]
    results = node.meta["val"]
    value = shape_at(results[0] if isinstance(results, tuple) else results, graph.hints)[-1]
    up = sum(bytes_of(w, graph) // w.meta["val"].dtype.itemsize for w in view.projections)
    seen: float = _seen(view.program, numbers_at(view.sizes, graph.hints), keys) if queries == keys else 1.0
    pairs: float = batch * heads * queries * keys * seen
    return float(2 * pairs * (width + value) + 2 * batch * keys * up)


def _seen(program: ScoreProgram, sizes: tuple[int, ...], total: int) -> float:
    """About which share of the pairs of so many tokens a mask leaves."""
    layout = one_run(max(n for n in range(1, 33) if total % n == 0))
    every = sum(pairs_of_ranks(ScoreProgram(()), sizes, layout, total))
    return float(sum(pairs_of_ranks(program, sizes, layout, total)) / every)
