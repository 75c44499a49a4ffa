"""What `generate` can be asked for: the names of transformers, its beams with end tokens, its order of
filters, streamers and stopping criteria, and a context that rolls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.runtime.sampling import kept_weights, sample
from tests.cache.models import WIDTH, Small, attend

pytestmark = pytest.mark.usefixtures("graphs_of_this_run")

transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")

VOCABULARY, CONTEXT = 13, 10


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, attn_implementation="eager",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def decoder(model: Any) -> Any:
    return attngraph.compile(model, cache=True)


def stir(model: nn.Module, seed: int) -> Tensor:
    """New weights, and prompts `[3, 4]`."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.6)
    return torch.randint(3, VOCABULARY, (3, 4))


def theirs(model: Any, ids: Tensor, **options: Any) -> Tensor:
    given = {"do_sample": False, "pad_token_id": 12, "eos_token_id": 2, **options}
    found: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    return found


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 2.0])
def test_beams_with_end_tokens_are_those_of_transformers(
    model: Any, decoder: Any, early_stopping: bool | str, penalty: float
) -> None:
    for seed in range(6):
        ids = stir(model, seed)
        for ends, width in ((2, 2), ([2, 5], 3)):
            options = {"num_beams": width, "length_penalty": penalty, "early_stopping": early_stopping}
            wanted = theirs(model, ids, max_new_tokens=9, eos_token_id=ends, **options)
            found = decoder.generate(ids, 9, eos_token_id=ends, pad_token_id=12, **options)
            assert torch.equal(found, wanted), (seed, ends)


@pytest.mark.parametrize(
    "options",
    [{"max_length": 9}, {"max_length": 9, "max_new_tokens": 3}, {"max_new_tokens": 8, "min_new_tokens": 5},
     {"max_length": 12, "min_length": 9},
     {"max_new_tokens": 8, "do_sample": False, "num_return_sequences": 1},
     {"max_new_tokens": 8, "num_beams": 3, "min_new_tokens": 4}],
)  # fmt: skip
def test_arguments_by_their_names_in_transformers(model: Any, decoder: Any, options: dict[str, Any]) -> None:
    for seed in range(4):
        ids = stir(model, seed)
        found = decoder.generate(input_ids=ids, eos_token_id=2, pad_token_id=12, **options)
        assert torch.equal(found, theirs(model, ids, **options))
    assert torch.equal(decoder.generate(inputs=ids, eos_token_id=2, pad_token_id=12, **options), found)


