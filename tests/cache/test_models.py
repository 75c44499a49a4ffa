"""Decoders of small models of every kind (`models.py`): their tokens are those of recomputing the whole
sequence, they keep what the kind needs, and what sees later tokens is refused with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attngraph
from attngraph import CacheConfig, NoDecoderError
from attngraph.capture.trace import capture
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from attngraph.models.linear_attention import LinearAttention, LinearAttentionConfig
from attngraph.models.linear_transformer import LinearTransformer, LinearTransformerConfig
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from attngraph.models.post_norm_decoder import PostNormDecoder
from attngraph.models.recurrent_mixers import (
    CausalConvolution,
    DeltaRule,
    GatedLinearAttention,
    MixerConfig,
    Retention,
    StateSpaceDuality,
    TimeMixing,
    WeightedKeyValue,
)  # fmt: skip
from attngraph.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from attngraph.passes.insert_kv_cache.join_pieces import join_pieces
from tests.cache import models
from tests.cache.models import VOCABULARY, WIDTH, Small, apart, causal
from tests.cache.small import by_steps, refuses, some_ids, stirred

NOT_TODAY = {"a difference": "prompts of two tokens are refused"}
"""Models that should decode, and why they do not."""


def cases(*names: str) -> list[Any]:
    """The cases of these models, of which those that do not decode today are expected to fail."""
    return [
        pytest.param(n, marks=pytest.mark.xfail(reason=NOT_TODAY[n], strict=True)) if n in NOT_TODAY else n
        for n in names
    ]


# --- what rows carry ---


@pytest.mark.parametrize("name", models.LOOPS)
def test_what_the_steps_of_a_loop_hand_on_is_carried(name: str, decodes: Any) -> None:
    cache = decodes(Small(models.LOOPS[name])).report.cache
    assert cache.bytes_per_token == 0 and sum(size for _, size in cache.carried) > 0


@pytest.mark.parametrize("name", models.RECURRENT)
def test_what_a_recurrent_network_hands_on_is_carried(name: str, decodes: Any) -> None:
    cache = decodes(models.RECURRENT[name]()).report.cache
    assert cache.bytes_per_token == 0 and sum(size for _, size in cache.carried) > 0


def _carries_sums(decoder: attngraph.Decoder) -> None:
    cache, passes = decoder.report.cache, decoder.report.passes
    assert cache is not None and cache.bytes_per_token == 0 and (cache.error or 0.0) < 1e-12
    assert any("running sum" in note for record in passes for note in record.notes)


@pytest.mark.parametrize("name", models.SUMS)
def test_sums_of_all_tokens_so_far_are_carried(name: str, decodes: Any) -> None:
    _carries_sums(decodes(Small(models.SUMS[name])))


@pytest.mark.parametrize("name", models.PRODUCTS)
def test_sums_of_products_are_carried(name: str, decodes: Any) -> None:
    _carries_sums(decodes(Small(models.PRODUCTS[name])))


@pytest.mark.parametrize("name", models.LINEAR_LOOPS)
def test_linear_loops_over_tokens_are_carried_as_sums(name: str, decodes: Any) -> None:
    _carries_sums(decodes(Small(models.LINEAR_LOOPS[name])))


@pytest.mark.parametrize("name", models.FOLDS)
def test_folds_of_all_tokens_so_far_are_carried(name: str, decodes: Any) -> None:
    cache = decodes(Small(models.FOLDS[name])).report.cache
    assert cache.bytes_per_token == 0 and sum(size for _, size in cache.carried) > 0


MIXER = MixerConfig(width=16, heads=2)
MIXERS: dict[str, Callable[[], nn.Module]] = {
    "weighted values": partial(WeightedKeyValue, MIXER),
    "a gated delta rule": partial(DeltaRule, MIXER, gated=True),
    "linear attention": partial(LinearAttention, LinearAttentionConfig(16, 2, 8, 8)),
    "linear attention without a normaliser": partial(
        LinearAttention, LinearAttentionConfig(16, 2, 8, 8, feature_map="identity")
    ),
    "retention": partial(Retention, MIXER),
    "gated linear attention": partial(GatedLinearAttention, MIXER),
    "state space duality": partial(StateSpaceDuality, MIXER),
    "a causal convolution": partial(CausalConvolution, MIXER),
    "time mixing": partial(TimeMixing, MIXER),
    "a delta rule": partial(DeltaRule, MIXER),
}


@pytest.mark.parametrize("name", MIXERS)
def test_the_memory_of_a_mixer_without_code_for_a_state_does_not_grow(name: str, decodes: Any) -> None:
    layers = 2 if name == "a gated delta rule" else 1  # one model shows that layers keep states of their own
    config = DecoderLMConfig(VOCABULARY, layers=layers, width=16, heads=2, max_tokens=96)
    decoder = decodes(stirred(DecoderLM(config, MIXERS[name])))
    assert (decoder.report.cache.error or 0.0) < 1e-12
    states = [decoder.prefill(torch.zeros(1, n, dtype=torch.int64))[1] for n in (9, 90)]
    assert len({state.nbytes for state in states}) == 1


def test_decays_in_rounded_tables_decode(decodes: Any) -> None:
    decoder = decodes(models.Blocks())
    assert any("rounded" in note for record in decoder.report.passes for note in record.notes)


@pytest.mark.parametrize("off", [1e-1, 1e-4, 1e-5])
def test_a_table_that_holds_something_else_is_refused(off: float) -> None:
    refuses(models.Blocks(off), "three tokens look like")


@pytest.mark.parametrize("name", models.UNEQUAL_STEPS)
def test_a_loop_that_is_not_of_equal_steps_is_refused(name: str) -> None:
    mix, reason = models.UNEQUAL_STEPS[name]
    refuses(Small(mix), reason, rows=2)


@pytest.mark.slow
def test_a_network_that_runs_in_both_directions_is_refused() -> None:
    model = models.of_torch(nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True))
    refuses(model, r"models\.py:\d+: .*both directions")


def test_positions_that_count_tokens_are_exact_whatever_the_tokens_are() -> None:
    """Those before that are no padding, as in RoBERTa."""

    def counting(m: Any, ids: Tensor) -> Tensor:
        real = ids.ne(1).int()
        return m.places((real.cumsum(1).type_as(real) * real).long() + 1)  # type: ignore[no-any-return]

    model, ids = models.OfIds(counting), some_ids(3, 12)
    ids[0, 2:4] = 1
    with torch.no_grad():
        found, _ = by_steps(attngraph.compile(model, cache=True), ids, 7)
        torch.testing.assert_close(found, model(ids))


DISTANCES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "a window of 100 tokens": (lambda d: (d >= 0) & (d < 100), True),
    "a distance in hundreds": (lambda d: (d >= 0) & (d * 0.01 < 1.5), True),
    "a later token far ahead": (lambda d: (d >= 0) | (d == -100), False),
    "a decay from 200 tokens on": (lambda d: (d >= 0) * 0.9 ** (d - 200.0).clamp(min=0), True),
    "a root of the distance": (lambda d: (d >= 0) & (d.clamp(min=0).sqrt() < 12.0), True),
    "a quotient": (lambda d: (d >= 0) & (d // 10 // 10 < 1), True),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_a_sum_is_compared_on_more_tokens_than_its_numbers_reach(name: str) -> None:
    """Three tokens of it, and seventy, look like a sum that can be carried."""
    weights, is_causal = DISTANCES[name]

    def mix(m: Any, x: Tensor) -> Tensor:
        k = m.gate(x).tanh()
        return (x @ k.mT * weights(apart(x.shape[1]))) @ k

    model, ids = Small(mix).double(), some_ids(1, 330)
    if not is_causal:
        return refuses(model, "three tokens look like one, but more do not")
    with torch.no_grad():
        logits, state = (decoder := attngraph.compile(model, cache=True)).prefill(ids[:, :9])
        # The model's own weights are of float32, as powers of whole numbers are.
        found = torch.cat([logits, decoder.decode(ids[:, 9:], state)], 1)
        torch.testing.assert_close(found, model(ids), rtol=1e-5, atol=1e-6)


# --- windows ---


@pytest.mark.parametrize("name", cases("a trigram", *models.WINDOWS))
def test_a_window_of_tokens_is_kept(name: str, decodes: Any) -> None:
    trigram = name == "a trigram"
    decoder = decodes(models.OfIds(models.trigram) if trigram else Small(models.WINDOWS[name]))
    assert any("computed from the last" in note for record in decoder.report.passes for note in record.notes)


@pytest.mark.parametrize("name", models.NO_WINDOWS)
def test_what_is_no_window_of_earlier_tokens_is_refused(name: str) -> None:
    refuses(Small(models.NO_WINDOWS[name][0]), models.NO_WINDOWS[name][1])


@pytest.mark.parametrize("width, dilation", [(5, 3), (2, 1), (2, 3), (5, 1)])
def test_pooled_tokens_are_those_of_a_loop_over_windows(width: int, dilation: int) -> None:
    back, ids = dilation * (width - 1), some_ids(2, 19)

    def pooled(m: Any, x: Tensor) -> Tensor:
        earlier = models.before(x, back, -0.1)
        return x + torch.nn.functional.max_pool1d(earlier, width, 1, dilation=dilation).mT

    model: Any = Small(pooled).double()
    found, _ = by_steps(attngraph.compile(model, cache=True), ids, 4)
    with torch.no_grad():
        x = model.embed(ids)
        nothing = torch.full_like(x[:, 0], -0.1)
        for t in range(19):
            seen = [x[:, t - n * dilation] if t >= n * dilation else nothing for n in range(width)]
            wanted = model.logits(x[:, t] + torch.stack(seen).amax(0))
            torch.testing.assert_close(found[:, t], wanted, rtol=1e-12, atol=1e-12)


def test_a_window_is_kept_and_undone_as_far_as_it_was_told_to() -> None:
    """The memory of a row does not grow."""
    model = Small(models.WINDOWS["a convolution, cut"])
    decoder, ids = attngraph.compile(model, cache=CacheConfig(rollback=2)), some_ids(1, 640)
    sizes = [decoder.prefill(ids[:, :n])[1].nbytes for n in (64, 640)]
    assert sizes[0] == sizes[1]
    _, state = decoder.prefill(ids[:, :6])
    before = decoder.decode(ids[:, 6:7], state)
    state.crop(6)
    assert torch.equal(decoder.decode(ids[:, 6:7], state), before)
    decoder.decode(ids[:, 7:9], state)
    with pytest.raises(attngraph.CacheError, match="a window of 4"):
        state.crop(4)


def _two_windows(m: Any, x: Tensor) -> Tensor:
    for window in (4, 64):
        x = x + models.attend(*m.qkv(x).chunk(3, -1), models.window(x, window))
    return x


def test_rows_go_back_as_far_as_every_window_has_kept_tokens() -> None:
    model, ids = Small(_two_windows), some_ids(1, 100)
    decoder = attngraph.compile(model, cache=CacheConfig(rollback=8))
    _, state = decoder.prefill(ids[:, :90])
    decoder.decode(ids[:, 90:], state)
    state.crop(92)
    with torch.no_grad():
        wanted = model(ids[:, :93])[:, -1:]
    torch.testing.assert_close(decoder.decode(ids[:, 92:93], state), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(attngraph.CacheError, match="a window of 4 has overwritten"):
        state.crop(91)


# --- attention ---

LM = DecoderLMConfig(VOCABULARY, layers=2, width=16, heads=2, max_tokens=32)
OURS: dict[str, Callable[[], nn.Module]] = {
    "linear attention": lambda: LinearTransformer(
        LinearTransformerConfig(VOCABULARY, layers=1, width=16, heads=2, max_tokens=32)
    ),
    "decoder-only LM": lambda: DecoderLM(LM),
    "modern, interleaved": lambda: ModernDecoder(
        ModernDecoderConfig(VOCABULARY, 1, 16, 4, 1, 4, rotary="interleaved")
    ),
    "sparse": lambda: SparseTransformer(SparseTransformerConfig(VOCABULARY, 2, 16, 2, max_tokens=32)),
    "post-norm": lambda: PostNormDecoder(LM),
    "modern": lambda: ModernDecoder(ModernDecoderConfig(VOCABULARY, 2, 16, 4, 2, 4, 32)),
}


@pytest.mark.parametrize("name", OURS)
def test_every_decoder_in_models_has_a_decoder(name: str, decodes: Any) -> None:
    decodes(stirred(OURS[name]()))


def test_the_encoder_decoder() -> None:
    model = stirred(EncoderDecoder(EncoderDecoderConfig(layers=2, width=16, heads=2)))
    source, target, padding = some_ids(2, 9), some_ids(2, 12), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 5:] = True
    compiled = attngraph.compile(model, cache=True)
    logits, state = compiled.prefill(target[:, :4], source=source, source_padding=padding)
    pieces = [logits, *(compiled.decode(target[:, n : n + 2], state) for n in range(4, 12, 2))]
    with torch.no_grad():
        wanted = model(source, target, source_padding=padding)
    torch.testing.assert_close(torch.cat(pieces, 1), wanted, rtol=1e-4, atol=1e-4)


class TwoEncoders(nn.Module):
    """A decoder that looks at what two encoders say, one after the other or both at once."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.together = nn.Embedding(50, 16), nn.Linear(16, 50), together
        self.first, self.second = (nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in "ab")
        self.own, self.one, self.other = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(3))

    def forward(self, ids: Tensor, text: Tensor, image: Tensor) -> Tensor:
        x, said = self.embedding(ids), [self.first(self.embedding(text)), self.second(self.embedding(image))]
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        x = x + self.own(x, x, x, attn_mask=later, need_weights=False)[0]
        said = [torch.cat(said, 1)] if self.together else said
        for attend, memory in zip((self.one, self.other), said, strict=False):
            x = x + attend(x, memory, memory, need_weights=False)[0]
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("together", [False, True])
def test_what_two_encoders_say_is_computed_once(together: bool) -> None:
    model = stirred(TwoEncoders(together))
    texts, images, ids = some_ids(2, 7), some_ids(2, 5), some_ids(2, 9)
    compiled = attngraph.compile(model, cache=True)
    found, _ = by_steps(compiled, ids, 4, text=texts, image=images)
    with torch.no_grad():
        torch.testing.assert_close(found, model(ids, texts, images))
    cache = compiled.report.cache
    assert cache is not None and cache.bytes_per_token == 128 and cache.fixed == (2 if together else 4)


