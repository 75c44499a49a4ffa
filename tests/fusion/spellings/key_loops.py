"""Attention computed in loops over keys: online softmax, flash, results merged by their log-sum-exp; and
loops in which one thing is wrong."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import INF, D, cross, mutant, near_miss, normal, normals, qkv, spelling

BLOCK = 3


def running(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum, the divisor and the output before the first key."""
    start = torch.full_like(q[..., :1], -INF)
    return start, torch.zeros_like(start), torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)


def flash(
    q: Tensor, k: Tensor, v: Tensor, starts: range, block: int = BLOCK, mask: Tensor | None = None
) -> Tensor:
    m, l, o = running(q, v)
    for j in starts:
        s = q @ k[..., j : j + block, :].mT / math.sqrt(q.shape[-1])
        if mask is not None:
            s = s.masked_fill(~mask[..., j : j + block], -INF)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        shrink, p = torch.exp(m - new), torch.exp(s - new)
        l = l * shrink + p.sum(-1, keepdim=True)
        o = o * shrink + p @ v[..., j : j + block, :]
        m = new
    return o / l


spelling(
    cross,
    flash_by_slices=lambda q, k, v: flash(q, k, v, range(0, k.shape[2], BLOCK)),
    flash_of_one_block=lambda q, k, v: flash(q, k, v, range(0, k.shape[2], 64), 64),
    flash_from_the_last_block_to_the_first=lambda q, k, v: flash(q, k, v, range(0, k.shape[2], BLOCK)[::-1]),
)


with spelling(qkv):

    def flash_causal(q, k, v):
        i = torch.arange(q.shape[2])
        return flash(q, k, v, range(0, k.shape[2], BLOCK), mask=i[None] <= i[:, None])

    def keys_one_after_the_other(q, k, v):
        s = q @ k.mT
        m, l, o = running(q, v)
        for i in range(k.shape[2]):
            x = s[..., i : i + 1]
            new = torch.maximum(m, x)
            shrink, weight = (m - new).exp(), (x - new).exp()
            total = l * shrink + weight
            o = o * (l / total) * shrink + weight * v[:, :, i : i + 1] / total
            m, l = new, total
        return o

    def causal_keys_one_after_the_other(q, k, v):
        i = torch.arange(q.shape[2])[:, None]
        m, l, o = running(q, v)
        for j in range(k.shape[2]):
            x = torch.where(j <= i, (q * k[:, :, j : j + 1]).sum(-1, keepdim=True) / math.sqrt(D), -INF)
            new = torch.maximum(m, x)
            l, o = (
                (m - new).exp() * l + (x - new).exp(),
                (m - new).exp() * o + (x - new).exp() * v[:, :, j : j + 1],
            )
            m = new
        return o / l

    def started_with_the_first_key(q, k, v):
        m = (q * k[:, :, :1]).sum(-1, keepdim=True)
        l, o = torch.ones_like(m), v[:, :, :1].expand_as(q)
        for j in range(1, k.shape[2]):
            x = (q * k[:, :, j : j + 1]).sum(-1, keepdim=True)
            new = torch.maximum(m, x)
            l = l * (m - new).exp() + (x - new).exp()
            o = o * (m - new).exp() + (x - new).exp() * v[:, :, j : j + 1]
            m = new
        return o / l

    def online_divisor_then_one_product(q, k, v):
        s = q @ k.mT
        m = s[..., 0]
        d = torch.ones_like(m)
        for j in range(1, s.shape[-1]):
            new = torch.maximum(m, s[..., j])
            d, m = d * torch.exp(m - new) + torch.exp(s[..., j] - new), new
        return (torch.exp(s - m[..., None]) / d[..., None]) @ v

    def softmax_whose_values_are_added_one_by_one(q, k, v):
        p = (q @ k.mT).softmax(-1)
        o = torch.zeros_like(q)
        for j in range(k.shape[2]):
            o = o + p[..., j : j + 1] * v[:, :, j : j + 1]
        return o

    def sums_without_a_maximum(q, k, v):
        o = l = 0
        for j in range(k.shape[2]):
            weight = torch.exp((q * k[:, :, j : j + 1]).sum(-1, keepdim=True) / math.sqrt(D))
            o, l = o + weight * v[:, :, j : j + 1], l + weight
        return o / l

    def flash_with_a_penalty_by_distance(q, k, v):
        m, l, o = running(q, v)
        i = torch.arange(q.shape[2])
        for j in range(0, k.shape[2], BLOCK):
            s = q @ k[:, :, j : j + BLOCK].mT - 0.5 * (i[:, None] - i[None, j : j + BLOCK]).abs()
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            l = l * (m - new).exp() + (s - new).exp().sum(-1, keepdim=True)
            o, m = o * (m - new).exp() + (s - new).exp() @ v[:, :, j : j + BLOCK], new
        return o / l


