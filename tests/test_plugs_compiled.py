"""A compiled transformers model in transformers: `generate`, pipelines and the Trainer run compiled code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph

transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")

TOKENS = {"vocab_size": 64, "pad_token_id": 60, "bos_token_id": 61, "eos_token_id": 62}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=64, **TOKENS, **NO_DROPOUT)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def both() -> tuple[Any, Any]:
    model = gpt2()
    return model, attngraph.compile(model)


def prompts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 60, 0
    return ids, mask


@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"do_sample": True, "top_k": 10}, {"num_beams": 3, "num_return_sequences": 2}],
    ids=["greedy", "sampled", "beams"],
)
def test_generate_gives_the_models_tokens_on_a_derived_decoder(
    both: tuple[Any, Any], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    ids, mask = prompts()
    for model in both:
        torch.manual_seed(0)
        found.append(model.generate(ids, attention_mask=mask, max_new_tokens=5, **options))
    assert torch.equal(*found)
    assert both[1].report.cache is not None
    assert not [r for r in caplog.records if r.name.startswith("attngraph")]


def test_a_report_after_a_generate_that_ran_the_model_says_that_nothing_was_traced() -> None:
    compiled = attngraph.compile(gpt2().train())
    compiled.generate(prompts()[0], max_new_tokens=2, do_sample=False)
    assert "nothing traced yet" in str(compiled.report)


@pytest.mark.slow
def test_generate_follows_the_settings_that_the_model_has_now(both: tuple[Any, Any]) -> None:
    model, compiled = both
    ids, mask = prompts()
    compiled.generation_config.max_new_tokens = 3
    try:
        assert compiled.generate(ids, attention_mask=mask).shape == (2, 10)
    finally:
        model.generation_config.max_new_tokens = None


def test_where_no_decoder_serves_the_model_generates_and_the_reason_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = gpt2()
    compiled = attngraph.compile(model)
    ids, mask = prompts()
    for _ in range(2):
        found = compiled.generate(
            ids, attention_mask=mask, max_new_tokens=3, do_sample=False, cache_implementation="static"
        )
        assert torch.equal(found, model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False))
    compiled.train()
    compiled.generate(ids, attention_mask=mask, max_new_tokens=2)
    told = [r.getMessage() for r in caplog.records if r.name == "attngraph.hf.generation"]
    assert told == [
        "generate runs the uncompiled model: a derived decoder has no cache_implementation",
        "generate runs the uncompiled model: the model is in training mode. Call model.eval() first.",
    ]


def test_generating_makes_no_later_call_trace_anew() -> None:
    """transformers notes each model's class in a table that every forward reads; ours is no reason."""
    model = gpt2()
    compiled = attngraph.compile(model, min_scores=0)
    ids, mask = prompts()
    with torch.no_grad():
        compiled(ids, attention_mask=mask)
        compiled.generate(ids, attention_mask=mask, max_new_tokens=2)
        compiled(ids, attention_mask=mask)
    assert compiled.report.retraces == ()


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"attention_mask": "padded"}])
def test_prompts_may_be_embeddings(
    both: tuple[Any, Any], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, compiled = both
    embeddings = torch.randn(2, 5, model.get_input_embeddings().embedding_dim)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = {n: mask if v == "padded" else v for n, v in options.items()}
    options |= {"inputs_embeds": embeddings, "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(compiled.generate(**options), model.generate(**options))
    assert not [r for r in caplog.records if r.name == "attngraph.hf.generation"]


def t5() -> tuple[Any, Tensor, dict[str, Any]]:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(decoder_start_token_id=59, **sizes, **TOKENS)
    ids = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return transformers.T5ForConditionalGeneration(config), ids, {"attention_mask": mask}


def test_the_embeddings_of_an_encoder_are_no_prompts() -> None:
    model, ids, _ = t5()
    model = model.eval()
    given = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "max_new_tokens": 3}
    wanted = model.generate(**given, do_sample=False)
    assert torch.equal(attngraph.compile(model).generate(**given, do_sample=False), wanted)
    assert torch.equal(attngraph.compile(model, cache=True).generate(**given), wanted)


def whisper() -> tuple[Any, Tensor, dict[str, Any]]:
    sizes: dict[str, Any] = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 20}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    own = {"max_target_positions": 40, "suppress_tokens": None, "begin_suppress_tokens": None}
    config = transformers.WhisperConfig(decoder_start_token_id=59, **sizes, **own, **TOKENS)
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.no_timestamps_token_id = 58
    model.generation_config.max_initial_timestamp_index = None
    return model, torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1)), {}