@pytest.mark.parametrize("name", models.ATTENTION)
def test_keys_and_values_are_kept(name: str, decodes: Any) -> None:
    cache = decodes(stirred(Small(models.ATTENTION[name]))).report.cache
    assert cache.bytes_per_token == (8 * 4 if name == "keys that are values" else cache.bytes_per_token) > 0


@pytest.mark.parametrize("name", models.BESIDE)
def test_keys_and_values_are_kept_beside_other_work_on_tokens(name: str, decodes: Any) -> None:
    assert decodes(stirred(Small(models.BESIDE[name]))).report.cache.bytes_per_token > 0


@pytest.mark.parametrize("name", models.PAPERS)
def test_attention_of_a_paper_decodes(name: str, decodes: Any) -> None:
    assert decodes(stirred(Small(models.PAPERS[name]))).report.cache.bytes_per_token > 0


@pytest.mark.parametrize("name", [*models.BAGS, *models.ARRANGED])
def test_each_key_head_is_kept_once_and_values_alone_where_keys_do_not_count(name: str, decodes: Any) -> None:
    of_words = name in models.BAGS
    cache = decodes(Small(models.BAGS[name]) if of_words else models.arranged(name)).report.cache
    assert cache.bytes_per_token == (8 * 4 if of_words else 2 * models.ARRANGED[name][1] * 4 * 4)


