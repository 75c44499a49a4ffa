"""The page of a report: what stands in it and in which order, how large it is; no name becomes markup."""

import base64
import dataclasses
import hashlib
import itertools
import json
import re
import stat
import zlib
from collections.abc import Callable, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import attngraph
from attngraph import cli
from attngraph.errors import DumpError
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.report import page
from attngraph.report.dump import read_dump
from attngraph.report.entries import Missed, PassRecord
from attngraph.report.page.chart import charts, place
from attngraph.report.page.diff import compare
from attngraph.report.page.folding import Fold, Hunk, fold
from attngraph.report.page.graphs import final_text
from attngraph.report.page.html import TIMES, html, span_of_names, tag
from attngraph.report.page.layers import read_lines
from attngraph.report.ranks import ContextEntry, RanksEntry
from attngraph.report.report import CompileReport

VOID = {"meta", "input", "br", "link"}


class Structure(HTMLParser):
    """Elements, texts and ids of a page; closing tags have to fit."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def packed(text: str) -> dict[str, list[object]]:
    found = re.search(r'<script type="text/plain" id="store">([^<]*)</script>', text)
    assert found is not None
    data: dict[str, list[object]] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return data


def test_what_was_missed_stands_first_with_its_reason_and_line(missed: CompileReport) -> None:
    text = page.render(missed)
    assert [h.get("id") for h in Structure(text).named("h2")] == [
        "missed-title", "attention-title", "passes-title", "graph-title",
    ]  # fmt: skip
    for entry in missed.missed:
        assert html(entry.reason) in text and html(entry.source) in text
    assert "1 of 3 softmax-like places fused" in text


def test_a_model_in_pieces_says_why_and_shows_every_graph(pieces: CompileReport) -> None:
    text = page.render(pieces)
    assert "forward() prints" in text and "2 graphs" in text
    assert [t for t in Structure(text).texts if re.fullmatch(r"Graph \d", t)] == ["Graph 0", "Graph 1"] * 2


def test_a_decoder_shows_its_cache(decoder: CompileReport) -> None:
    assert decoder.cache is not None
    words = "".join(Structure(page.render(decoder)).texts)
    assert f"{decoder.cache.bytes_per_token:,} bytes per token" in words
    told = decoder.cache.account()
    assert told.facts and all(fact in words for fact in (told.head, *told.facts))


@pytest.mark.parametrize("what", ["ranks", "context"])
def test_what_ranks_divide_is_told_in_the_page_as_in_the_text(missed: CompileReport, what: str) -> None:
    entry = RanksEntry(2, vectors=3) if what == "ranks" else ContextEntry(2, sums=(3, 8))
    report = dataclasses.replace(missed, **{what: entry})
    words, told = "".join(Structure(page.render(report)).texts), entry.account()
    assert told.facts and all(fact in words and fact in str(report) for fact in told.facts)


def test_every_pass_says_whether_it_changed_something(decoder: CompileReport) -> None:
    found = Structure(page.render(decoder))
    kinds = [li["data-kind"] for li in found.named("li") if "data-kind" in li]
    assert kinds == ["capture", *("changed" if p.changed else "unchanged" for p in decoder.passes)]
    words = "".join(found.texts)
    for record in decoder.passes:
        assert f"{record.name} {'changed' if record.changed else 'no change'} " in words


def test_an_attention_shows_program_mask_costs_and_kernel(
    equal_layers: Callable[[int], CompileReport],
) -> None:
    words = "".join(Structure(page.render(equal_layers(12))).texts)
    assert f"attention {TIMES} 12 model.py:7" in words
    assert "blocks.0.attn .. blocks.11.attn" in words
    for expected in (
        "s = 0.125 * dot\nkeep k <= q", "causal", "cpu.compiled", "int main;", "3e-16",
        "1.05 MFLOP each over all pairs; in tiles of 4 by 4, 53 % (557 kFLOP) are not empty",
        "64 KiB each at the least", "each matrix of scores is 64 KiB more", "512 bytes per token each",
        "left expanded: left",
    ):  # fmt: skip
        assert expected in words, expected


def test_names_are_text_wherever_they_stand(evil: CompileReport) -> None:
    text = page.render(evil, evil.attention[0].name)
    text.encode("utf-8")
    found = Structure(text)
    assert not found.named("img")
    assert len(found.named("script")) == 2
    assert not [a for _, attributes in found.elements for a in attributes if a.startswith("on")]
    assert "\u202e" not in text and "\x00" not in text
    assert "\\u202ecode" in "".join(found.texts)
    assert "".join(found.texts).count("</script><img src=x onerror=") > 20


def test_only_the_pages_own_script_may_run(evil: CompileReport) -> None:
    text = page.render(evil)
    (policy,) = (m["content"] for m in Structure(text).named("meta") if m.get("http-equiv"))
    digest = base64.b64encode(
        hashlib.sha256(text.rpartition("<script>")[2].partition("</script>")[0].encode()).digest()
    )
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{digest.decode()}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )  # fmt: skip
    assert not re.search(r"""(?:src|href|action)=["'](?!#)""", text)
    assert "url(" not in text and "@import" not in text and "innerHTML" not in text


