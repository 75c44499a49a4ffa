"""The report's entry of an attention: of one that was fused, or of one that is in the graph already."""

import dataclasses
from collections.abc import Iterable, Sequence

from torch import fx

from attngraph.ir.graph import ProgramGraph, caller_of, measured_sizes, module_of, own_line, source_of
from attngraph.ir.language import ScoreProgram
from attngraph.ir.ops import nodes
from attngraph.meaning.attention.claim import Attention
from attngraph.meaning.check.check import Verdict
from attngraph.meaning.check.region import bytes_at, numbers_at, shape_at
from attngraph.meaning.masks import words as masks
from attngraph.meaning.masks.visible import warn_of_blind_rows
from attngraph.report.entries import AttentionEntry, KernelEntry, TracedCall


def describe_claim(
    claim: Attention, verdict: Verdict, whole: fx.Node, graph: ProgramGraph
) -> tuple[AttentionEntry, list[str]]:
    """The entry of a claim that was checked and became the node `whole`, and notes on both."""
    # The names that the text gives to sizes: in order of the inputs' dimensions.
    names = {symbol: f"s{number}" for number, symbol in enumerate(graph.hints)}
    told = [[f"{n}={s[symbol]}" for symbol, n in names.items() if symbol in s] for s in verdict.sizes if s]
    shown = " and ".join(f"({', '.join(each)})" for each in told)
    checked = f"checked in float64{' at ' + shown if shown else ''} (max error {verdict.error:.0e})"
    both, queries = (numbers_at(axes, graph.hints) for axes in claim.axes)
    entry = dataclasses.replace(
        describe(whole, graph, claim.node), numerics="reassociated", error=verdict.error, axes=(both, queries)
    )
    notes = [f"look at {entry.source}: {entry.warning}"] if entry.warning else []
    return entry, [*notes, f"fused attention at {entry.source}, {checked}"]


def in_words(program: ScoreProgram, reads: Sequence[object], graph: ProgramGraph) -> str:
    """The mask of a program whose tensors are these values of a graph."""
    hiding = masks.hiding(reads, graph.known_values())
    return masks.describe(program, hiding, masks.given(reads, graph))


def describe(node: fx.Node, graph: ProgramGraph, claimed: fx.Node | None = None) -> AttentionEntry:
    """The entry of an attention node. `claimed`: what it stands for of the model's own."""
    found, hints, at = nodes.AttentionOp.of(node), graph.hints, claimed or node
    q, k, v = (shape_at(n.meta["val"], hints) for n in (found.q, *found.keys))
    (caller, code), warning = caller_of(at), ""
    call = TracedCall(
        q[0], q[2], k[2], str(found.q.meta["val"].dtype).removeprefix("torch."),
        numbers_at(found.sizes, hints), sum(bytes_at(r.meta["val"], hints) for r in found.reads),
    )  # fmt: skip
    if not any(map(measured_sizes, node.all_input_nodes)):  # which queries see keys is known when data are
        warning = warn_of_blind_rows(found.program, (q[0], q[1], q[2], k[2]), call.numbers)
    return AttentionEntry(
        name=module_of(at), program=str(found.program), heads=q[1], kv_heads=k[1], head_dim=q[3],
        value_dim=v[3], mask=in_words(found.program, found.reads, graph), source=source_of(at),
        kernel=KernelEntry(), error=0.0, numerics="exact", call=call, warning=warning, caller=caller,
        code=code, reads=_told(found.reads, graph),
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