ANEW = models.ANEW | models.ANEW_BY_CHOICE | models.ANEW_BY_SCORE | models.ANEW_BY_PLACE
"""Two products of a pair of tokens; a choice among earlier tokens; what is made of their scores; what the
places of a pair decide."""
OFTEN = (*models.ANEW, *models.ANEW_BY_SCORE)


@pytest.mark.parametrize("name", [*OFTEN, *cases(*(name for name in ANEW if name not in OFTEN))])
def test_what_cannot_be_kept_is_computed_anew(name: str, decodes: Any) -> None:
    report = decodes(Small(ANEW[name])).report
    assert report.cache is not None and len(report.cache.anew) == 1 and not report.cache.carried
    assert "computed from all that is kept at every step" in str(report) and "would be 0" not in str(report)


def test_the_nearest_point_of_the_simplex_decodes(decodes: Any) -> None:
    report = decodes(Small(models.weighing(models.sparsemax))).report
    assert len(report.cache.anew) == 3 and not report.cache.carried


@pytest.mark.parametrize("name", models.LOOKING_AHEAD)
def test_what_lets_a_token_see_a_later_one_is_refused(name: str) -> None:
    mix, reason = models.LOOKING_AHEAD[name]
    refuses(Small(mix), "(?s)" + reason, rows=2)


