"""Caches of 8 bits: what is kept is within its bound, attention reads it as it was written, and all that is
done to a state takes the scales along."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import CacheConfig, KVCache, NoDecoderError
from attngraph.ir.ops import cached_attention as op
from attngraph.ir.ops import quantised
from attngraph.ir.ops.cached_attention import Rows
from attngraph.ir.ops.quantised import largest_error, quantise, widened
from tests.cache.models import Small, attend, convolved

transformers = pytest.importorskip("transformers")
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
VOCABULARY = 61


# --- values ---


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [1e-4, 1.0, 3e3])
def test_every_element_is_within_the_bound(dtype: torch.dtype, source: torch.dtype, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(50, 3, 24, generator=generator) * size).to(source)
    values[::7, :, ::3] *= 1e-3  # of a vector with few large elements
    found, by = quantise(values, dtype)
    assert found.dtype == dtype and by.dtype == torch.float32 and by.shape == values.shape[:-1]
    error = (widened(found, by, torch.float64) - values.double()).abs()
    allowed = largest_error(values, by, dtype)
    assert (error <= allowed).all()
    assert (error / allowed).max() > 0.9  # the bound is no larger than it needs to be
    if dtype == torch.int8:
        assert (allowed <= values.double().abs().amax(-1, keepdim=True) / 253).all()


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_vectors_of_zeros_and_of_no_numbers(dtype: torch.dtype) -> None:
    values = torch.randn(5, 8)
    values[1], values[2, 3], values[3, 0], values[4] = 0, torch.inf, torch.nan, 1e-42
    read = widened(*quantise(values, dtype), torch.float32)
    assert read[1].tolist() == [0] * 8
    assert read[2:4].isnan().all()
    assert read[[0, 4]].isfinite().all() and (read[4] - values[4]).abs().max() < 1e-38


# --- attention ---


class Kept:
    """Two rows in shuffled pages of 3 tokens, and new tokens."""

    def __init__(self, dtype: torch.dtype, width: int, heads: int, kv: int, columns: int, of: torch.dtype):
        g = torch.Generator().manual_seed(width)
        held, new = torch.tensor([11, 4, 70]), torch.tensor([0, 1, 3, 5])
        self.rows = Rows(torch.randperm(3 * columns, generator=g).view(3, columns), new, held, held)
        wide = torch.randn(2, 3 * columns, kv, 3, width, generator=g).to(of)
        self.scales: Any = (None, None)
        if dtype in EIGHT_BITS:
            pages, scales = quantise(wide, dtype)
            self.scales, read = tuple(scales), widened(pages, scales, torch.float64)
        else:
            pages = wide.to(dtype)
            read = pages.double()
        self.pages, self.wide = tuple(pages), tuple(read)
        self.q = torch.randn(1, heads, 5, width, generator=g).to(of)
        self.new = tuple(torch.randn(2, 1, kv, 5, width, generator=g).to(of))

    def found(self, program: str, kernel: str, reads: list[Tensor]) -> Tensor:
        return torch.ops.attngraph.cached_attention(
            self.q, *self.new, *self.pages, reads, (), program, *self.rows, kernel, *self.scales
        )

    def wanted(self, program: str, reads: list[Tensor]) -> Tensor:
        """What is read of the pages, as pages of float64."""
        q, k, v = (t.double() for t in (self.q, *self.new))
        return torch.ops.attngraph.cached_attention(
            q, k, v, *self.wide, [r.double() for r in reads], (), program, *self.rows, "reference"
        )


PROGRAMS = (
    "s = 0.3 * dot\nkeep k <= q",
    "s = 5.0 * tanh(dot / 5.0) + r0[h] * (k - q)\nkeep k <= q\nsink r0[h]",
    "keep k <= q and q - k < 6",
)


@pytest.mark.parametrize("kernel", ["cpu.decode", "reference", ""])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "heads", "kv"), [(16, 2, 2), (80, 4, 2), (20, 12, 1), (150, 3, 3)])
def test_attention_reads_what_was_written(
    dtype: torch.dtype, width: int, heads: int, kv: int, program: str, kernel: str
) -> None:
    for of, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        case = Kept(dtype, width, heads, kv, 3 if "q - k" in program else 24, of)
        reads = [torch.randn(heads, generator=torch.Generator().manual_seed(1)).to(of)]
        found, wanted = case.found(program, kernel, reads), case.wanted(program, reads)
        assert found.dtype == of
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_c_reads_pages_of_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "row_by_row", lambda *_: pytest.fail("a call for each row"))
    for dtype in (*EIGHT_BITS, torch.bfloat16, torch.float16, torch.float32):
        Kept(dtype, 16, 2, 2, 24, torch.float32).found(PROGRAMS[0], "", [])


def test_pages_of_integers_without_scales_are_not_read_by_c() -> None:
    case = Kept(torch.int8, 16, 2, 2, 24, torch.float32)
    by = torch.ones_like(case.scales[0])
    with_ones = torch.ops.attngraph.cached_attention(
        case.q, *case.new, *case.pages, [], (), PROGRAMS[0], *case.rows, "", by, by
    )
    case.scales = (None, None)
    torch.testing.assert_close(case.found(PROGRAMS[0], "", []), with_ones)


# --- decoders ---


SMALL = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip


def of(name: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return getattr(transformers, name)(getattr(transformers, config)(**sizes))  # type: ignore[no-any-return]

    make.__name__ = name  # in names of tests
    return make


gpt2 = of(
    "GPT2LMHeadModel", "GPT2Config", n_layer=1, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=64
)
llama = of("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **SMALL)
qwen3 = of("Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=2, head_dim=16, **SMALL)
mistral = of("MistralForCausalLM", "MistralConfig", num_key_value_heads=2, sliding_window=6, **SMALL)
"""With a window of six tokens: rings."""
deepseek = of(
    "DeepseekV3ForCausalLM", "DeepseekV3Config", kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1, n_routed_experts=2, num_experts_per_tok=1,
    n_group=1, topk_group=1, moe_intermediate_size=16, num_key_value_heads=4, **SMALL,
)  # fmt: skip
"""With latents of 16 + 8."""
BYTES = {gpt2: (256, 2 * 2 * (16 + 4)), llama: (128, 2 * 2 * (8 + 4)), qwen3: (256, 80), mistral: (128, 48),
         deepseek: (96, 24 + 4)}  # fmt: skip
"""Per token as computed, and in 8 bits."""
CONFIGS = {"contiguous": {}, "paged": {"layout": "paged", "page": 4}}


@functools.cache
def model_of(make: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = make().eval().requires_grad_(False)
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1 and "experts" not in name:
            parameter.mul_(5)  # so that attention is not the mean of its values
    return made


@functools.cache
def decoder_of(make: Any, dtype: torch.dtype | None, layout: str) -> attngraph.Decoder:
    return attngraph.compile(model_of(make), cache=CacheConfig(dtype=dtype, **CONFIGS[layout]))


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, wanted: Tensor, error: float = 0.1) -> bool:
    return bool((found - wanted).abs().max() < error * wanted.abs().max())


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("layout", CONFIGS)
@pytest.mark.parametrize("make", BYTES)
def test_stock_models_drift_little_for_a_quarter_of_the_bytes(
    make: Any, layout: str, dtype: torch.dtype, poisoned: None
) -> None:
    decoder, tokens = decoder_of(make, dtype, layout), ids(2, 24)
    with torch.no_grad():
        wanted = model_of(make)(tokens).logits
    logits, state = decoder.prefill(tokens[:, :5])
    torch.testing.assert_close(logits, wanted[:, :5], rtol=1e-3, atol=1e-3)  # nothing has been rounded yet
    pieces = [decoder.decode(tokens[:, 5:14], state)]  # many new tokens after a cached sequence
    pieces += [decoder.decode(tokens[:, at : at + 1], state) for at in range(14, 24)]
    found = torch.cat(pieces, 1)
    assert close(found, wanted[:, 5:]) and not close(found, wanted[:, 5:], 1e-4)
    cache = decoder.report.cache
    assert cache is not None and cache.drift is not None
    assert (cache.rounded, cache.error < 1e-8) == (str(dtype)[6:], True)
    assert cache.drift.largest < 0.05 and cache.drift.same >= 0.9 * cache.drift.tokens
    assert state.bytes_per_token == cache.bytes_per_token == BYTES[make][1]
    assert "approximate: kept as" in str(decoder.report)


@pytest.mark.parametrize(
    "make", [m if m is llama else pytest.param(m, marks=pytest.mark.slow) for m in BYTES]
)
def test_stock_models_keep_the_other_bytes_where_nothing_is_rounded(make: Any) -> None:
    """As computed, and in float64."""
    tokens = ids(2, 12)
    for dtype, factor in ((None, 1), (torch.float64, 2)):
        decoder = attngraph.compile(model_of(make), cache=CacheConfig(dtype=dtype))
        _, state = decoder.prefill(tokens[:, :8])
        assert state.bytes_per_token == factor * BYTES[make][0]
        found = decoder.decode(tokens[:, 8:], state)
        torch.testing.assert_close(found, model_of(make)(tokens).logits[:, 8:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", CONFIGS)
@pytest.mark.parametrize("make", [llama, mistral, deepseek])
def test_the_scales_go_with_the_rows(make: Any, layout: str, tmp_path: Path, poisoned: None) -> None:
    """Whatever is done to a state: rows of it then give what they give alone."""
    decoder, tokens, next_ids = decoder_of(make, torch.int8, layout), ids(3, 12), ids(3, 1, seed=9)

    def alone(row: int, length: int, token: int) -> Tensor:
        _, state = decoder.prefill(tokens[row : row + 1, :length])
        return decoder.decode(next_ids[token : token + 1], state)

    _, state = decoder.prefill(tokens)
    state.save(tmp_path / "state")
    copy, loaded = state.copy(), KVCache.load(tmp_path / "state")
    state.crop([12, 9, 10])
    state.reorder([2, 0, 0, 1])
    found = decoder.decode(next_ids[[0, 1, 2, 0]], state)
    for place, (row, length, token) in enumerate([(2, 10, 0), (0, 12, 1), (0, 12, 2), (1, 9, 0)]):
        torch.testing.assert_close(found[place : place + 1], alone(row, length, token), rtol=1e-4, atol=1e-4)
    for other in (copy, loaded):
        torch.testing.assert_close(
            decoder.decode(next_ids, other), torch.cat([alone(row, 12, row) for row in range(3)]),
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip


def test_an_engine_serves_rounded_caches() -> None:
    decoder = decoder_of(llama, torch.int8, "contiguous")
    engine = attngraph.Engine(decoder, max_batch=2, chunk=64)
    prompts = [ids(1, n, seed=n)[0] for n in (7, 3, 11)]
    requests = [engine.submit(p, 6) for p in prompts]
    engine.run()
    assert engine.state is not None and engine.state.bytes_per_token == BYTES[llama][1]
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.result() == decoder.generate(prompt[None], 6)[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_the_drift_is_measured_on_the_users_tokens() -> None:
    for dtype, low, high in ((None, 0, 1e-6), (torch.int8, 1e-9, 0.05), (torch.float8_e4m3fn, 1e-8, 0.2)):
        drift = decoder_of(llama, dtype, "contiguous").drift(ids(3, 20, seed=4))
        assert drift.tokens == 57 and low <= drift.largest <= high and drift.same >= 50
    with pytest.raises(ValueError, match="two tokens or more"):
        decoder_of(llama, None, "contiguous").drift(ids(3, 1))


# --- what is checked ---


def test_what_is_not_kept_or_not_read_within_its_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantised.LARGEST, torch.int8, 100.0)
    attngraph.compile(model_of(llama), cache=CacheConfig(dtype=torch.int8)).prefill(ids(1, 9))
    exact = quantised.quantise

    def coarse(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found, by = exact(values, dtype)
        return found // 2 * 2, by

    for where, name, wrong, reason in (
        (quantised, "quantise", coarse, "further from what was computed than rounding explains"),
        (op, "widened", lambda values, by, dtype: values.to(dtype), "not read as it is written"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, wrong)
            with pytest.raises(NoDecoderError, match=reason):
                attngraph.compile(model_of(llama), cache=CacheConfig(dtype=torch.int8)).prefill(ids(1, 9))


def test_what_else_is_kept_stays_as_it_is_computed() -> None:
    """A window of tokens before attention."""
    model, tokens = Small(lambda m, x: attend(*[convolved(m, x)] * 3)), ids(2, 12) % 24
    decoder = attngraph.compile(model, cache=CacheConfig(dtype=torch.int8))
    _, state = decoder.prefill(tokens[:, :8])
    found = torch.cat([decoder.decode(tokens[:, at : at + 1], state) for at in range(8, 12)], 1)
    assert close(found, model(tokens)[:, 8:])
    dtypes = {str(t.dtype) for t in state.stores().values()}
    assert dtypes == {"torch.int8", "torch.float32"}
    notes = [n for p in decoder.report.passes if p.name == "quantise-cache" for n in p.notes]
    assert notes[0] == "2 value(s) are kept as int8 with scales: approximate"
    assert any("kept as it is computed: last_tokens" in n for n in notes[1:])
    assert "1 value(s) kept as computed, not in 8 bits" in str(decoder.report)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e5m2])
def test_a_cache_of_another_dtype_is_refused_when_it_is_configured(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of .*float8_e4m3fn"):
        CacheConfig(dtype=dtype)
