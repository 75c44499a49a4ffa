"""Latent attention: keys and values of all heads are made from one narrow vector per token.

q is `[B, H, Sq, P + R]`, latent `[B, 1, Skv, C]`. A key of head g is key_up[g] times the first L values of
the latent, followed by the next R values unchanged; a value is value_up[g] times the values
`values[0] : values[0] + values[1]`. key_up is `[G, P, L]` and value_up `[G, V, Lv]`, in nn.Linear's layout;
if one is absent, those values themselves are the key (the value) of every head. The rest is
`attngraph::attention` with the score program unchanged, in one of two orders of multiplication:

    expanded    keys and values are computed for every head
    absorbed    q . (W c) = (W^T q) . c, so the query is multiplied by key_up and attends to the latents,
                which all heads share; sum of w (W c) = W (sum of w c), so value_up is applied after the sum

(Liu et al. 2024, DeepSeek-V2, section 2.1.2). `absorb` is "always", "never", or "auto": by cost
(`ir/ops/cost.py`) at each call. `family` ("cpu", "reference", ...; empty: any) restricts the kernels.
Nothing here has gradients.

`cached_latent_attention` is the same over a cache whose pages hold latents. In the expanded form a row's
pages are projected up a block at a time, and the blocks' results are merged by their log-sum-exps, so memory
does not grow with the cache (except for rows whose scores are all far from zero: these are projected up at
once).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.ir.language import parse
from attngraph.ir.ops import cached_attention as cached
from attngraph.ir.ops import kernels
from attngraph.ir.ops.cached_attention import Rows, attended, counts, no_pages, packed_result
from attngraph.ir.ops.cost import LatentSizes, absorbing_pays
from attngraph.ir.ops.declare import INSTEAD, Sizes, declare, require_no_derivative
from attngraph.ir.ops.in_order import product_in_order

ABSORB = ("auto", "always", "never")
BLOCK = 1024
"""Kept tokens that are projected up at once."""


def sizes_of(
    q: Tensor, latent: Tensor, key_up: Tensor | None, value_up: Tensor | None, values: Sequence[int]
) -> LatentSizes:
    """The sizes of one node, from its operands."""
    heads, width = int(q.shape[1]), int(q.shape[3])
    kv_heads = next((int(t.shape[0]) for t in (key_up, value_up) if t is not None), 1)
    nope, rank = (0, 0) if key_up is None else (int(key_up.shape[1]), int(key_up.shape[2]))
    value, value_rank = (values[1], 0) if value_up is None else (int(value_up.shape[1]), values[1])
    return LatentSizes(heads, kv_heads, nope, width - nope, value, rank, value_rank, int(latent.shape[3]))


class LatentNode:
    """One node's weights and sizes, and its operands in both forms."""

    def __init__(
        self, q: Tensor, latent: Tensor, key_up: Tensor | None, value_up: Tensor | None,
        values: Sequence[int], in_order: bool = False,
    ) -> None:  # fmt: skip
        self.sizes = sizes_of(q, latent, key_up, value_up, values)
        self.key_up, self.value_up, self.values = key_up, value_up, values
        self.in_order = in_order

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """`[B, H, S, D]` times `[G, D, W]`, each group of heads by its own."""
        if self.in_order and x.dtype != torch.float64:
            return product_in_order(x, weight)
        return kernels.grouped(x, weight.unsqueeze(0))

    def absorbed_query(self, q: Tensor) -> Tensor:
        """`[B, H, S, L + R]`: the query multiplied by key_up, to be compared with the latents."""
        if self.key_up is None:
            return q
        nope = self.sizes.nope
        return torch.cat([self.product(q[..., :nope], self.key_up), q[..., nope:]], -1)

    def absorbed_result(self, out: Tensor) -> Tensor:
        """`[B, H, S, V]` from the weighted sum of latents."""
        return out if self.value_up is None else self.product(out, self.value_up.mT)

    def shared(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the absorbed form: two views of the latents."""
        first, count = self.values
        return latent[..., : self.sizes.latent + self.sizes.shared], latent[..., first : first + count]

    def expanded(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[B, G, S, P + R]` and values `[B, G, S, V]` of every key/value head."""
        keys, values = self.shared(latent)
        rank, heads = self.sizes.latent, self.sizes.kv_heads
        if self.key_up is not None:
            direct = keys[..., rank:].expand(-1, heads, -1, -1)
            keys = torch.cat([torch.matmul(keys[..., :rank], self.key_up.mT), direct], -1)
        if self.value_up is not None:
            values = torch.matmul(values, self.value_up.mT)
        most = max(keys.shape[1], values.shape[1])
        return keys.expand(-1, most, -1, -1), values.expand(-1, most, -1, -1)

    def absorbs(self, absorb: str, rows: Sequence[tuple[int, int]], q: Tensor) -> bool:
        """Whether this call is computed in the absorbed form: in order, all are."""
        if self.in_order:
            return True
        if absorb != "auto":
            return absorb == "always"
        return absorbing_pays(self.sizes, rows, q.device.type, q.dtype.itemsize)


def absorbed_operands(
    q: Tensor, latent: Tensor, key_up: Tensor | None, value_up: Tensor | None, values: Sequence[int]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The query, and the keys and values, of the absorbed form."""
    node = LatentNode(q, latent, key_up, value_up, values)
    return node.absorbed_query(q), node.shared(latent)


def token_major(out: Tensor) -> Tensor:
    """The tensor with the heads of a token contiguous in memory, so that joining them needs no copy."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@declare(
    fake=packed_result, after=token_major, plain=True,
    derivatives='compile the model with gradients enabled, or absorb="never"',
)  # fmt: skip
def latent_attention(
    q: Tensor, latent: Tensor, key_up: Tensor | None, value_up: Tensor | None, values: Sequence[int],
    reads: list[Tensor], sizes: Sizes, program: str, absorb: str = "auto", family: str = "",
) -> Tensor:  # fmt: skip
    node = LatentNode(q, latent, key_up, value_up, values)
    new, keys = q.shape[2], latent.shape[2]
    absorbed = node.absorbs(absorb, [(new, max(0, keys - new))] * q.shape[0], q)
    query = node.absorbed_query(q) if absorbed else q
    k, v = node.shared(latent) if absorbed else node.expanded(latent)
    chosen = kernels.choose(parse(program), (query, k, v), family)
    out: Tensor = torch.ops.attngraph.attention(query, k, v, reads, sizes, program, chosen.name)[0]
    return node.absorbed_result(out) if absorbed else out


@declare(fake=packed_result, after=token_major, derivatives=INSTEAD, plain=True)
def cached_latent_attention(
    q: Tensor, latent: Tensor, pages: Tensor, key_up: Tensor | None, value_up: Tensor | None,
    values: Sequence[int], reads: list[Tensor], sizes: Sizes, program: str, table: Tensor, starts: Tensor,
    first: Tensor, held: Tensor, absorb: str = "auto", family: str = "", scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    require_no_derivative("cached_latent_attention", INSTEAD, (q, latent, reads))
    parsed = parse(program)
    node = LatentNode(q, latent, key_up, value_up, values, parsed.in_order)
    rows = Rows(table, starts, first, held)
    news, _, kept = counts(rows)
    if node.absorbs(absorb, list(zip(news, kept, strict=True)), q):
        new, old, query = node.shared(latent), node.shared(pages), node.absorbed_query(q)
        out = attended(parsed, query, new, old, reads, sizes, rows, family, (scales, scales))
        return node.absorbed_result(out)
    if not any(kept):  # only new tokens to expand
        k, v = node.expanded(latent)
        return attended(parsed, q, (k, v), no_pages((k, v)), reads, sizes, rows, family)
    return cached.row_by_row(
        parsed, q, [latent], [pages], reads, sizes, rows, family, [scales], keys_of=node.expanded, block=BLOCK
    )
