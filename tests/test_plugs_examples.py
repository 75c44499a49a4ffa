"""The examples of docs/plugs.md run, in their order; lm-eval scores a decoder as it scores its model."""

from __future__ import annotations

import importlib
import importlib.util
import re
import string
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import attngraph

transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "plugs.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
HAS_LM_EVAL = all(importlib.util.find_spec(name) for name in ("lm_eval", "accelerate"))
needs_lm_eval = pytest.mark.skipif(not HAS_LM_EVAL, reason="the extra lm-eval is not installed (it is large)")


def is_for_lm_eval(code: str) -> bool:
    return code.startswith("# needs lm_eval\n")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the examples define, but for those of lm-eval, in a module that dynamo can import."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    names = vars(module)
    for number, code in enumerate(c for c in EXAMPLES if not is_for_lm_eval(c)):
        exec(compile(code, f"docs/plugs.md, example {number + 1}", "exec"), names)
    return names


@pytest.mark.slow
def test_the_examples_of_the_page_run(page: dict[str, Any]) -> None:
    assert sum(is_for_lm_eval(code) for code in EXAMPLES) == 1
    assert len(EXAMPLES) >= 5
    assert isinstance(page["model"], transformers.GenerationMixin)


@needs_lm_eval
def test_lm_eval_scores_a_derived_decoder_as_it_scores_the_model(page: dict[str, Any]) -> None:
    instance = importlib.import_module("lm_eval.api.instance").Instance
    tokenizers = importlib.import_module("tokenizers")
    words = ["<unk>", "<s>", "</s>", *string.ascii_letters, *string.digits, " ", ".", ","]
    characters = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    questions = [
        instance("loglikelihood", {}, pair, 0) for pair in (("hello", " you"), ("one two", " three"))
    ]

    (code,) = filter(is_for_lm_eval, EXAMPLES)
    page["tokenizer"] = tokenizer
    exec(compile(code, "docs/plugs.md, lm-eval", "exec"), page)
    assert len(page["evaluated"].loglikelihood(questions, disable_tqdm=True)) == 2

    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=100, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    stock = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2 if parameter.ndim > 1 else 0.1)
    wrapped = attngraph.hf.generation_model(attngraph.compile(stock, cache=True))
    found = []
    for model in (stock, wrapped):
        tested = page["HFLM"](
            pretrained=model, tokenizer=tokenizer, backend="causal", max_length=64, batch_size=2, device="cpu"
        )
        scores = tested.loglikelihood(questions, disable_tqdm=True)
        until = {"until": ["qq"], "max_gen_toks": 12, "do_sample": False}
        asked = [instance("generate_until", {}, (text, until), 0) for text in ("hello", "one two three")]
        found.append((scores, tested.generate_until(asked, disable_tqdm=True)))
    (theirs, their_text), (ours, our_text) = found
    assert our_text == their_text
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], rel=1e-5)
