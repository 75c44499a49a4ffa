"""Ranks that run a model together do the same: they compare what they are asked, and rank 0 decides.

Each rank gathers a few numbers of every other: a digest of the call (shapes, dtypes, modes), and after a
trace a digest of the graph, or that tracing failed. Where they differ every rank sees it, and every rank
raises an error that says what each of them has. A rank that is gone lets the gathering fail, within the
time-out of the process group. What is chosen from a decoder's logits, a token or the end of a row, is chosen
by rank 0 and sent to the others: logits that several ranks computed each for itself may differ in their last
bits, and random numbers without a seed do.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from attngraph.capture.state.content import tensor_digest
from attngraph.errors import DisagreementError
from attngraph.ir.graph import ProgramGraph, format_file
from attngraph.runtime.parallel.mesh import RankMesh


def agree(mesh: RankMesh, what: str, text: str) -> None:
    """Check that `text`, which describes `what`, is the same on all ranks; else all raise an error."""
    digest = hashlib.sha256(text.encode()).digest()
    number = int.from_bytes(digest[:8], "little", signed=True)
    found = mesh.gathered(torch.tensor([number]))
    if bool((found == found[0]).all()):
        return
    texts = mesh.everything(text[:_SHOWN])
    lines = "\n".join(f"    rank {rank}: {_difference(t, texts)}" for rank, t in enumerate(texts))
    raise DisagreementError(f"the ranks disagree about {what}:\n{lines}")


def agree_on_graph(mesh: RankMesh, graph: ProgramGraph) -> None:
    """Check that a graph and its stages are the same on all ranks. Process groups, which are called otherwise
    on ranks of other lines of the mesh, are compared by their axis."""
    text = "\n".join(line for part in (graph, *graph.stages.values()) for line in format_file(part))
    for number, axis in enumerate(mesh.axes):
        text = text.replace(f"'{axis.group}')", f"ranks of axis {number})")
    agree(mesh, "the graph", text)


_SHOWN = 20_000


def _difference(text: str, texts: Sequence[str]) -> str:
    """The first line in which texts differ, as this one has it."""
    split = [t.splitlines() for t in texts]
    for number, line in enumerate(text.splitlines()):
        if any(number >= len(other) or other[number] != line for other in split):
            return line.strip()[:200]
    return "the same, but shorter"


def describe_call(
    tensors: Sequence[Tensor], others: Sequence[Any], training: bool, draws: bool, tokens: bool
) -> str:
    """A call as text: what must be equal on all ranks. `tokens`: they divide tokens, so what is sent is
    decided by what whole numbers and masks hold."""
    tell = [tokens and not (t.is_floating_point() or t.is_complex()) for t in tensors]
    lines = [f"tensor {n}: {_about(*each)}" for n, each in enumerate(zip(tensors, tell, strict=True))]
    lines += [f"argument: {value!r}"[:200] for value in others if isinstance(value, (int, float, str, bool))]
    lines.append(f"training={training}, gradients={torch.is_grad_enabled()}")
    if draws:
        lines.append(random_state())
    return "\n".join(lines)


def _about(tensor: Tensor, contents: bool) -> str:
    digest = f" with contents {tensor_digest(tensor)[:16]}" if contents else ""
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}{digest}"


def random_state() -> str:
    """The state of PyTorch's random numbers, as text."""
    state = tensor_digest(torch.get_rng_state())[:16]
    return f"random numbers: state {state} (torch.manual_seed makes it equal)"


def draws_numbers(graph: fx.Graph) -> bool:
    """Whether a graph draws random numbers."""
    return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.nodes)


def described(given: Any) -> str:
    """Tensors, numbers and names as text: equal where they are equal."""
    leaves = pytree.tree_leaves_with_path(given)
    return "\n".join(f"argument{pytree.keystr(path)}: {_described(leaf)}" for path, leaf in leaves)


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return _about(leaf, True)
    plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    return repr(leaf)[:200] if plain else type(leaf).__name__
