"""Sums of several products in one score, and weights that are a sum of several softmaxes; near misses and a
mutant of the latter."""

import math

import torch
from torch import Tensor

from .registry import INF, D, H, causal, mutant, near_miss, normal, normals, qkv, size, spelling

with spelling(lambda: (*qkv(), *normals("BHT4 B1T4"))):

    def products_added_up(q, k, v, q_rotary, k_rotary):
        return ((q_rotary @ k_rotary.mT + q @ k.mT) / math.sqrt(D + 4)).softmax(-1) @ v

    def products_added_up_at_scales_of_their_own(q, k, v, q_more, k_more):
        scores = torch.einsum("bhqd,bhkd->bhqk", q * 0.3, k) - 0.7 * torch.einsum(
            "bhqd,bkd->bhqk", q_more, k_more[:, 0]
        )
        return (5 * torch.tanh(scores / 5)).softmax(-1) @ v


@spelling(lambda: (*qkv(), *normals("TD TD BHT3 BHT3")))
def products_of_contents_and_of_places(q, k, v, place_q, place_k, q_more, k_more):
    at = torch.einsum("qd,kd->qk", place_q, place_k)
    return ((q @ k.mT + at + q_more @ k_more.mT) / math.sqrt(2 * D)).softmax(-1) @ v


@spelling(lambda: normals("BHTD BTD BHT4 BT4"))
def latents_that_all_heads_share(q, latent, q_rotary, k_rotary):
    scores = torch.einsum("bhqc,bkc->bhqk", q, latent) + torch.einsum("bhqr,bkr->bhqk", q_rotary, k_rotary)
    return torch.einsum("bhqk,bkc->bhqc", (scores / 3).softmax(-1), latent)


def two_scores() -> tuple[Tensor, ...]:
    return (*qkv(), *normals("BHTD BHTD"))


@spelling(lambda: (*two_scores(), normal(H)), count=2)
def differential(q, k, v, q_less, k_less, less):
    keep = causal(q.shape[2])
    first, second = ((a @ b.mT).masked_fill(~keep, -INF).softmax(-1) for a, b in ((q, k), (q_less, k_less)))
    return (first - (less.exp() + 0.2)[:, None, None] * second) @ v


@spelling(lambda: (normal(size.B, size.T, 3 * H * D), normal(5)), count=2)
def differential_by_pairs_of_heads(x, less):
    q, k, v = x.unflatten(-1, (3, -1)).unbind(2)
    q, k = (a.unflatten(-1, (H, D)).transpose(1, 2) for a in (q, k))
    p = (q @ k.mT / math.sqrt(D)).softmax(-1).unflatten(1, (H // 2, 2))
    return (p[:, :, 0] - less.exp().mean() * p[:, :, 1]) @ v.unflatten(-1, (H // 2, 2 * D)).transpose(1, 2)


@spelling(lambda: (*two_scores(), normal(size.B, 1, size.T, 1)), count=2)
def mixed_by_a_gate_of_the_query_and_masked(q, k, v, q_more, k_more, gate):
    gate = gate.sigmoid()
    p = gate * (q @ k.mT).softmax(-1) + (1 - gate) * (q_more @ k_more.mT).softmax(-1)
    return p.tril() @ v


@spelling(two_scores, count=2)
def mean_of_a_stack(q, k, v, q_more, k_more):
    return torch.stack([(q @ k.mT).softmax(-1), (q_more @ k_more.mT).softmax(-1)]).mean(0) @ v


@spelling(lambda: (*qkv(), normal(size.T, size.T)), count=2)
def near_and_far_weights_and_fixed_ones(q, k, v, fixed):
    s, i = q @ k.mT, torch.arange(q.shape[2])
    near = s.masked_fill((i[:, None] - i).abs() > 1, -INF).softmax(-1)
    return (0.5 * near + 0.25 * (s.softmax(-1) + fixed)) @ v


@near_miss(two_scores)
def difference_divided_by_its_own_sum(q, k, v, q_less, k_less):
    p = ((q @ k.mT).softmax(-1) - 0.5 * (q_less @ k_less.mT).softmax(-1)).tril()
    return p / p.sum(-1, keepdim=True) @ v


near_miss(
    two_scores,
    softmaxes_multiplied=lambda q, k, v, q_more, k_more: (
        ((q @ k.mT).softmax(-1) * (q_more @ k_more.mT).softmax(-1)) @ v
    ),
    difference_cut_off_at_zero=lambda q, k, v, q_less, k_less: (
        ((q @ k.mT).softmax(-1) - (q_less @ k_less.mT).softmax(-1)).relu() @ v
    ),
    one_of_two_over_queries=lambda q, k, v, q_less, k_less: (
        ((q @ k.mT).softmax(-1) - (q_less @ k_less.mT).softmax(-2)) @ v
    ),
)


@mutant(two_scores)
def the_other_softmax_of_the_next_key(q, k, v, q_less, k_less):
    return ((q @ k.mT).softmax(-1) - (q_less @ k_less.mT).softmax(-1).roll(1, -1)) @ v
