"""How attention may be divided among ranks, told to DTensor, which `parallelize_module` and planners use.

Attention of some rows of the batch, or of some heads, is attention. So its operands may be sharded along the
batch, or along heads where each rank has whole groups: queries beside the key/value heads that they share, or
all of one key/value head. What the scores read is sharded alike where it is read at the row or the head
itself; a program that uses their numbers otherwise (slopes computed from `h`, dropout) is not divided along
them. Nothing else is offered: tokens see each other.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from attngraph.ir.language import E, ScoreProgram, parse
from attngraph.ir.walk import reached

_OPS = torch.ops.attngraph
ROW, HEAD = ("b", 0), ("h", 1)
"""The variables of a program, with their dimensions in the operands."""


def read_dims(program: ScoreProgram, variable: str, count: int) -> list[int | None] | None:
    """For each of `count` tensors that a program reads the dimension that is read at a variable, None where
    there is none; None for all where the program uses the variable otherwise."""
    letter, found = E.var(variable), dict[int, set[int | None]]()
    uses = reached(program.expressions, lambda n: [a for a in n.args if n.op != "read" or a is not letter])
    for node in uses:
        if node is letter:
            return None
        if node.op == "read":
            dims = [d for d, index in enumerate(node.args) if index is letter]
            found.setdefault(node.value, set()).update(dims or [None])
    if any(len(dims) > 1 for dims in found.values()):
        return None
    return [next(iter(found.get(number, {None}))) for number in range(count)]


def tell_dtensor() -> None:
    """Tell DTensor, once, if the program uses it: importing it takes a second."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    # Not by `register_sharding` of torch.distributed.tensor.experimental: a way that it finds for one program
    # is taken for that of all others, and it knows no ops whose result is a list. Here DTensor tells calls
    # apart by sizes and program as well, the arguments from `first` on.
    known = DTensor._op_dispatcher.sharding_propagator
    for op, strategy, first in ((_OPS.attention, _forward, 4), (_OPS.attention_backward, _backward, 8)):
        known.register_op_strategy(op.default, strategy, RuntimeSchemaInfo(first, needs_pytree=True))


def _forward(schema: Any) -> Any:
    """The placements of the results and of the operands that go together."""
    q, k, _, reads, _, program, *_ = schema.args_schema
    specs = _specs(q, k, reads)
    ways = _ways(*specs, program)
    return _strategies(schema, [[q, q, q, keys, keys, *placed] for q, keys, placed in ways], 2)


def _specs(q: Any, k: Any, reads: Any) -> tuple[Any, Any, list[Any]]:
    """How operands are placed now, and their shapes."""
    first, second, *others = (s.strategies[0].output_spec for s in (q, k, *getattr(reads, "children", reads)))
    return first, second, others


def _strategies(schema: Any, ways: list[list[Any]], results: int) -> Any:
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    return expand_to_full_mesh_op_strategy(schema.get_mesh_from_args(), schema, ways, input_index=results)


def _ways(q: Any, k: Any, reads: Sequence[Any], program: str) -> list[tuple[Any, Any, list[Any]]]:
    """The placements of queries, of keys and values, and of what is read, that go together."""
    from torch.distributed.tensor import Replicate, Shard

    whole = Replicate()
    found: list[tuple[Any, Any, list[Any]]] = [(whole, whole, [whole] * len(reads))]
    parsed, ranks = parse(program), q.mesh.size()
    heads, kv_heads = q.shape[1], k.shape[1]
    for name, dim in (ROW, HEAD):
        dims = read_dims(parsed, name, len(reads))
        if dims is None:
            continue
        # A dimension of one entry is the same for all rows, or all heads.
        pairs = zip(dims, reads, strict=True)
        of_reads = [whole if d is None or r.shape[d] == 1 else Shard(d) for d, r in pairs]
        if name == "b" or (heads % ranks == 0 and kv_heads % ranks == 0):
            found.append((Shard(dim), Shard(dim), of_reads))
        elif heads % ranks == 0 and kv_heads == 1:
            found.append((Shard(dim), whole, of_reads))
    return found


def _backward(schema: Any) -> Any:
    """The strategies of `attention_backward`: what a rank has of an operand it has of its gradient; the
    gradient of an operand that all ranks have whole is a sum over ranks."""
    from torch.distributed.tensor import Partial, Replicate

    _, _, _, _, q, k, _, reads, _, program, _ = schema.args_schema
    specs = _specs(q, k, reads)
    floating = [r.tensor_meta.dtype.is_floating_point for r in specs[2]]
    ways = []
    for mine, keys, placed in _ways(*specs, program):
        learning = [mine, keys, keys, *(p for p, f in zip(placed, floating, strict=True) if f)]
        whole = isinstance(mine, Replicate)
        gradients = [Partial() if isinstance(p, Replicate) and not whole else p for p in learning]
        ways.append([*gradients, mine, mine, mine, mine, mine, keys, keys, *placed])
    return _strategies(schema, ways, 3 + sum(floating))
