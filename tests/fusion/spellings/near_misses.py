"""What looks like attention, one change away from it, and must be left alone (near misses of sinks, sums,
heads and parts of keys stand beside these). Two of the same kind may fuse: they are in other tables."""

import torch
import torch.nn.functional as F

from .registry import INF, H, causal, mutant, near_miss, normal, normals, qkv

near_miss(
    qkv,
    softmax_over_queries=lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    softmax_over_heads=lambda q, k, v: (q @ k.mT).softmax(1) @ v,
    sigmoid_attention=lambda q, k, v: (q @ k.mT).sigmoid() @ v,
    double_softmax=lambda q, k, v: (q @ k.mT).softmax(-1).softmax(-1) @ v,
    linear_attention=lambda q, k, v: (q @ k.mT) @ v,
    mean_of_the_values=lambda q, k, v: torch.zeros(*q.shape[:3], k.shape[2], dtype=q.dtype).softmax(-1) @ v,
    softmax_over_features=lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
    additive_scores=lambda q, k, v: torch.tanh(q.unsqueeze(3) + k.unsqueeze(2)).sum(-1).softmax(-1) @ v,
    distance_scores=lambda q, k, v: (-torch.cdist(q, k)).softmax(-1) @ v,
)


@near_miss(lambda: (*qkv(), normal(H, H)))
def talking_heads(q, k, v, mix):
    return torch.einsum("bhqk,hg->bgqk", (q @ k.mT).softmax(-1), mix) @ v


@mutant(lambda: (*qkv(), normal(H, H)))
def talking_heads_before_softmax(q, k, v, mix):
    return torch.einsum("bhqk,hg->bgqk", q @ k.mT, mix).softmax(-1) @ v


near_miss(
    lambda: (*qkv(), normal(H, H, 1, 1), normal(H)),
    heads_mixed_by_a_convolution_before_the_softmax=lambda q, k, v, mix, bias: (
        F.conv2d(q @ k.mT, mix, bias).softmax(-1) @ v
    ),
    heads_mixed_by_a_convolution_after_the_softmax=lambda q, k, v, mix, bias: (
        F.conv2d((q @ k.mT).softmax(-1), mix, bias) @ v
    ),
)


@near_miss(lambda: (*qkv(), normal(H, H), normal(H)))
def heads_mixed_by_a_linear_map_after_the_softmax(q, k, v, mix, bias):
    p = F.linear((q @ k.mT).softmax(-1).permute(0, 2, 3, 1), mix, bias)
    return p.permute(0, 3, 1, 2) @ v


with near_miss(qkv):

    def renormalised_after_masking(q, k, v):
        p = (q @ k.mT).softmax(-1) * causal(q.shape[2])
        return (p / p.sum(-1, keepdim=True)) @ v

    def weights_returned(q, k, v):
        p = (q @ k.mT).softmax(-1)
        return p @ v, p

    def top_k(q, k, v):
        s = q @ k.mT
        kept = s >= s.topk(3, dim=-1).values[..., -1:]
        return s.masked_fill(~kept, -INF).softmax(-1) @ v

    def normalised_by_another_sum(q, k, v):
        e = (q @ k.mT).exp()
        return (e / (2 * q @ k.mT).exp().sum(-1, keepdim=True)) @ v

    def linear_attention_normalised(q, k, v):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT)

    def scores_returned(q, k, v):
        s = q @ k.mT
        return s.softmax(-1) @ v, s

    def scores_changed_after_use(q, k, v):
        s = q @ k.mT
        out = s.softmax(-1) @ v
        s.add_(1)
        return out, s

    def gumbel_like_straight_through(q, k, v):
        p = (q @ k.mT).softmax(-1)
        hard = F.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype)
        return (hard - p.detach() + p) @ v

    def small_number_beside_exponentials_that_were_shifted(q, k, v):
        s = q @ k.mT
        e = (s - s.amax(-1, keepdim=True)).exp()
        return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


@near_miss(lambda: normals("BHTT BHTT BHTT"))
def keys_permuted_not_transposed(q, k, v):
    return ((q * k).softmax(-1)) @ v


@near_miss(qkv)
def softmax_over_distances_in_a_band(q, k, v):
    i = torch.arange(q.shape[2])
    behind = i[:, None] - i
    in_band = (behind >= 0) & (behind < 3)
    s = torch.gather(F.pad(q @ k.mT, (2, 0)), -1, (i[:, None] + torch.arange(3)).expand(*q.shape[:2], -1, -1))
    p = F.pad(s.softmax(-1), (0, 1))
    return p.gather(-1, torch.where(in_band, 2 - behind, 3).expand(*q.shape[:2], -1, -1)) @ v