def test_do_sample_without_a_temperature_samples_at_one(model: Any, decoder: Any) -> None:
    ids = stir(model, 0)
    found = decoder.generate(ids, 8, do_sample=True, seed=1)
    assert torch.equal(found, decoder.generate(ids, 8, temperature=1.0, seed=1))
    greedy = decoder.generate(ids, 8, do_sample=False, temperature=0.7)
    assert torch.equal(greedy, decoder.generate(ids, 8))
    with pytest.raises(ValueError, match="temperature above 0"):
        decoder.generate(ids, 8, do_sample=True, temperature=0.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"no_repeat_ngram_size": 2}, "LogitsProcessor of"), ({"num_return_sequences": 2}, "do_sample"),
     ({"assistant_model": object()}, "draft="), ({"use_cache": False}, "the model itself"),
     ({"generation_config": object()}, "its values as arguments"), ({"max_length": 4}, "no room"),
     ({"early_stopping": "soon"}, "never"), ({"context": "slide"}, '"roll"'), ({"min_p": 2.0}, "min_p")],
)  # fmt: skip
def test_what_is_not_done_here_is_told_with_what_to_write(
    decoder: Any, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decoder.generate(torch.ones(1, 4, dtype=torch.int64), **wrong)


def test_a_mistyped_option_is_no_argument_of_the_model(decoder: Any) -> None:
    with pytest.raises(TypeError, match="temprature"):
        decoder.generate(torch.ones(1, 4, dtype=torch.int64), temprature=0.5)
    with pytest.raises(ValueError, match="input_ids="):
        decoder.generate(max_new_tokens=3)


class Streamer:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_is_given_what_transformers_gives_it(model: Any, decoder: Any) -> None:
    ids = stir(model, 3)
    ours, other = Streamer(), Streamer()
    decoder.generate(ids, 9, eos_token_id=2, pad_token_id=12, streamer=ours)
    theirs(model, ids, max_new_tokens=9, streamer=other)
    assert ours.given == other.given
    assert ours.ended == other.ended == 1


def test_stopping_criteria_end_the_rows_that_they_name(model: Any, decoder: Any) -> None:
    def after_a_repetition(tokens: Tensor, scores: Any) -> Tensor:
        return tokens[:, -1] == tokens[:, -2]

    for seed in range(4):
        ids = stir(model, seed)
        criteria = transformers.StoppingCriteriaList([after_a_repetition])
        wanted = theirs(model, ids, max_new_tokens=9, stopping_criteria=criteria)
        found = decoder.generate(ids, 9, eos_token_id=2, pad_token_id=12, stopping_criteria=criteria)
        assert torch.equal(found, wanted)
    alone = decoder.generate(ids, 9, stopping_criteria=lambda tokens, scores: tokens.shape[1] >= 6)
    assert alone.shape == (3, 6)


def test_a_function_sees_each_token_and_can_end_the_generation(model: Any, decoder: Any) -> None:
    ids = stir(model, 5)
    seen: list[Tensor] = []
    found = decoder.generate(ids, 8, on_token=seen.append)
    assert torch.equal(torch.stack(seen, 1), found[:, 4:])
    ended = decoder.generate(ids, 8, on_token=lambda tokens: len(seen) > 0)
    assert torch.equal(ended, found[:, :5])


@pytest.mark.parametrize(
    "asked", [{"streamer": Streamer()}, {"on_token": print}, {"stopping_criteria": print}]
)
def test_beams_have_no_token_to_show_before_the_end(decoder: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        decoder.generate(torch.ones(1, 4, dtype=torch.int64), num_beams=2, **asked)


@pytest.mark.slow
def test_an_encoder_decoder_begins_with_its_own_start_token() -> None:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=3,
        pad_token_id=0, eos_token_id=1, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    both = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.randint(4, 32, (2, 6))
    found = attngraph.compile(both, cache=True).generate(
        input_ids=ids, max_new_tokens=7, eos_token_id=1, pad_token_id=0
    )
    assert torch.equal(found, both.generate(ids, max_new_tokens=7, do_sample=False))


# --- the order of the filters ---


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 0.7, None), (None, 0.6, 0.2), (6, None, 0.3), (8, 0.9, 0.15), (1, 0.5, 1.0)],
)
def test_filters_leave_what_those_of_transformers_leave_in_their_order(
    top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    from transformers.generation import logits_process as theirs_of

    logits = torch.randn(64, 30, generator=torch.Generator().manual_seed(0)) * 2
    chain: list[Any] = [theirs_of.TemperatureLogitsWarper(0.8)]
    chain += [] if top_k is None else [theirs_of.TopKLogitsWarper(top_k)]
    chain += [] if top_p is None else [theirs_of.TopPLogitsWarper(top_p)]
    chain += [] if min_p is None else [theirs_of.MinPLogitsWarper(min_p)]
    scores = logits.double()
    for warper in chain:
        scores = warper(torch.zeros(64, 1), scores)
    weights, order, total = kept_weights(
        logits, torch.full((64,), 0.8, dtype=torch.float64),
        None if top_k is None else torch.full((64,), top_k),
        None if top_p is None else torch.full((64,), top_p),
        None if min_p is None else torch.full((64,), min_p),
    )  # fmt: skip
    torch.testing.assert_close(weights.sum(-1), total)
    found = torch.zeros_like(scores).scatter(1, order, weights / weights.sum(-1, keepdim=True))
    torch.testing.assert_close(found, scores.softmax(-1), rtol=1e-9, atol=1e-12)


def _sorted_sample(logits: Tensor, temperature: Tensor, options: dict[str, Any], uniform: Tensor) -> Tensor:
    """As `sample`, by sorting all tokens."""
    weights, order, _ = kept_weights(logits, temperature, **options)
    sums = weights.cumsum(-1)
    place = torch.searchsorted(sums, (uniform * sums[:, -1]).unsqueeze(1), right=True)
    place = torch.minimum(place, (weights > 0).sum(-1, keepdim=True) - 1)
    return torch.where(temperature > 0, order.gather(1, place)[:, 0], order[:, 0])


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(
    "names", [(), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p"), ("top_k", "top_p", "min_p")]
)
def test_the_likeliest_tokens_decide_as_if_all_were_sorted(
    names: tuple[str, ...], scale: float, ties: bool
) -> None:
    rows, made = 40, torch.Generator().manual_seed(1)
    logits = scale * torch.randn(rows, 3000, generator=made)
    logits = (logits * 4).round() / 4 if ties else logits
    temperature = torch.where(torch.arange(rows) % 5 == 0, 0.0, 0.3 + torch.rand(rows, generator=made))
    top_p = torch.where(torch.arange(rows) % 3 == 0, 1.0, 0.3 + 0.69 * torch.rand(rows, generator=made))
    every = {"top_k": torch.arange(rows) * 7 % 90, "top_p": top_p, "min_p": torch.full((rows,), 0.02)}
    options = {"top_k": None, "top_p": None} | {name: every[name] for name in names}
    uniform = torch.rand(rows, generator=made, dtype=torch.float64)
    uniform[:3] = torch.tensor([0.0, 0.999999, 0.999999], dtype=torch.float64)
    found = sample(logits, temperature, uniform=uniform, **options)
    wanted = _sorted_sample(logits, temperature, options, uniform)
    assert (found != wanted).sum() <= 1  # a number drawn at the border of two tokens may fall on either side
    each = [
        sample(
            logits[r : r + 1], temperature[r : r + 1], uniform=uniform[r : r + 1],
            **{n: v[r : r + 1] if isinstance(v, Tensor) else v for n, v in options.items()},
        )
        for r in range(rows)
    ]  # fmt: skip
    assert torch.equal(found, torch.cat(each))


# --- a context that rolls ---


def test_a_context_that_rolls_is_the_loop_over_the_last_tokens() -> None:
    """Of learned positions for `CONTEXT` tokens, as in nanoGPT."""
    table = nn.Embedding(CONTEXT, WIDTH)
    model = Small(lambda m, x: attend(*[x + m.table(torch.arange(x.shape[1]))] * 3), table=table)
    decoder = attngraph.compile(model, cache=True)
    rows = [torch.randint(0, VOCABULARY, (n,)) for n in (3, 9, 10, 14)]
    found = decoder.generate(rows, 12, context="roll")
    for row, tokens in zip(rows, found, strict=True):
        whole = row
        for _ in range(12):
            whole = torch.cat([whole, model(whole[None, -CONTEXT:])[0, -1:].argmax(-1)])
        assert torch.equal(tokens[-12:], whole[-12:])
        assert torch.equal(tokens[:-12][-len(row) :], row)
    with pytest.raises(attngraph.CacheError, match=str(CONTEXT)):
        decoder.generate(rows[0][None], 12)
    with pytest.raises(ValueError, match="one beam"):
        decoder.generate(rows[0][None], 12, context="roll", num_beams=2)
    ended = decoder.generate(rows, 12, context="roll", eos_token_id=int(found[1, -10]))
    assert torch.equal(ended[1, 5 : 14 + 3], found[1, 5 : 14 + 3]), "a row that ended rolls no further"
