"""The softmax written by hand, and what is done with its weights afterwards."""

import math

import torch
import torch.nn.functional as F

from .registry import INF, D, H, causal, cross, near_miss, normal, qkv, size, spelling, with_padding

with spelling(cross):

    def exp_over_sum(q, k, v):
        e = torch.exp(q @ k.mT)
        return (e / e.sum(-1, keepdim=True)) @ v

    def stable_exp_over_sum(q, k, v):
        s = q @ k.mT
        e = (s - s.amax(-1, keepdim=True)).exp()
        return (e / e.sum(dim=-1, keepdim=True)) @ v

    def stable_with_max(q, k, v):
        s = q @ k.mT
        e = torch.exp(s - torch.max(s, dim=-1, keepdim=True)[0])
        return torch.matmul(e / torch.sum(e, -1, keepdim=True), v)

    def max_of_all_scores_subtracted(q, k, v):
        s = q @ k.mT
        e = (s - s.max()).exp()
        return (e / e.sum(-1, keepdim=True)) @ v

    def divided_after_values(q, k, v):
        e = torch.exp(q @ k.mT)
        return (e @ v) / e.sum(-1, keepdim=True)

    def minus_logsumexp(q, k, v):
        s = q @ k.mT
        return torch.exp(s - torch.logsumexp(s, -1, keepdim=True)) @ v

    def powers_of_two(q, k, v):
        e = torch.exp2(q @ k.mT / math.log(2))
        return (e / e.sum(-1, keepdim=True)) @ v

    def powers_of_e(q, k, v):
        w = torch.pow(math.e, q @ k.mT / 4)
        return w / w.sum(3, keepdim=True) @ v

    def squared_softmax_renormalised(q, k, v):
        w = (q @ k.mT).softmax(-1) ** 2
        return w / w.sum(-1, keepdim=True) @ v

    def values_gated_by_hand(q, k, v):
        e = (q @ k.mT).exp()
        return (e @ (v / (1 + (-v).exp()))) / e.sum(-1, keepdim=True)

    def hyperbolic_values_in_a_broadcast_product(q, k, v):
        p = (q @ k.mT).softmax(-1)
        return (p[..., None] * (v.exp() + (-v).exp())[:, :, None]).sum(3)

    def a_small_number_added_before_weights_are_normalised_once_more(q, k, v):
        p = (q @ k.mT).softmax(-1) + 1e-6
        return (p / p.sum(dim=-1, keepdim=True)) @ v

    def weights_with_the_sign_of_their_score(q, k, v):
        s = torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5
        return torch.einsum("bhij,bhjd->bhid", s.sign() * s.abs().softmax(-1), v)


spelling(
    cross,
    exp_of_log_softmax=lambda q, k, v: F.log_softmax(q @ k.mT, -1).exp() @ v,
    softmax_of_log_softmax=lambda q, k, v: F.softmax(F.log_softmax(q @ k.mT, -1), -1) @ v,
    softmax_in_float32_and_back=lambda q, k, v: (
        torch.softmax(q @ k.mT, -1, dtype=torch.float64).to(v.dtype) @ v
    ),
    softmin_of_the_negative=lambda q, k, v: F.softmin(-(q @ k.mT), dim=-1) @ v,
    exponentials_are_weighed=lambda q, k, v: ((q @ k.mT).softmax(-1) @ v.exp()).log(),
    weights_normalised_once_more=lambda q, k, v: F.normalize((q @ k.mT).softmax(-1), p=1, dim=-1) @ v,
)


@spelling(qkv)
def squared_weights(q, k, v):
    p = (q @ k.mT).softmax(-1)
    p = p * p
    return (p / p.sum(-1, keepdim=True)) @ v


spelling(
    qkv,
    masked_after_softmax=lambda q, k, v: ((q @ k.mT).softmax(-1) * causal(q.shape[2])) @ v,
    value_gated_after=lambda q, k, v: ((q @ k.mT).softmax(-1) @ v) * torch.sigmoid(q),
)


@spelling(lambda: (*qkv(), normal(H)))
def head_mask(q, k, v, mask):
    return ((q @ k.mT).softmax(-1) * mask[:, None, None]) @ v


@spelling(with_padding)
def nan_to_num(q, k, v, keep):
    s = (q @ k.mT).masked_fill(~keep[:, None, None, :], -INF)
    return s.softmax(-1).nan_to_num(0.0) @ v


@spelling(lambda: (*cross(), torch.rand(size.B, size.S) < 0.7))
def padding_gets_a_small_weight_after_the_softmax(q, k, v, keep):
    p = (q @ k.mT).masked_fill(~keep[:, None, None], -1e9).softmax(-1) + 1e-3
    return (p @ v) / p.sum(dim=-1, keepdim=True)


with near_miss(cross):

    def weights_of_length_one(q, k, v):
        return F.normalize((q @ k.mT).softmax(-1), p=2, dim=-1) @ v

    def weights_with_the_sign_of_another_key(q, k, v):
        s = q @ k.mT
        return (s.abs().softmax(-1) * s.flip(-1).sign()) @ v

    def exponentials_of_keys_gate_the_weights(q, k, v):
        s = q @ k.mT
        return (s.softmax(-1) * (s * s).exp()) @ v.exp()


@spelling(lambda: (*qkv(), normal(H, 1, 1)))
def weights_gated_by_their_score(q, k, v, threshold):
    s = q @ k.mT / math.sqrt(D)
    p = s.masked_fill(~causal(q.shape[2]), -INF).softmax(-1)
    return (p * torch.sigmoid(s - threshold)) @ v


with spelling(lambda: (*cross(), normal(size.B, H, size.T, 1))):

    def weights_scaled_by_an_exponential_of_each_query(q, k, v, level):
        return ((q @ k.mT).softmax(-1) * level.exp()) @ v

    def exponentials_scaled_before_they_are_divided(q, k, v, level):
        s = q @ k.mT
        e = (s - s.amax(-1, keepdim=True)).exp()
        return (e * level.exp() / e.sum(-1, keepdim=True)) @ v
