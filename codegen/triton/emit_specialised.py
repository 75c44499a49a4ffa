"""A plan as a warp-specialised Triton kernel: the same body as `emit.py`, with other loads and another loop.

Tiles are loaded by tensor descriptors, which the TMA unit of sm_90 and later executes and which read zeros
beyond a tensor's bounds. The compiler assigns loading and computing to different warps; it can do so for one
loop without branches, so there is no loop of whole tiles: bounds and masks are evaluated in every tile.
Arguments and epilogue are those of the classic kernel: the output is stored by pointers, once for each block
of queries, because a descriptor would need more shared memory.
"""

from __future__ import annotations

from attngraph.codegen.triton import schedule
from attngraph.codegen.triton.emit import Emitter
from attngraph.codegen.triton.module import indented
from attngraph.codegen.triton.plan import Plan
from attngraph.codegen.unsupported import UnsupportedError


class SpecialisedEmitter(Emitter):
    """Writes one forward kernel, warp-specialised.

    Raises:
        UnsupportedError: the plan cannot be warp-specialised (`schedule.py`).
    """

    splits = False

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        reason = schedule.obstacle(plan) or schedule.obstacle_of_blocks(plan.blocks)
        if reason is not None:
            raise UnsupportedError(f"warp specialisation: {reason}")

    def remark(self) -> list[str]:
        return ["Warp-specialised: some warps fetch tiles while others compute."]

    def operands(self) -> list[str]:
        return [
            *self.widths(),
            *self.descriptor("query", "h", "Sq", self.plan.D, f"BLOCK_Q, {self.D}"),
            *self.descriptor("key", self.group, "Skv", self.plan.D, f"BLOCK_K, {self.D}"),
            *self.descriptor("value", self.group, "Skv", self.plan.Dv, f"BLOCK_K, {self.Dv}"),
            "query_tile = query_rows.load([first, 0])",
        ]

    def descriptor(self, name: str, head: str, rows: str, width: int, block: str) -> list[str]:
        """The descriptor that loads a tensor's tiles."""
        what = f"{name}_head, [{rows}, {width}], [{name}_s, 1], [{block}]"
        return [self.base(name, head), f"{name}_rows = tl.make_tensor_descriptor({what})"]

    def load(self, name: str, columns: str, edge: bool, start: str = "start") -> list[str]:
        return [f"{name}_tile = {name}_rows.load([{start}, 0])"]

    def loop_bounds(self) -> list[str]:
        before, _, _, stop = self.bounds()
        return [*before, f"stop = {stop}"]

    def loops(self) -> list[str]:
        start = "tl.load(line + i) * BLOCK_K" if self.plan.listed else "i * BLOCK_K"
        body = [f"start = {start}", *self.body(edge=True)]
        return ["for i in tl.range(0, stop, warp_specialize=True):", *indented(body)]
