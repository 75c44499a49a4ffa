"""Attention over a cache whose tokens ranks divide.

The ranks of a group have heads of their own, and `team` neighbours among them attend to the same keys. Of
these each keeps every team-th token: position p lies with member p % team, at slot p // team of the pages
that its own `table` tells. `held` counts the tokens that the team keeps together. New tokens are known to
all: a rank attends to them with its own heads, so a first prompt exchanges nothing. For rows that have
kept tokens,

1. each rank sends its queries to its team (for latents, multiplied by key_up),
2. attends with all heads of the team to the tokens that it keeps, where slot k is position
   k * team + member,
3. and sends each member the results of its heads, with the log-sum-exps by which they are merged.

A sink counts with the new tokens. For latents the sums of kept latents are merged before value_up is
applied; new tokens are absorbed or projected up as elsewhere. `bytes_exchanged` counts what is sent.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.ir.language import E, ScoreProgram, Sink, operation, parse
from attngraph.ir.ops import cached_attention as cached
from attngraph.ir.ops import kernels
from attngraph.ir.ops import latent_attention as latents
from attngraph.ir.ops.cached_attention import Pair, Rows, counts, only
from attngraph.ir.ops.collectives import EXCHANGING, Team
from attngraph.ir.ops.declare import INSTEAD, Sizes, declare, require_no_derivative
from attngraph.ir.ops.kernels import Part, joined

_declared = declare(
    fake=cached.packed_result, after=latents.token_major, derivatives=INSTEAD, plain=True, runs=False
)


def own_count(length: int, team: int, member: int) -> int:
    """How many of a row's first `length` tokens a member of a team keeps."""
    return (length - member + team - 1) // team


@_declared
def divided_attention(
    q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, reads: list[Tensor], sizes: Sizes,
    program: str, table: Tensor, starts: Tensor, first: Tensor, held: Tensor, by: str = "",
    k_scales: Tensor | None = None, v_scales: Tensor | None = None, team: int = 1, ranks: int = 1,
    group: str = "",
) -> Tensor:  # fmt: skip
    require_no_derivative("divided_attention", INSTEAD, (q, k, v, reads))
    rows = Rows(table, starts, first, held)
    if not any(_asking(rows)):  # no page is read
        return cached.attended(parse(program), q, (k, v), (k_pages, v_pages), reads, sizes, rows, by)
    call = _Attending(parse(program), reads, sizes, rows, by, Team(team, ranks, group))
    kept = call.kept(q, (k_pages, v_pages))
    return joined([kept, call.new(q, (k, v))]).out


@_declared
def divided_latent_attention(
    q: Tensor, latent: Tensor, pages: Tensor, key_up: Tensor | None, value_up: Tensor | None,
    values: Sequence[int], reads: list[Tensor], sizes: Sizes, program: str, table: Tensor, starts: Tensor,
    first: Tensor, held: Tensor, absorb: str = "auto", family: str = "", scales: Tensor | None = None,
    team: int = 1, ranks: int = 1, group: str = "",
) -> Tensor:  # fmt: skip
    require_no_derivative("divided_latent_attention", INSTEAD, (q, latent, reads))
    rows = Rows(table, starts, first, held)
    news, _, lengths = counts(rows)
    if not any(_asking(rows)):
        about = (key_up, value_up, values, reads, sizes, program, *rows, absorb, family)
        return latents.cached_latent_attention(q, latent, pages, *about)
    node = latents.LatentNode(q, latent, key_up, value_up, values)
    call = _Attending(parse(program), reads, sizes, rows, family, Team(team, ranks, group))
    query = node.absorbed_query(q)
    kept = call.kept(query, node.shared(pages))
    if node.absorbs(absorb, list(zip(news, lengths, strict=True)), q):
        return node.absorbed_result(joined([kept, call.new(query, node.shared(latent))]).out)
    new = call.new(q, node.expanded(latent))
    return joined([kept._replace(out=node.absorbed_result(kept.out)), new]).out


def _asking(rows: Rows) -> list[bool]:
    """For each row, whether it has new tokens that attend to kept ones."""
    about = counts(rows)
    return [new > 0 and held > 0 for new, held in zip(about.new, about.held, strict=True)]


