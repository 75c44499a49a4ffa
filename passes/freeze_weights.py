"""FreezeWeights: weights that the user says will not change are laid out once for the machine's products.

Matches products of token programs with a float32 weight that follows from the model's parameters and
constants alone and that nothing else in the program reads. Each is computed once, in the stage of weights, as
panels (`ir/ops/panels.py`), also where the model computes it (a norm of its rows, an adapter that is added).
Right because the panels have the same numbers at other places. Refuses where gradients may flow, and weights
of so few outputs that zeros would fill a fifth of the panels. With `release`, the model may do without
parameters that nothing else in the graph reads.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import fx

from attngraph.ir.graph import Level, ProgramGraph, Rate, move_to_stage
from attngraph.ir.language import E
from attngraph.ir.language.token_program import TokenProgram, parse
from attngraph.ir.ops.panels import in_panels, panels_of
from attngraph.ir.ops.token_program import RUNNERS
from attngraph.ir.walk import reached
from attngraph.passes.build import Builder
from attngraph.pipeline import Outcome
from attngraph.report.words import binary

_OWN = ("parameter", "constant", Rate.WEIGHTS.value)
"""Kinds of inputs that do not change. A buffer may: it is state."""


@dataclasses.dataclass(frozen=True)
class FreezeWeights:
    serves: ClassVar[tuple[Level, ...]] = (Level.FUSED, Level.CACHED)
    release: bool = False
    name: str = "freeze-weights"
    requires: Level = Level.FUSED
    yields: Level = Level.FUSED

    def run(self, graph: ProgramGraph) -> Outcome:
        if graph.gradients:
            told = "gradients may flow: call the model under torch.no_grad()"
            return Outcome([f"no weight is frozen, because {told}"])
        wide = max((runner.panel() for runner in RUNNERS), default=0)
        if not wide:
            return Outcome(["no weight is frozen, because there is no C compiler"])
        made: dict[tuple[fx.Node, bool], fx.Node] = {}
        op = torch.ops.attngraph.token_program.default
        programs = graph.graph.find_nodes(op="call_function", target=op)
        left = sum(_freeze(graph, node, wide, made) for node in programs)
        released = 0
        others = {i for rate, stage in graph.stages.items() if rate is not Rate.WEIGHTS for i in stage.inputs}
        for (weight, way), node in made.items():
            about = graph.given().get(weight)
            alone = self.release and about is not None and about.kind == "parameter" and about not in others
            alone = alone and set(weight.users) == {node}
            node.args = (weight, way, wide, alone)
            released += alone * node.meta["val"].nbytes
        if made:
            known = len(graph.stages[Rate.WEIGHTS].outputs) if Rate.WEIGHTS in graph.stages else 0
            values = {f"panels{number}": node for number, node in enumerate(made.values(), start=known)}
            move_to_stage(graph, Rate.WEIGHTS, values)
        size = sum(node.meta["val"].nbytes for node in made.values())
        note = f"{len(made)} weight(s) are kept in panels, {binary(size)} besides the model's own"
        if released:
            note += f", of which {binary(released)} are given up after the first call"
        more = f"{left} product(s) read weights where they lie"
        return Outcome([note, *[more] * bool(left)])


def _freeze(graph: ProgramGraph, node: fx.Node, wide: int, made: dict[tuple[fx.Node, bool], fx.Node]) -> int:
    """Give a program its weights in panels; returns how many products have others."""
    given, text = node.args
    program = parse(str(text))
    weights = _weights(program)
    builder, operands = Builder(graph, node), list(given)  # type: ignore[arg-type]
    turned: dict[int, bool] = {}
    for number, way in weights.items():
        weight = operands[number]
        outs = program.given[number].shape[way]
        filled = panels_of(outs or 0, wide) * wide
        is_here = weight.meta["val"].device.type == "cpu"
        if not is_here or not _is_own(graph, weight) or 5 * (outs or 0) < 4 * filled:
            continue
        if (weight, way) not in made:
            made[weight, way] = builder.call(in_panels, weight, way, wide, False)
        operands[number], turned[number] = made[weight, way], way
    if turned:
        node.args = (operands, _in_panels(program, turned).text)
    return sum(p is not None and p.weight not in turned for p in map(program.product, _numbers(program)))


def _numbers(program: TokenProgram) -> range:
    return range(len(program.given), len(program.given) + len(program.definitions))


def _weights(program: TokenProgram) -> dict[int, bool]:
    """The float32 matrices that products alone read, all of them in one way: whether they are `[in, out]`."""
    found: dict[int, set[bool | None]] = {}
    for number, made in zip(_numbers(program), program.definitions, strict=True):
        product = program.product(number)
        for read in made.reads:
            is_weight = product is not None and product.weight == read and program.scales(number) is None
            found.setdefault(read, set()).add(product.turned if product and is_weight else None)
    return {
        number: bool(next(iter(ways))) for number, ways in found.items()
        if number < len(program.given) and len(ways) == 1 and None not in ways
        and program.given[number].dtype == "float32" and not program.given[number].in_panels
    }  # fmt: skip


def _is_own(graph: ProgramGraph, weight: fx.Node) -> bool:
    """Whether a value follows from what does not change."""
    given = graph.given()
    sources = [n for n in reached([weight], lambda n: n.all_input_nodes) if not n.all_input_nodes]
    return all(n in given and given[n].kind in _OWN for n in sources)


def _in_panels(program: TokenProgram, turned: Mapping[int, bool]) -> TokenProgram:
    """The program with these weights `[out, in]` in panels."""
    given = [
        dataclasses.replace(g, shape=g.shape[::-1] if turned[n] else g.shape, in_panels=True)
        if n in turned else g
        for n, g in enumerate(program.given)
    ]  # fmt: skip
    definitions = []
    for made in program.definitions:
        reads = {n: n.args[::-1] for n in E.reads(made.value) if turned.get(n.value)}
        new = {read: E.read(read.value, args, read.kind) for read, args in reads.items()}
        definitions.append(dataclasses.replace(made, value=E.replaced(made.value, new)))
    return dataclasses.replace(program, given=tuple(given), definitions=tuple(definitions))