@pytest.mark.parametrize("name", models.FAR_AHEAD)
def test_however_far_ahead_a_token_sees_it_is_refused(name: str) -> None:
    """However the distance is written, nothing of it follows from short sequences; and where more keys are
    chosen than a short sequence has, all of them are."""
    mix, reason = models.FAR_AHEAD[name]
    refuses(Small(mix), reason)


@pytest.mark.parametrize("name", models.SIZED)
def test_sizes_that_are_numbers_follow_from_sequences_and_tokens(name: str, decodes: Any) -> None:
    decodes(Small(models.SIZED[name]))


@pytest.mark.parametrize("name", models.TOO_MUCH_OF_SIZES)
def test_where_sizes_say_more_the_first_reason_is_told(name: str) -> None:
    """The prompt is of equal tokens, whose values are equal whatever weighs them: others are proved with."""
    refuses(Small(models.TOO_MUCH_OF_SIZES[name]), "it fixes how many sequences there are to 2")


def test_attention_within_a_token_is_computed_for_that_token_alone(decodes: Any) -> None:
    cache = decodes(Small(models.within_a_token)).report.cache
    assert not cache.anew and cache.bytes_per_token == 0


@pytest.mark.parametrize("name", models.OWN)
def test_a_token_that_reads_its_own_place_is_itself(name: str) -> None:
    model, ids = models.reading_at(models.OWN[name]), some_ids(2, 9)
    decoder = attngraph.compile(model, cache=CacheConfig(proof=False), backend="reference")
    with torch.no_grad():
        torch.testing.assert_close(by_steps(decoder, ids, 7)[0], model(ids))