class _Attending:
    """One call: its scores, and whose tokens are where."""

    def __init__(
        self, program: ScoreProgram, reads: Sequence[Tensor], sizes: Sequence[int], rows: Rows, by: str,
        team: Team,
    ) -> None:  # fmt: skip
        self.program, self.reads, self.sizes, self.rows, self.by = program, reads, sizes, rows, by
        self.team, self.member = team, team.member

    def new(self, q: Tensor, keys: Pair) -> Part:
        """The rank's heads and the new tokens: a cache without pages, of which all but these are lost."""
        rows = self.rows._replace(table=self.rows.table[:, :0])
        return self._part(self.program, q, keys, cached.no_pages(keys), self.sizes, rows)

    def kept(self, q: Tensor, pages: Pair) -> Part:
        """The rank's heads and all kept tokens, by exchange with the team."""
        asking = _asking(self.rows)
        tokens, rows = (None, self.rows) if all(asking) else only(asking, self.rows)
        asked = q if tokens is None else q.index_select(2, tokens)
        everyone = self.team.swapped(asked.expand(self.team.size, *asked.shape[1:]))
        found = self._of_own(everyone.flatten(0, 1).unsqueeze(0), pages, rows)
        # One tensor: the bits of the log-sum-exp follow the result.
        sent = torch.cat([found.out, found.lse.unsqueeze(-1).contiguous().view(found.out.dtype)], -1)
        answers = self.team.swapped(sent.reshape(self.team.size, q.shape[1], *sent.shape[2:]))
        merged = joined([_unpacked(a.unsqueeze(0), found) for a in answers])
        return merged if tokens is None else _spread(merged, tokens, q.shape[2])

    def _of_own(self, q: Tensor, pages: Pair, rows: Rows) -> Part:
        """All heads of the team and the tokens that this rank keeps."""
        own = [own_count(n, self.team.size, self.member) for n in counts(rows).held]
        have = [n > 0 for n in own]
        rows = rows._replace(held=_lengths(tuple(own), rows.held.device))
        none = tuple(p.new_empty((1, p.shape[1], 0, p.shape[3]), dtype=q.dtype) for p in pages)
        program, count = strided(self.program, self.team.size)
        sizes = [*self.sizes, *([0] * (count - len(self.sizes))), self.member]
        if all(have):
            return self._part(program, q, none, pages, sizes, rows)  # type: ignore[arg-type]
        tokens, some = only(have, rows)
        empty = q.new_zeros((1, q.shape[1], 0, pages[1].shape[3]))
        part = Part(empty, empty.new_zeros(empty.shape[:3], dtype=kernels.accumulation_dtype(q.dtype)))
        if any(have) and len(tokens):
            part = self._part(program, q.index_select(2, tokens), none, pages, sizes, some)  # type: ignore[arg-type]
        return _spread(part, tokens[: part.lse.shape[2]], q.shape[2])

    def _part(
        self, program: ScoreProgram, q: Tensor, new: Pair, pages: Pair, sizes: Sequence[int], rows: Rows
    ) -> Part:
        """Attention over a cache, with the log-sum-exps."""
        lse = q.new_empty(q.shape[:3], dtype=kernels.accumulation_dtype(q.dtype))
        out = cached.attended(program, q, new, pages, self.reads, sizes, rows, self.by, lse=lse)
        return Part(out, lse)


@functools.lru_cache(maxsize=256)
def strided(program: ScoreProgram, team: int) -> tuple[ScoreProgram, int]:
    """The program for the tokens that a member keeps, without a sink, and its number of sizes so far: one
    more follows them, the member."""
    count, k = program.sizes, E.var("k")
    place = operation("add", operation("mul", k, E.const(team)), E.size(f"n{count}"))
    statements = [s for s in program.statements if not isinstance(s, Sink)]
    return cached.replaced(statements, {k: place}), count


@functools.lru_cache(maxsize=8)
def _lengths(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers of tokens as a tensor; all layers of a step have the same one."""
    return cached.tell(torch.tensor(numbers, dtype=torch.int64).to(device), numbers)


def _unpacked(packed: Tensor, like: Part) -> Part:
    width = like.out.shape[3]
    sums = packed[..., width:].contiguous().view(like.lse.dtype).squeeze(-1)
    return Part(packed[..., :width], sums)


def _spread(part: Part, tokens: Tensor, count: int) -> Part:
    """A part of some tokens as one of all `count`, of which the others see no key."""
    shape = [*part.out.shape[:2], count, part.out.shape[3]]
    out = part.out.new_zeros(shape).index_copy(2, tokens, part.out)
    lse = part.lse.new_full(shape[:3], -math.inf).index_copy(2, tokens, part.lse)
    return Part(out, lse)


def bytes_exchanged(
    heads: int, width: int, value_width: int, dtype: torch.dtype, team: int
) -> tuple[int, int]:
    """The bytes that a rank sends for one new token of a row that has kept tokens: of queries, `heads` of its
    own of `width` numbers, and of results, `value_width` numbers and a log-sum-exp for each head."""
    sums = kernels.accumulation_dtype(dtype).itemsize
    others = (team - 1) * heads
    return others * width * dtype.itemsize, others * (value_width * dtype.itemsize + sums)


_OPS = torch.ops.attngraph
EXCHANGING |= {_OPS.divided_attention.default, _OPS.divided_latent_attention.default}
