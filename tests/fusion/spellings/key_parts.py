"""Keys in several parts, joined or multiplied separately under one softmax; and parts that do not fit."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import D, H, cross, mutant, near_miss, normal, normals, qkv, size, spelling


@spelling(lambda: (*cross(), normal(size.B, H, 3, D), normal(size.B, H, 3, D + 2)))
def memory_before_the_keys(q, k, v, memory_k, memory_v):
    k, v = torch.cat([memory_k, k], 2), torch.cat([memory_v, v], 2)
    return (q @ k.mT).softmax(-1) @ v


def prefixed() -> tuple[Tensor, ...]:
    return (*qkv(), *normals("BHSD BHSD"))


with spelling(prefixed):

    def keys_and_values_in_two_parts(q, k, v, more_k, more_v):
        p = torch.cat([q @ more_k.mT, q @ k.mT], -1).div(math.sqrt(D)).softmax(-1)
        return p[..., : more_k.shape[2]] @ more_v + p[..., more_k.shape[2] :] @ v

    def parts_with_queries_of_their_own(q, k, v, more_k, more_v):
        p = torch.cat([q @ more_k.mT, (q + 1).tanh() @ k.mT], -1).softmax(-1)
        return p[..., : more_k.shape[2]] @ more_v + p[..., more_k.shape[2] :] @ v


@spelling(lambda: (*prefixed(), normal(size.B, size.S + size.T)))
def parts_split_under_one_mask(q, k, v, more_k, more_v, mask):
    p = torch.softmax(torch.cat([q @ more_k.mT, q @ k.mT], -1) + mask[:, None, None], -1)
    first, second = p.split([more_k.shape[2], k.shape[2]], -1)
    return torch.einsum("bhqk,bhkd->bqhd", second, v) + (first @ more_v).transpose(1, 2)


@spelling(lambda: (*qkv(), *normals("BHSD BHSD BHSD BHSD")))
def keys_in_three_parts(q, k, v, a, a_values, c, c_values):
    n, m = a.shape[2], a.shape[2] + k.shape[2]
    p = torch.cat([q @ a.mT, q @ k.mT, q @ c.mT], -1).softmax(-1)
    return p[..., :n] @ a_values + p[..., n:m] @ v + p[..., m:] @ c_values


def with_shared_keys() -> tuple[Tensor, ...]:
    blocks = normals("BH3TD BH3TD BH3TD")
    return (*blocks, *normals("BHSD BHSD"), normal(size.B, 3, size.S + size.T))


@spelling(with_shared_keys)
def shared_keys_beside_those_of_each_block(q, k, v, shared_k, shared_v, mask):
    n = shared_k.shape[2]
    s = [torch.einsum("bhnqd,bhkd->bhnqk", q, shared_k), torch.einsum("bhnqd,bhnkd->bhnqk", q, k)]
    p = (torch.cat(s, -1) + mask[:, None, :, None]).softmax(-1)
    own = torch.einsum("bhnqk,bhnkd->bhnqd", p[..., n:], v)
    return own + torch.einsum("bhnqk,bhkd->bhnqd", p[..., :n], shared_v)


with near_miss(prefixed):

    def parts_of_which_a_key_is_left_out(q, k, v, more_k, more_v):
        n = more_k.shape[2]
        p = torch.cat([q @ more_k.mT, q @ k.mT], -1).softmax(-1)
        return p[..., : n - 1] @ more_v[:, :, : n - 1] + p[..., n:] @ v

    def parts_of_which_a_key_counts_twice(q, k, v, more_k, more_v):
        n = more_k.shape[2]
        p = torch.cat([q @ more_k.mT, q @ k.mT], -1).softmax(-1)
        return p[..., :n] @ more_v + p[..., n - 1 :] @ F.pad(v, (0, 0, 1, 0))


@mutant(lambda: (*cross(), normal(size.B, H, size.T, 5), normal(size.B, H, 5, D + 2)))
def two_sets_of_keys_in_one_softmax(q, k, v, other_scores, other_v):
    p = torch.cat([q @ k.mT, other_scores], -1).softmax(-1)
    own, other = p.split([k.shape[2], 5], -1)
    return own @ v + other @ other_v
