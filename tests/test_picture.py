"""Pictures of masks show what programs do: held against the score of each pair, worked out by itself."""

from __future__ import annotations

import re
import types
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attngraph.ir.language import expr as E
from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import SCORE, Keep, Score, ScoreProgram
from attngraph.report import picture
from attngraph.report.picture import STATES, TileMap, mask_map, tile_map, to_svg, to_text
from attngraph.report.programs import WELL_KNOWN

Q, K = 7, 12
SIZES = (3, 2)


def truth_of(program: ScoreProgram, reads: list[Any], value_of: Callable[..., Any], q: int, k: int) -> str:
    """What becomes of one pair of b = 0, h = 1, statement by statement, in plain Python."""
    tables = [r.tolist() for r in reads]

    def read(number: int, at: tuple[int, ...]) -> Any:
        found = tables[number]
        for place in at:
            found = found[place]
        return found

    names = {"b": 0, "h": 1, "q": q, "k": k, "dot": 0.25, "s": 0.25, "n0": SIZES[0], "n1": SIZES[1]}
    dropped = False
    for statement in program.statements:
        if isinstance(statement, Score):
            dropped = dropped and any(n is SCORE for n in E.walk(statement.value))
            names["s"] = value_of(statement.value, names, read)
        elif isinstance(statement, Keep) and not value_of(statement.predicate, names, read):
            names["s"] = value_of(statement.fill, names, read)
            dropped = True
    return "full" if not dropped else "empty" if names["s"] == float("-inf") else "filled"


@given(data=st.data())
@settings(max_examples=100)
def test_each_pair_of_a_mask_map_is_what_the_program_makes_of_it(
    data: st.DataObject, language: types.SimpleNamespace, number: Callable[..., Any]
) -> None:
    program = data.draw(language.programs(1, weights=False, masks=True))
    reads = language.reads(2, 2, Q, K)
    known = mask_map(program, Q, K, reads, SIZES, heads=(1,)).rows
    unknown = mask_map(program, Q, K, (), SIZES, heads=(1,)).rows
    for q in range(Q):
        for k in range(K):
            truth = truth_of(program, reads, number, q, k)
            assert known[q][k] in (truth, "unknown"), f"({q}, {k}) of\n{program}"
            assert unknown[q][k] in (known[q][k], "unknown"), f"({q}, {k}) of\n{program}"
            if not any(isinstance(s, Score) for s in program.statements[1:]):
                assert known[q][k] != "unknown", f"({q}, {k}) of\n{program}"


@pytest.mark.slow
@given(data=st.data(), tile=st.integers(2, 5), given_reads=st.booleans())
@settings(max_examples=100)
def test_a_tile_is_what_all_its_pairs_are(
    data: st.DataObject, tile: int, given_reads: bool, language: types.SimpleNamespace
) -> None:
    program = data.draw(language.programs(1, masks=True))
    reads = language.reads(2, 2, Q, K) if given_reads else ()
    whole = tile_map(program, Q, K, tile, reads, SIZES)
    pairs = mask_map(program, Q, K, reads, SIZES).rows
    for i, row in enumerate(whole.rows):
        for j, state in enumerate(row):
            inside = {s for r in pairs[i * tile : i * tile + tile] for s in r[j * tile : j * tile + tile]}
            allowed = {
                "full": {"full"},
                "empty": {"empty"},
                "filled": {"empty", "filled", "unknown"},
                "partial": set(STATES),
                "unknown": set(STATES),
            }[state]
            assert inside <= allowed, f"a {state} tile ({i}, {j}) has {inside} in\n{program}"


def test_the_usual_masks_are_drawn_tile_by_tile() -> None:
    assert tile_map("keep k <= q", 6, 6, 2).rows == (
        ("partial", "empty", "empty"),
        ("full", "partial", "empty"),
        ("full", "full", "partial"),
    )
    soft = tile_map("keep k <= q else -1e9", 6, 6, 2)
    assert soft.rows[0] == ("partial", "filled", "filled")
    assert soft.fills == ("-1000000000.0",)
    assert "-1000000000.0" in to_text(soft, color=False)
    unknown = tile_map("keep k <= q and r0[b, k]", 6, 6, 2)
    assert unknown.rows[2] == ("unknown", "unknown", "unknown")
    assert unknown.rows[0] == ("unknown", "empty", "empty")
    assert unknown.unknown == ("r0",)
    assert "decided by r0" in to_text(unknown, color=False)
    data = torch.tensor([[True, True, False, True, False, False]])
    assert tile_map("keep r0[b, k]", 6, 6, 2, [data]).rows[0] == ("full", "partial", "empty")


