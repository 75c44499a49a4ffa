"""Arguments with an entry for each pair of tokens (a mask `[B, 1, T, T]`), as the rule of their entries.

A decoder's new tokens have entries that nobody has given yet. Where those of a prompt follow from the places
of query and key alone (`k <= q`, a window), the rule is what the model is given in a trace, for any number of
tokens; each call's own entries are compared with it. A prompt of one token has one entry, which tells no
rule: that later tokens are hidden is taken for it, and told in the report.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngraph.ir.language import E
from attngraph.ir.language.evaluate import Environment, Tile, evaluate
from attngraph.ir.language.parser import expression
from attngraph.meaning.algebra import M
from attngraph.meaning.constants import describe

_QUERY, _KEY = E.var("q"), E.var("k")


class PairRule(NamedTuple):
    """`axes` has a letter for each dimension: B (rows), 1 (of size 1), Q and T (the tokens of a pair); `told`
    says whether several entries told the rule, or "one"; `text` is the formula of an element of places q and
    k."""

    axes: str
    dtype: str
    told: str
    text: str

    def entries(self, first: int, tokens: int, device: torch.device) -> Tensor:
        """The entries of queries from `first` on, `[tokens - first, tokens]`."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        precise = dtype if dtype.is_floating_point else torch.float32
        tile = Tile(q=(first, tokens), k=(0, tokens))
        found = evaluate(_parsed(self.text), Environment(tile, (), (), precise, device), {})
        found = found[0, 0] if isinstance(found, Tensor) else torch.tensor(found, device=device)
        return found.to(dtype).expand(tokens - first, tokens)

    def given(self, rows: int, tokens: int, device: torch.device) -> Tensor:
        """All entries, as the model takes them."""
        found = self.entries(0, tokens, device)
        for _ in self.axes[:-2]:
            found = found.unsqueeze(0)
        return found.expand(rows, *found.shape[1:]) if self.axes[0] == "B" else found

    def holds(self, value: Tensor, real: Tensor) -> bool:
        """Whether an argument follows the rule. `real`: which places of a call have tokens, `[B, T]`."""
        if _axes(value, *real.shape) != self.axes or str(value.dtype) != f"torch.{self.dtype}":
            return False
        rows = _of_rows(value, real)
        return all(bool((own == self.entries(0, len(own), own.device)).all()) for own in rows)


@functools.lru_cache(256)
def _parsed(text: str) -> E.Expr:
    return expression(text, q=_QUERY, k=_KEY)


def _axes(value: Tensor, rows: int, tokens: int) -> str:
    """The letters of a value's dimensions; "" if it has no entry for each pair of tokens."""
    if value.ndim < 2 or value.shape[-2:] != (tokens, tokens):
        return ""
    found = ["1" if n == 1 else "." for n in value.shape[:-2]]
    if value.ndim > 2 and value.shape[0] == rows != 1:
        found[0] = "B"
    return "" if "." in found else f"{''.join(found)}QT"


def _of_rows(value: Tensor, real: Tensor) -> list[Tensor]:
    """Each row's entries of real tokens."""
    pairs = value.flatten(0, -3) if value.ndim > 2 else value[None]
    each = zip(pairs.expand(len(real), *pairs.shape[1:]), real, strict=True)
    return [row[kept][:, kept] for row, kept in each]


def rule_of(value: Tensor, real: Tensor, one: bool = False) -> PairRule | None:
    """The rule of an argument's entries; None if it has no such, or they follow none, or one in each row.
    `real`: which places of the call have tokens, `[B, T]`. `one`: of a single entry, as of a causal mask."""
    axes, tokens = _axes(value, *real.shape), real.shape[1]
    if not axes or (tokens < 2) is not one:
        return None
    longest = max(_of_rows(value, real), key=len)
    formula = _causal(longest) if one else describe(longest, (_QUERY, _KEY))
    if formula is None:
        return None
    dtype, told = str(value.dtype).removeprefix("torch."), "one" if one else "several"
    found = PairRule(axes, dtype, told, E.format_expr(formula))
    return found if found.holds(value, real) else None


def _causal(entry: Tensor) -> E.Expr | None:
    """The rule by which later tokens are hidden, where this is the entry of one that is not."""
    shown = entry.flatten()[0].item() if entry.numel() else None
    if entry.dtype == torch.bool:
        hidden: Any = not shown
    else:
        hidden = {0: -math.inf if entry.is_floating_point() else 1, 1: 0}.get(shown)  # type: ignore[arg-type]
    if hidden is None or shown is None:
        return None
    return M.where(M.le(_KEY, _QUERY), E.const(shown), E.const(hidden))
