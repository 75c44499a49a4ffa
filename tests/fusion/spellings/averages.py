"""Weights without queries and keys: averages over what a mask keeps (bags of words), tables of biases."""

import torch

from .registry import INF, H, causal, near_miss, normal, normals, size, spelling


def words():
    return normals("BTD")


with spelling(words):

    def bag_of_words_by_a_softmax_of_zeros(x):
        t = x.shape[1]
        weights = torch.zeros(t, t, dtype=x.dtype).masked_fill(torch.tril(torch.ones(t, t)) == 0, -INF)
        return weights.softmax(-1) @ x

    def bag_of_words_by_a_softmax_of_zeros_for_each_sequence(x):
        b, t, _ = x.shape
        hidden = torch.tril(torch.ones(t, t)).view(1, t, t) == 0
        return torch.zeros(b, t, t, dtype=x.dtype).masked_fill(hidden, -INF).softmax(-1) @ x

    def bag_of_words_by_a_triangle_over_its_sum(x):
        t = x.shape[1]
        weights = torch.tril(torch.ones(t, t, dtype=x.dtype))
        return (weights / weights.sum(1, keepdim=True)) @ x

    def bag_of_words_by_a_triangle_divided_afterwards(x):
        weights = causal(x.shape[1]).to(x.dtype)
        weights = weights / weights.sum(-1)[:, None]
        return torch.einsum("qk,bkd->bqd", weights, x)

    def averages_that_weigh_near_tokens_twice(x):
        i = torch.arange(x.shape[1])
        weights = torch.where((i[:, None] - i).abs() < 2, 2.0, 1.0).to(x.dtype)
        return (weights / weights.sum(1, keepdim=True)) @ x


@spelling(lambda: normals("TD"))
def averages_over_a_window(x):
    weights = torch.ones(x.shape[0], x.shape[0], dtype=x.dtype).tril().triu(-2)
    return (weights / weights.sum(1, keepdim=True)) @ x


@spelling(lambda: normals("BHTD"))
def bag_of_words_under_heads(v):
    t = v.shape[2]
    return torch.zeros(t, t, dtype=v.dtype).masked_fill(~causal(t), -INF).softmax(-1) @ v


@spelling(lambda: (normal(size.B, H, size.T, 8), normal(H, size.T, size.T)))
def softmax_of_a_table(v, table):
    return table.masked_fill(~causal(v.shape[2]), -INF).softmax(-1) @ v


@spelling(lambda: (normal(size.B, H, size.T, 8), normal(H)))
def softmax_of_distances_alone(v, slopes):
    i = torch.arange(v.shape[2])
    return (-slopes[:, None, None] * (i[:, None] - i).abs()).softmax(-1) @ v


@near_miss(lambda: (*normals("BHTD"), normal(size.B, H, size.T, size.T)))
def softmax_of_a_table_as_large_as_the_weights(v, table):
    return table.softmax(-1) @ v


@near_miss(lambda: (*normals("BTD"), torch.rand(size.B, size.T) > 0.3))
def mean_over_what_is_no_padding(x, keep):
    weights = torch.zeros(*keep.shape, dtype=x.dtype).masked_fill(~keep, -INF).softmax(-1)
    return (weights[:, None] @ x)[:, 0]


with near_miss(words):

    def a_table_divided_by_the_sum_of_its_columns(x):
        weights = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=x.dtype))
        return (weights / weights.sum(0, keepdim=True)) @ x

    def a_triangle_that_is_not_divided(x):
        return torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=x.dtype)) @ x

    def a_table_with_negative_entries_over_its_sum(x):
        i = torch.arange(x.shape[1])
        weights = torch.where(i <= i[:, None], 1.0, -0.25).to(x.dtype)
        return (weights / weights.sum(1, keepdim=True)) @ x
