"""The report's records of a graph: attentions, token programs, results that wait until somebody looks."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import attngraph.codegen  # noqa: F401  registers the kernels
from attngraph.api.plan_memory import bytes_of
from attngraph.capture.captured import Captured
from attngraph.ir.graph.program_graph import ProgramGraph, Rate, part_of
from attngraph.ir.graph.source import module_of
from attngraph.ir.language.step_program import parse as step_program
from attngraph.ir.language.token_program import parse
from attngraph.ir.ops import nodes, token_program
from attngraph.ir.ops.cached_attention import source_for_short_queries
from attngraph.ir.ops.kernels import KERNELS
from attngraph.ir.ops.latent_attention import absorbed_operands
from attngraph.ir.ops.loop import loop
from attngraph.meaning.check.region import shape_at
from attngraph.report.entries import AttentionEntry, KernelEntry, LaterEntry, TokenProgramEntry


def entries_of(graph: ProgramGraph) -> Iterator[AttentionEntry]:
    """The report's entries, one for each attention."""
    for part in (*graph.stages.values(), graph):
        for node in (n for n in part.graph.nodes if "attention" in n.meta):
            yield dataclasses.replace(node.meta["attention"], kernel=_kernel(node))


def programs_of(graph: ProgramGraph) -> tuple[TokenProgramEntry, ...]:
    """Token programs of a graph and of its loops' steps, equal ones once, with the source for few tokens."""
    names: dict[str, dict[str, None]] = {}
    for node in graph.graph.nodes:
        for text in _programs_in(node):
            names.setdefault(text, {})[module_of(node)] = None
    found = []
    for text, modules in names.items():
        sources = ((runner.name, runner.source(parse(text))) for runner in token_program.RUNNERS)
        name, source = next(((n, s) for n, s in sources if s), ("", ""))
        found.append(TokenProgramEntry(text, tuple(modules), KernelEntry(name, source)))
    return tuple(found)


def _programs_in(node: fx.Node) -> Iterator[str]:
    if node.target is torch.ops.attngraph.token_program.default:
        yield str(node.args[1])
    elif node.target is loop:
        parts = step_program(str(node.args[5]))
        yield from (text for part in parts for inner in part.graph.nodes for text in _programs_in(inner))


def _kernel(node: fx.Node) -> KernelEntry:
    """An attention's kernel, with its source; where calls choose one, that for rows with one new token."""
    chosen = "", ""
    match nodes.called(node.target, fx.node.map_arg(node.args, lambda n: n.meta["val"]), {}):  # type: ignore[arg-type]
        case nodes.Attention(q=q, k=k, v=v, kernel=name) as found:
            source = KERNELS[name].source(found.program, (q, k, v), found.reads) if name else ""
            return KernelEntry(name, source)
        case nodes.CachedAttention(k_pages=k, v_pages=v) as found:
            chosen = source_for_short_queries(found.program, found.q, (k, v), found.reads, found.by)
        case nodes.CachedLatentAttention(absorb="auto" | "always") as found:
            operands = absorbed_operands(found.q, found.pages, found.key_up, found.value_up, found.values)
            chosen = source_for_short_queries(found.program, *operands, found.reads, found.family)
    name, source = chosen
    return KernelEntry(f"{name} for few new tokens" if name else "chosen by the number of new tokens", source)


def later_of(captured: Captured) -> tuple[LaterEntry, ...]:
    """An entry for each look that a call may be followed by."""
    stage = captured.graph.stages.get(Rate.LOOK)
    if stage is None:
        return ()
    names = captured.names()
    looks: dict[int | None, dict[str, fx.Node]] = {}
    for node, output in zip(stage.results(), stage.outputs, strict=True):
        if output.place is not None:
            looks.setdefault(output.look, {})[names[output.place]] = node
    return tuple(_later(part_of(stage, values), tuple(values)) for values in looks.values())


def _later(part: ProgramGraph, names: tuple[str, ...]) -> LaterEntry:
    """What is computed then; multiplications are counted by torch, at the sizes of the first call."""
    marked: dict[str, list[fx.Node]] = {}
    for node in part.graph.nodes:
        marked.setdefault(node.meta.get("of_attention", ""), []).append(node)
    what = next((what for what in ("weights", "scores") if what in marked), "")
    size = sum(bytes_of(node, part) for node in marked[what]) if what else 0
    values = [node.meta["val"] for node in part.placeholders()]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, FlopCounterMode(display=False) as counter, torch.no_grad():
        part.module(*(torch.empty(shape_at(v, part.hints), dtype=v.dtype, device=v.device) for v in values))
    return LaterEntry(names, what, size, int(counter.get_total_flops()) // 2)
