"""The report's entry of an attention: of one that was fused, or of one that is in the graph already."""

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph, measured_sizes
from attngraph.ir.graph.source import caller_of, module_of, own_line, source_of
from attngraph.ir.language import Expr, ScoreProgram
from attngraph.ir.ops import nodes
from attngraph.meaning.algebra.sizes import evaluate_size, size_expression
from attngraph.meaning.attention.claim import Attention
from attngraph.meaning.check.check import Verdict
from attngraph.meaning.masks import words as masks
from attngraph.meaning.masks.visible import warn_of_blind_rows
from attngraph.report.entries import AttentionEntry, KernelEntry, TracedCall


def describe_claim(
    claim: Attention, verdict: Verdict, whole: fx.Node, graph: ProgramGraph
) -> tuple[AttentionEntry, list[str]]:
    """The entry of a claim that was checked and became the node `whole`, and notes on both."""
    hints = graph.hints
    source, (caller, code) = source_of(claim.node), caller_of(claim.node)
    heads, call = _number(claim.heads, hints), _call(whole, hints)
    warning = _warning(claim.program, heads, call, whole)
    # The names that the text gives to sizes: in order of the inputs' dimensions.
    names = {symbol: f"s{number}" for number, symbol in enumerate(hints)}
    shown = " and ".join(
        "(" + ", ".join(f"{name}={s[symbol]}" for symbol, name in names.items() if symbol in s) + ")"
        for s in verdict.sizes
        if s
    )
    checked = f"checked in float64{' at ' + shown if shown else ''} (max error {verdict.error:.0e})"
    notes = [f"look at {source}: {warning}"] if warning else []
    entry = AttentionEntry(
        name=module_of(claim.node), program=str(claim.program), heads=heads,
        kv_heads=_number(claim.kv_heads, hints), head_dim=_number(claim.head_dim, hints),
        value_dim=_number(claim.value_dim, hints), source=source,
        mask=in_words(claim.program, claim.reads, graph),
        caller=caller, code=code, kernel=KernelEntry(), error=verdict.error, call=call, warning=warning,
        axes=(_numbers(claim.axes[0], hints), _numbers(claim.axes[1], hints)),
        reads=_told(nodes.AttentionOp.of(whole).reads, graph),
    )  # fmt: skip
    return entry, [*notes, f"fused attention at {source}, {checked}"]


def in_words(program: ScoreProgram, reads: Sequence[object], graph: ProgramGraph) -> str:
    """The mask of a program whose tensors are these values of a graph."""
    hiding = masks.hiding(reads, graph.known_values())
    return masks.describe(program, hiding, masks.given(reads, graph))


def describe(node: fx.Node, graph: ProgramGraph) -> AttentionEntry:
    """The report's entry for an attention node that is already in the graph."""
    found, hints = nodes.AttentionOp.of(node), graph.hints
    q, k, v = (n.meta["val"].shape for n in (found.q, *found.keys))
    heads, kv_heads, head_dim, value_dim = (
        _number(size_expression(s), hints) for s in (q[1], k[1], q[3], v[3])
    )
    call = _call(node, hints)
    caller, code = caller_of(node)
    return AttentionEntry(
        name=module_of(node), program=str(found.program), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        value_dim=value_dim, mask=in_words(found.program, found.reads, graph), source=source_of(node),
        kernel=KernelEntry(), error=0.0, numerics="exact", call=call,
        warning=_warning(found.program, heads, call, node), caller=caller, code=code,
        reads=_told(found.reads, graph),
    )  # fmt: skip


def _told(reads: Iterable[fx.Node], graph: ProgramGraph) -> tuple[str, ...]:
    """What tensors are that a program reads: by the model's names, or by the lines that compute them."""
    given, told = graph.given(), []
    for node in reads:
        if node in given:
            kind, name = given[node].kind, given[node].label
            told.append(f"tensor {name} of the arguments" if kind == "argument" else f"{name} ({kind})")
        else:
            module = module_of(node)
            told.append(f"computed at {own_line(node)}{f' in {module}' if module else ''}")
    return tuple(told)


def _warning(program: ScoreProgram, heads: int, call: TracedCall, whole: fx.Node) -> str:
    if any(map(measured_sizes, whole.all_input_nodes)):
        return ""  # which queries there are, and see keys, is known when data are
    return warn_of_blind_rows(program, (call.batch, heads, call.queries, call.keys), call.numbers)


def _call(whole: fx.Node, hints: Mapping[str, int]) -> TracedCall:
    """The sizes of an attention node in the traced call."""
    found = nodes.AttentionOp.of(whole)
    q, k = found.q.meta["val"], found.keys[0].meta["val"]
    batch, queries, keys = (_number(size_expression(s), hints) for s in (q.shape[0], q.shape[2], k.shape[2]))
    numbers = (s if isinstance(s, int) else s.meta["val"] for s in found.sizes)
    reads = (r.meta["val"] for r in found.reads)
    return TracedCall(
        batch, queries, keys, str(q.dtype).removeprefix("torch."),
        tuple(_number(size_expression(n), hints) for n in numbers),
        sum(_number(size_expression(r.numel()), hints) * r.dtype.itemsize for r in reads),
    )  # fmt: skip


def _numbers(extents: Iterable[Expr], hints: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(_number(extent, hints) for extent in extents)


def _number(extent: Expr, hints: Mapping[str, int]) -> int:
    return int(evaluate_size(extent, hints))