@spelling(qkv, count=3)
def flash_over_blocks_of_queries(q, k, v):
    found = [flash(part, k, v, range(0, k.shape[2], BLOCK)) for part in q.split(BLOCK, 2)]
    return torch.cat(found, 2)


@spelling(qkv, count=2)
def flash_that_skips_later_blocks(q, k, v):
    out = torch.zeros_like(q)
    for i in range(0, q.shape[2], 4):
        rows, columns = torch.arange(i, min(i + 4, q.shape[2])), torch.arange(k.shape[2])
        mask = columns[None] <= rows[:, None]
        out[:, :, i : i + 4] = flash(q[:, :, i : i + 4], k, v, range(0, i + 1, 4), 4, mask)
    return out


with spelling(cross):

    def flash_divided_at_each_step(q, k, v):
        m, l, o = running(q, v)
        for keys, values in zip(torch.split(k, BLOCK, 2), torch.split(v, BLOCK, 2), strict=True):
            s = q @ keys.mT
            top = s.max(-1, keepdim=True).values
            p = (s - top).exp()
            new = torch.max(m, top)
            total = (m - new).exp() * l + (top - new).exp() * p.sum(-1, keepdim=True)
            o = (l * (m - new).exp() * o + (top - new).exp() * (p @ values)) / total
            m, l = new, total
        return o

    def flash_in_powers_of_two(q, k, v):
        m, l, o = running(q, v)
        for keys, values in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True):
            s = q @ keys.mT * (math.log2(math.e) / math.sqrt(D))
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            shrink, p = torch.exp2(m - new), torch.exp2(s - new)
            l, o, m = l * shrink + p.sum(-1, keepdim=True), torch.addcmul(p @ values, o, shrink), new
        return o * l.reciprocal()

    def merged_by_logaddexp(q, k, v):
        o = whole = None
        for keys, values in zip(k.split(BLOCK, 2), v.split(BLOCK, 2), strict=True):
            s = q @ keys.mT
            part, total = s.softmax(-1) @ values, s.logsumexp(-1, keepdim=True)
            if o is None:
                o, whole = part, total
            else:
                both = torch.logaddexp(whole, total)
                o, whole = o * (whole - both).exp() + part * (total - both).exp(), both
        return o

    def merged_as_in_a_ring(q, k, v):
        o = whole = None
        for keys, values in zip(k.split(BLOCK, 2), v.split(BLOCK, 2), strict=True):
            s = q @ keys.mT
            part, total = s.softmax(-1) @ values, s.logsumexp(-1, keepdim=True)
            if o is None:
                o, whole = part, total
            else:
                o = o - torch.sigmoid(total - whole) * (o - part)
                whole = whole - F.logsigmoid(whole - total)
        return o

    def split_keys_combined_by_a_softmax(q, k, v):
        parts, totals = [], []
        for keys, values in zip(k.split(BLOCK, 2), v.split(BLOCK, 2), strict=True):
            s = q @ keys.mT
            parts.append(s.softmax(-1) @ values)
            totals.append(s.logsumexp(-1))
        return (torch.stack(totals).softmax(0).unsqueeze(-1) * torch.stack(parts)).sum(0)

    def three_passes_over_blocks(q, k, v):
        """The maximum, then the divisor, then the values."""
        m = torch.stack([(q @ a.mT).amax(-1) for a in k.split(BLOCK, 2)]).amax(0).unsqueeze(-1)
        l = o = 0
        for a in k.split(4, 2):
            l = l + (q @ a.mT - m).exp().sum(-1, keepdim=True)
        for a, b in zip(k.split(BLOCK, 2), v.split(BLOCK, 2), strict=True):
            o = o + ((q @ a.mT - m).exp() / l) @ b
        return o


@spelling(lambda: normals("D SD SD"))
def one_query_in_a_loop_over_vectors(q, k, v):
    m, l, o = torch.tensor(-INF, dtype=q.dtype), torch.tensor(0.0, dtype=q.dtype), torch.zeros_like(v[0])
    for j in range(k.shape[0]):
        x = q @ k[j]
        new = torch.maximum(m, x)
        total = l * (m - new).exp() + (x - new).exp()
        o = o * (l * (m - new).exp() / total) + (x - new).exp() / total * v[j]
        m, l = new, total
    return o


def with_prefix() -> tuple[Tensor, ...]:
    return (*qkv(), *normals("1HSD 1HSD"))


