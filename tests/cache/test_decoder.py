"""Prefill, decode and generate answer as whole sequences do, whatever came before."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import attngraph
from attngraph import CacheConfig, CacheError, Decoder, KVCache, NoDecoderError
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from tests.cache.small import stirred

pytestmark = pytest.mark.usefixtures("graphs_of_this_run")

VOCABULARY = 40


def learned_positions() -> nn.Module:
    return stirred(DecoderLM(DecoderLMConfig(VOCABULARY, 2, 16, 2, max_tokens=48)))


def rotary_groups() -> nn.Module:
    return stirred(ModernDecoder(ModernDecoderConfig(VOCABULARY, 2, 16, 4, 2, 4, 32)))


class Windowed(nn.Module):
    """One layer that sees a window, one that sees all, positions by a sinusoid computed on the way."""

    def __init__(self, window: int = 4) -> None:
        super().__init__()
        self.window = window
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        tokens = ids.shape[1]
        place = torch.arange(tokens, device=ids.device)
        x = self.embed(ids) + torch.sin(place[:, None] / 10.0 ** torch.linspace(0, 2, 16))
        distance = place[:, None] - place[None]
        for layer, (mix, out) in enumerate(zip(self.mix, self.out, strict=True)):
            q, k, v = (t.view(*t.shape[:2], 2, 8).transpose(1, 2) for t in mix(x).chunk(3, -1))
            hidden = distance < 0
            if layer == 0:
                hidden = hidden | (distance >= self.window)
            scores = (q @ k.mT / 8**0.5).masked_fill(hidden, -torch.inf)
            if documents is not None:
                other = documents[:, None, :, None] != documents[:, None, None, :]
                scores = scores.masked_fill(other, -torch.inf)
            x = x + out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head(x)


MODELS = {
    "learned": learned_positions,
    "rotary": rotary_groups,
    "windowed": lambda: stirred(Windowed()),
}


def whole_logits(model: nn.Module, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        found = model(ids, **inputs)
    return found[0] if isinstance(found, tuple) else found


CLOSE = {"rtol": 1e-4, "atol": 1e-4}
CONFIGS = {
    "contiguous": CacheConfig(),
    "paged": CacheConfig(layout="paged", page=4),
    "no slack": CacheConfig(layout="paged", page=3, rollback=0),
}
_decoders: dict[tuple[str, str], tuple[nn.Module, Decoder]] = {}


def decoder(model: str, config: str = "contiguous") -> tuple[nn.Module, Decoder]:
    if (model, config) not in _decoders:
        made = MODELS[model]()
        _decoders[model, config] = made, attngraph.compile(made, cache=CONFIGS[config])
    return _decoders[model, config]


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("model", MODELS)
def test_prefill_and_decode_give_what_the_whole_sequence_gives(
    model: str, config: str, poisoned: None
) -> None:
    plain, compiled = decoder(model, config)
    tokens = ids(3, 20)
    logits, state = compiled.prefill(tokens[:, :6])
    pieces = [logits]
    for start, stop in ((6, 7), (7, 8), (8, 13), (13, 20)):
        pieces.append(compiled.decode(tokens[:, start:stop], state))
    torch.testing.assert_close(torch.cat(pieces, 1), whole_logits(plain, tokens), **CLOSE)
    assert state.lengths == [20, 20, 20]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", MODELS)
def test_padding_changes_nothing(model: str, side: str) -> None:
    plain, compiled = decoder(model)
    tokens = ids(2, 9)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    if side == "right":
        mask = mask.flip(1)
    logits, state = compiled.prefill(tokens, attention_mask=mask)
    alone = whole_logits(plain, tokens[1:, mask[1] == 1])
    torch.testing.assert_close(logits[1:, mask[1] == 1], alone, **CLOSE)
    assert (logits[1:, mask[1] == 0] == 0).all()
    assert state.lengths == [9, 5]
    generated = compiled.generate(tokens, attention_mask=mask, max_new_tokens=8)
    single = compiled.generate(tokens[1:, mask[1] == 1], max_new_tokens=8)
    assert torch.equal(generated[1, -8:], single[0, -8:])


def test_prompts_may_be_a_list_of_unequal_ones() -> None:
    plain, compiled = decoder("learned")
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    found = compiled.generate(prompts, max_new_tokens=6)
    assert found.shape == (2, 11)
    for row, prompt in enumerate(prompts):
        assert torch.equal(found[row, -6:], compiled.generate(torch.tensor(prompt), max_new_tokens=6)[0, -6:])
        assert found[row, 5 - len(prompt) : 5].tolist() == prompt
    del plain


def test_generate_is_argmax_over_the_whole_sequence_each_time() -> None:
    for name in MODELS:
        plain, compiled = decoder(name)
        tokens = ids(2, 5)
        found = compiled.generate(tokens, max_new_tokens=12)
        for _ in range(12):
            tokens = torch.cat([tokens, whole_logits(plain, tokens)[:, -1:].argmax(-1)], 1)
        assert torch.equal(found, tokens)


def test_rows_end_by_themselves_and_do_not_disturb_others() -> None:
    plain, compiled = decoder("rotary")
    tokens = ids(3, 5)
    free = compiled.generate(tokens, max_new_tokens=10)
    end = int(free[1, 7])
    found = compiled.generate(tokens, max_new_tokens=10, eos_token_id=end, pad_token_id=39)
    for row in range(3):
        new = free[row, 5:].tolist()
        stop = new.index(end) + 1 if end in new else 10
        assert found[row, 5 : 5 + stop].tolist() == new[:stop]
        assert set(found[row, 5 + stop :].tolist()) <= {39}
    del plain


def test_documents_are_carried_along() -> None:
    model = stirred(Windowed())
    compiled = attngraph.compile(model, cache=True)
    tokens, documents = ids(2, 14), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]).expand(2, -1)
    logits, state = compiled.prefill(tokens[:, :5], documents=documents[:, :5])
    pieces = [logits]
    for start, stop in ((5, 6), (6, 11), (11, 14)):
        pieces.append(compiled.decode(tokens[:, start:stop], state, documents=documents[:, start:stop]))
    torch.testing.assert_close(
        torch.cat(pieces, 1), whole_logits(model, tokens, documents=documents), **CLOSE
    )
    with pytest.raises(ValueError, match="needs documents for every token"):
        compiled.decode(tokens[:, :1], state)
    with pytest.raises(ValueError, match="documents"):
        compiled.generate(tokens, documents=documents)


# --- the state ---


def test_overflow_is_an_error_before_anything_is_written() -> None:
    plain, compiled = decoder("learned")
    tokens = ids(1, 46)
    _, state = compiled.prefill(tokens)
    before = {name: t.clone() for name, t in state.stores().items()}
    with pytest.raises(CacheError, match=r"has 46 token\(s\) and gets 3 more, but at most 48"):
        compiled.decode(ids(1, 3), state)
    assert state.lengths == [46]
    for name, store in state.stores().items():
        assert torch.equal(store, before[name])
    more = ids(1, 2)
    found = compiled.decode(more, state)
    torch.testing.assert_close(found, whole_logits(plain, torch.cat([tokens, more], 1))[:, 46:], **CLOSE)
    with pytest.raises(CacheError, match="at most 10"):
        attngraph.compile(plain, cache=CacheConfig(max_length=10)).prefill(ids(1, 11))


def test_copies_and_saved_states_go_their_own_way(tmp_path: Path) -> None:
    for config in ("contiguous", "paged"):
        plain, compiled = decoder("windowed", config)
        tokens = ids(2, 9)
        _, state = compiled.prefill(tokens)
        other = state.copy()
        state.save(tmp_path / "state")
        compiled.decode(ids(2, 4, 1), state)
        loaded = KVCache.load(tmp_path / "state")
        more = ids(2, 3, 2)
        wanted = whole_logits(plain, torch.cat([tokens, more], 1))[:, 9:]
        for one in (other, loaded):
            torch.testing.assert_close(compiled.decode(more, one), wanted, **CLOSE)
        assert loaded.lengths == [12, 12]
    (tmp_path / "state").write_bytes(b"nothing of the kind")
    with pytest.raises(CacheError, match="holds no saved cache"):
        KVCache.load(tmp_path / "state")


def test_a_window_cannot_be_taken_back_further_than_it_was_told_to_keep() -> None:
    model = stirred(Windowed())
    compiled = attngraph.compile(model, cache=CacheConfig(rollback=2))
    tokens = ids(1, 20)
    _, state = compiled.prefill(tokens)
    with pytest.raises(CacheError, match="a window of 4 has overwritten"):
        state.crop(15)
    assert state.lengths == [20]
    state.crop(18)
    found = compiled.decode(tokens[:, 18:], state)
    torch.testing.assert_close(found, whole_logits(model, tokens)[:, 18:], **CLOSE)


@pytest.mark.slow
def test_memory_is_what_the_report_says() -> None:
    for name in ("learned", "rotary"):
        plain, _ = decoder(name)
        compiled = attngraph.compile(plain, cache=CacheConfig(layout="paged", page=1))
        _, state = compiled.prefill(ids(1, 8))
        cache = compiled.report.cache
        assert cache is not None
        assert state.bytes_per_token == cache.bytes_per_token == state.nbytes // 8
    assert cache.expanded == 2 * cache.bytes_per_token  # four query heads share two


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("rows", "length"), [(1, 12), (3, 9), (2, 2)])
def test_the_report_tells_the_bytes_of_a_batch_of_any_length(
    rows: int, length: int, dtype: torch.dtype | None
) -> None:
    config = CacheConfig(max_length=length, rollback=2, dtype=dtype)
    compiled = attngraph.compile(stirred(Windowed()), cache=config)
    _, state = compiled.prefill(ids(rows, length))
    cache = compiled.report.cache
    assert cache is not None
    assert cache.bytes(rows, length) == state.nbytes
    assert cache.bytes_per_token == state.bytes_per_token
    assert cache.bytes(0, 2) == cache.bytes(5, 0) == 0
    with pytest.raises(ValueError, match="must not be negative"):
        cache.bytes(-1, 2)


def test_a_page_that_is_begun_counts_whole_and_a_text_gives_an_example() -> None:
    plain, _ = decoder("learned")
    compiled = attngraph.compile(plain, cache=CacheConfig(layout="paged", page=8))
    _, state = compiled.prefill(ids(2, 9))
    cache = compiled.report.cache
    assert cache is not None
    used = sum(len(row) for group in state.groups.values() for row in group.rows)
    assert cache.bytes(2, 9) == used * 8 * cache.bytes_per_token
    most = cache.most_tokens
    assert most is not None
    kib = cache.bytes(1, most) / 1024
    assert f"{most} tokens: {kib:,.1f} KiB for one sequence, " in str(compiled.report)
    with pytest.raises(ValueError, match=f"at most {most} tokens"):
        cache.bytes(1, most + 1)


class Run:
    """What a random program does to a state, and what recomputing gives."""

    def __init__(self, model: str, config: str, draw: random.Random) -> None:
        self.plain, self.decoder = decoder(model, config)
        self.draw, self.window = draw, model == "windowed"
        self.rows: list[list[int]] = [self.tokens(1, 6) for _ in range(draw.randint(1, 3))]
        logits, self.state = self.decoder.prefill([torch.tensor(r) for r in self.rows])
        for row, tokens in enumerate(self.rows):
            self.check(row, logits[row, : len(tokens)], 0)

    def tokens(self, least: int, most: int) -> list[int]:
        return [self.draw.randrange(VOCABULARY) for _ in range(self.draw.randint(least, most))]

    def check(self, row: int, logits: Tensor, start: int) -> None:
        wanted = whole_logits(self.plain, torch.tensor([self.rows[row]]))[0, start:]
        torch.testing.assert_close(logits, wanted, **CLOSE)

    def decode(self) -> None:
        new = [self.tokens(0, 3) for _ in self.rows]
        if not any(new):
            return
        if max(len(r) + len(n) for r, n in zip(self.rows, new, strict=True)) > 48:
            return
        starts = [len(r) for r in self.rows]
        logits = self.decoder.decode([torch.tensor(n, dtype=torch.int64) for n in new], self.state)
        for row, tokens in enumerate(new):
            self.rows[row] += tokens
            if tokens:
                self.check(row, logits[row, : len(tokens)], starts[row])

    def crop(self) -> None:
        lengths = [self.draw.randint(max(0, len(r) - 6), len(r)) for r in self.rows]
        try:
            self.state.crop(lengths)
        except CacheError:
            assert self.window
            return
        self.rows = [r[:n] for r, n in zip(self.rows, lengths, strict=True)]

    def reorder(self) -> None:
        order = [self.draw.randrange(len(self.rows)) for _ in range(self.draw.randint(1, 4))]
        self.state.reorder(order)
        self.rows = [list(self.rows[n]) for n in order]

    def reset(self) -> None:
        row = self.draw.randrange(len(self.rows))
        self.state.reset(row)
        self.rows[row] = []

    def copy(self) -> None:
        old, self.state = self.state, self.state.copy()
        self.decoder.decode([torch.tensor([1])] * len(self.rows), old)

    def overflow(self) -> None:
        many = [torch.zeros(60, dtype=torch.int64)] * len(self.rows)
        if self.state.limit is not None:
            with pytest.raises(CacheError):
                self.decoder.decode(many, self.state)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("model", MODELS)
def test_random_programs_of_calls(model: str, config: str, poisoned: None) -> None:
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 1 << 30))
    def check(seed: int) -> None:
        draw = random.Random(seed)
        run = Run(model, config, draw)
        actions: list[Any] = [run.decode, run.decode, run.decode, run.crop, run.reorder, run.reset, run.copy]
        for _ in range(10):
            draw.choice([*actions, run.overflow])()

    check()


def test_no_new_tokens_give_no_logits() -> None:
    _, compiled = decoder("rotary")
    _, state = compiled.prefill(ids(2, 4))
    assert compiled.decode(ids(2, 4)[:, :0], state).shape == (2, 0, VOCABULARY)
    assert state.lengths == [4, 4]
    with pytest.raises(CacheError, match="tokens for 3 row"):
        compiled.decode(ids(3, 1), state)


def test_rows_share_pages_until_they_write() -> None:
    plain, compiled = decoder("learned", "paged")
    tokens = ids(1, 10)
    _, state = compiled.prefill(tokens)
    before = state.nbytes
    state.reorder([0, 0, 0])
    (group,) = state.groups.values()
    assert group.rows[0] == group.rows[1] == group.rows[2]
    assert state.nbytes == before, "tables were moved, no tensors"
    more = ids(3, 2, 5)
    found = compiled.decode(more, state)
    wanted = whole_logits(plain, torch.cat([tokens.expand(3, -1), more], 1))[:, 10:]
    torch.testing.assert_close(found, wanted, **CLOSE)
    (group,) = state.groups.values()
    assert group.rows[0][:2] == group.rows[1][:2], "full pages stay shared"
    assert len({row[2] for row in group.rows}) == 3, "the last one does not"


def test_a_decoder_is_the_model_too() -> None:
    plain, compiled = decoder("rotary")
    tokens = ids(2, 6)
    torch.testing.assert_close(whole_logits(compiled, tokens), whole_logits(plain, tokens), **CLOSE)
    assert set(compiled.state_dict()) == set(plain.state_dict())
    assert compiled.config is plain.config
    assert sum(p.numel() for p in compiled.parameters()) == sum(p.numel() for p in plain.parameters())


def test_weights_may_change_between_calls() -> None:
    model = MODELS["learned"]()
    compiled = attngraph.compile(model, cache=True)
    compiled.prefill(ids(1, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    torch.testing.assert_close(compiled.prefill(ids(1, 4))[0], whole_logits(model, ids(1, 4)), **CLOSE)


def test_what_is_kept_may_be_of_fewer_digits() -> None:
    plain, _ = decoder("learned")
    compiled = attngraph.compile(plain, cache=CacheConfig(dtype=torch.bfloat16))
    tokens = ids(2, 12)
    logits, state = compiled.prefill(tokens[:, :8])
    torch.testing.assert_close(logits, whole_logits(plain, tokens[:, :8]), **CLOSE)
    assert all(t.dtype == torch.bfloat16 for t in state.stores().values())
    found, wanted = compiled.decode(tokens[:, 8:], state), whole_logits(plain, tokens)[:, 8:]
    assert 0 < (found - wanted).abs().max() < 0.05 * wanted.abs().max()


# --- beams and sampling ---


@pytest.mark.parametrize("config", ["contiguous", "paged"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_as_many_as_there_are_sequences_find_the_best_one(config: str, penalty: float) -> None:
    plain, compiled = decoder("learned", config)
    prompt = ids(1, 4, 3)
    end = 7
    found = compiled.generate(
        prompt, max_new_tokens=2, num_beams=VOCABULARY, eos_token_id=end, length_penalty=penalty
    )
    best, wanted = -float("inf"), None
    first = whole_logits(plain, prompt)[0, -1].double().log_softmax(-1)
    for a in range(VOCABULARY):
        if a == end:
            options = [(float(first[a]), [a])]
        else:
            second = (
                whole_logits(plain, torch.cat([prompt, torch.tensor([[a]])], 1))[0, -1]
                .double()
                .log_softmax(-1)
            )
            options = [(float(first[a] + second[b]) / 2**penalty, [a, b]) for b in range(VOCABULARY)]
        for score, tokens in options:
            if score > best:
                best, wanted = score, tokens
    assert found[0, 4 : 4 + len(wanted or [])].tolist() == wanted


def test_sampling_follows_the_distribution_and_the_seed() -> None:
    plain, compiled = decoder("rotary")
    prompt = ids(1, 6)
    weights = (whole_logits(plain, prompt)[0, -1].double() / 1.5).softmax(-1)
    many = prompt.expand(4000, -1)
    drawn = compiled.generate(many, max_new_tokens=1, temperature=1.5, seed=3)[:, -1]
    counts = torch.bincount(drawn, minlength=VOCABULARY) / 4000
    assert (counts - weights).abs().max() < 5 * (0.25 / 4000) ** 0.5
    again = compiled.generate(many, max_new_tokens=1, temperature=1.5, seed=3)[:, -1]
    assert torch.equal(drawn, again)
    other = compiled.generate(many, max_new_tokens=1, temperature=1.5, seed=4)[:, -1]
    assert not torch.equal(drawn, other)
    order = weights.argsort(descending=True)
    allowed = compiled.generate(many, max_new_tokens=1, temperature=1.5, seed=3, top_k=3)[:, -1]
    assert set(allowed.tolist()) == set(order[:3].tolist())
    nucleus = int((weights[order].cumsum(0) < 0.5).sum()) + 1
    allowed = compiled.generate(many, max_new_tokens=1, temperature=1.5, seed=3, top_p=0.5)[:, -1]
    assert set(allowed.tolist()) == set(order[:nucleus].tolist())


@pytest.mark.parametrize(
    "wrong",
    [{"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")},
     {"top_k": 0, "temperature": 1.0},
     {"top_p": 1.5, "temperature": 1.0}, {"num_beams": 0}, {"num_beams": 2, "temperature": 1.0}],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_named(wrong: dict[str, Any]) -> None:
    _, compiled = decoder("learned")
    with pytest.raises(ValueError, match=next(iter(wrong))):
        compiled.generate(ids(1, 3), **wrong)


def test_an_empty_prompt_is_an_error() -> None:
    _, compiled = decoder("learned")
    with pytest.raises(ValueError, match="no tokens"):
        compiled.generate(ids(2, 3), attention_mask=torch.tensor([[0, 0, 0], [1, 1, 1]]))


# --- what has no decoder ---


class Plain(nn.Module):
    """An attention with a mask, and something before it."""

    def __init__(self, hide: Any = None, before: Any = None, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.hide, self.before, self.layer = hide, before, layer

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.before is not None:
            x = self.before(x)
        if self.layer is not None:
            x = self.layer(x.mT).mT
        if self.hide is not None:
            place = torch.arange(ids.shape[1])
            scores = (x @ x.mT).masked_fill(self.hide(place[:, None], place), -torch.inf)
            x = x + scores.softmax(-1) @ x
        return self.head(x)


def _causal(q: Tensor, k: Tensor) -> Tensor:
    return k > q


WITHOUT = {
    "an encoder": (lambda: Plain(lambda q, k: (k < 0) & (q < 0)), "attention.*later.*Token 0 sees token 1"),
    "a prefix": (lambda: Plain(lambda q, k: (k > q) & (k >= 3)), r"later tokens.*Token 0 sees token 1"),
    "one ahead": (lambda: Plain(lambda q, k: k > q + 1), "later tokens.*Token 0 sees token 1"),
    "chunks": (lambda: Plain(lambda q, k: k // 4 > q // 4), "later tokens.*Token 0 sees token 1"),
    "a mean over tokens": (
        lambda: Plain(_causal, lambda x: x - x.mean(1, keepdim=True)), "mean.*Token 0 sees token 1",
    ),
    "flip": (lambda: Plain(_causal, lambda x: x + x.flip(1)), "flip|add.*Token 0 sees token"),
    "a shift ahead": (lambda: Plain(_causal, lambda x: x + torch.roll(x, -1, 1)), "Token 0 sees token 1"),
    "the next token beside each": (
        lambda: Plain(_causal, lambda x: x + nn.functional.pad(x[:, 1:], (0, 0, 0, 1))),
        "Token 0 sees token 1",
    ),
    "a convolution that looks ahead": (
        lambda: Plain(_causal, layer=nn.Conv1d(8, 8, 3, padding=1)), "conv1d.*Token 0 sees token 1",
    ),
    "a norm over tokens": (
        lambda: Plain(_causal, layer=nn.BatchNorm1d(8, track_running_stats=False)),
        "norm.*Token 0 sees token 1",
    ),
    "a running sum of later tokens": (
        lambda: Plain(_causal, lambda x: x.flip(1).cumsum(1).flip(1)),
        "flip.*test_decoder.py.*Token 0 sees",
    ),
    "a running sum over the batch": (
        lambda: Plain(_causal, lambda x: x.cumsum(0)), "cumsum.*test_decoder.py",
    ),
    "scores that know the length": (
        lambda: Plain(None, lambda x: x * x.shape[1]), "how many tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
def test_what_lets_a_token_see_a_later_one_is_refused(name: str) -> None:
    make, message = WITHOUT[name]
    with pytest.raises(NoDecoderError, match="(?s)" + message):
        attngraph.compile(stirred(make()), cache=True).prefill(ids(1, 5))


class Written(nn.Module):
    """A layer of Plain, `[B, C, T]`, whose mask (one where a key is seen) comes from a function of T."""

    def __init__(self, mask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        seen = self.mask(x.shape[2])
        return x @ ((x.mT @ x) * seen - 1e10 * (1 - seen)).softmax(-1).mT


def _diagonals(tokens: int) -> Tensor:
    return torch.diag_embed(torch.ones(tokens)) + torch.diag_embed(torch.ones(tokens - 1), offset=-1)


def _row_by_row(tokens: int) -> Tensor:
    seen = torch.zeros(tokens, tokens)
    for row in range(tokens):
        seen[row, max(0, row - 2) : row + 1] = 1
    return seen


def test_a_mask_may_be_a_sum_of_diagonals() -> None:
    model = stirred(Plain(layer=Written(_diagonals)))
    tokens = ids(2, 9)
    compiled = attngraph.compile(model, cache=True)
    first, state = compiled.prefill(tokens[:, :5])
    found = torch.cat([first, *(compiled.decode(tokens[:, [place]], state) for place in range(5, 9))], 1)
    torch.testing.assert_close(found, whole_logits(model, tokens), **CLOSE)


def test_a_mask_that_a_loop_writes_row_by_row_is_refused_with_what_to_do() -> None:
    model = stirred(Plain(layer=Written(_row_by_row)))
    message = (
        r"attention at .*coder\.py:\d+: its scores have a case of their own for each of 11 tokens.*arange"
    )
    with pytest.raises(NoDecoderError, match=message) as problem:
        attngraph.compile(model, cache=True).prefill(ids(1, 5))
    assert "looked into" not in problem.value.reason


@pytest.mark.parametrize(
    ("sign", "reason"),
    [(-1, r"sees later tokens \({}\)\. Token 0 sees"), (1, r"could not be shown .*\({}\)\.\n")],
)
def test_a_fill_that_leaks_is_named_and_a_pair_of_tokens_only_if_there_is_one(sign: int, reason: str) -> None:
    """A token's product with itself is far above a fill of -100, unless it is negated."""

    class Leaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:  # [B, C, T], as a layer of Plain takes it
            later = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).triu(1)
            return x @ (sign * (x.mT @ x)).masked_fill(later, -100.0).softmax(-1).mT

    with pytest.raises(NoDecoderError, match=reason.format(r"s = where\(k > q, -100\.0, .*dot\)")):
        attngraph.compile(stirred(Plain(layer=Leaking())), cache=True).prefill(ids(1, 5))


