"""Rows of queries, keys and values in a kernel's tiles: their addresses, their masks, and the loads of tiles.

The extents of a tile are powers of two. Rows of another width lie in a wider tile, whose last columns are
masked and multiplied for nothing, or (`Blocks.split`) in two tiles: the largest power of two below their
width, and the rest. Rows of 80 then take 64 + 16 columns instead of 128.
"""

from __future__ import annotations

from attngraph.codegen.triton.plan import Plan, in_two, padded

VALUES = ("value", "grad", "out")
"""Tensors whose rows are as wide as those of values."""


class RowEmitter:
    """The part of an emitter that knows where rows lie.

    Attributes:
        D, Dv: columns of a tile of keys and of values. rest, value_rest: of the tiles beside them, or 0.
    """

    splits = False
    """Whether rows may lie in two tiles."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        cut = in_two if plan.blocks.split and self.splits else lambda width: (padded(width), 0)
        (self.D, self.rest), (self.Dv, self.value_rest) = cut(plan.D), cut(plan.Dv)

    @property
    def dv(self) -> str:
        return "d" if self.plan.Dv == self.plan.D else "dv"

    @property
    def group(self) -> str:
        """The key head, as an expression."""
        return f"h // {self.plan.group}" if self.plan.group > 1 else "h"

    def widths(self) -> list[str]:
        """The column indices of tiles."""
        found = {"d": (self.D, self.rest), self.dv: (self.Dv, self.value_rest)}
        lines = []
        for name, (tile, rest) in found.items():
            lines.append(f"{name} = tl.cast(tl.arange(0, {tile}), tl.int64)[None, :]")
            if rest:
                lines.append(f"{name}_rest = {tile} + tl.cast(tl.arange(0, {rest}), tl.int64)[None, :]")
        return lines

    def rest_of(self, name: str) -> int:
        return self.value_rest if name in VALUES else self.rest

    def head(self, name: str, head: str, rows: str, columns: str) -> list[str]:
        """The addresses of a tensor's first tile, and of that beside it."""
        lines = [self.base(name, head)]
        if self.rest_of(name):
            lines.append(f"{name}_beside = {name}_head + {rows} * {name}_s + {columns}_rest * {name}_d")
        return [*lines, f"{name}_head += {rows} * {name}_s + {columns} * {name}_d"]

    def base(self, name: str, head: str) -> str:
        """The address of a tensor's head."""
        return (
            f"{name}_head = {name} + tl.cast(b, tl.int64) * {name}_b + tl.cast({head}, tl.int64) * {name}_h"
        )

    def inside(self, rows: str, columns: str) -> str:
        """The mask of a tile: rows in range, and columns where the width is padded; may be empty."""
        parts, is_keys = [rows] if rows else [], columns in ("d", "d_rest")
        width, tile, rest = (
            (self.plan.D, self.D, self.rest) if is_keys else (self.plan.Dv, self.Dv, self.value_rest)
        )
        is_full = width == tile + rest or (rest > 0 and not columns.endswith("_rest"))
        if not is_full:
            parts.append(f"{columns} < {width}")
        return " & ".join(f"({p})" for p in parts) if len(parts) > 1 else "".join(parts)

    def load(self, name: str, columns: str, edge: bool, start: str = "start") -> list[str]:
        """Lines that load the tiles of a block of rows."""
        extent = "Skv" if name in ("key", "value") else "Sq"
        rows = f"down < {extent} - {start}" if edge else ""
        where = f"tl.cast({start}, tl.int64) * {name}_s"
        lines = [f"{name}_tile = tl.load({name}_head + {where}{self.guard(rows, columns)})"]
        if self.rest_of(name):
            guard = self.guard(rows, f"{columns}_rest")
            lines.append(f"{name}_rest = tl.load({name}_beside + {where}{guard})")
        return lines

    def guard(self, rows: str, columns: str) -> str:
        mask = self.inside(rows, columns)
        return f", mask={mask}, other=0.0" if mask else ""
