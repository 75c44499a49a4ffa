"""Heatmaps of attention weights: what a square stands for, and that pictures and pages are sound."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import attngraph
from attngraph.report.heatmap import HEADS, heatmap, to_svg, to_text
from attngraph.report.report import CompileReport


def test_a_square_is_the_largest_weight_in_it_and_the_last_ones_may_be_smaller() -> None:
    weights = torch.rand(2, 10, 7)
    drawn = heatmap(weights, side=4)
    assert (drawn.tall, drawn.wide) == (3, 2)
    assert drawn.values.shape == (2, 4, 4)
    for head in range(2):
        for i in range(4):
            for j in range(4):
                block = weights[head, 3 * i : 3 * i + 3, 2 * j : 2 * j + 2]
                assert drawn.values[head, i, j] == block.max()
    assert drawn.largest == weights.max().item()
    assert "a square is the largest weight of 3 by 2 (queries by keys)" in drawn.notes()


def test_shades_grow_with_the_weight_and_zero_is_blank() -> None:
    drawing = to_svg(torch.tensor([[[0.0, 0.25], [0.5, 1.0]]]), "h.0.attn")
    found = [float(x) for x in re.findall(r'fill-opacity="([\d.]+)"', drawing)]
    assert found == [0.25, 0.5, 1.0]
    assert "h.0.attn" in drawing
    assert to_text(torch.tensor([[[0.0, 1.0]]])).splitlines()[1] == "    @@"


def test_a_small_weight_is_not_blank_as_a_hidden_key_is() -> None:
    weights = torch.ones(64, 64).tril().softmax(-1) * torch.ones(64, 64).tril()
    small = (weights / weights.sum(-1, keepdim=True))[None]  # the last rows have 1/64, the first has 1
    last = to_text(small, side=64).splitlines()[64]
    assert last == "  " + ".." * 64
    assert to_text(small, side=64).splitlines()[32] == "  " + ".." * 32 + "  " * 32


def test_what_is_not_a_number_is_crossed_and_said() -> None:
    weights = torch.tensor([[[torch.nan, torch.nan], [0.5, 0.5]]])
    assert "crossed: not a number" in to_svg(weights)
    assert "????" in to_text(weights)
    assert "nan" not in to_svg(torch.full((1, 2, 2), torch.nan))


@pytest.mark.parametrize("shape", [(3, 1, 200), (12, 5, 5), (2, 2, 64, 3), (1, 1, 1)])
def test_a_picture_is_well_formed_and_counts_what_it_leaves_out(shape: tuple[int, ...]) -> None:
    drawing = to_svg(torch.rand(shape).softmax(-1), "<b> & \x00")
    root = ET.fromstring(drawing)
    assert root.tag.endswith("svg")
    assert ("more heads are not drawn" in drawing) == (shape[0] > HEADS and len(shape) == 3)


def test_other_shapes_are_refused() -> None:
    for shape in ((4, 4), (1, 0, 4), (1, 1, 1, 1, 1)):
        with pytest.raises(ValueError, match="a heatmap needs weights"):
            heatmap(torch.zeros(shape))


def test_a_page_shows_the_weights_that_it_is_given(tmp_path: Path) -> None:
    compiled = attngraph.compile(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    q = torch.randn(2, 3, 6, 4)
    weights = compiled.weights(q, q, q)
    text = compiled.report.to_html(tmp_path / "page.html", weights=weights).read_text()
    assert '<section id="weights"' in text
    assert "The first of 2 rows." in text
    assert text.count("head 2") == 1
    plain = compiled.report.to_html(tmp_path / "plain.html").read_text()
    assert '<section id="weights"' not in plain
    twice = {"a": weights["attention"], "<script>b</script>": weights["attention"]}
    both = CompileReport().to_html(tmp_path / "both.html", weights=twice).read_text()
    ids = re.findall(r' id="([^"]+)"', both)
    assert len(ids) == len(set(ids))
    assert "<script>b" not in both