@pytest.mark.parametrize("proof", [True, False])
def test_places_that_are_turned_round_twice_are_refused_at_their_line(proof: bool) -> None:
    model = models.reading_at(lambda x, i: x[:, i.flip(0)].flip(1))
    with pytest.raises(NoDecoderError, match=r"index at .*test_models.py:\d+: it takes tokens by an index"):
        attngraph.compile(model, cache=CacheConfig(proof=proof), backend="reference").prefill(some_ids(2, 9))


@pytest.mark.parametrize("name", models.LAST)
def test_a_model_of_the_last_logits_alone_has_a_decoder_which_gives_those_of_every_token(name: str) -> None:
    model, ids = models.last_of(models.LAST[name]), some_ids(2, 12)
    decoder = attngraph.compile(model, cache=True)

    def wanted(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            each = [model(tokens[:, : n + 1]).reshape(len(tokens), -1) for n in range(tokens.shape[1])]
        return torch.stack(each, 1)

    torch.testing.assert_close(by_steps(decoder, ids, 7)[0], wanted(ids), rtol=1e-5, atol=1e-5)
    found = decoder.generate(ids[:, :7], 4)
    assert torch.equal(wanted(found).argmax(-1)[:, 6:-1], found[:, 7:])
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    logits, _ = decoder.prefill(ids, mask)
    torch.testing.assert_close(logits[:1, 3:], wanted(ids[:1, 3:]), rtol=1e-5, atol=1e-5)
    assert decoder.report.cache is not None and (decoder.report.cache.error or 1.0) < 1e-10
    assert any("every token has the result" in n for r in decoder.report.passes for n in r.notes)
    torch.testing.assert_close(decoder(ids), model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", models.NOT_LAST)
def test_what_is_not_the_last_token_alone_has_no_decoder(name: str) -> None:
    pick, reason = models.NOT_LAST[name]
    refuses(models.last_of(pick), reason, rows=2)


# --- what is not known of a model ---


def test_which_of_equal_scores_is_chosen_is_no_obstacle() -> None:
    """An indexer's scores are zero for many keys; torch's choice among them depends on how many there are."""
    chosen = models.weighing(lambda scores, keep: models.most_similar(scores.relu(), keep))
    decoder = attngraph.compile(Small(chosen), cache=True)
    assert decoder.prefill(some_ids(1, 4)) is not None  # so few that all are chosen


def test_one_token_at_a_time_from_the_first_on() -> None:
    model, ids = Small(models.ANEW_BY_CHOICE["the most similar keys"]), some_ids(1, 12)
    with torch.no_grad():
        found, _ = by_steps(attngraph.compile(model, cache=True), ids, 1)
        torch.testing.assert_close(found, model(ids))


def _chosen_if_there_are_more(scores: Tensor, keep: Tensor) -> Tensor:
    if scores.shape[-1] > 4:
        return models.most_similar(scores, keep)
    return (2 * scores).masked_fill(~keep, -torch.inf).softmax(-1)


def _all_if_there_are_few(scores: Tensor, keep: Tensor) -> Tensor:
    if scores.shape[-1] > 4:
        return models.most_similar(scores, keep)
    return scores.masked_fill(~keep, -torch.inf).softmax(-1)


def test_a_branch_that_makes_no_difference_is_crossed() -> None:
    model, ids = Small(models.weighing(_all_if_there_are_few)), some_ids(1, 12)
    with torch.no_grad():
        torch.testing.assert_close(by_steps(attngraph.compile(model, cache=True), ids, 2)[0], model(ids))


def test_a_model_that_does_something_else_with_short_sequences_goes_on_with_long_ones() -> None:
    model, ids = Small(models.weighing(_chosen_if_there_are_more)), some_ids(1, 12)
    decoder = attngraph.compile(model, cache=True)
    with torch.no_grad():
        torch.testing.assert_close(by_steps(decoder, ids, 9)[0], model(ids))
        _, short = decoder.prefill(ids[:, :4])
        line = _chosen_if_there_are_more.__code__.co_firstlineno + 1
        with pytest.raises(attngraph.CacheError, match=rf"test_models.py:{line} whether tokens <= 4"):
            decoder.decode(ids[:, 4:5], short)


def test_weights_that_are_no_numbers_in_a_trial_show_nothing() -> None:
    """Random masks may hide a whole row, and a sum over queries then is NaN for every token of the chunk."""
    model = Small(models.later_queries)
    refuses(model, "Token 0 sees token 1", rows=2)


def test_attention_in_chunks_is_computed_anew_though_nobody_knows_how_many_there_will_be() -> None:
    model, ids = Small(models.inside_chunks), some_ids(2, 11)
    decoder = attngraph.compile(model, cache=CacheConfig(proof=False, assume_causal=True))
    with torch.no_grad():
        torch.testing.assert_close(by_steps(decoder, ids, 9)[0], model(ids))


def test_where_it_cannot_be_shown_that_no_later_token_is_seen_the_user_may_say_so() -> None:
    model, ids = Small(models.weighing(models.exponential)), some_ids(2, 14)
    refuses(model, "matrix_exp")
    decoder = attngraph.compile(model, cache=CacheConfig(assume_causal=True))
    with torch.no_grad():
        logits, state = decoder.prefill(ids[:, :9])
        found = torch.cat([logits, decoder.decode(ids[:, 9:], state)], 1)
        torch.testing.assert_close(found, model(ids))
    told = r"taken to \(assume_causal\): .*models.py:\d+ \(every token is read\)"
    assert re.search(told, str(decoder.report))


@pytest.mark.parametrize(
    ("sign", "reason"),
    [(-1, r"sees later tokens \({}\)\. Token 0 sees"), (1, r"could not be shown .*\({}\)\.\n")],
)
def test_a_fill_that_leaks_is_named_and_a_pair_of_tokens_only_if_there_is_one(sign: int, reason: str) -> None:
    """A token's product with itself is far above a fill of -100, unless it is negated."""

    def leaking(m: Any, x: Tensor) -> Tensor:
        return (sign * (x @ x.mT)).masked_fill(~causal(x.shape[1]), -100.0).softmax(-1) @ x

    refuses(stirred(Small(leaking)), reason.format(r"s = where\(k > q, -100\.0, .*dot\)"))


@pytest.mark.parametrize(("low", "problem"), [(-3.4e38, ""), (-50.0, "could not be shown to hide")])
def test_a_score_that_is_raised_to_the_fill_stays_masked_only_if_that_is_low(
    low: float, problem: str
) -> None:
    def raised(m: Any, x: Tensor) -> Tensor:
        scores = x @ x.mT + torch.where(causal(x.shape[1]), 0.0, low)
        return torch.maximum(scores, torch.tensor(low)).softmax(-1) @ x

    model, ids = Small(raised), some_ids(2, 6)
    if problem:
        return refuses(model, problem)
    torch.testing.assert_close(attngraph.compile(model, cache=True).prefill(ids)[0], model(ids))


def test_what_else_has_no_decoder_is_told_with_what_to_do() -> None:
    def row_by_row(m: Any, x: Tensor) -> Tensor:
        seen = torch.zeros(x.shape[1], x.shape[1])
        for row in range(x.shape[1]):
            seen[row, max(0, row - 2) : row + 1] = 1
        return ((x @ x.mT) * seen - 1e10 * (1 - seen)).softmax(-1) @ x

    def in_pieces(m: Any, x: Tensor) -> Tensor:
        return torch.cat([m.gate(p + p if n % 2 else 2 * p) for n, p in enumerate(x.split(1, 1))], 1)

    def strict(m: Any, x: Tensor) -> Tensor:
        return (x @ x.mT).masked_fill(apart(x.shape[1]) <= 0, -1e9).softmax(-1) @ x

    own = r"attention at .*models\.py:\d+: its scores have a case of their own for each of \d+ tokens.*arange"
    assert "looked into" not in refuses(Small(row_by_row), own)
    refuses(Small(in_pieces), r"split at .*test_models.py:\d+: how many results")
    refuses(Small(strict), "the first token sees nothing, and a finite fill")
    refuses(Small(models.LOOPS["LSTM cells"]).train(), r"model\.eval")
    with pytest.raises(NoDecoderError, match="how many values a token has follows from"):
        attngraph.compile(lambda x: models.attend(x, x, x), cache=True).prefill(torch.randn(2, 7, 8))


PIECES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "differently": (
        lambda x: torch.cat([f(p) for f, p in zip((torch.sin, torch.cos), x.split(4, 1), strict=True)], 1),
        False),
    "by themselves": (
        lambda x: torch.cat([p - p.mean(1, keepdim=True) for p in x.split(4, 1)], 1), False),
    "in another order": (lambda x: torch.cat([p.sin() for p in x.split(4, 1)[::-1]], 1), False),
    "alike": (lambda x: torch.cat([p.sin() * 2 for p in x.split(4, 1)], 1), True),
}  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_the_tokens_are_one_if_they_are_treated_alike(name: str) -> None:
    treated, alike = PIECES[name]
    assert len(join_pieces(capture(treated, (torch.randn(2, 8, 3),), {}).graph)) == alike


# --- larger distances than a trace has ---

FURTHER: dict[str, Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]] = {
    "a window": lambda s, d, n: (s, d < n),
    "a dilated window": lambda s, d, n: (s, d % n < 4),
    "a bias": lambda s, d, n: (s + torch.linspace(0, 1, 64)[d.clamp(0, n)], d >= 0),
    "steps": lambda s, d, n: (s + torch.where(d < n, 0.0, -3.0), d >= 0),
    "blocks": lambda s, d, n: (s, d[:, :1] // n == d[:, :1].mT // n),
    "sinks": lambda s, d, n: (s, (d < n) | (d[:1] > -2)),
    "places": lambda s, d, n: (s * torch.where(d[:, :1] < n, 1.0, 0.5), d >= 0),
}


# 40 is beyond what is traced, 22 a multiple of the traced number of tokens, 5 below it.
@pytest.mark.parametrize("limit", [40, 22, 5])
@pytest.mark.parametrize("kind", FURTHER)
def test_far_tokens_are_as_in_the_model_though_a_loop_is_traced_for_few(kind: str, limit: int) -> None:
    def mix(m: Any, x: Tensor) -> Tensor:
        x = models.LINEAR_LOOPS["a linear loop"](m, x)
        scores, keep = FURTHER[kind](x @ x.mT / 3, apart(x.shape[1]), limit)
        return scores.masked_fill(~(keep & causal(x.shape[1])), -torch.inf).softmax(-1) @ x

    model, ids = Small(mix), some_ids(1, 80)
    with torch.no_grad():
        found, _ = by_steps(attngraph.compile(model, cache=True), ids, 3)
        torch.testing.assert_close(found[:, 2:], model(ids)[:, 2:])


@pytest.mark.slow
def test_a_result_that_depends_on_the_number_of_tokens_is_refused() -> None:
    scan = models.LINEAR_LOOPS["a linear loop"]
    refuses(
        Small(lambda m, x: models.attend(*[scan(m, x / x.shape[1])] * 3)), r"for \d+ it gives something else"
    )


# --- FlexAttention ---

Function = Callable[..., Tensor]


def flexible(mask: Function | None, score: Callable[[Any], Function] = lambda m: lambda s, *at: s) -> Small:
    def attention(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, block = q.shape[2], None
        if mask is not None:
            block = create_block_mask(mask, None, None, n, n, device="cpu")
        return flex_attention(q, k, v, score_mod=score(m), block_mask=block)  # type: ignore[return-value]

    return Small(models.of_heads(attention))


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


FLEXIBLE: dict[str, Callable[[], Small]] = {
    "causal": lambda: flexible(_causal),
    "a window": lambda: flexible(lambda b, h, q, k: (q >= k) & (q - k < 4)),
    "a score function": lambda: flexible(
        None, lambda m: lambda s, b, h, q, k: torch.where(k <= q, s, -torch.inf)
    ),
    "slopes": lambda: flexible(_causal, lambda m: lambda s, b, h, q, k: s + m.begin[h] * (k - q)),
    "a table": lambda: flexible(_causal, lambda m: lambda s, b, h, q, k: s + m.pairs[(q - k).abs(), h]),
    "a soft cap": lambda: flexible(_causal, lambda m: lambda s, b, h, q, k: 5 * torch.tanh(s / 5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLEXIBLE)
def test_a_model_that_attends_by_flex_attention_has_a_decoder(name: str, decodes: Any) -> None:
    torch._dynamo.reset()
    decodes(FLEXIBLE[name]())


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask, shown", [(None, "no mask"), (lambda b, h, q, k: (q >= k) | (k < 3), "keep k <= 2 or k <= q")]
)
def test_a_mask_of_flex_attention_that_shows_later_tokens_is_named(mask: Function | None, shown: str) -> None:
    refuses(flexible(mask), f"it sees later tokens .{shown}.*Token 0 sees token 1")
