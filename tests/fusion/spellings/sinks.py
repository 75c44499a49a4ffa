"""Rows that give weight to no key: a larger divisor, an extra column, a gate of the row's total; and gates
that are near misses."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import INF, D, H, causal, near_miss, normal, qkv, spelling


def with_sink() -> tuple[Tensor, ...]:
    return (*qkv(), normal(H))


with spelling(qkv):

    def softmax_plus_one(q, k, v):
        e = (q @ k.mT).exp()
        return (e / (1 + e.sum(-1, keepdim=True))) @ v

    def zero_key_as_an_extra_column(q, k, v):
        s = F.pad(q @ k.mT, (1, 0))
        return s.softmax(-1)[..., 1:] @ v


@spelling(lambda: (*qkv(), normal(H)))
def sink_as_an_extra_column(q, k, v, sink):
    s = q @ k.mT
    column = sink.view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)
    return torch.cat([s, column], -1).softmax(-1)[..., :-1] @ v


with spelling(lambda: (*qkv(), normal(H, 1, 1))):

    def learned_softmax_plus(q, k, v, extra):
        e = (q @ k.mT).exp()
        return e @ v / (extra.exp() + e.sum(-1, keepdim=True))

    def sink_by_logaddexp(q, k, v, sink):
        s = q @ k.mT
        return (s - torch.logaddexp(s.logsumexp(-1, keepdim=True), sink)).exp() @ v


@spelling(lambda: (*qkv(), normal(H, 2)))
def two_sinks_in_front(q, k, v, sink):
    s = q @ k.mT
    s = torch.cat([sink[None, :, None].expand(s.shape[0], -1, s.shape[2], 2), s], -1)
    return s.softmax(-1)[..., 2:] @ v


with spelling(with_sink):

    def gate_of_the_rows_total(q, k, v, sink):
        s = (q @ k.mT).masked_fill(~causal(q.shape[2]), -INF)
        gate = (torch.logsumexp(s, -1) - sink.view(1, -1, 1)).sigmoid()
        return ((s.softmax(-1) @ v) * gate.unsqueeze(-1)).transpose(1, 2)

    def divided_by_one_plus_a_ratio_of_totals(q, k, v, sink):
        s = q @ k.mT
        top = s.amax(-1, keepdim=True)
        e = (s - top).exp()
        total = e.sum(-1, keepdim=True)
        out = (e / total @ v).transpose(1, 2)
        return out / (1 + torch.exp(sink[:, None, None] - top - total.log())).transpose(1, 2)


@spelling(lambda: (*with_sink(), normal(H, D)))
def weights_gated_by_one_minus_the_sink(q, k, v, sink, key):
    s = q @ k.mT
    empty = torch.einsum("bhqd,hd->bhq", q, key) + sink[:, None]
    gate = 1 - torch.sigmoid(empty - s.logsumexp(-1))
    return (s.softmax(-1) * gate.unsqueeze(-1)) @ v


with near_miss(with_sink):

    def gate_of_twice_the_total(q, k, v, sink):
        s = q @ k.mT
        return (s.softmax(-1) @ v) * (2 * s.logsumexp(-1, keepdim=True) - sink[:, None, None]).sigmoid()

    def gate_that_closes_with_the_total(q, k, v, sink):
        s = q @ k.mT
        return (s.softmax(-1) @ v) * (sink[:, None, None] - s.logsumexp(-1, keepdim=True)).sigmoid()

    def gated_and_the_total_returned(q, k, v, sink):
        s = q @ k.mT
        total = s.logsumexp(-1, keepdim=True)
        return (s.softmax(-1) @ v) * (total - sink[:, None, None]).sigmoid(), total


@near_miss(qkv)
def gate_of_the_columns_total(q, k, v):
    s = q @ k.mT
    return (s.softmax(-1) @ v) * s.logsumexp(-2).unsqueeze(-1).sigmoid()
