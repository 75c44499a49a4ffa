"""Heads that share keys, loops over heads, heads stacked or written one by one."""

import math

import torch
import torch.nn.functional as F

from .registry import INF, D, H, causal, grouped, near_miss, normal, normals, qkv, size, spelling

with spelling(grouped):

    def grouped_repeat_interleave(q, k, v):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return (q @ k.mT).softmax(-1) @ v

    def grouped_queries(q, k, v):
        q = q.view(size.B, 2, 2, -1, D)
        return ((q @ k[:, :, None].mT).softmax(-1) @ v[:, :, None]).reshape(size.B, H, -1, D)

    def grouped_tiled(q, k, v):
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        return (q @ k.mT).softmax(-1) @ v

    def grouped_by_index(q, k, v):
        pick = torch.arange(H) // 2
        return (q @ k[:, pick].mT).softmax(-1) @ v[:, pick]

    def grouped_stacked(q, k, v):
        k, v = (torch.stack([x, x], 2).flatten(1, 2) for x in (k, v))
        return (q @ k.mT).softmax(-1) @ v

    def grouped_einsum(q, k, v):
        q = q.unflatten(1, (2, 2))
        weights = torch.einsum("bgrqd,bgkd->bgrqk", q, k).softmax(-1)
        return torch.einsum("bgrqk,bgkd->bgrqd", weights, v).flatten(1, 2)

    def grouped_by_torch(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def groups_of_queries_in_one_product(q, k, v):
        b, heads, t, width = q.shape
        groups = k.shape[1]
        scores = (q.reshape(b, groups, heads // groups * t, width) @ k.mT).view(b, heads, t, -1)
        weights = scores.masked_fill(~causal(t), -INF).softmax(-1)
        return (weights.view(b, groups, heads // groups * t, -1) @ v).view(b, heads, t, width)


@spelling(grouped)
def grouped_expand_reshape(q, k, v):
    k, v = (
        x[:, :, None].expand(size.B, 2, 2, x.shape[2], D).reshape(size.B, H, x.shape[2], D) for x in (k, v)
    )
    return (q @ k.mT).softmax(-1) @ v


spelling(
    lambda: normals("BHTD BTD BTD"),
    one_key_head=lambda q, k, v: torch.einsum(
        "bhqk,bkd->bhqd", torch.einsum("bhqd,bkd->bhqk", q, k).softmax(-1), v
    ),
    one_key_head_broadcast=lambda q, k, v: (q @ k[:, None].mT).softmax(-1) @ v[:, None],
)


with spelling(
    lambda: (normal(size.B, size.T, H * D), normal(size.B, size.T, H * D), normal(size.B, size.T, H * D))
):

    def loop_over_heads(q, k, v):
        heads = []
        for h in range(H):
            one = slice(h * D, (h + 1) * D)
            heads.append((q[..., one] @ k[..., one].mT).softmax(-1) @ v[..., one])
        return torch.cat(heads, -1)

    def heads_stacked_into_the_batch(q, k, v):
        b = q.shape[0]
        q, k, v = (torch.cat(x.split(D, -1), 0) for x in (q, k, v))
        return torch.cat(((q @ k.mT).softmax(-1) @ v).split(b, 0), -1)


@spelling(lambda: normals("BHTD B2TD B2TD"))
def loop_over_heads_of_two_groups(q, k, v):
    heads = []
    for h in range(H):
        s = q[:, h] @ k[:, h // 2].mT / math.sqrt(D)
        heads.append(s.softmax(-1) @ v[:, h // 2])
    return torch.stack(heads, 1)


@spelling(lambda: (normal(size.B, size.T, 16), normal(H, 3, D, 16), normal(H)))
def heads_of_their_own_weights(x, w, slopes):
    i = torch.arange(x.shape[1])
    heads = []
    for h in range(H):
        q, k, v = (F.linear(x, w[h, part]) for part in range(3))
        s = (q @ k.mT / math.sqrt(D) + slopes[h] * (i[None] - i[:, None])).tril()
        heads.append(s.masked_fill(i[None] > i[:, None], -INF).softmax(-1) @ v)
    return torch.cat(heads, -1)


@spelling(qkv, count=H)
def written_into_an_empty_tensor(q, k, v):
    out = torch.empty_like(q)
    for h in range(H):
        out[:, h] = (q[:, h] @ k[:, h].mT).softmax(-1) @ v[:, h]
    return out


@near_miss(qkv)
def a_head_with_the_scores_of_another(q, k, v):
    scores = q @ k.mT
    scores[:, 1] = scores[:, 0]
    return scores.softmax(-1) @ v