@spelling(with_prefix)
def shared_prefix_merged_with_the_rest(q, k, v, prefix_k, prefix_v):
    """A cascade: one prefix for all rows."""
    a, b = q @ prefix_k.mT, q @ k.mT
    total_a, total_b = a.logsumexp(-1, keepdim=True), b.logsumexp(-1, keepdim=True)
    top = torch.maximum(total_a, total_b)
    x, y = (total_a - top).exp(), (total_b - top).exp()
    return (x * (a.softmax(-1) @ prefix_v) + y * (b.softmax(-1) @ v)) / (x + y)


@spelling(lambda: (*cross(), normal(4, 1, 1)))
def flash_with_a_sink(q, k, v, sink):
    m = sink.expand(*q.shape[:-1], 1)
    l, o = torch.ones_like(m), torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for keys, values in zip(k.split(BLOCK, 2), v.split(BLOCK, 2), strict=True):
        s = q @ keys.mT
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        l = l * (m - new).exp() + (s - new).exp().sum(-1, keepdim=True)
        o = o * (m - new).exp() + (s - new).exp() @ values
        m = new
    return o / l


@spelling(qkv)
def blocks_of_keys_one_after_another(q, k, v):
    most, total, out = torch.full(q.shape[:3], -INF, dtype=q.dtype)[..., None], 0.0, 0.0
    for keys, values in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True):
        scores = q @ keys.mT
        now = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights, kept = (scores - now).exp(), (most - now).exp()
        total, out, most = kept * total + weights.sum(-1, keepdim=True), kept * out + weights @ values, now
    return out / total


# --- one thing wrong ---


def step(q, k, v, j, m):
    """Scores of a block, their maximum with the running one, and the values."""
    s = q @ k[..., j : j + BLOCK, :].mT
    return s, torch.maximum(m, s.amax(-1, keepdim=True)), v[..., j : j + BLOCK, :]


with near_miss(qkv):

    def block_that_the_divisor_lacks(q, k, v):
        m, l, o = running(q, v)
        for j in range(0, k.shape[2], BLOCK):
            s, new, values = step(q, k, v, j, m)
            p, shrink = (s - new).exp(), (m - new).exp()
            l = l * shrink + (p.sum(-1, keepdim=True) if j else 0.0)
            o, m = o * shrink + p @ values, new
        return o / l

    def block_whose_values_are_left_out(q, k, v):
        m, l, o = running(q, v)
        for j in range(0, k.shape[2], BLOCK):
            s, new, values = step(q, k, v, j, m)
            p, shrink = (s - new).exp(), (m - new).exp()
            l = l * shrink + p.sum(-1, keepdim=True)
            o, m = o * shrink + (p @ values if j else 0.0), new
        return o / l

    def divisor_of_one_key_less(q, k, v):
        s = q @ k.mT
        m = s.amax(-1)
        d = torch.zeros_like(m)
        for j in range(1, s.shape[-1]):
            d = d + torch.exp(s[..., j] - m)
        return (torch.exp(s - m[..., None]) / d[..., None]) @ v

    def weights_added_in_another_order_than_the_values(q, k, v):
        p = (q @ k.mT).softmax(-1)
        o = torch.zeros_like(q)
        for j in range(k.shape[2]):
            o = o + p[..., j : j + 1] * v[:, :, (j + 1) % 7 : (j + 1) % 7 + 1]
        return o


with mutant(qkv):

    def results_merged_by_shares_of_their_own(q, k, v):
        parts = [(q @ a.mT).softmax(-1) @ b for a, b in zip(k.split(4, 2), v.split(4, 2), strict=True)]
        shares = torch.stack([(q @ a.mT).logsumexp(-1) for a in k.split(4, 2)]).sigmoid().unsqueeze(-1)
        return (shares * torch.stack(parts)).sum(0)

    def each_block_scaled_by_its_number(q, k, v):
        m, l, o = running(q, v)
        for j in range(0, k.shape[2], BLOCK):
            s = q @ k[..., j : j + BLOCK, :].mT / (1 + j)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, shrink = (s - new).exp(), (m - new).exp()
            l, o, m = l * shrink + p.sum(-1, keepdim=True), o * shrink + p @ v[..., j : j + BLOCK, :], new
        return o / l


mutant(
    qkv,
    block_left_out=lambda q, k, v: flash(q, k, v, range(0, k.shape[2], 2 * BLOCK)),
    values_of_the_next_keys=lambda q, k, v: flash(q, k, v.roll(-1, 2), range(0, k.shape[2], BLOCK)),
)


def with_left_padding() -> tuple[Tensor, ...]:
    q, k, v = qkv()
    mask = torch.arange(q.shape[2]) >= torch.tensor([0, 4])[:, None]
    return q, k, v, mask[:, None, None]


@mutant(with_left_padding)
def flash_under_padding_on_the_left(q, k, v, mask):
    """Rows that see nothing of the first block are NaN in eager, and stay so."""
    return flash(q, k, v, range(0, k.shape[2], BLOCK), mask=mask)