def test_controls_are_native_and_headings_do_not_skip(missed: CompileReport) -> None:
    found = Structure(page.render(missed))
    levels = [int(name[1]) for name, _ in found.elements if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = ids_of(found)
    for _, attributes in found.elements:
        for label in (attributes.get("aria-labelledby") or "").split():
            assert label in ids
    leads = {a["href"] for a in found.named("a")}
    assert leads >= {"#report", *(f"#{s['id']}" for s in found.named("section") if "id" in s)}
    assert leads <= {f"#{name}" for name in ids}
    assert all(b["type"] == "button" for b in found.named("button"))


def ids_of(found: Structure) -> list[str]:
    ids = [attributes["id"] for _, attributes in found.elements if attributes.get("id")]
    assert len(ids) == len(set(ids))
    return [name for name in ids if name]


def test_an_id_stands_once_where_masks_look_the_same(pieces: CompileReport) -> None:
    found = Structure(page.render(pieces))
    assert {"attention-0-mask", "attention-1-mask"} <= set(ids_of(found))


def test_equal_layers_are_drawn_once_and_their_changes_shown_once(
    equal_layers: Callable[[int], CompileReport],
) -> None:
    report = equal_layers(61)
    (drawn,) = charts(read_lines(report.passes[1].text))
    assert (drawn.layers[0], drawn.layers[-1], len(drawn.layers), drawn.ops) == (
        "blocks.0",
        "blocks.60",
        61,
        15,
    )
    old, new = read_lines(report.captured), read_lines(report.passes[1].text)
    found = fold(compare(old, new), old, new)
    assert [type(f) for f in found] == [Hunk, Fold]
    assert found[0].words() == "1 line changed, 3 removed, 3 added"
    assert found[1].words().endswith("the same change in blocks.1 .. blocks.60 (60 more times)")


def test_what_is_computed_before_the_graph_has_charts_of_its_own() -> None:
    text = (
        "prelude(\n  %arg0: f32[2],\n) {\n  [h.0.a]\n  %0 = neg(%arg0) : f32[2]\n  return [%0]\n}\n"
        "graph(\n  %arg0: f32[2],\n) {\n  [h.0.a]\n  %0 = cos(%arg0) : f32[2]\n"
        "  []\n  %1 = exp(%0) : f32[2]\n  return [%1]\n}"
    )
    found = [(chart.part, chart.layers, chart.ops) for chart in charts(read_lines(text))]
    assert found == [("prelude", ("h.0",), 1), ("graph", ("h.0",), 1), ("graph", ("",), 1)]


@pytest.mark.parametrize("count", [12, 61, 600])
def test_a_page_grows_little_with_equal_layers(
    count: int, equal_layers: Callable[[int], CompileReport]
) -> None:
    assert len(page.render(equal_layers(count))) < 80_000 + 500 * count


def test_a_page_of_twelve_real_layers_is_small(tmp_path: Path) -> None:
    made = attngraph.compile(DecoderLM(DecoderLMConfig(vocab_size=64, width=32, heads=2, max_tokens=32)))
    with torch.no_grad():
        made(torch.zeros(1, 16, dtype=torch.long))
    assert len(made.report.attention) == 12
    assert made.report.to_html(tmp_path / "page.html").stat().st_size < 250 * 1024


def test_a_softmax_that_was_left_alone_is_marked_where_it_is_drawn(missed: CompileReport) -> None:
    text = page.render(missed)
    assert text.count('class="missed"') == len(missed.missed) == 2
    for entry in missed.missed:
        assert html(f"not fused: {entry.reason}") in text


def test_lines_that_are_only_numbered_anew_are_equal() -> None:
    old = read_lines(
        "graph(\n) {\n  %0 = neg(%arg0) : f32[2]\n  %1 = cos(%arg0) : f32[2]\n  %2 = exp(%1) : f32[2]\n}"
    )
    new = read_lines("graph(\n) {\n  %0 = cos(%arg0) : f32[2]\n  %1 = exp(%0) : f32[2]\n}")
    kinds = [(b.kind, b.b - b.a, b.d - b.c) for b in compare(old, new)]
    assert kinds == [("equal", 2, 2), ("replaced", 1, 0), ("equal", 3, 3)]


def test_a_line_that_reads_another_value_is_changed() -> None:
    old = read_lines("  %0 = neg(%arg0) : f32[2]\n  %1 = cos(%arg0) : f32[2]\n  %2 = exp(%0) : f32[2]")
    new = read_lines("  %0 = neg(%arg0) : f32[2]\n  %1 = cos(%arg0) : f32[2]\n  %2 = exp(%1) : f32[2]")
    assert [(b.kind, b.a, b.b) for b in compare(old, new)] == [("equal", 0, 2), ("changed", 2, 3)]


def test_blocks_cover_both_texts_in_order(decoder: CompileReport) -> None:
    texts = [decoder.captured, *(p.text for p in decoder.passes if p.text)]
    for old, new in itertools.pairwise(map(read_lines, texts)):
        a = c = 0
        for block in compare(old, new):
            assert (block.a, block.c) == (a, c)
            a, c = block.b, block.d
            if block.kind == "equal":
                assert [x.key for x in old[block.a : a]] == [x.key for x in new[block.c : c]]
        assert (a, c) == (len(old), len(new))


PIECES = st.sampled_from([
    "graph(", "prelude(", ") {", "}", "  [h.0]", "  [h.1.a]", "  [m]", "  []", "  ['h.2.x",
    "  %arg0: f32[2],", "  $h.0.w: f32[2],", "  %0 = neg(%arg0) : f32[2]",
    "  %1 = add(%0, $h.0.w) : f32[2]  # m.py:1", "  %2 = reshape(%1, [2]) : f32[2]",
    "  %3 = attention(%2, %2.1, %9) : f32[2]", "          s = dot",
    "  %1 = softmax(%1) : f32[2]  # m.py:2", "  return [%3]", "", "words of no graph = (", "  %4 = ",
])  # fmt: skip


@example([], [") {", "  %1 = softmax(%1) : f32[2]  # m.py:2", "}"])
@given(st.lists(PIECES, max_size=40), st.lists(PIECES, max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_text_has_a_page(before: list[str], after: list[str]) -> None:
    record = PassRecord("pass", True, 0.1, 1, 2, (), "", "\n".join(after))
    report = CompileReport(
        missed=(Missed("why", "m.py:2"),), passes=(record,), graphs=1, captured="\n".join(before)
    )
    Structure(page.render(report))
    old, new = read_lines(report.captured), read_lines(record.text)
    blocks = compare(old, new)
    assert _rows([b for part in fold(blocks, old, new) for b in part.blocks]) == _rows(blocks)
    assert len(_rows(blocks)) == len(old) + len(new)


def test_folds_and_hunks_cover_a_diff(decoder: CompileReport) -> None:
    old, new = read_lines(decoder.captured), read_lines(decoder.passes[0].text or decoder.passes[1].text)
    shown = [b for part in fold(compare(old, new), old, new) for b in part.blocks]
    assert _rows(shown) == _rows(compare(old, new))


def _rows(blocks: Sequence[object]) -> list[tuple[str, int | None, int | None]]:
    """The lines of blocks one by one; how they are cut into blocks does not matter."""
    found: list[tuple[str, int | None, int | None]] = []
    for b in blocks:
        found += [("old", n, None) for n in range(b.a, b.b)]  # type: ignore[attr-defined]
        found += [("new", None, n) for n in range(b.c, b.d)]  # type: ignore[attr-defined]
    return sorted(found, key=str)


def test_what_is_folded_can_be_unpacked_from_the_page(decoder: CompileReport) -> None:
    text = page.render(decoder)
    store = packed(text)
    assert store["texts"] == [decoder.captured, *(p.text for p in decoder.passes if p.text)]
    assert len(store["folds"]) == text.count("data-fold=") > 0


def test_boxes_stand_below_what_they_read_and_beside_each_other(decoder: CompileReport) -> None:
    final = next(p.text for p in reversed(decoder.passes) if p.text)
    for chart in charts(read_lines(final)):
        boxes = chart.boxes()
        placed = place(boxes, [80.0] * len(boxes))
        rows = {n: number for number, row in enumerate(placed.rows) for n in row}
        for n, box in enumerate(boxes):
            assert all(rows[read] < rows[n] for read in box.reads)
        for row in placed.rows:
            middles = sorted(placed.middle[n] for n in row)
            assert all(b - a >= 80 for a, b in itertools.pairwise(middles))
        assert sum(len(box.lines) for box in boxes) == chart.ops


def test_names_of_equal_things_are_said_shortly() -> None:
    assert span_of_names([f"h.{n}.attn" for n in range(12)]) == "h.0.attn .. h.11.attn"
    assert span_of_names(["h.0", "h.2", "h.4"]) == "h.0, h.2, h.4"
    assert span_of_names(["a", "", "a"]) == "a"
    assert span_of_names(["m.1", "m", "m.1.2"]) == "m.1, m, m.1.2"
    assert span_of_names([f"h.{n}.{n}" for n in range(9)]) == "h.0.0, h.1.1, h.2.2, h.3.3, h.4.4 and 4 more"


def test_text_is_escaped_and_markup_is_not_escaped_twice() -> None:
    assert (
        tag("p", "a < b", tag("b", '"'), title="'\"<")
        == '<p title="&#x27;&quot;&lt;">a &lt; b<b>&quot;</b></p>'
    )


def test_a_page_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, missed: CompileReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DumpError, match=r"cannot write the page to .*nothing"):
        missed.to_html(tmp_path / "nothing" / "page.html")
    old = tmp_path / "page.html"
    old.write_text("mine")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(DumpError, match="No space left on device"):
        missed.to_html(old)
    assert old.read_text() == "mine" and list(tmp_path.iterdir()) == [old]


def test_a_page_can_be_read_by_others(tmp_path: Path, missed: CompileReport) -> None:
    assert stat.S_IMODE(missed.to_html(tmp_path / "page.html").stat().st_mode) == 0o644


def test_equal_kernels_are_written_once(equal_layers: Callable[[int], CompileReport]) -> None:
    report = equal_layers(2)
    first, second = report.attention
    two = dataclasses.replace(report, attention=(first, dataclasses.replace(second, source="model.py:8")))
    text = page.render(two)
    assert text.count("int main;") == 1 and 'href="#attention-0-source"' in text


def test_a_report_without_texts_says_so(missed: CompileReport) -> None:
    words = "".join(Structure(page.render(CompileReport.from_json(missed.to_json()))).texts)
    assert "The text of the graph is not part of this report." in words
    assert "Point at a box" not in words


def test_a_report_of_nothing_has_a_page() -> None:
    assert "Nothing was traced" in page.render(CompileReport(graphs=0))


def test_inspect_writes_the_page_of_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from attngraph.models.targets import tiny_decoder_lm

    model, inputs = tiny_decoder_lm(tokens=8)
    made = attngraph.compile(model, dump=tmp_path / "run")
    made(*inputs)
    assert cli.main(["inspect", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "report.html")
    (found,) = read_dump(tmp_path / "run")
    assert (tmp_path / "run" / "report.html").read_text() == page.render(found, "run")
    assert cli.main(["inspect", str(tmp_path / "run"), "--json"]) == 0
    assert CompileReport.from_json(capsys.readouterr().out).attention[0].name == "blocks.0.attention"


def test_two_dumps_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def attend(x: torch.Tensor, window: int) -> torch.Tensor:
        i = torch.arange(x.shape[1])
        seen = (i <= i[:, None]) & (i > i[:, None] - window)
        return torch.softmax((x @ x.mT).masked_fill(~seen, float("-inf")), -1) @ x

    for name, window in (("old", 3), ("new", 4)):
        attngraph.compile(attend, dump=tmp_path / name)(torch.randn(2, 9, 8), window)
    new, old = str(tmp_path / "new"), str(tmp_path / "old")
    assert cli.main(["inspect", new, "--against", old]) == 0
    page = Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8")
    section = page.partition('<section id="compared"')[2].partition("</section>")[0]
    assert "k &gt;= q - <mark>2</mark>" in section and "k &gt;= q - <mark>3</mark>" in section
    assert cli.main(["inspect", new, "--against", new]) == 0
    assert "The graph after all passes is the same." in Path(capsys.readouterr().out.strip()).read_text()
    assert cli.main(["inspect", new, "--against", str(tmp_path / "none")]) == 2


def test_inspect_opens_the_page_that_it_wrote(
    tmp_path: Path, missed: CompileReport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: not opened.append(address))
    monkeypatch.setattr("attngraph.cli.inspect.read_dump", lambda _: (missed,))
    out = tmp_path / "a page.html"
    assert cli.main(["inspect", str(tmp_path), "--open", "--json", "--out", str(out)]) == 0
    assert opened == [out.as_uri()] and out.is_file()
    assert CompileReport.from_json(capsys.readouterr().out).missed == missed.missed


def test_inspect_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "there is no dump in" in capsys.readouterr().err


def test_what_the_report_warns_of_and_which_sizes_are_numbers_stand_in_the_page(tmp_path: Path) -> None:
    def inverted(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scale = {(5, (1,)): 2.0}[x.shape[1], (1,)]
        return (scale * x @ x.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ x

    report = attngraph.explain(inverted, torch.randn(2, 5, 8))
    (entry,), (number,) = report.attention, report.numbers
    texts = " ".join(Structure(report.to_html(tmp_path / "page.html").read_text("utf-8")).texts)
    assert "is the mask inverted?" in entry.warning
    assert entry.warning in texts
    assert number.reason in texts


def test_what_all_kernels_have_is_folded_and_the_parts_are_the_whole_source(
    equal_layers: Callable[[int], CompileReport],
) -> None:
    x = torch.randn(2, 4, 70, 8)
    report = attngraph.explain(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, x, x, x)
    (entry,) = report.attention
    source = entry.kernel.source
    assert "functions.h, the same in every kernel" in source
    page_text = page.render(report)
    shown = page_text[page_text.index('class="source"') :]
    shown = shown[: shown.index("</details></article>") if "</details></article>" in shown else None]
    parts = re.findall(r"<pre[^>]*><code>(.*?)</code></pre>", shown, re.DOTALL)
    assert unescape(re.sub(r"</?[ib]>", "", "".join(parts))) == source
    assert shown.count('class="shared"') == source.count("the same in every kernel")
    own = unescape(re.sub(r"</?[ib]>", "", parts[0]))
    assert own.startswith("// attngraph, for the scores") and len(own.splitlines()) < 20


def test_the_box_of_an_attention_has_its_program() -> None:
    def causal(q: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        return (q @ q.mT / 4).masked_fill(hidden, -torch.inf).softmax(-1) @ q

    report = attngraph.explain(causal, torch.randn(2, 5, 8))
    (chart,) = charts(read_lines(report.passes[-1].text or final_text(report)))
    (box,) = [box for box in chart.boxes() if box.program]
    assert box.program == tuple(report.attention[0].program.splitlines()) == ("s = 0.25 * dot", "keep k <= q")
    assert box.is_attention
    drawn = page.render(report)
    drawn = drawn[drawn.index('class="chart"') :]
    assert "keep k &lt;= q</tspan>" in drawn and "\n    keep k &lt;= q" in drawn


def test_two_reports_are_compared_in_numbers_and_by_their_attentions(
    equal_layers: Callable[[int], CompileReport],
) -> None:
    now, entry = equal_layers(4), equal_layers(4).attention[0]
    sunk = dataclasses.replace(entry, program="s = 0.125 * dot\nkeep k <= q\nsink 1.0")
    earlier = dataclasses.replace(now, attention=(*now.attention[:3], sunk), seconds=3.0, missed=())
    words = "".join(Structure(page.render(now, earlier=earlier)).texts)
    assert "Attentions fused44" in words and "Not fused01" in words and "Compiled in3.00 s1.50 s" in words
    before, after = words.partition("Only before:")[2].split("Only now:")
    assert (
        before == "attention of 4 heads of width 16: s = 0.125 * dot; keep k <= q; sink 1.0 by cpu.compiled"
    )
    assert after.startswith("attention of 4 heads of width 16: s = 0.125 * dot; keep k <= q by cpu.compiled")
    assert "The graph after all passes is the same." in words
    assert "Only" not in "".join(Structure(page.render(now, earlier=now)).texts)