def test_a_convolution_that_is_padded_on_both_sides_and_cut_has_a_decoder() -> None:
    class Shortened(nn.Module):
        """A convolution over earlier tokens: padded on both sides, and the end cut off."""

        def __init__(self) -> None:
            super().__init__()
            self.convolve = nn.Conv1d(8, 8, 3, padding=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.convolve(x)[..., : x.shape[2]]

    model, tokens = stirred(Plain(_causal, layer=Shortened())), ids(2, 8)
    decoder = attngraph.compile(model, cache=True)
    logits, state = decoder.prefill(tokens[:, :5])
    found = torch.cat([logits, *(decoder.decode(tokens[:, at], state) for at in range(5, 8))], 1)
    torch.testing.assert_close(found, whole_logits(model, tokens), **CLOSE)


def test_keys_that_are_values_are_kept_once() -> None:
    model = stirred(Plain(_causal))
    compiled = attngraph.compile(model, cache=True)
    tokens = ids(2, 8)
    logits, state = compiled.prefill(tokens[:, :5])
    found = torch.cat([logits, compiled.decode(tokens[:, 5:], state)], 1)
    torch.testing.assert_close(found, whole_logits(model, tokens), **CLOSE)
    assert compiled.report.cache is not None
    assert compiled.report.cache.bytes_per_token == 8 * 4


def test_batch_norm_with_its_own_statistics_is_token_wise() -> None:
    model = stirred(Plain(_causal, layer=nn.BatchNorm1d(8)))
    compiled = attngraph.compile(model, cache=True)
    logits, state = compiled.prefill(ids(2, 8)[:, :5])
    found = torch.cat([logits, compiled.decode(ids(2, 8)[:, 5:], state)], 1)
    torch.testing.assert_close(found, whole_logits(model, ids(2, 8)), **CLOSE)


def test_a_model_in_training_mode_has_no_decoder() -> None:
    with pytest.raises(NoDecoderError, match=r"model\.eval"):
        attngraph.compile(MODELS["learned"]().train(), cache=True).prefill(ids(1, 4))


def test_a_buffer_that_changes_its_values_is_noticed() -> None:
    class Buffered(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            scores = (x @ x.mT).masked_fill(~self.mask[: ids.shape[1], : ids.shape[1]], -torch.inf)
            return self.head(x + scores.softmax(-1) @ x)

    model = stirred(Buffered())
    compiled = attngraph.compile(model, cache=True)
    tokens = ids(1, 9)
    torch.testing.assert_close(compiled.prefill(tokens)[0], whole_logits(model, tokens), **CLOSE)
    model.mask[5, 2] = False
    with pytest.raises(NoDecoderError):
        compiled.prefill(tokens)


class Masked(nn.Module):
    """Adds a mask `[B, 1, 1, T]` of keys to its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids)
        place = torch.arange(ids.shape[1])
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        s = (heads @ heads.mT).masked_fill(place > place[:, None], -torch.inf) + mask
        return (s.softmax(-1) @ heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_a_mask_may_have_the_tokens_in_its_last_dimension(tokens: int) -> None:
    model = Masked().eval()
    decoder = attngraph.compile(model, cache=True)
    prompts, mask = ids(2, tokens + 3) % 20, torch.zeros(2, 1, 1, tokens + 3)
    mask[1, ..., 1:2] = -torch.inf
    wanted = whole_logits(model, prompts, mask=mask)
    logits, state = decoder.prefill(prompts[:, :tokens], mask=mask[..., :tokens])
    torch.testing.assert_close(logits, wanted[:, :tokens], **CLOSE)
    for at, end in ((tokens, tokens + 1), (tokens + 1, tokens + 3)):
        logits = decoder.decode(prompts[:, at:end], state, mask=mask[..., at:end])
        torch.testing.assert_close(logits, wanted[:, at:end], **CLOSE)


def test_a_mask_of_pairs_of_tokens_is_told_what_to_be() -> None:
    decoder = attngraph.compile(Masked().eval(), cache=True)
    with pytest.raises(
        NoDecoderError, match=r"its argument mask is \[2, 1, 3, 3\], with an entry for each pair"
    ):
        decoder.prefill(torch.ones(2, 3, dtype=torch.long), mask=torch.zeros(2, 1, 3, 3))


@pytest.mark.parametrize("given", [torch.arange(5.0), torch.arange(5.0)[None], (torch.ones(2, 5),)])
def test_places_in_another_layout_are_told_how_to_be_given(given: Any) -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)

        def forward(self, ids: Tensor, at: Any) -> Tensor:
            at = at[0] if isinstance(at, tuple) else at
            x = self.embed(ids) + at[..., None].cos()
            s = x @ x.mT
            return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ x

    told = r"its argument at has the number of tokens, 5, in another place than a decoder takes it"
    with pytest.raises(NoDecoderError, match=told):
        attngraph.compile(Placed().eval(), cache=True).prefill(torch.ones(2, 5, dtype=torch.long), at=given)


def test_a_spread_attention_mask_marks_padding() -> None:
    class Padded(Masked):
        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            mask = torch.zeros(()) if attention_mask is None else attention_mask
            return super().forward(ids, mask)

    model = Padded().eval()
    decoder = attngraph.compile(model, cache=True)
    prompts = ids(2, 5) % 20
    kept = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    added = torch.where(kept[:, None, None] > 0, 0.0, -torch.inf)
    wanted = whole_logits(model, prompts, attention_mask=added)
    for mask in (added, kept[:, None, None], kept):
        logits, _ = decoder.prefill(prompts, mask)
        torch.testing.assert_close(logits[kept > 0], wanted[kept > 0], **CLOSE)


@pytest.mark.parametrize(("low", "problem"), [(-3.4e38, ""), (-50.0, "could not be shown to hide")])
def test_a_score_that_is_raised_to_the_fill_stays_masked_only_if_that_is_low(
    low: float, problem: str
) -> None:
    class Raised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 8)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            place = torch.arange(ids.shape[1])
            s = x @ x.mT + torch.where(place <= place[:, None], 0.0, low)
            return torch.maximum(s, torch.tensor(low)).softmax(-1) @ x

    model = Raised().eval()
    decoder, ids = attngraph.compile(model, cache=True), torch.arange(12).view(2, 6)
    if problem:
        with pytest.raises(NoDecoderError, match=problem):
            decoder.prefill(ids)
    else:
        torch.testing.assert_close(decoder.prefill(ids)[0], model(ids))


@pytest.mark.parametrize("config", CONFIGS)
def test_memory_is_allocated_at_once_for_all_rows(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngraph.runtime.pages import Pages

    _, compiled = decoder("windowed", config)
    compiled.prefill(ids(1, 5))
    empty, made = Pages._empty, []
    monkeypatch.setattr(Pages, "_empty", lambda self, *a: made.append(a) or empty(self, *a))
    calls = []
    for rows in (4, 100):
        made.clear()
        _, state = compiled.prefill(ids(rows, 5))
        compiled.decode(ids(rows, 3), state)
        calls.append(len(made))
        made.clear()
        state.reorder([n // 2 for n in range(2 * rows)])
        compiled.decode(ids(2 * rows, 1), state)
        calls.append(len(made))
    assert calls[:2] == calls[2:]
