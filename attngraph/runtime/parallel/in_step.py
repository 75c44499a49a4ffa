"""Ranks that decode together, kept in step: they compare what they are asked, and rank 0 decides.

Before a call, ranks compare its tokens and options: where they differ, every rank raises an error before
anything is computed. What is chosen from the logits, a token or the end of a row, is chosen by rank 0 and
sent to the others: logits that several ranks computed each for itself may differ in their last bits, and
random numbers without a seed do.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attngraph.runtime.parallel.agree import agree
from attngraph.runtime.parallel.mesh import RankMesh


class InStep:
    """The ranks of a mesh; one device, or ranks simulated in one process, have nobody to agree with."""

    def __init__(self, mesh: RankMesh | None = None) -> None:
        self.mesh = mesh if mesh is not None and not mesh.is_simulated and mesh.count > 1 else None

    def agree(self, what: str, *given: Any) -> None:
        """Check that all ranks make this call, with equal tensors.

        Raises:
            DisagreementError: they do not; on every rank.
        """
        if self.mesh is not None and self.mesh.config.agree:
            agree(self.mesh, "the call", f"{what}\n{described(given)}")

    def whose(self, rank: tuple[int, int]) -> str:
        """Whose part of what was cached a state has, as ranks can compare it."""
        own = self.mesh is None or rank == (self.mesh.rank, self.mesh.count)
        return "a state of this rank" if own else "a state of another rank"

    def lead(self, decided: Tensor) -> Tensor:
        """What rank 0 decided; a tensor of the same shape and dtype on every rank."""
        if self.mesh is None:
            return decided
        found = decided.detach().clone().contiguous().to(self.mesh.axes[0].mesh.device_type)
        for axis in self.mesh.axes:
            torch.distributed.broadcast(found, group=axis.mesh.get_group(), group_src=0)
        return found.to(decided.device)


def described(given: Any) -> str:
    """Tensors, numbers and names as text: equal where they are equal."""
    leaves = pytree.tree_leaves_with_path(given)
    return "\n".join(f"argument{pytree.keystr(path)}: {_described(leaf)}" for path, leaf in leaves)


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype)[6:]} {list(leaf.shape)}, contents {digest(leaf)}"
    plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    return repr(leaf)[:200] if plain else type(leaf).__name__


def digest(tensor: Tensor) -> str:
    """A text that is equal for tensors of equal contents."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(bytes(flat.tolist())).hexdigest()[:16]
