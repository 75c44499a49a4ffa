"""The two products, by every operation that multiplies and sums (matmul, einsum, bmm, vmap, torch's own), and
the layouts of what is multiplied: packed projections, images, axes, local blocks."""

import torch
import torch.nn.functional as F

from .registry import D, H, cross, normal, normals, qkv, size, spelling

spelling(
    cross,
    einsum=lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v
    ),
    keys_in_rows=lambda q, k, v: torch.softmax(k @ q.mT, dim=-2).mT @ v,
    torchs_own=lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
)


with spelling(lambda: normals("BTHD BSHD BSHD")):

    def einsum_tokens_first(q, k, v):
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    def einsum_heads_before_keys(q, k, v):
        return torch.einsum("bths,bshd->bthd", torch.einsum("bthd,bshd->bths", q, k).softmax(3), v)


with spelling(cross):

    def einsum_ellipsis(q, k, v):
        weights = torch.einsum("...qd,...kd->...qk", q, k).softmax(-1)
        return torch.einsum("...qk,...kd->...qd", weights, v)

    def flattened_bmm(q, k, v):
        q, k, v = (x.reshape(size.B * H, x.shape[2], -1) for x in (q, k, v))
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v).view(size.B, H, size.T, -1)

    def baddbmm(q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        zero = torch.zeros(size.B * H, size.T, size.S, dtype=q.dtype)
        return torch.baddbmm(zero, q, k.transpose(1, 2), beta=0, alpha=D**-0.5).softmax(-1) @ v

    def multiply_and_sum(q, k, v):
        scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1)
        return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)

    def vmap_over_batch_and_heads(q, k, v):
        def one(q, k, v):
            return torch.softmax(q @ k.T, -1) @ v

        return torch.vmap(torch.vmap(one))(q, k, v)


@spelling(lambda: (*cross(), normal(H, D + 2, 16)))
def einsum_with_output_projection(q, k, v, w):
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqd,hdo->bqo", torch.einsum("bhqk,bhkd->bhqd", weights, v), w)


@spelling(lambda: (*cross(), normal(H)))
def einsum_of_three_operands(q, k, v, scale):
    return torch.einsum("bhij,bhje->bhie", torch.einsum("bhid,bhjd,h->bhij", q, k, scale).softmax(-1), v)


@spelling(lambda: (*cross(), normal(H, D + 2, 5)))
def einsum_with_values_and_projection(q, k, v, w):
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhje,hec->bic", weights, v, w)


spelling(
    lambda: normals("TD SD SD"),
    linear_as_product=lambda q, k, v: F.linear(q, k).softmax(-1) @ v,
    tensordot=lambda q, k, v: torch.tensordot(torch.tensordot(q, k, dims=([1], [1])).softmax(-1), v, dims=1),
    inner_products=lambda q, k, v: torch.inner(torch.inner(q, k).softmax(-1), v.T),
)


@spelling(lambda: (*normals("D SD"), normal(size.S, D + 2)))
def one_query_multiplied_and_summed(q, k, v):
    weights = ((k * q).sum(1) / D**0.5).softmax(0)
    return (weights[:, None] * v).sum(0)


@spelling(lambda: normals("BTD BSD BSD"))
def single_head(q, k, v):
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT), dim=2), v)


@spelling(lambda: (*normals("D SD"), normal(size.S, D + 1)))
def one_vector_query(q, k, v):
    return torch.softmax(k @ q, 0) @ v


@spelling(qkv)
def torchs_own_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


@spelling(lambda: (normal(size.B, 3 * H * D, 16),))
def channel_first(x):
    q, k, v = x.view(size.B, 3, H, D, 16).unbind(1)
    return (v @ torch.softmax(q.mT @ k, -1).mT).reshape(size.B, H * D, 16)


@spelling(lambda: normals("BD35 BD35 BD35"))
def channel_first_images(q, k, v):
    weights = (q.flatten(2).mT @ k.flatten(2)).softmax(-1)
    return (v.flatten(2) @ weights.mT).view(v.shape)


with spelling(lambda: (normal(size.B, size.T, 3 * H * D),)):

    def packed_interleaved(x):
        q, k, v = x.view(size.B, -1, H, 3, D).permute(3, 0, 2, 1, 4)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(size.B, -1, H * D)

    def packed_per_head(x):
        q, k, v = x.view(size.B, -1, H, 3 * D).transpose(1, 2).chunk(3, dim=-1)
        return (q @ k.mT).softmax(-1) @ v


@spelling(lambda: normals("B5TD B5TD B5TD"))
def axial_rows(q, k, v):
    return torch.einsum("brcx,brxd->brcd", torch.einsum("brcd,brxd->brcx", q, k).softmax(-1), v)


@spelling(lambda: normals("BH8D BH8D BH8D"))
def local_blocks_by_view(q, k, v):
    q, k, v = (x.unflatten(2, (-1, 4)) for x in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).flatten(2, 3)


@spelling(lambda: normals("BH34D BH35D BH35D"))
def pixels_in_two_dimensions(q, k, v):
    s = torch.einsum("bhxyd,bhuvd->bhxyuv", q, k)
    weights = s.flatten(-2).softmax(-1).view_as(s)
    return torch.einsum("bhxyuv,bhuvd->bhxyd", weights, v)


@spelling(lambda: (*[normal(4 * (size.B - 1), H, 9, D) for _ in range(3)], normal(4, 9, 9)))
def windows_of_one_image(q, k, v, mask):
    images = q.shape[0] // 4
    assert images == size.B - 1
    scores = (q @ k.mT).view(images, 4, q.shape[1], 9, 9) + mask[:, None]
    return scores.view(-1, q.shape[1], 9, 9).softmax(-1) @ v
