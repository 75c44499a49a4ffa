"""What is added to a score for a pair of positions: dense biases, ALiBi, tables of distances, relative
shifts."""

import math

import torch
import torch.nn.functional as F

from .registry import INF, D, H, causal, normal, normals, qkv, size, spelling


@spelling(lambda: (*qkv(), normal(1, H, size.T, size.T)))
def dense_bias(q, k, v, bias):
    return (bias + q @ k.mT).softmax(-1) @ v


with spelling(lambda: (*qkv(), normal(H))):

    def alibi(q, k, v, slopes):
        i = torch.arange(q.shape[2])
        return (q @ k.mT + slopes[:, None, None] * (i[None] - i[:, None])).softmax(-1) @ v

    def alibi_by_key(q, k, v, slopes):
        bias = slopes.view(1, H, 1, 1) * torch.arange(k.shape[2]).view(1, 1, 1, -1)
        return (q @ k.mT + bias).masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v


with spelling(qkv):

    def alibi_with_computed_slopes(q, k, v):
        slopes = 2.0 ** (-8.0 * torch.arange(1, H + 1, dtype=q.dtype) / H)
        i = torch.arange(q.shape[2])
        return (q @ k.mT - slopes[:, None, None] * (i[:, None] - i[None]).abs()).softmax(-1) @ v

    def two_finite_fills_one_inside_the_other(q, k, v):
        i = torch.arange(q.shape[2])
        causal_fill = torch.where(i[:, None] >= i, 0.0, -1e9)
        return (q @ k.mT + torch.where(i[:, None] - i < 4, causal_fill, -1e9)).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(H, 2 * size.T - 1)))
def relative_table(q, k, v, table):
    i = torch.arange(q.shape[2])
    return (q @ k.mT + table[:, i[None] - i[:, None] + size.T - 1]).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(8, H)))
def t5_buckets(q, k, v, table):
    i = torch.arange(q.shape[2])
    behind = -torch.clamp(i[None] - i[:, None], max=0)
    far = 4 + (torch.log(behind.float() / 4) / math.log(16 / 4) * 4).to(torch.int64)
    bucket = torch.where(behind < 4, behind, far.clamp(max=7))
    return (q @ k.mT + F.embedding(bucket, table).permute(2, 0, 1)[None]).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(9, H), torch.randint(0, 9, (size.T, size.T))))
def swin_index_table(q, k, v, table, index):
    bias = table[index.view(-1)].view(q.shape[2], q.shape[2], -1).permute(2, 0, 1).contiguous()
    return (q @ k.mT + bias.unsqueeze(0)).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(1, H, 16, 16)))
def bias_cut_from_a_larger_one(q, k, v, bias):
    t = q.shape[2]
    return (q @ k.mT + bias[:, :, :t, :t]).softmax(-1) @ v


@spelling(lambda: (*qkv(), normal(9, D)))
def relative_keys(q, k, v, table):
    i = torch.arange(q.shape[2])
    relative = table[(i[None] - i[:, None]).clamp(-4, 4) + 4]
    return (q @ k.mT + torch.einsum("bhqd,qkd->bhqk", q, relative)).softmax(-1) @ v


@spelling(lambda: (*qkv(), *normals("9D 9D")))
def disentangled(q, k, v, key_table, query_table):
    i = torch.arange(q.shape[2])
    place = (i[:, None] - i[None]).clamp(-4, 4) + 4
    to_place = torch.gather(q @ key_table.mT, -1, place.expand(*q.shape[:2], -1, -1))
    from_place = torch.gather(k @ query_table.mT, -1, place.expand(*q.shape[:2], -1, -1)).mT
    return ((q @ k.mT + to_place + from_place) / math.sqrt(3 * D)).softmax(-1) @ v


@spelling(lambda: (*qkv(), *normals("HTD H1D H1D")))
def transformer_xl(q, k, v, positions, u, w):
    t = q.shape[2]
    shifted = F.pad((q + w) @ positions.mT, (1, 0))
    shifted = shifted.view(*q.shape[:2], t + 1, t)[:, :, 1:].view(*q.shape[:2], t, t)
    s = ((q + u) @ k.mT + shifted) / math.sqrt(D)
    return s.masked_fill(~causal(t), -INF).softmax(-1) @ v


@spelling(lambda: (normal(size.B, 2 * size.T + 2, H * D), normal(H, 64, D)))
def relative_shift_over_every_second_token(x, positions):
    x = x[:, 1::2].unflatten(-1, (H, D)).transpose(1, 2)
    t = x.shape[2] - 1
    q, k, v = x[:, :, :t], x[:, :, 1:], x[:, :, 1:]
    shifted = F.pad(torch.einsum("bhqd,hpd->bhqp", q, positions[:, : 2 * t - 1]), (1, 0))
    shifted = shifted.view(*q.shape[:2], 2 * t, t)[:, :, 1:].view(*q.shape[:2], t, 2 * t - 1)[..., :t]
    return ((q @ k.mT + shifted) / math.sqrt(D)).softmax(-1) @ v


@spelling(lambda: (*[normal(size.T, size.B, H, D) for _ in range(3)], normal(D, D)))
def relative_shift_of_distances_counted_down(q, k, v, weight):
    tokens = k.shape[0]
    far = torch.arange(tokens - 1, -1, -1.0, dtype=q.dtype)[:, None] / 10 ** torch.arange(
        0, D, 2, dtype=q.dtype
    )
    table = torch.cat([far.sin(), far.cos()], -1) @ weight
    by_distance = torch.einsum("ibhd,jd->ijbh", q, table)
    padded = torch.cat([by_distance.new_zeros(tokens, 1, *by_distance.shape[2:]), by_distance], 1)
    shifted = padded.view(tokens + 1, tokens, *by_distance.shape[2:])[1:].view_as(by_distance)
    scores = torch.einsum("ibhd,jbhd->ijbh", q, k) + shifted
    scores = scores.masked_fill(~causal(tokens)[:, :, None, None], -INF)
    return torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), v)


@spelling(lambda: normals("BHTD BHTD BHTD BHT4"))
def bias_of_near_keys_and_a_finite_fill_in_one_selection(q, k, v, relative):
    i = torch.arange(q.shape[2])
    behind = i[:, None] - i
    bias = relative.gather(-1, behind.clamp(0, 3).expand(*relative.shape[:2], -1, -1))
    return (q @ k.mT + torch.where((behind >= 0) & (behind < 4), bias, -3e38)).softmax(-1) @ v


@spelling(lambda: (*normals("BHTD BHTD BHTD"), normals("H")[0]))
def slopes_and_two_kinds_of_fill_in_nested_selections(q, k, v, slopes):
    i = torch.arange(q.shape[2])
    behind = i[:, None] - i
    far = torch.where(behind < -3, -INF, -1e9)
    return (q @ k.mT + torch.where(behind >= 0, -slopes[:, None, None] * behind, far)).softmax(-1) @ v
