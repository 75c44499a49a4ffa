"""Mixtures of experts in exported files: tokens sorted by expert, multiplied with the weights of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.exporter.whole import REMARK, by_expert
from attngraph.runtime.verify import compare

EXPERTS, WIDTH = 4, 16
needs_grouped = pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_grouped_mm"), reason="this torch has no grouped products"
)


class Experts(nn.Module):
    """Every token goes to the expert of its largest score, after an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.route = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + (q @ k.mT / 4).softmax(-1) @ v
        flat = x.flatten(0, 1)
        chosen = self.route(flat).argmax(-1)
        order = chosen.argsort()
        ends = (chosen[:, None] == torch.arange(EXPERTS)).sum(0).cumsum(0).to(torch.int32)
        y = self.grouped(flat[order], self.up, ends)
        return x + torch.zeros_like(y).index_copy(0, order, y).view_as(x)

    def grouped(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)


class OfTorch(Experts):
    """With torch's own product."""

    def grouped(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return torch.ops.aten._grouped_mm(x, weight, ends)


def test_each_token_takes_the_product_of_its_expert() -> None:
    """Beside a loop over tokens; some experts have no token, and the last tokens have no expert."""
    x, weight = torch.randn(9, 5, dtype=torch.float64), torch.randn(5, 5, 3, dtype=torch.float64)
    ends = torch.tensor([0, 4, 4, 7, 7])
    wanted = torch.zeros(9, 3, dtype=torch.float64)
    for token, expert in enumerate([1, 1, 1, 1, 3, 3, 3]):
        wanted[token] = x[token] @ weight[expert]
    torch.testing.assert_close(by_expert(x, weight, ends), wanted)


@needs_grouped
def test_the_models_own_answer_in_float64_is_found_where_torch_has_none() -> None:
    model = OfTorch().eval()
    x = torch.randn(2, 7, WIDTH)
    with pytest.raises(RuntimeError):
        model.double()(x.double())
    model = model.float()
    found = compare(model, model, (x,))
    assert found.holds and 0 < found.error < 1e-4

    def wrong(x: Tensor) -> Tensor:
        return model(x) + 1e-3

    assert not compare(wrong, model, (x,)).holds


@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_a_mixture_of_experts(format: str, tmp_path: Path) -> None:
    if format == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason=f"{package} is not installed")
    pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
    model = Experts().eval()
    file = tmp_path / f"experts.{format}"
    report = attngraph.export(attngraph.compile(model), file, (torch.randn(2, 6, WIDTH),))
    assert report.checked.startswith("equal to eager") and REMARK in report.remarks
    if format == "pt2":
        assert "grouped" not in str(torch.export.load(file).graph)
