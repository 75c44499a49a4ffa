"""One softmax that weighs several tensors, and one matrix of scores with a softmax over its rows and another
over its columns; near misses, in which a use is left that needs the weights or the scores."""

import torch
import torch.nn.functional as F

from .registry import D, cross, near_miss, normals, qkv, size, spelling

with spelling(lambda: (*cross(), *normals("BHS3"))):

    def one_softmax_for_two_values(q, k, v, more):
        p = (q @ k.mT).softmax(-1)
        return p @ v, p @ more

    def two_values_in_a_loop_over_blocks_of_keys(q, k, v, more):
        most, total, out, other = torch.full_like(q[..., :1], -torch.inf), 0.0, 0.0, 0.0
        for keys, values, others in zip(k.chunk(2, 2), v.chunk(2, 2), more.chunk(2, 2), strict=True):
            s = q @ keys.mT
            now = torch.maximum(most, s.amax(-1, keepdim=True))
            p, kept, most = (s - now).exp(), (most - now).exp(), now
            total = kept * total + p.sum(-1, keepdim=True)
            out, other = kept * out + p @ values, kept * other + p @ others
        return out / total, other / total


@spelling(lambda: (*cross(), *normals("BHS3 TD")))
def the_second_value_is_computed_after_the_first_sum(q, k, v, more, gate):
    p = (q @ k.mT).softmax(-1)
    out = (p @ v)[..., :D] * gate
    return out, p @ more.tanh()


@spelling(lambda: normals("BTHD BTHD BTHD BTH43 BTH43 BTH53 H"))
def invariant_points(q, k, v, q_points, k_points, v_points, weight):
    apart = ((q_points[:, :, None] - k_points[:, None]) ** 2).sum((-1, -2))
    s = torch.einsum("bihd,bjhd->bhij", q, k) - 0.5 * (apart * F.softplus(weight)).permute(0, 3, 1, 2)
    p = (s / D**0.5).softmax(-1)
    values = torch.einsum("bhij,bjhd->bihd", p, v).flatten(2)
    points = torch.einsum("bhij,bjhpc->bihpc", p, v_points)
    return torch.cat([values, points.flatten(2), points.norm(dim=-1).flatten(2)], -1)


@spelling(qkv, count=2)
def weights_applied_twice_in_turn(q, k, v):
    p = (q @ k.mT).softmax(-1)
    return p @ (p @ v)


@spelling(lambda: normals("BTD BSD BTD BSD"), count=2)
def scores_of_both_directions(a, b, of_a, of_b):
    s = a @ b.mT
    return s.softmax(-1) @ of_b, s.softmax(-2).mT @ of_a


def two_images():
    return (*normals("BHTD BHSD BHTD BHSD"), torch.rand(size.B, 1, size.T, size.S) < 0.8)


@spelling(two_images, count=2)
def both_directions_under_a_mask(qk, other_qk, v, other_v, keep):
    s = torch.einsum("bhid,bhjd->bhij", qk * D**-0.25, other_qk * D**-0.25).masked_fill(~keep, -float("inf"))
    there = F.softmax(s, dim=-1)
    back = F.softmax(s.transpose(-2, -1).contiguous(), dim=-1)
    found = torch.einsum("bhij,bhjd->bhid", there, other_v)
    other_found = torch.einsum("bhji,bhjd->bhid", back.transpose(-2, -1), v)
    return found.nan_to_num(), other_found.nan_to_num()


@spelling(lambda: (*cross(), *normals("BHS3 BHT3")), count=2)
def both_directions_and_two_values(q, k, v, more, back):
    s = q @ k.mT
    p = s.softmax(-1)
    return p @ v, p @ more, s.mT.softmax(-1) @ back


@near_miss(lambda: (*qkv(), *normals("BTT3")))
def values_of_pairs_beside_values_of_tokens(q, k, v, pairs):
    p = (q @ k.mT).softmax(-1)
    return p @ v, torch.einsum("bhij,bijc->bihc", p, pairs)


@near_miss(lambda: (*cross(), *normals("BHS3")))
def one_of_two_uses_is_changed_by_a_maximum(q, k, v, more):
    p = (q @ k.mT).softmax(-1)
    return p @ v, p @ more, p.amax(-1)


@near_miss(lambda: normals("BTD BSD BTD BSD"))
def weights_of_both_directions_multiplied(a, b, of_a, of_b):
    s = a @ b.mT
    there, back = s.softmax(-1), s.softmax(-2)
    return there @ of_b, back.mT @ of_a, there * back
