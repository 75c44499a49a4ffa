"""How parameters are held: divided, or whole on every rank.

A parameter is divided where a rank's part is a run of its rows or columns (or equally many equal runs, for
packed projections), and nothing needs it otherwise. Elsewhere it stays whole on every rank, which takes its
part in each call: key/value heads that several ranks share, and parameters with other uses.
"""

import torch

from attngraph.ir.graph import ProgramGraph, source_of
from attngraph.ir.ops.collectives import SUM_GRADIENTS
from attngraph.passes.build import Builder
from attngraph.passes.shard_heads.parts import Parts

aten = torch.ops.aten
HOLDS_RUNS = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 14)
"""Whether this torch's DTensors can have several equal runs of a dimension, and be made whole again."""


def settle(graph: ProgramGraph, parts: Parts, runs: bool = True) -> dict[str, str]:
    """Let ranks take their part of what cannot be held divided; returns why not, by the parameter's name.
    `runs`: whether a part may be several runs."""
    kept: dict[str, str] = {}
    for (parameter, dim, table), shard in list(parts.shards.items()):
        if not shard.users:
            continue
        name = parts.names[parameter].name
        others = [u for u in parameter.users if u.target is not SUM_GRADIENTS or u.users]
        uses = [s for (p, _, _), s in parts.shards.items() if p is parameter and s.users]
        if table.copies > 1:
            kept[name] = f"ranks share parts of it ({table.describe()})"
        elif table.runs() is None:
            kept[name] = f"a rank's part is no equal runs of it ({table.describe()})"
        elif table.runs() != 1 and not runs:
            kept[name] = 'a rank\'s part is several runs of it, and parameters="even" leaves it whole'
        elif table.runs() != 1 and not HOLDS_RUNS:
            kept[name] = "torch holds parts of packed projections from version 2.14 on"
        elif others:
            kept[name] = f"it is used whole at {source_of(others[0]) or 'another place'}"
        elif len(uses) > 1:
            kept[name] = "two places divide it differently"
        else:
            continue
        order = {node: place for place, node in enumerate(graph.graph.nodes)}
        first = min(shard.users, key=order.__getitem__)
        builder = Builder(graph, first)
        mine = builder.call(
            aten.index_select.default, parts.enter(parameter), dim, parts.number("rows", table.places)
        )
        shard.replace_all_uses_with(mine)
    graph.clean()
    return kept
