"""Windows with global tokens and windows with gaps equal their definitions over the visible keys."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attngraph.models.masked_attention import SlidingWindowAttention, SlidingWindowConfig
from attngraph.models.windowed_attention import (
    DilatedWindowAttention,
    DilatedWindowConfig,
    GlobalWindowAttention,
    GlobalWindowConfig,
)

Oracle = Callable[..., Tensor]
GLOBAL = GlobalWindowConfig(width=6, heads=3, key_width=4, value_width=5, window=4)
DILATED = DilatedWindowConfig(width=6, heads=3, key_width=4, value_width=5, window=4, dilations=(1, 2, 3))


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def some_global(*places: tuple[int, ...]) -> Tensor:
    marked = torch.zeros(len(places), 9, dtype=torch.bool)
    for row, tokens in enumerate(places):
        marked[row, list(tokens)] = True
    return marked


@pytest.mark.parametrize("lengths", [None, (9, 6)])
def test_global_tokens_see_everything_by_projections_of_their_own_and_others_their_window(
    lengths: tuple[int, int] | None, attend: Oracle, heads_of: Oracle, join: Oracle
) -> None:
    module, x = GlobalWindowAttention(GLOBAL).double(), rand(2, 9, 6)
    is_global = some_global((0, 5), (2,))
    keep = None if lengths is None else torch.arange(9) < torch.tensor(lengths)[:, None]

    def real(b: int, k: int) -> bool:
        return lengths is None or k < lengths[b]

    def local(b: int, h: int, q: int, k: int) -> bool:
        return real(b, k) and (abs(q - k) <= 2 or bool(is_global[b, k]))

    def everywhere(b: int, h: int, q: int, k: int) -> bool:
        return real(b, k)

    def attention(names: tuple[str, str, str], seen: Callable[[int, int, int, int], bool]) -> Tensor:
        parts = [module.get_submodule(name) for name in names]
        query, key, value = (heads_of(x, part.weight, part.bias, 3) for part in parts)
        return attend(query, key, value, scale=0.5, keep=seen)

    near = attention(("query", "key", "value"), local)
    far = attention(("global_query", "global_key", "global_value"), everywhere)
    expected = near.clone()
    for b in range(2):
        for t in range(9):
            if is_global[b, t]:
                expected[b, :, t] = far[b, :, t]
    assert_close(module(x, is_global, keep), join(expected, module.project))


def test_without_global_tokens_it_is_the_plain_sliding_window() -> None:
    module, x = GlobalWindowAttention(GLOBAL).double(), rand(2, 9, 6)
    plain = SlidingWindowAttention(
        SlidingWindowConfig(width=6, heads=3, key_width=4, value_width=5, window=4)
    ).double()
    parts = [module.query, module.key, module.value]
    with torch.no_grad():
        plain.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
        plain.qkv.bias.copy_(torch.cat([part.bias for part in parts]))
    plain.project.load_state_dict(module.project.state_dict())
    assert_close(module(x, torch.zeros(2, 9, dtype=torch.bool)), plain(x))


def test_a_global_token_has_influence_everywhere_and_a_local_one_on_its_window_and_the_global_ones() -> None:
    module, x, is_global = GlobalWindowAttention(GLOBAL).double(), rand(1, 9, 6), some_global((7,))
    before = module(x, is_global)

    def moved_by(token: int) -> list[int]:
        changed = x.clone()
        changed[:, token] += 1.0
        return (module(changed, is_global) != before).any(dim=-1)[0].nonzero().flatten().tolist()

    assert moved_by(7) == list(range(9))
    assert moved_by(2) == [0, 1, 2, 3, 4, 7]


def test_padding_far_from_any_key_is_nan_unless_a_token_is_global() -> None:
    module, x = GlobalWindowAttention(GLOBAL).double(), rand(2, 9, 6)
    keep = torch.arange(9).expand(2, 9) < 5
    output = module(x, some_global((), (0,)), keep)
    assert output[0].isnan().any(dim=-1).tolist() == [t >= 7 for t in range(9)]
    assert output[1].isfinite().all()


@pytest.mark.parametrize("window", [0, 1, 2, 4, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_a_dilated_window_equals_the_definition(
    causal: bool, window: int, attend: Oracle, heads_of: Oracle, join: Oracle
) -> None:
    module = DilatedWindowAttention(replace(DILATED, window=window, causal=causal)).double()
    x = rand(2, 11, 6)

    def keep(b: int, h: int, q: int, k: int) -> bool:
        steps = range(window + 1) if causal else range(-(window // 2), window // 2 + 1)
        return k in {q - (h + 1) * step for step in steps}

    weight, bias = module.qkv.weight, module.qkv.bias
    spans = (slice(0, 12), slice(12, 24), slice(24, None))
    query, key, value = (heads_of(x, weight[s], bias[s], 3) for s in spans)
    assert_close(module(x), join(attend(query, key, value, scale=0.5, keep=keep), module.project))


@pytest.mark.parametrize("causal", [False, True])
def test_a_dilation_of_one_is_the_plain_sliding_window(causal: bool) -> None:
    dilated = DilatedWindowAttention(replace(DILATED, dilations=(1, 1, 1), causal=causal)).double()
    sizes = SlidingWindowConfig(width=6, heads=3, key_width=4, value_width=5, window=4, causal=causal)
    plain, x = SlidingWindowAttention(sizes).double(), rand(2, 9, 6)
    plain.load_state_dict(dilated.state_dict())
    assert_close(dilated(x), plain(x), rtol=0, atol=0)


def test_the_default_has_a_dilation_for_every_head() -> None:
    assert len(DilatedWindowConfig().dilations) == DilatedWindowConfig().heads
