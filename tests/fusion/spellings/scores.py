"""How a score comes about: where its scale stands, and functions of the score, the query or the key."""

import math

import torch
import torch.nn.functional as F

from .registry import INF, D, H, causal, cross, normal, normals, not_yet, qkv, size, spelling

spelling(
    qkv,
    no_scale=lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v,
    scale_divides_in_place=lambda q, k, v: (
        torch.matmul(q, k.transpose(2, 3)).div_(D**0.5).softmax(-1).matmul(v)
    ),
    leaky_scores=lambda q, k, v: F.leaky_relu(q @ k.mT, 0.2).softmax(-1) @ v,
    clipped_to_six=lambda q, k, v: F.relu6(q @ k.mT).softmax(-1) @ v,
    cosine=lambda q, k, v: (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10).softmax(-1) @ v,
)


spelling(
    cross,
    scale_divides_scores=lambda q, k, v: torch.softmax(q @ k.mT / math.sqrt(D), dim=-1) @ v,
    scale_from_the_tensor=lambda q, k, v: (q @ k.mT * q.size(-1) ** -0.5).softmax(-1) @ v,
    scale_in_q=lambda q, k, v: torch.softmax((q * D**-0.5) @ k.mT, -1) @ v,
    scale_in_k=lambda q, k, v: torch.softmax(q @ (k / math.sqrt(D)).mT, -1) @ v,
    scale_in_both=lambda q, k, v: torch.softmax((q * D**-0.25) @ (k * D**-0.25).mT, -1) @ v,
    scale_as_tensor=lambda q, k, v: (
        torch.softmax(q @ k.mT / torch.tensor(math.sqrt(D), dtype=torch.float64), -1) @ v
    ),
)


@spelling(lambda: (*qkv(), normal(H, 1, 1)))
def scale_per_head(q, k, v, temperature):
    return torch.softmax(q @ k.mT * temperature, -1) @ v


@spelling(lambda: (*cross(), torch.rand((), dtype=torch.float64)))
def scale_learned(q, k, v, temperature):
    return ((q @ k.mT) * temperature.exp().clamp(max=100)).softmax(-1) @ v


@spelling(cross)
def the_first_query_has_another_scale(q, k, v):
    scores = q @ k.mT
    return torch.cat([scores[:, :, :1] * 2, scores[:, :, 1:]], 2).softmax(-1) @ v


@spelling(lambda: (*cross(), normal(size.B, H, size.T, 1)))
def a_constant_added_to_each_row(q, k, v, shift):
    return (q @ k.mT + shift).softmax(-1) @ v


with spelling(qkv):

    def softcap(q, k, v):
        s = 20.0 * torch.tanh(q @ k.mT / 20.0)
        return s.masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v

    def rotary(q, k, v):
        i = torch.arange(q.shape[2], dtype=q.dtype)
        angle = i[:, None] * 10000 ** (-torch.arange(0, D, 2, dtype=q.dtype) / D)

        def turn(x):
            a, b = x.chunk(2, -1)
            return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

        return (turn(q) @ turn(k).mT).masked_fill(~causal(q.shape[2]), -INF).softmax(-1) @ v


@not_yet(cross)
def cosine_by_its_function(q, k, v):
    return (10 * F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)).softmax(-1) @ v


@spelling(lambda: (*qkv(), *normals("D D")))
def normalised_queries_and_keys(q, k, v, a, b):
    return (F.layer_norm(q, (D,), a) @ F.layer_norm(k, (D,), b).mT).softmax(-1) @ v


@spelling(lambda: normals("BT BS BSD"))
def scores_are_an_outer_product(a, b, v):
    return (0.5 * a[:, :, None] * b[:, None]).softmax(-1) @ v


@spelling(lambda: (*normals("BTH BTH BTHD"), torch.rand(size.B, size.T, size.T) < 0.6))
def graph_attention(of_query, of_key, v, edges):
    scores = F.leaky_relu(of_query[:, :, None] + of_key[:, None], 0.2)
    scores = scores.masked_fill(~edges[..., None], -9e15)
    return torch.einsum("bqkh,bkhd->bqhd", scores.softmax(2), v)
