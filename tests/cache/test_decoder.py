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


MODELS = {"learned": learned_positions, "rotary": rotary_groups, "windowed": lambda: stirred(Windowed())}


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
        new = [self.tokens(0, 5) for _ in self.rows]
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
        assert run.state.lengths == [len(row) for row in run.rows]

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
    compiled.prefill(tokens)
    cache = compiled.report.cache
    assert cache is not None and cache.expanded == 2 * cache.bytes_per_token  # four query heads share two


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


# --- masks and places that are arguments ---


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


class Placed(nn.Module):
    """Reads places of tokens in a layout of its own."""

    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.read = nn.Embedding(20, 8), nn.Linear(8, 20), read

    def forward(self, ids: Tensor, at: Any) -> Tensor:
        x = self.embed(ids) + self.read(at)[..., None].cos()
        s = (x @ x.mT).masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -torch.inf)
        logits: Tensor = self.head(s.softmax(-1) @ x)
        return logits


EACH = torch.stack([torch.arange(9.0), torch.arange(9.0) / 2 + 1])
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, int]] = {
    "[1, T]": (lambda at: at, torch.arange(9.0)[None], 1),
    "[T]": (lambda at: at, torch.arange(9.0), 0),
    "[T, B]": (lambda at: at.t(), EACH.t(), 0),
    "[3, B, T]": (lambda at: at.sum(0), torch.stack([EACH, EACH + 1, EACH * 2]), 2),
    "[B, 5, T]": (lambda at: at.sum(1), EACH[:, None] * torch.arange(5.0)[:, None], 2),
    "[1, 3, 1, T]": (lambda at: at.squeeze(-2).sum(1), torch.arange(27.0).view(1, 3, 1, 9), 3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_belongs_to_tokens_may_be_in_any_layout(name: str, tmp_path: Path) -> None:
    read, at, dim = LAYOUTS[name]
    torch.manual_seed(0)
    model, prompts = Placed(read).eval(), ids(2, 9) % 20
    decoder = attngraph.compile(model, cache=True)
    wanted = whole_logits(model, prompts, at=at)
    for again in (False, True):
        for end in (6, 4):
            logits, state = decoder.prefill(prompts[:, :end], at=at.narrow(dim, 0, end))
            torch.testing.assert_close(logits, wanted[:, :end], **CLOSE)
        for start, stop in ((4, 5), (5, 9)):
            logits = decoder.decode(prompts[:, start:stop], state, at=at.narrow(dim, start, stop - start))
            torch.testing.assert_close(logits, wanted[:, start:stop], **CLOSE)
        if not again:
            decoder = attngraph.load(decoder.save(tmp_path / "decoder"), model)


def test_what_rows_have_in_common_is_refused_where_each_row_would_be_another() -> None:
    def read(at: Tensor) -> Tensor:
        return at[None] if at.ndim == 1 else at.sum(0)[None]

    with pytest.raises(NoDecoderError, match="its argument at has the number of tokens, 5, in another place"):
        decoder = attngraph.compile(Placed(read).eval(), cache=True)
        decoder.prefill(torch.ones(2, 5, dtype=torch.long), at=torch.arange(5.0))


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("rows", [1, 2])
def test_what_belongs_to_tokens_may_be_parts_of_a_tuple(
    kind: Callable[[Any], Any], rows: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, prompts = Placed(lambda at: at[0] - at[1]).eval(), ids(2, 9) % 20
    decoder, at = attngraph.compile(model, cache=True), (EACH[:rows], EACH[:rows] * 3)
    wanted = whole_logits(model, prompts, at=at)
    for again in (False, True):
        logits, state = decoder.prefill(prompts[:, :4], at=kind(part[:, :4] for part in at))
        torch.testing.assert_close(logits, wanted[:, :4], **CLOSE)
        logits = decoder.decode(prompts[:, 4:], state, at=kind(part[:, 4:] for part in at))
        torch.testing.assert_close(logits, wanted[:, 4:], **CLOSE)
        with pytest.raises(ValueError, match=r"the model needs at(\.\d|\[\d\]) for every token"):
            decoder.decode(prompts[:, 4:], state)
        if not again:
            decoder = attngraph.load(decoder.save(tmp_path / "decoder"), model)


@pytest.mark.parametrize("shape", ["int64 [B, T]", "bool [B, T]", "int64 [B, 1, 1, T]"])
def test_a_mask_that_forward_demands_is_given_flags(shape: str) -> None:
    class Demands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.embed(ids)
            seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask != 0
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            hidden = later | (~seen).flatten(1)[:, None]
            logits: Tensor = self.head((x @ x.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ x)
            return logits

    model, prompts = Demands().eval(), ids(2, 7) % 20
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    given = mask if shape.startswith("bool") else mask.long()
    given = given[:, None, None] if "1, 1" in shape else given
    decoder = attngraph.compile(model, cache=True)
    logits, state = decoder.prefill(prompts, attention_mask=given)
    torch.testing.assert_close(
        logits[mask], whole_logits(model, prompts, attention_mask=given)[mask], **CLOSE
    )
    logits = decoder.decode(prompts[:, :1], state)
    short = torch.cat([prompts[1:, :4], prompts[1:, :1]], 1)
    wanted = whole_logits(model, short, attention_mask=torch.ones_like(short))
    torch.testing.assert_close(logits[1:], wanted[:, -1:], **CLOSE)
    with pytest.raises(TypeError, match="this one has numbers of"):
        decoder.prefill(prompts, attention_mask=mask.float())


class Either(nn.Module):
    """Takes ids, or what its embedding makes of them, times a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.other, self.embed, self.head = nn.Embedding(20, 8), nn.Embedding(20, 8), nn.Linear(8, 20)
        self.factor = factor

    def forward(self, ids: Tensor | None = None, embeddings: Tensor | None = None) -> Tensor:
        x = embeddings if ids is None else self.embed(ids) * self.factor
        s = (x @ x.mT).masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -torch.inf)
        logits: Tensor = self.head(s.softmax(-1) @ x)
        return logits


def test_ids_go_on_behind_a_prompt_of_embeddings() -> None:
    torch.manual_seed(0)
    model, e, new = Either().eval(), torch.randn(2, 5, 8), ids(2, 3) % 20
    decoder = attngraph.compile(model, cache=True)
    logits, state = decoder.prefill(embeddings=e)
    torch.testing.assert_close(logits, model(embeddings=e), **CLOSE)
    whole = model(embeddings=torch.cat([e, model.embed(new)], 1))
    torch.testing.assert_close(decoder.decode(new, state), whole[:, 5:], **CLOSE)
    written = decoder.generate(embeddings=e, max_new_tokens=4)
    assert written.shape == (2, 4) and torch.equal(written[:, 0], logits[:, -1].argmax(-1))
    scaled = attngraph.compile(Either(2.0).eval(), cache=True)
    _, state = scaled.prefill(embeddings=e)
    with pytest.raises(CacheError, match="no embedding whose results it takes there for the ids themselves"):
        scaled.decode(new, state)
    assert state.lengths == [5, 5]


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