def test_tiles_that_bounds_leave_open_are_evaluated_where_tensors_are_given() -> None:
    gathered = torch.tensor([1, 1, 1, 0, 0, 0])
    found = tile_map("keep r0[(k + 1) % 6] == 1", 6, 6, 2, [gathered])
    assert found.rows[0] == ("full", "empty", "partial") and found.looked
    assert tile_map("keep r0[(k + 1) % 6] == 1", 6, 6, 2).rows[0] == ("unknown",) * 3
    assert not tile_map("keep k <= q", 6, 6, 2).looked


def test_heads_share_a_panel_where_they_look_alike() -> None:
    drawn = mask_map("keep k <= q + h // 2", 4, 4, heads=range(4))
    assert [p.heads for p in drawn.panels] == [(0, 1), (2, 3)]
    assert len(mask_map("keep k <= q", 4, 4, heads=range(4)).panels) == 1
    assert drawn.pairs["full"] == 2 * (10 + 13)
    text = to_text(drawn, color=False)
    assert "head 0, 1" in text and "head 2, 3" in text


def test_shares_count_pairs_also_where_tiles_are_cut_off() -> None:
    found = tile_map("keep k < 4", 5, 7, 4)
    assert found.pairs == {"full": 20, "partial": 0, "filled": 0, "empty": 15, "unknown": 0}
    assert sum(found.shares.values()) == pytest.approx(1)


