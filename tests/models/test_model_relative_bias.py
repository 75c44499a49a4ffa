"""Relative biases equal those of stock T5, BLOOM and Swin, and attention with them its definition."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attngraph.models.relative_bias import (
    ALiBi,
    RelativeBiasAttention,
    RelativeBiasConfig,
    T5Bias,
    WindowBias,
    offsets,
    t5_buckets,
)

Oracle = Callable[..., Tensor]
Kind = Literal["t5", "alibi", "swin"]
SMALL = RelativeBiasConfig(
    width=6, heads=3, key_width=4, value_width=5, buckets=8, max_distance=8, side=3
)  # fmt: skip
KINDS: list[Kind] = ["t5", "alibi", "swin"]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def with_random_tables(module: RelativeBiasAttention) -> RelativeBiasAttention:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_bias_is_added_to_the_scores(
    kind: Kind, causal: bool, attend: Oracle, heads_of: Oracle, join: Oracle
) -> None:
    module = with_random_tables(RelativeBiasAttention(replace(SMALL, bias_kind=kind, causal=causal)).double())
    x = rand(2, 9, 6)
    query, key, value = (
        heads_of(x, part.weight, part.bias, 3) for part in (module.query, module.key, module.value)
    )
    # A key and a query with one coordinate for each place carry the bias into the dot product.
    scale = 1.0 if kind == "t5" else 0.5
    bias = module.relative_bias(9)
    assert bias.shape == (3, 9, 9)
    query = torch.cat([query, bias.expand(2, 3, 9, 9) / scale], dim=-1)
    key = torch.cat([key, torch.eye(9, dtype=torch.float64).expand(2, 3, 9, 9)], dim=-1)
    mixed = attend(query, key, value, scale=scale, keep=lambda b, h, q, k: k <= q or not causal)
    assert_close(module(x), join(mixed, module.project))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (16, 64)])
def test_buckets_are_those_of_stock_t5(buckets: int, max_distance: int, causal: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offset = torch.arange(-300, 301)
    theirs = t5.T5Attention._relative_position_bucket(
        offset, bidirectional=not causal, num_buckets=buckets, max_distance=max_distance
    )
    ours = t5_buckets(offset, buckets=buckets, max_distance=max_distance, causal=causal)
    assert torch.equal(ours, theirs)


def test_buckets_grow_geometrically_in_exact_arithmetic() -> None:
    found = t5_buckets(-torch.arange(200), buckets=32, max_distance=128, causal=True).tolist()
    for distance in range(16):
        assert found[distance] == distance
    for distance in range(16, 200):
        # the largest n with 16 * 8^(n / 16) <= distance, n at most 15
        n = max(n for n in range(16) if Fraction(distance, 16) ** 16 >= 8**n)
        assert found[distance] == 16 + n


def test_t5_attention_equals_stock_t5_with_the_same_weights() -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(
        d_model=12, d_kv=4, num_heads=3, relative_attention_num_buckets=8, dropout_rate=0.0,
        relative_attention_max_distance=20, is_decoder=False, attn_implementation="eager",
    )  # fmt: skip
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double().eval()
    sizes = RelativeBiasConfig(
        width=12, heads=3, key_width=4, value_width=4, bias=False, buckets=8, max_distance=20
    )
    ours, x = RelativeBiasAttention(sizes).double(), rand(2, 40, 12)
    weights = {
        "query.weight": theirs.q.weight,
        "key.weight": theirs.k.weight,
        "value.weight": theirs.v.weight,
        "project.weight": theirs.o.weight,
        "relative_bias.table.weight": theirs.relative_attention_bias.weight,
    }
    for tensor in weights.values():
        torch.nn.init.normal_(tensor, std=0.3)
    ours.load_state_dict(weights)
    # T5 takes its softmax in float32.
    assert_close(ours(x), theirs(x)[0], rtol=1e-5, atol=1e-5)


def test_alibi_slopes_are_a_geometric_sequence_and_those_of_stock_bloom() -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    assert ALiBi(8).slopes.tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    # BLOOM adds slope * j, which differs from slope * (j - i) by a constant of each row.
    theirs = bloom.build_alibi_tensor(torch.ones(1, 7), 8, torch.float32)  # [H, 1, T]
    ours = ALiBi(8)(7)
    assert_close(ours - ours[:, :, :1], (theirs - theirs[:, :, :1]).expand(8, 7, 7))
    assert not ours.diagonal(dim1=1, dim2=2).any()


def test_window_attention_equals_stock_swin_with_the_same_weights() -> None:
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    config = swin.SwinConfig(attention_probs_dropout_prob=0.0, attn_implementation="eager")
    theirs = swin.SwinAttention(config, 12, 3, 4).double().eval()
    sizes = RelativeBiasConfig(width=12, heads=3, key_width=4, value_width=4, bias_kind="swin", side=4)
    ours, x = RelativeBiasAttention(sizes).double(), rand(5, 16, 12)
    table = dict(theirs.relative_position_bias.named_parameters())
    assert list(table) == ["relative_position_bias_table"]
    parts = {"query": theirs.q_proj, "key": theirs.k_proj, "value": theirs.v_proj, "project": theirs.o_proj}
    weights = {"relative_bias.table": table["relative_position_bias_table"]}
    for name, part in parts.items():
        weights |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
    for tensor in weights.values():
        torch.nn.init.normal_(tensor, std=0.3)
    ours.load_state_dict(weights)
    # Swin takes its softmax in float32.
    assert_close(ours(x), theirs(x)[0], rtol=1e-5, atol=1e-5)


def test_every_offset_in_the_plane_has_an_entry_of_its_own() -> None:
    bias = WindowBias(1, 3)
    with torch.no_grad():
        bias.table.copy_(torch.arange(25.0)[:, None])
    found: dict[tuple[int, int], float] = {}
    for i in range(9):
        for j in range(9):
            offset = (i // 3 - j // 3, i % 3 - j % 3)
            assert found.setdefault(offset, bias(9)[0, i, j].item()) == bias(9)[0, i, j].item()
    assert sorted(found.values()) == list(range(25))


@pytest.mark.parametrize("causal", [False, True])
def test_t5_and_alibi_biases_depend_on_the_offset_only(causal: bool) -> None:
    t5 = T5Bias(3, buckets=8, max_distance=20, causal=causal)
    for bias in (t5(40), ALiBi(3)(40)):
        assert torch.equal(bias[:, 1:, 1:], bias[:, :-1, :-1])
    assert offsets(3, torch.device("cpu")).tolist() == [[0, 1, 2], [-1, 0, 1], [-2, -1, 0]]
