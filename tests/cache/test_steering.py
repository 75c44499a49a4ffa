"""What steers `generate`: processors, penalties, stop strings, several samples, what is returned beside the
tokens, and a state that goes on; beside transformers' own `generate`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph
from tests.cache.test_generate import VOCABULARY, decoder, model, stir, theirs  # noqa: F401 (fixtures)

pytestmark = pytest.mark.usefixtures("graphs_of_this_run")

transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")


class Letters:
    """A tokenizer whose token n is the n-th letter."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + int(n)) for n in ids)


@pytest.mark.parametrize("beams", [1, 3])
def test_processors_and_penalties_are_those_of_transformers(model: Any, decoder: Any, beams: int) -> None:  # noqa: F811
    for seed in range(4):
        ids = stir(model, seed)
        processors = transformers.LogitsProcessorList([
            transformers.NoRepeatNGramLogitsProcessor(2), transformers.SuppressTokensLogitsProcessor([4])
        ])  # fmt: skip
        asked = {"logits_processor": processors, "repetition_penalty": 1.3, "num_beams": beams}
        wanted = theirs(model, ids, max_new_tokens=9, **asked)
        found = decoder.generate(ids, 9, eos_token_id=2, pad_token_id=12, **asked)
        assert torch.equal(found, wanted)
        assert not torch.equal(
            found, decoder.generate(ids, 9, eos_token_id=2, pad_token_id=12, num_beams=beams)
        )


def test_a_processor_is_given_all_rows_also_those_that_have_ended(model: Any, decoder: Any) -> None:  # noqa: F811
    ids, seen = stir(model, 1), list[tuple[int, ...]]()

    def processor(tokens: Tensor, scores: Tensor) -> Tensor:
        seen.append((*tokens.shape, *scores.shape))
        scores[0, 2] = torch.inf if tokens.shape[1] == 6 else scores[0, 2]
        return scores

    found = decoder.generate(ids, 5, eos_token_id=2, pad_token_id=12, logits_processor=[processor])
    assert seen == [(3, width, 3, VOCABULARY) for width in range(4, 4 + len(seen))]
    assert found[0, 6:].tolist() == [2, *[12] * (found.shape[1] - 7)]


def test_stop_strings_end_rows_where_transformers_ends_them(model: Any, decoder: Any) -> None:  # noqa: F811
    ids = stir(model, 2)
    free = Letters().decode(decoder.generate(ids, 9)[0, 4:].tolist())
    for strings in ([free[2:4]], free[4], ["zz", free[1:4]]):
        found = decoder.generate(ids, 9, stop_strings=strings, tokenizer=Letters(), pad_token_id=12)
        first = free[: len(found[0]) - 4]
        several = [strings] if isinstance(strings, str) else strings
        for row in found[:, 4:]:
            text = Letters().decode([n for n in row.tolist() if n != 12])
            assert not any(s in text[:-1] for s in several)
        assert first == free[: len(first)]
    with pytest.raises(ValueError, match="tokenizer="):
        decoder.generate(ids, 9, stop_strings="a")


def test_a_stop_string_of_the_prompt_does_not_stop_and_a_second_one_does(decoder: Any) -> None:  # noqa: F811
    ids = torch.tensor([[3, 4, 3, 4]])

    def only(tokens: Tensor, scores: Tensor) -> Tensor:
        wanted = [5, 3, 4, 6][tokens.shape[1] - 4]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([wanted]), 0.0)

    found = decoder.generate(ids, 4, stop_strings="de", tokenizer=Letters(), logits_processor=[only])
    assert found[0, 4:].tolist() == [5, 3, 4]


def test_several_samples_of_a_prompt_are_those_of_repeated_prompts(model: Any, decoder: Any) -> None:  # noqa: F811
    ids = stir(model, 3)
    found = decoder.generate(ids, 6, do_sample=True, seed=4, num_return_sequences=3)
    again = decoder.generate(ids.repeat_interleave(3, 0), 6, do_sample=True, seed=4)
    assert found.shape == (9, 10)
    assert torch.equal(found, again)
    wanted = theirs(model, ids, max_new_tokens=6, num_beams=4, num_return_sequences=2)
    best = decoder.generate(ids, 6, num_beams=4, num_return_sequences=2, eos_token_id=2, pad_token_id=12)
    assert torch.equal(best, wanted)
    for wrong in ({"num_return_sequences": 2}, {"num_return_sequences": 3, "num_beams": 2}):
        with pytest.raises(ValueError, match="num_return_sequences"):
            decoder.generate(ids, 6, **wrong)


def test_prompts_that_begin_alike_are_computed_once(model: Any, decoder: Any, monkeypatch: Any) -> None:  # noqa: F811
    stir(model, 5)
    torch.manual_seed(0)
    begin = torch.randint(3, VOCABULARY, (1, 45))
    rows = [torch.cat([begin[0], torch.randint(3, VOCABULARY, (n,))]) for n in (3, 1, 5)]
    rows.append(rows[0])
    alone = [decoder.generate(row, 8)[0, len(row) :] for row in rows]
    computed, advance = list[int](), type(decoder._derived.latest).advance

    def counted(self: Any, state: Any, counts: Any, *args: Any, **kwargs: Any) -> Any:
        computed.append(sum(counts))
        return advance(self, state, counts, *args, **kwargs)

    monkeypatch.setattr(type(decoder._derived.latest), "advance", counted)
    found = decoder.generate(rows, 8)
    assert torch.equal(found[:, -8:], torch.stack(alone))
    assert computed[:2] == [45, 9]


