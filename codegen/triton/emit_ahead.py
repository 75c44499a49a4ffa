"""A plan as a Triton kernel whose products are a tile ahead of its weights, for GPUs with warp groups.

In `emit.py` a turn of the loop takes one tile: scores, weights, sums. The tensor cores wait for weights, and
warps for scores. Here a turn multiplies the queries and keys of one tile, and joins weights and values of the
tile before, of which the turn before left the exponents. The warps of sm_90 go on after they have asked for
products, so exponentials are computed beside the products of scores, and the rows' maxima beside those of
values (Shah et al. 2024, FlashAttention-3, section 3.2, without dividing the warps).

What makes the compilers do so was found by reading machine code. Exponents are left to the next turn: where
scores are, Triton waits for all products first. Keys and values come by descriptors, that is by the machine's
own copies of blocks: they need no registers, and with loads by addresses ptxas computes all exponentials
before it asks for products. Queries lie in registers, which leaves shared memory to keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from attngraph.codegen.triton.emit import Emitter
from attngraph.codegen.triton.module import indented


class AheadEmitter(Emitter):
    """Writes one forward kernel. While tile `start` is multiplied, tile `behind` joins the sums."""

    splits = False

    def operands(self) -> list[str]:
        """Lines with the addresses of queries, and the queries."""
        return [
            *self.widths(),
            *self.head("query", "h", "tl.cast(q, tl.int64)", "d"),
            f"query_tile = tl.load(query_head{self.guard('q < Sq', 'd')})",
        ]

    def load(self, name: str, columns: str, edge: bool, start: str = "start") -> list[str]:
        """A tile of keys or values by its descriptor. Beyond the ends it is zero."""
        width = self.D if name == "key" else self.Dv
        block = f"{name}.load([b, {self.group}, {start}, 0])"
        return [f"{name}_tile = {block}.reshape(BLOCK_K, {width})"]

    def first_tile(self) -> list[str]:
        """Multiply the first tile, whichever it is: masks say what of it is seen."""
        products, scores, multiple = self.scored(edge=True)
        places = super().first_tile() or ["start = 0"]
        if self.plan.listed:
            second = "tl.load(line + tl.minimum(1, tl.maximum(last, 0)))"
            scores += ["behind = start", f"start = {second} * BLOCK_K"]
        return [*self.in_registers(), *places, *products, *scores, *self.prepared(multiple)]

    def in_registers(self) -> list[str]:
        """Move queries to registers: Triton leaves sums of products there, laid out as the next products need
        them, and queries are the sums of no products."""
        zeros = f"tl.zeros([BLOCK_Q, 16], query_tile.dtype), tl.zeros([16, {self.D}], query_tile.dtype)"
        total = f"tl.dot({zeros}, query_tile.to(tl.float32){self.exact})"
        return [f"query_tile = {total}.to(query_tile.dtype)  # the same, in registers"]

    def loops(self) -> list[str]:
        """The loops, and the sums of the last tile."""
        end = "stop" if self.plan.fill is None else "every"
        place = [] if self.plan.listed else [f"behind = (tl.maximum({end}, 1) - 1) * BLOCK_K"]
        return [*super().loops(), *place, *self.absorbed(edge=True)]

    def loop(
        self, begin: str, stop: str, body: Sequence[str], number: str = "i", about: str = ""
    ) -> list[str]:
        """A loop over tiles to multiply, without the first of all."""
        begin = "1" if begin == "0" else f"tl.maximum({begin}, 1)"
        head = f"for i in tl.range({begin}, {stop}):{about}"
        if not self.plan.listed:
            return [head, *indented([f"start = {number} * BLOCK_K", "behind = start - BLOCK_K", *body])]
        # Both are loaded: where one is the other of the turn before, Triton does not fetch tiles early.
        places = [
            f"{name} = tl.load(line + {which}) * BLOCK_K"
            for name, which in (("behind", "i"), ("start", "tl.minimum(i + 1, last)"))
        ]
        return [head, *indented([*body, *places])]

    def body(self, edge: bool) -> list[str]:
        products, scores, multiple = self.scored(edge)
        return [*products, *self.absorbed(edge), *scores, *self.prepared(multiple)]

    def absorbed(self, edge: bool) -> list[str]:
        """Join the weights and values of the tile behind to the sums. Weights are computed before values are
        waited for, which is beside the products of scores."""
        return [
            "w = tl.exp2(exponents)",
            *self.summed("query_tile"),
            *self.load("value", self.dv, edge, "behind"),
            f"acc = {''.join(self.weighted_sums())}",
        ]

    def prepared(self, multiple: str) -> list[str]:
        """Prepare what the next turn needs of this tile's scores."""
        weighs = [f"multiple = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32) + {multiple}"] if multiple else []
        return ["m, exponents, shrink = prepare(m, s)", *weighs]

    def step(self) -> str:
        """What a turn leaves to the next, as a function of the module."""
        words = "The rows' maximum with scores s, the exponents of their weights, and what older sums weigh."
        return "\n".join([
            "@triton.jit",
            "def prepare(m, s):",
            f'    """{words}"""',
            f"    {self.top}",
            f"    return top, {self.exponents}, tl.exp2({self.fall})",
        ])  # fmt: skip
