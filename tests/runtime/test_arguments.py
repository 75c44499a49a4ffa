"""What `compile`, `prefill` and `submit` are given: decorators, passes by name, and clear errors."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.passes import DEFAULT_PIPELINE
from tests.runtime.small import attend


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return torch.softmax((x @ x.mT).masked_fill(~seen, float("-inf")), -1) @ x


@pytest.fixture(scope="module")
def decoder() -> attngraph.Decoder:
    return attngraph.compile(Words().eval(), cache=True)


@pytest.fixture(scope="module")
def report() -> attngraph.CompileReport:
    """Of attention that is compiled with its passes given by name."""
    compiled = attngraph.compile(attend, passes=[step.name for step in DEFAULT_PIPELINE], min_scores=0)
    compiled(torch.randn(2, 5, 8))
    return compiled.report


def test_compile_is_a_decorator_with_and_without_options(x: Tensor) -> None:
    @attngraph.compile
    def plain(x: Tensor) -> Tensor:
        return attend(x)

    @attngraph.compile(strict=True, disable=("merge-heads",))
    def strict(x: Tensor) -> Tensor:
        return attend(x)

    for compiled in (plain, strict):
        torch.testing.assert_close(compiled(x), attend(x))
        assert len(compiled.report.attention) == 1
    assert [p.notes for p in strict.report.passes if p.name == "merge-heads"] == [("disabled",)]
    with pytest.raises(ValueError, match="backend must be one of"):
        attngraph.compile(backend="abacus")  # where the decorator stands


@pytest.mark.parametrize(
    ("model", "options", "kind", "message"),
    [
        (attend, {"passes": ["nope"]}, ValueError, "there is no pass 'nope'"),
        (attend, {"passes": "nope"}, ValueError, "passes takes a sequence, as in passes=('nope',)."),
        (attend, {"passes": [3]}, TypeError, "passes takes names and passes; 3 has no 'name'"),
        (attend, {"backend": "nonsense"}, ValueError, "auto, cpu, triton, gluon, gluon_unordered, reference"),
        (attend, {"min_scores": -1}, ValueError, "is a whole number from 0 on; found -1"),
        (3, {}, TypeError, "found int"),
    ],
)
def test_what_cannot_be_compiled_is_refused_at_once(
    model: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        attngraph.compile(model, **options)


def test_what_is_no_prompt_or_no_decoder_is_told(decoder: attngraph.Decoder) -> None:
    for prompt in ("hello", [1.5, 2.0], ["a", "b"], None):
        for take in (attngraph.Engine(decoder).submit, *([] if prompt is None else [decoder.prefill])):
            with pytest.raises(TypeError, match="a prompt is a sequence of token ids"):
                take(prompt)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Engine takes what"):
        attngraph.Engine(Words())  # type: ignore[arg-type]


def test_a_row_without_new_tokens_may_be_an_empty_list(decoder: attngraph.Decoder) -> None:
    (_, state), (_, other) = (decoder.prefill([[1, 2], [3], [0, 1]]) for _ in range(2))
    found = decoder.decode([[1], [], [2]], state)
    wanted = decoder.decode([torch.tensor(row, dtype=torch.int64) for row in ([1], [], [2])], other)
    assert torch.equal(found, wanted) and state.lengths == [3, 1, 3]


def test_the_report_has_the_passes_the_time_of_capture_and_a_notebooks_form(
    report: attngraph.CompileReport,
) -> None:
    text = str(report)
    assert [p.name for p in report.passes] == [step.name for step in DEFAULT_PIPELINE]
    assert report.waited >= report.seconds >= report.capture > 0
    first = f"compiled in {report.seconds:.2f} s, in a call that took {report.waited:.2f} s"
    assert text.splitlines()[0].endswith(first)
    assert re.search(r"capture +\d+ ops +[\d.]+ ms", text)
    assert "no longer written: " in text
    assert report._repr_html_().startswith("<pre>attngraph: 1 of 1")
    assert attngraph.CompileReport.from_json(report.to_json()).capture == report.capture
    assert (report.attention[0].caller, report.attention[0].code) == ("", "")


def test_the_lowest_number_of_a_dtype_is_named(x: Tensor) -> None:
    def filled(x: Tensor) -> Tensor:
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = x @ x.mT
        return torch.softmax(scores.masked_fill(~seen, torch.finfo(x.dtype).min), -1) @ x

    report = attngraph.explain(filled, x)
    assert "finfo.min" in str(report)
    assert report.attention[0].mask.endswith("(else finfo(float32).min)")


def test_a_call_of_a_library_is_shown_with_the_models_own_line(x: Tensor) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=64)
    report = attngraph.explain(
        transformers.GPT2LMHeadModel(config).eval(), torch.zeros(1, 9, dtype=torch.int64)
    )
    (entry,) = report.attention
    assert "integrations/sdpa_attention.py" in entry.source
    assert "models/gpt2/modeling_gpt2.py" in entry.caller and "attention_interface(" in entry.code
    assert f"called at {entry.caller}" in str(report)


def test_a_library_of_several_files_is_shown_with_the_models_own_line(
    x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "strange_library"
    library.mkdir()
    (library / "__init__.py").write_text("from strange_library.outer import product\n")
    (library / "outer.py").write_text("from .inner import run\n\ndef product(a, b):\n    return run(a, b)\n")
    (library / "inner.py").write_text("def run(a, b):\n    return a @ b\n")
    monkeypatch.syspath_prepend(tmp_path)
    import strange_library  # type: ignore[import-not-found]

    def layer(x: Tensor) -> Tensor:
        weights = (x @ x.mT).softmax(-1)
        return strange_library.product(weights, x)  # type: ignore[no-any-return]

    (entry,) = attngraph.explain(lambda x: layer(x), x).attention
    assert entry.source == "strange_library/inner.py:2"
    assert "test_arguments.py" in entry.caller and entry.code.startswith("return strange_library.product")


def test_a_number_that_is_asked_for_inside_of_torch_is_told_at_the_users_line(x: Tensor) -> None:
    def in_blocks(x: Tensor) -> Tensor:
        return torch.cat([torch.softmax(part @ x.mT, -1) @ x for part in x.split(2, 1)], 1)

    (asked,) = attngraph.explain(in_blocks, x).numbers
    assert "test_arguments.py" in asked.source and "x.split(2, 1)" in asked.reason


def test_a_decoder_names_the_arguments_that_are_missing() -> None:
    class Translating(Words):
        def forward(self, ids: Tensor, source: Tensor) -> Tensor:  # type: ignore[override]
            return torch.softmax(self.embed(ids) @ source.mT, -1) @ source

    class Masked(Words):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
            return attend(self.embed(ids) * attention_mask[..., None])

    ids = torch.zeros(1, 5, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"needs source as well: give it by name \(source=...\)"):
        attngraph.compile(Translating().eval(), cache=True).prefill(ids)
    with pytest.raises(TypeError, match=r"Padding is removed before.*attention_mask=None"):
        attngraph.compile(Masked().eval(), cache=True).prefill(ids, attention_mask=torch.ones(1, 5))
