"""Mutants: a spelling whose operands, scores, weights, normaliser or gradients have one thing changed."""

import torch

from .registry import INF, causal, grouped, mutant, normals, qkv

mutant(
    qkv,
    keys_reversed=lambda q, k, v: (q @ k.flip(2).mT).softmax(-1) @ v,
    values_reversed=lambda q, k, v: (q @ k.mT).masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v.flip(2),
    keys_rolled=lambda q, k, v: (q @ k.roll(1, 2).mT).softmax(-1) @ v,
    keys_reshaped_not_transposed=lambda q, k, v: (
        (q @ k.reshape(*k.shape[:2], k.shape[3], k.shape[2])).softmax(-1) @ v
    ),
    heads_swapped=lambda q, k, v: (q @ k[:, [1, 0, 3, 2]].mT).softmax(-1) @ v,
    batches_swapped=lambda q, k, v: (q @ k.flip(0).mT).softmax(-1) @ v,
    weights_transposed=lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v,
    gradient_stopped_at_the_weights=lambda q, k, v: (q @ k.mT).softmax(-1).detach() @ v,
    gradient_stopped_at_the_keys=lambda q, k, v: (q @ k.detach().mT).softmax(-1) @ v,
    scores_rounded=lambda q, k, v: (q @ k.mT).round().softmax(-1) @ v,
    scores_clamped=lambda q, k, v: (q @ k.mT).clamp(-1, 1).softmax(-1) @ v,
    dropped_keys_in_the_values=lambda q, k, v: (q @ k.mT).softmax(-1)[..., :-1] @ v[:, :, :-1],
    every_second_key=lambda q, k, v: (q @ k[:, :, ::2].mT).softmax(-1) @ v[:, :, ::2],
)


@mutant(grouped)
def groups_interleaved_the_other_way(q, k, v):
    return (q @ k.repeat(1, 2, 1, 1).mT).softmax(-1) @ v.repeat_interleave(2, 1)


with mutant(qkv):

    def weights_used_twice(q, k, v):
        p = (q @ k.mT).softmax(-1)
        return p @ v + p @ k

    def weights_changed_in_place(q, k, v):
        p = (q @ k.mT).softmax(-1) * 1
        p.mul_(2).masked_fill_(~causal(q.shape[2]), 0.5)
        return p @ v

    def scores_changed_in_place_between(q, k, v):
        s = q @ k.mT
        top = s.detach().amax(-1, keepdim=True)
        s += torch.arange(s.shape[-1])
        return (s - top).softmax(-1) @ v

    def normaliser_before_the_mask(q, k, v):
        e = (q @ k.mT).exp()
        return (e * causal(q.shape[2]) / e.sum(-1, keepdim=True)) @ v

    def normaliser_of_another_mask(q, k, v):
        s = q @ k.mT
        e = s.masked_fill(~causal(q.shape[2]), -INF).exp()
        other = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(1), -INF).exp()
        return (e / other.sum(-1, keepdim=True)) @ v

    def normalised_over_queries(q, k, v):
        e = (q @ k.mT).exp()
        return (e / e.sum(-2, keepdim=True)) @ v

    def small_number_in_the_normaliser(q, k, v):
        e = (q @ k.mT - 3).exp()
        return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v

    def max_over_queries_subtracted(q, k, v):
        s = q @ k.mT
        return (s - s.amax(-2, keepdim=True)).softmax(-1) @ v

    def gradient_stopped_at_the_scores(q, k, v):
        with torch.no_grad():
            s = q @ k.mT
        return s.softmax(-1) @ v


@mutant(qkv, tolerance=1e-5)
def scores_through_float32(q, k, v):
    return (q @ k.mT).float().softmax(-1).double() @ v


mutant(
    lambda: (*qkv(), *normals("BHT4 BHT4")),
    products_multiplied=lambda q, k, v, q_more, k_more: ((q @ k.mT) * (q_more @ k_more.mT)).softmax(-1) @ v,
    products_of_which_one_is_capped=lambda q, k, v, q_more, k_more: (
        (q @ k.mT + torch.tanh(q_more @ k_more.mT)).softmax(-1) @ v
    ),
)


@mutant(lambda: (*qkv(), *normals("BHT4 BHT4 H11")))
def products_of_which_one_is_gated_by_head(q, k, v, q_more, k_more, gate):
    return (q @ k.mT + gate * (q_more @ k_more.mT)).softmax(-1) @ v
