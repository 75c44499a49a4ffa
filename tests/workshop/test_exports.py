"""The command that exports stock models of transformers: its rows, its table, and (slow) all classes."""

from pathlib import Path

import pytest

from workshop.bench.stock.exported import DECODERS, ENCODERS, HEADING, examine, write

ROWS = [
    {"cell": "A", "kind": "decoder", "outcome": "equal", "attentions": 2, "onnx": 2, "pt2": 2,
     "onnx words": ["with a mask"]},
    {"cell": "C", "kind": "decoder", "outcome": "equal", "attentions": 2, "onnx": 2, "pt2": 2,
     "onnx words": ["with a mask"]},
    {"cell": "B", "kind": "encoder", "outcome": "refused", "reason": "ExportError: no"},
]  # fmt: skip


def test_the_table_replaces_the_last_part_of_its_page(tmp_path: Path) -> None:
    page = tmp_path / "export.md"
    page.write_text(f"# Export\n\nBefore.\n\n{HEADING}\nAn old table.\n")
    write(page, ROWS)
    write(page, ROWS)
    text = page.read_text()
    assert text.startswith("# Export\n\nBefore.\n\n## Models of transformers\n") and "old table" not in text
    assert text.count(HEADING) == 1
    assert "### Decoders: 2 of 2 equal" in text and "### Encoders: 0 of 1 equal" in text
    assert "| A, C | 2 | 2 | 2 | with a mask | equal |" in text
    assert "| B |  |  |  |  | refused: ExportError: no |" in text


def test_no_class_is_named_twice_and_each_exists() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    names = (*DECODERS, *ENCODERS)
    assert len(set(names)) == len(names) and min(len(DECODERS), len(ENCODERS)) >= 20
    assert [name for name in names if not hasattr(transformers, name)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_a_stock_model_gives_the_same_where_attngraph_is_not(name: str) -> None:
    for package in ("transformers", "onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    row = examine(name)
    assert row["outcome"] in ("equal", "not built", "refused"), row
    if row["outcome"] == "equal":
        assert row["onnx"] + row["plain"] == row["attentions"]
        assert row["plain"] == 0 or any("heads" in words for words in row["onnx words"]), row