@pytest.mark.parametrize("make", [t5, whisper])
def test_an_encoder_decoder_generates_on_a_derived_decoder_also_where_its_class_has_a_generate_of_its_own(
    make: Callable[[], tuple[Any, Tensor, dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, inputs, given = make()
    for parameter in model.eval().parameters():
        parameter.data.mul_(3)  # else all tokens are the same
    compiled = attngraph.compile(model)
    for beams in (1, 3):
        options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, **given}
        assert torch.equal(compiled.generate(inputs, **options), model.generate(inputs, **options))
    assert compiled.report.cache is not None
    assert not [r for r in caplog.records if r.name.startswith("attngraph")]


class OfParts(transformers.GPT2LMHeadModel):  # type: ignore[misc]
    def generate(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.transformer(ids).last_hidden_state).argmax(-1)


class Logged(torch.nn.Module):
    def training_step(self, x: Tensor) -> Tensor:
        return self(x)


class OverLogged(Logged):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x

    def training_step(self, x: Tensor) -> Tensor:
        return super().training_step(x)


def test_a_generate_that_calls_parts_of_the_model_says_that_nothing_of_it_is_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4, n_positions=64, **TOKENS)
    attngraph.compile(OfParts(config).eval()).generate(prompts()[0])
    assert "OfParts.generate runs the uncompiled model: it calls parts of the model" in caplog.text


def test_a_method_that_calls_the_model_through_super_runs_compiled_code() -> None:
    compiled = attngraph.compile(OverLogged(), min_scores=0)
    compiled.training_step(torch.randn(2, 5, 8))
    assert len(compiled.report.attention) == 1


def test_an_invalid_option_of_generate_is_the_models_own_error(both: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="not used by the model: \\['nonsense'\\]"):
        both[1].generate(prompts()[0], nonsense=3)


def test_a_pipeline_takes_a_compiled_model(both: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0")
    inner = tokenizers.Tokenizer(words)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="w60", eos_token="w62", padding_side="left"
    )
    answers = [
        transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)(
            ["w1 w2 w3", "w4 w5"], max_new_tokens=5, do_sample=False, batch_size=2
        )
        for model in both
    ]
    assert answers[0] == answers[1]
    assert not [r for r in caplog.records if r.name.startswith("attngraph") or "not supported" in r.message]


def test_save_pretrained_saves_tied_weights_once_and_the_models_class(tmp_path: Path) -> None:
    model = gpt2()
    attngraph.compile(model).save_pretrained(tmp_path)
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert found.lm_head.weight is found.transformer.wte.weight
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)
    assert found.config.architectures == ["GPT2LMHeadModel"]


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_trains_evaluates_and_saves_a_compiled_model(bf16: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the accelerate package is not installed")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = torch.randint(0, 60, (16, 12), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row, "not_an_argument": 1} for row in rows]
    losses = []
    for number, model in enumerate((gpt2(), attngraph.compile(gpt2()))):
        folder = tmp_path / str(number)
        settings = transformers.TrainingArguments(
            str(folder), max_steps=4, per_device_train_batch_size=4, report_to=[], eval_strategy="steps",
            eval_steps=2, logging_steps=1, disable_tqdm=True, use_cpu=True, bf16=bf16,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=data, eval_dataset=data[:4])
        trainer.train()
        trainer.save_model(str(folder / "final"))
        saved = transformers.GPT2LMHeadModel.from_pretrained(folder / "final")
        assert torch.equal(saved.lm_head.weight, model.lm_head.weight)
        history = trainer.state.log_history
        losses.append([e[k] for e in history for k in ("loss", "eval_loss") if k in e])
    torch.testing.assert_close(*losses, rtol=2e-2 if bf16 else 1e-4, atol=0)
