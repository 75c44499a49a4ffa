"""A plan as a Triton kernel that multiplies the next tile's queries and keys while it weighs this tile's.

On sm_90 products by warp groups go on while the warps that asked for them execute other instructions. In the
classic schedule (`emit.py`) a tile's scores are needed at once, so warps wait for them. Here a turn of the
loop asks for the products of the next tile, then does the softmax of its own, whose products the turn before
asked for (Shah et al. 2024, algorithm 2, without dividing warps). Only what comes after the last tile is
multiplied in vain. It takes registers for the scores of a second tile.
"""

from __future__ import annotations

from collections.abc import Sequence

from attngraph.codegen.triton.emit import Emitter, uses_of_dot
from attngraph.codegen.triton.module import indented
from attngraph.ir.language.score import Keep, Score


class AheadEmitter(Emitter):
    """Writes one forward kernel whose products are a tile ahead."""

    def remark(self) -> list[str]:
        return [
            "Queries and keys are multiplied a tile ahead: dot has this tile's products, next the next one's."
        ]

    def first_listed(self) -> list[str]:
        """The products of the first tile."""
        places = ["start = 0"]
        if self.plan.listed:
            second = "tl.load(line + tl.minimum(1, tl.maximum(last, 0)))"
            places = ["start = tl.load(line) * BLOCK_K", f"ahead = {second} * BLOCK_K"]
        return [*places, *self.load("key", "d", edge=True), f"dot = {self.dot()}"]

    def loop(
        self, begin: str, stop: str, body: Sequence[str], number: str = "i", about: str = ""
    ) -> list[str]:
        head = f"for i in tl.range({begin}, {stop}):{about}"
        if not self.plan.listed:
            places = [f"start = {number} * BLOCK_K", "ahead = start + BLOCK_K"]
            return [head, *indented([*places, *body, "dot = next"])]
        # Both are loaded: where one would be the other of the turn before, Triton does not fetch tiles early.
        places = [
            f"{name} = tl.load(line + tl.minimum(i + {turns}, last)) * BLOCK_K"
            for name, turns in (("start", 1), ("ahead", 2))
        ]
        return [head, *indented([*body, "dot = next", *places])]

    def products(self, statements: list[Score | Keep], edge: bool) -> list[str]:
        """Lines that multiply the next tile of keys, and name the products of this one."""
        _, replaces = uses_of_dot(statements)
        own = [] if replaces else ["s = dot"]
        return [*self.load("key", "d", edge=True, start="ahead"), f"next = {self.dot()}", *own]
