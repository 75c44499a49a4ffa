"""Caches of 8 bits on simulated ranks: each rounds what its heads attend to, with scales of its own."""

import copy

import pytest
import torch

import attngraph
from attngraph.models.mla import MLAConfig, MLADecoder
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from tests.parallel.models import on_ranks


def _heads(kv_heads: int) -> torch.nn.Module:
    sizes = {"vocab_size": 64, "width": 32, "heads": 4, "head_width": 8, "hidden": 48, "layers": 1}
    return ModernDecoder(ModernDecoderConfig(**sizes, kv_heads=kv_heads))


def _latent() -> torch.nn.Module:
    sizes = {"vocab_size": 64, "width": 32, "heads": 4, "latent": 8, "nope": 8, "rope": 4, "value": 8}
    return MLADecoder(MLAConfig(**sizes, query_rank=None, layers=1, hidden=48))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "model, alone, held, alike",
    [
        pytest.param(lambda: _heads(4), 96, 48, [], id="heads"),
        pytest.param(lambda: _heads(1), 24, 24, [12, 12], id="one key head"),
        pytest.param(_latent, 16, 16, [16], id="latent"),
    ],
)
def test_ranks_round_what_their_heads_attend_to(
    model: object, alone: int, held: int, alike: list[int], dtype: torch.dtype
) -> None:
    """Bytes a token: of keys and values 8 a head, of a latent 12, and 4 of each scale."""
    torch.manual_seed(0)
    whole = model().eval()  # type: ignore[operator]
    config, ids = attngraph.CacheConfig(dtype=dtype), torch.randint(0, 64, (2, 9))
    one = attngraph.compile(copy.deepcopy(whole), cache=config)
    ranks = attngraph.compile(whole, cache=config, mesh=attngraph.SimulatedMesh(tensor=2))
    states = []
    for decoder in (one, ranks):
        logits, state = decoder.prefill([ids[0], ids[1, :4]])
        state.crop([8, 3])
        state.reorder([1, 0])
        states.append([logits, decoder.decode(ids[:, :2], state), decoder.generate(ids, 6)])
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
    cache = ranks.report.cache
    assert (one.report.cache.bytes_per_token, cache.bytes_per_token) == (alone, held)
    assert [size for _, size, _, _ in cache.ranks.alike] == alike
    assert cache.drift is not None and cache.drift.same == one.report.cache.drift.same


def test_tokens_of_rounded_values_are_not_divided_yet() -> None:
    with pytest.raises(ValueError, match="a cache of int8 whose tokens are divided"):
        on_ranks(2, _latent(), cache="tokens", dtype=torch.int8)
