"""The report: for people it folds what is equal, for machines it goes through JSON unchanged, and it has
the fields that users were promised."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.passes import DEFAULT_PIPELINE
from attngraph.report.entries import AttentionEntry, Break, KernelEntry, Missed, PassRecord, TracedCall
from attngraph.report.report import CompileReport, merge


def entry(**changed: object) -> AttentionEntry:
    plain = AttentionEntry(
        name="blocks.0.attention",
        program="s = 0.125 * dot\nkeep k <= q",
        heads=12,
        kv_heads=12,
        head_dim=64,
        value_dim=64,
        mask="causal",
        source="gpt.py:61",
        kernel=KernelEntry("cpu.flash"),
        error=3e-16,
        call=TracedCall(2, 16, 16, "float32", (3,)),
    )
    return dataclasses.replace(plain, **changed)  # type: ignore[arg-type]


def record(**changed: object) -> PassRecord:
    return dataclasses.replace(PassRecord("fuse-attention", True, 0.25, 41, 33, ("fused 12",)), **changed)  # type: ignore[arg-type]


def test_equal_attentions_are_folded_with_their_number_and_the_names_of_first_and_last() -> None:
    report = CompileReport(tuple(entry(name=f"blocks.{i}.attention", error=i * 1e-16) for i in range(12)))
    text = str(report)
    assert "attention x 12   gpt.py:61   blocks.0.attention .. blocks.11.attention" in text
    assert text.count("keep k <= q") == 1
    assert "12 of 12 softmax-like places fused" in text
    assert "error 1e-15" in text  # the largest of them


def test_a_mask_too_long_to_be_read_is_left_to_the_program() -> None:
    conditions = " or ".join(f"k == {n} and q == {n + 1}" for n in range(20))
    report = CompileReport((entry(mask=conditions, program=f"s = dot\nkeep {conditions}"),))
    text = str(report)
    assert "mask: the conditions below" in text
    assert text.count(conditions) == 1
    assert report.attention[0].mask == conditions


@pytest.mark.parametrize(
    "other",
    [
        {"program": "s = dot"},
        {"heads": 6},
        {"kv_heads": 4},
        {"head_dim": 32},
        {"value_dim": 32},
        {"mask": "none"},
        {"source": "gpt.py:62"},
        {"kernel": KernelEntry("cpu.tiled")},
        {"numerics": "exact"},
    ],
    ids=lambda o: next(iter(o)),
)
def test_attentions_that_differ_in_anything_a_reader_sees_are_not_folded(other: dict[str, object]) -> None:
    text = str(CompileReport((entry(), entry(**other))))
    assert text.count("\n  attention ") == 2
    assert " x 2" not in text


def test_grouped_heads_and_other_value_widths_are_told() -> None:
    text = str(CompileReport((entry(kv_heads=4, value_dim=32),)))
    assert "12 heads on 4 key/value heads of width 64 (values 32), mask: causal" in text


def test_what_was_missed_is_told_with_reason_and_line() -> None:
    missed = (Missed("softmax over heads", "model.py:7"),) * 3 + (Missed("sum of squares", "model.py:9"),)
    text = str(CompileReport((entry(),), missed))
    assert "1 of 5 softmax-like places fused" in text
    assert re.search(r"not fused x 3 +model\.py:7\n +softmax over heads", text)
    assert re.search(r"not fused +model\.py:9\n +sum of squares", text)


def test_places_that_every_layer_has_are_told_once_with_their_number() -> None:
    rules = [Missed("no softmax", f"gpt.py:{line}", f"l.{n}") for n in range(3) for line in (4, 7)]
    text = str(CompileReport(missed=tuple(rules)))
    assert text.count("not fused x 3") == 2 and text.count("no softmax") == 2


def test_where_capture_broke_is_told() -> None:
    text = str(CompileReport(breaks=(Break("depends on data", "model.py:3"),)))
    assert re.search(r"captured in pieces +model\.py:3\n +depends on data", text)


def test_a_report_of_nothing_says_what_to_do() -> None:
    compiled = attngraph.compile(torch.nn.Linear(2, 2))
    assert str(compiled.report).startswith("attngraph: nothing traced yet; call the compiled model once")
    assert compiled.report.attention == ()


def test_json_holds_every_field_and_comes_back_the_same() -> None:
    report = CompileReport(
        (entry(), entry(name="x")), (Missed("why", "a.py:1", "m"),), (record(),), (Break("r", "s"),), 1.5, 2
    )
    found = json.loads(report.to_json())
    texts = {"captured", "code", "parts"}
    assert set(found) == {f.name for f in dataclasses.fields(CompileReport)} - texts
    rebuilt = CompileReport.from_json(report.to_json())
    assert rebuilt == report
    assert str(rebuilt) == str(report)


def test_merging_adds_up_passes_and_keeps_each_break_once() -> None:
    one = CompileReport((entry(),), (), (record(changed=False),), (Break("r", "s"),), 1.0, 1)
    two = CompileReport(
        (entry(name="b"),), (Missed("m", "n"),), (record(seconds=0.5),), (Break("r", "s"),), 2.0, 1
    )
    both = merge([one, two])
    assert [a.name for a in both.attention] == ["blocks.0.attention", "b"]
    assert both.passes == (PassRecord("fuse-attention", True, 0.75, 82, 66, ("fused 12", "fused 12")),)
    assert both.breaks == one.breaks
    assert (both.seconds, both.graphs, len(both.missed)) == (3.0, 2, 1)


@pytest.fixture(scope="module")
def real() -> CompileReport:
    """The report on a decoder of three layers beside a softmax that is no attention."""
    torch.manual_seed(0)
    model = DecoderLM(DecoderLMConfig(vocab_size=50, layers=3, width=32, heads=4, max_tokens=32)).eval()

    def score(ids: torch.Tensor) -> torch.Tensor:
        return torch.softmax(model(ids), -1)

    compiled = attngraph.compile(score)
    compiled(torch.randint(0, 50, (2, 9)))
    return compiled.report


def test_every_attention_has_the_fields_that_were_promised(real: CompileReport) -> None:
    assert len(real.attention) == 3
    first = real.attention[0]
    assert (first.heads, first.kv_heads, first.head_dim, first.mask) == (4, 4, 8, "causal")
    assert re.fullmatch(r"(.*/)?models/masked_attention\.py:\d+", first.source)
    assert not first.source.startswith("/")
    assert attngraph.parse(first.program)
    assert [a.name for a in real.attention] == [f"blocks.{i}.attention" for i in range(3)] or all(
        f"blocks.{i}.attention" in a.name for i, a in enumerate(real.attention)
    )
    assert first.kernel.name
    assert (first.flops, first.score_bytes) == (2 * 2 * 4 * 9 * 9 * 16, 2 * 4 * 9 * 9 * 4)
    assert first.bytes == 4 * 2 * 9 * 32 * 4
    assert first.cached_bytes == 2 * 32 * 4


def test_what_was_left_alone_has_reason_and_line(real: CompileReport) -> None:
    (missed,) = real.missed
    assert missed.reason
    assert re.fullmatch(r".*test_report\.py:\d+", missed.source)
    assert not missed.source.startswith("/")


def test_every_pass_has_the_fields_that_were_promised(real: CompileReport) -> None:
    assert [p.name for p in real.passes] == [step.name for step in DEFAULT_PIPELINE]
    for step in real.passes:
        assert isinstance(step.changed, bool)
        assert step.seconds >= 0
        assert step.before > 0 and step.after > 0
    fused = real.passes[1]
    assert fused.changed and fused.after < fused.before
    assert any("fused 3" in note for note in fused.notes)


def test_the_text_of_a_real_report_is_for_people(real: CompileReport) -> None:
    text = str(real)
    assert "3 of 4 softmax-like places fused" in text
    assert "attention x 3" in text
    assert "4 heads of width 8, mask: causal" in text
    assert "| keep k <= q" in text
    assert "0x" not in text
    assert max(len(line) for line in text.splitlines()) < 160


def test_what_came_up_in_running_a_kernel_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngraph.ir.ops.kernels import KERNELS

    def attend(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x

    compiled = attngraph.compile(attend, backend="reference")
    compiled(torch.randn(2, 5, 8))
    assert compiled.report.attention[0].kernel.remarks == ()
    said = "Blocks(128, 64) does not run on cuda:0, smaller tiles are tried: OutOfResources"
    monkeypatch.setattr(KERNELS["reference"], "remarks", lambda program: (said,), raising=False)
    assert compiled.report.attention[0].kernel.remarks == (said,)
    assert said in str(compiled.report)
    assert CompileReport.from_json(compiled.report.to_json()).attention[0].kernel.remarks == (said,)


def test_a_report_has_the_time_of_each_stage() -> None:
    report = attngraph.explain(lambda q: (q @ q.mT).softmax(-1) @ q, torch.randn(2, 5, 8))
    assert list(report.stages) == ["capture", *(record.name for record in report.passes)]
    assert 0 < sum(report.stages.values()) <= report.seconds


class MapAttention(nn.Module):
    """Two heads of attention among the pixels of a map."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(8, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (t.reshape(b * 2, c // 2, h * w) for t in self.qkv(x).chunk(3, 1))
        p = torch.einsum("bct,bcs->bts", q / 2, k).softmax(-1)
        return torch.einsum("bts,bcs->bct", p, v).reshape(b, c, h, w)


@pytest.mark.parametrize("height, width", [(4, 6), (8, 8)])
def test_the_height_of_a_map_is_not_told_as_heads(height: int, width: int) -> None:
    model, x = MapAttention(), torch.randn(2, 8, height, width)
    compiled = attngraph.compile(model)
    torch.testing.assert_close(compiled(x), model(x))
    (entry,) = compiled.report.attention
    assert (entry.heads, entry.kv_heads) == (2, 2)
    assert entry.call is not None and entry.call.queries == height * width


def test_heads_that_lie_beside_the_queries_in_one_dimension_are_told_as_heads() -> None:
    def shared_keys(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Four heads of queries on one of keys, multiplied at once."""
        b, s, _ = x.shape
        q = x.view(b, s, 4, 8).transpose(1, 2).reshape(b, 4 * s, 8)
        return ((q @ k.mT).softmax(-1) @ v).view(b, 4, s, 8)

    x, k, v = torch.randn(2, 7, 32), torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    compiled = attngraph.compile(shared_keys)
    torch.testing.assert_close(compiled(x, k, v), shared_keys(x, k, v))
    (entry,) = compiled.report.attention
    assert (entry.heads, entry.kv_heads) == (4, 1)