def test_what_is_returned_beside_the_tokens(model: Any, decoder: Any) -> None:  # noqa: F811
    ids = stir(model, 6)
    asked = {
        "output_scores": True,
        "output_logits": True,
        "return_dict_in_generate": True,
        "repetition_penalty": 1.4,
    }
    wanted: Any = theirs(model, ids, max_new_tokens=7, **asked)
    found = decoder.generate(ids, 7, eos_token_id=2, pad_token_id=12, **asked)
    assert torch.equal(found.sequences, wanted.sequences)
    new = found.sequences[:, 4:]
    real = torch.cat([torch.ones(3, 1, dtype=torch.bool), (new == 2).cumsum(1)[:, :-1] == 0], 1)
    for ours, other in ((found.scores, wanted.scores), (found.logits, wanted.logits)):
        assert len(ours) == len(other) == new.shape[1]
        for place, (a, b) in enumerate(zip(ours, other, strict=True)):
            torch.testing.assert_close(a[real[:, place]], b[real[:, place]], rtol=1e-4, atol=1e-4)
    logits = torch.stack(found.logits, 1)
    wide = logits.double().log_softmax(-1).gather(-1, new.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.logprobs[real].double(), wide[real], rtol=1e-5, atol=1e-6)
    assert not found.logprobs[~real].any()


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_a_state_goes_on_with_the_next_turn_alone(model: Any, decoder: Any, draft: str | None) -> None:  # noqa: F811
    ids, more = stir(model, 7), torch.tensor([[3, 4], [5, 6], [7, 8]])
    first = decoder.generate(ids, 5, return_dict_in_generate=True, draft=draft)
    assert first.state.lengths == [9, 9, 9]
    second = decoder.generate(more, 6, state=first.state, draft=draft)
    whole = decoder.generate(torch.cat([first.sequences, more], 1), 6)
    assert torch.equal(second, whole[:, 9:])
    assert first.state.lengths == [16, 16, 16]
    with pytest.raises(attngraph.CacheError, match="2 row"):
        decoder.generate(more[:2], 6, state=first.state)
    with pytest.raises(ValueError, match="beams"):
        decoder.generate(more, 6, state=first.state, num_beams=2)


def test_a_row_that_ended_goes_on_behind_its_own_end(model: Any, decoder: Any) -> None:  # noqa: F811
    ids = stir(model, 8)

    def ends_first(tokens: Tensor, scores: Tensor) -> Tensor:
        scores[0, 2] = torch.inf if tokens.shape[1] == 6 else scores[0, 2]
        scores[1:, 2] = -torch.inf
        return scores

    asked = {"eos_token_id": 2, "pad_token_id": 12, "logits_processor": [ends_first]}
    first = decoder.generate(ids, 5, return_dict_in_generate=True, **asked)
    ended = int((first.sequences[0] == 2).nonzero()[0]) + 1
    assert first.state.lengths == [ended, 9, 9]
    more = torch.tensor([[3, 4], [5, 6], [7, 8]])
    second = decoder.generate(more, 4, state=first.state)
    alone = decoder.generate(torch.cat([first.sequences[0, :ended], more[0]]), 4)
    assert torch.equal(second[0], alone[0, ended:])


def test_a_state_is_as_it_was_where_going_on_fails(model: Any, decoder: Any) -> None:  # noqa: F811
    ids, more = stir(model, 9), torch.tensor([[3, 4], [5, 6], [7, 8]])
    first = decoder.generate(ids, 5, return_dict_in_generate=True)
    wanted = decoder.generate(more, 6, state=first.state.copy())

    def fails(tokens: Tensor, scores: Tensor) -> Tensor:
        if tokens.shape[1] == 5:
            raise KeyError("mine")
        return scores

    with pytest.raises(KeyError):
        decoder.generate(more, 6, state=first.state, logits_processor=[fails])
    with pytest.raises(attngraph.CacheError, match="at most 64"):
        decoder.generate(more, 60, state=first.state)
    assert first.state.lengths == [9, 9, 9]
    assert torch.equal(decoder.generate(more, 6, state=first.state), wanted)


def test_a_grammar_of_xgrammar_holds_for_each_row_and_with_a_draft() -> None:
    xgrammar = pytest.importorskip("xgrammar", reason="the xgrammar package is not installed")
    from xgrammar.contrib.hf import LogitsProcessor

    letters = [*map(chr, range(32, 127)), "</s>"]
    end = len(letters) - 1
    about = xgrammar.TokenizerInfo(
        letters, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(letters), stop_token_ids=[end]
    )
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    grammar = xgrammar.GrammarCompiler(about).compile_json_schema(json.dumps(schema), any_whitespace=False)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(letters), n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=end
    )
    made = attngraph.compile(transformers.GPT2LMHeadModel(config).eval(), cache=True)
    ids = torch.randint(0, end, (3, 4))
    asked = {"do_sample": True, "seed": 1, "eos_token_id": end}

    def texts(rows: list[list[int]]) -> list[Any]:
        return [json.loads("".join(letters[n] for n in row if n != end)) for row in rows]

    found = made.generate(ids, 40, logits_processor=[LogitsProcessor(grammar)], **asked)
    alone = [
        made.generate(ids[:1], 40, logits_processor=[LogitsProcessor(grammar)], draft=draft, **asked)
        for draft in (None, "lookup")
    ]
    assert torch.equal(*alone)
    engine = attngraph.Engine(made)
    requests = [engine.submit(row, 40, logits_processor=[LogitsProcessor(grammar)], **asked) for row in ids]
    engine.run()
    for rows in (found[:, 4:].tolist(), alone[0][:, 4:].tolist(), [r.tokens for r in requests]):
        assert all(text in ({"a": True}, {"a": False}) for text in texts(rows))