def test_joined_tiles_never_hide_that_they_differ() -> None:
    causal = tile_map("keep k <= q", 8, 8, 1).joined(2)
    assert causal.rows == tile_map("keep k <= q", 8, 8, 2).rows
    part = tile_map("keep r0[b, k] and k < 4", 8, 8, 2).joined(4)
    assert part.rows == (("unknown",),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("keep k < n1", 4, 4, 2, (), (3,)), "n1, which is not given"),
        (("keep k <= q", 0, 4, 2), "queries must be at least 1"),
        (("keep k <= q", 4, 4, 0), "tile must be at least 1"),
        (("keep r0[b, k]", 4, 4, 2, (torch.ones(4),)), "r0 is read with 2 indices"),
        (("keep k <= q", 1 << 20, 1 << 20, 64), "make the tile larger"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_its_reason(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tile_map(*arguments)


def test_a_tensor_that_is_too_short_is_an_error() -> None:
    with pytest.raises(IndexError, match="r0 is read at k = 7"):
        mask_map("keep r0[k]", 8, 8, [torch.ones(7)])


MAPS = [
    mask_map("keep k <= q and k > q - 6"),
    tile_map("keep k <= q else -1e9; keep r0[b, k]", 1000, 700, 64),
    mask_map("keep k <= q + h", 3, 500, heads=range(12)),
    tile_map("keep k <= q", 20000, 20000, 64),
]


@pytest.mark.parametrize("drawn", MAPS, ids=str)
@pytest.mark.parametrize("columns", [40, 79, 200])
def test_no_line_of_a_text_is_wider_than_the_terminal(drawn: TileMap, columns: int) -> None:
    text = to_text(drawn, color=False, columns=columns)
    assert max(len(line) for line in text.splitlines()) <= columns
    colored = to_text(drawn, color=True, columns=columns)
    assert re.sub(r"\x1b\[\d+m", "", colored) == text != colored


def test_every_kind_of_tile_that_is_drawn_is_explained() -> None:
    for drawn in MAPS:
        text, svg = to_text(drawn, color=False, plain=True, columns=200), to_svg(drawn)
        shown = picture._fitting(drawn, 64)
        for state in shown.states():
            assert f"  {picture.marks()[state] * 2}  {shown.meaning(state)[:20]}" in text
            assert shown.meaning(state)[:20] in svg


def test_color_goes_to_terminals_that_were_not_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = MAPS[0]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" in to_text(drawn)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in to_text(drawn)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[" not in to_text(drawn)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert "\x1b[" not in to_text(drawn)


@pytest.mark.parametrize(
    ("encoding", "plain"), [("utf-8", False), ("ascii", True), ("latin-1", True), (None, True)]
)
def test_blocks_are_drawn_where_the_encoding_has_them(
    encoding: str | None, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", types.SimpleNamespace(encoding=encoding, isatty=lambda: False))
    assert to_text(MAPS[0]).isascii() is plain


SPACE = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("drawn", MAPS[:3], ids=str)
def test_an_svg_has_a_shape_for_every_tile_and_a_description(drawn: TileMap) -> None:
    root = ElementTree.fromstring(to_svg(drawn))
    title, description = root.find(f"{SPACE}title"), root.find(f"{SPACE}desc")
    assert title is not None and description is not None
    assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    assert root.get("role") == "img" and drawn.mask in (title.text or "")
    shown = picture._fitting(drawn, 64)
    legend = set(shown.states())
    for state in STATES:
        paths = [p.get("d", "") for p in root.iter(f"{SPACE}path") if p.get("class") == state]
        tiles = sum(row.count(state) for panel in shown.panels[:8] for row in panel.rows)
        assert sum(d.count("M") for d in paths) == tiles + (state in legend)


@given(title=st.text(st.characters(), max_size=60), program=st.sampled_from(sorted(WELL_KNOWN)))
@settings(max_examples=60)
def test_an_svg_is_xml_whatever_its_title_and_asks_for_nothing(title: str, program: str) -> None:
    known = WELL_KNOWN[program]
    svg = to_svg(mask_map(known.text, 6, 6, known.reads(6, 6, known.small), known.small), title)
    root = ElementTree.fromstring(svg)
    found = root.findtext(f"{SPACE}title") or ""
    if title and title.isprintable():
        assert found == title
    assert not [e.tag for e in root.iter() if e.tag.rpartition("}")[2] in ("script", "image", "use", "a")]
    without = re.sub(r"<(title|desc|text)\b.*?</\1>", "", svg, flags=re.DOTALL)
    assert not re.search(r"href|url\(|@import|src=", without)
    assert without.count("http") == 1, "the name of the language itself"


def test_two_pictures_on_one_page_have_names_of_their_own() -> None:
    assert len({ElementTree.fromstring(to_svg(drawn)).get("id") for drawn in MAPS}) == len(MAPS)


@pytest.mark.parametrize("name", sorted(WELL_KNOWN))
def test_every_well_known_program_can_be_drawn_small_and_large(name: str) -> None:
    known = WELL_KNOWN[name]
    program = parse(known.text)
    assert len(known.sizes) == len(known.small) == program.sizes
    assert known.about
    small = mask_map(program, 24, 24, known.reads(24, 24, known.small), known.small)
    large = tile_map(program, 1024, 1024, 64, known.reads(1024, 1024, known.sizes), known.sizes)
    assert not small.pairs["unknown"] and not large.pairs["unknown"]
    assert len(known.reads(8, 8, known.small)) == len(program.reads)
    if program.keeps:
        assert small.pairs["full"] < 24 * 24


def test_what_is_unknown_decides_only_where_it_matters() -> None:
    for text, above in (
        ("keep r0[b, k] or k > q", "full"),
        ("keep r0[b, k] and k <= q", "empty"),
        ("keep not (r0[b, k] and k <= q)", "full"),
        ("keep not (r0[b, k] or k > q)", "empty"),
        ("keep k <= q; keep r0[b, k] else -5", "filled"),
        ("keep k <= q; keep r0[b, k] else s - 5", "empty"),
        ("keep k > q or dot > 0", "full"),
    ):
        rows = mask_map(text, 2, 2).rows
        if above == "filled":
            assert rows == (("unknown", "unknown"), ("unknown", "unknown"))
        else:
            assert rows == (("unknown", above), ("unknown", "unknown")), text
    assert mask_map("keep dot > 0", 1, 1).unknown == ("dot",)
