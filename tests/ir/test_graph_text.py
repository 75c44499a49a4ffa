"""The text of a graph is read back as the same graph: it prints the same, computes the same, and a line that
is wrong is named. Its relations between sizes hold as numbers are put into them, and its names of dtypes are
unique.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.utils._sympy import functions as torch_functions

from attngraph import pipeline
from attngraph.capture.trace import capture
from attngraph.codegen.scalar.form import KINDS
from attngraph.errors import TextError
from attngraph.ir.dtypes import DTYPES, FLOATS, NAMED, SCALED
from attngraph.ir.graph.formula import holds
from attngraph.ir.graph.printer import format_file
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.graph.reader import read_graph
from attngraph.ir.graph.verify import verify
from attngraph.models import targets
from attngraph.passes import DEFAULT_PIPELINE
from attngraph.passes.absorb_mla.absorb import AbsorbMLA


def whole(graph: ProgramGraph) -> str:
    return "\n".join(format_file(graph))


def several_results(x: Tensor) -> tuple[Tensor, ...]:
    first, second = x.split([3, 5], dim=-1)
    values, places = x.topk(2, dim=-1)
    return first.sum() + second.amax((0, -1)), values, places, *torch.var_mean(x, -1)


def sizes_computed_with(x: Tensor) -> Tensor:
    b, t, c = x.shape
    y = x.reshape(b * t, c)[: (b * t) // 2 * 2].reshape(-1, 2, c)
    return y.mean() * t**0.5 + torch.arange(t + 1, device=x.device).float().mean() / max(t - 1, 1)


def words_and_types(x: Tensor) -> Tensor:
    y = torch.einsum("btc,bsc->bts", x, x).to(torch.float64, memory_format=torch.contiguous_format)
    y = nn.functional.gelu(y.float(), approximate="tanh")
    y = torch.where(y > 0, y, float("-inf")).clamp(min=-1e30).nan_to_num(0.0)
    return y[:, None, torch.arange(y.shape[1])].to(torch.bfloat16) * 2


def constants_in_the_code(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0]).sum() + x.new_full((1,), 3.0)


def scalars_and_tensors(x: Tensor) -> Tensor:
    y = torch.add(x, 2.0, alpha=3) + torch.add(x, x, alpha=2)
    return (1 - y) / y.sqrt().pow(2).add(1) + torch.pow(2, y) - torch.true_divide(y, 3) % 2


class Counting(nn.Module):
    """Writes to a buffer, and reads one."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(64, 64).tril().bool())
        self.model = nn.ModuleDict({"it's [odd], name": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        t = x.shape[1]
        y = self.model["it's [odd], name"](x)
        mask: Tensor = self.mask[:t, :t]  # type: ignore[index, assignment]
        return (y @ y.mT).masked_fill(~mask, float("-inf")).softmax(-1) @ y


def changes_its_argument(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.transpose(0, 1) + 1


X = torch.randn(2, 6, 8)
MODELS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    f.__name__: (f, (X.clone(),))
    for f in (several_results, sizes_computed_with, words_and_types, constants_in_the_code,
              scalars_and_tensors, changes_its_argument)
} | {
    "buffers_and_odd_names": (Counting().eval(), (X,)),
    "strides": (scalars_and_tensors, (torch.randn(8, 2, 6).permute(1, 2, 0),)),
    "strides of something larger": (scalars_and_tensors, (torch.randn(2, 6, 9)[..., :8],)),
    "pixels": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), (torch.randn(2, 3, 8, 8),)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gradients", [False, True])
def test_what_is_read_prints_and_computes_the_same(name: str, gradients: bool) -> None:
    model, args = MODELS[name]
    with torch.set_grad_enabled(gradients):
        graph = capture(model, args, {}).graph
    for steps in ((), *((step,) for step in DEFAULT_PIPELINE)):
        pipeline.run(graph, steps)
        text = whole(graph)
        again = read_graph(text)
        assert whole(again) == text
        verify(again)
        assert again.gradients == gradients
        assert again.level is graph.level
        assert same_results(graph, again)


def same_results(graph: ProgramGraph, again: ProgramGraph) -> bool:
    """Both modules on the same random inputs; the one that was read knows only inputs that are used."""
    made = {}
    for node, given in zip(graph.placeholders(), graph.inputs, strict=True):
        fake = node.meta["val"]
        shape = [s if isinstance(s, int) else s.node.hint for s in fake.shape]
        value = torch.randn(shape).mul(3)
        made[given.kind, given.label] = value.to(fake.dtype) if fake.dtype is not torch.bool else value > 0
    first = graph.module(*(made[i.kind, i.label].clone() for i in graph.inputs))
    second = again.module(*(made[i.kind, i.label].clone() for i in again.inputs))
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["mla_decoder", "longformer", "encoder_decoder", "tiny_decoder_lm", "vit"])
def test_whole_models_are_read_back_after_every_pass(name: str) -> None:
    make = getattr(targets, name)
    model, args = make(tokens=16) if name != "vit" else make()
    with torch.no_grad():
        graph = capture(model, args, {}).graph
    passes = [AbsorbMLA("always") if isinstance(s, AbsorbMLA) else s for s in DEFAULT_PIPELINE]
    for step in passes:
        pipeline.run(graph, (step,))
        assert whole(read_graph(whole(graph))) == whole(graph)


def test_sizes_have_the_same_names_in_every_trace() -> None:
    """Torch numbers sizes by where they come from; the text must not follow it."""
    with torch.no_grad():
        first = capture(sizes_computed_with, (X,), {}).graph
        second = capture(lambda unused, x: sizes_computed_with(x), (torch.zeros(()), X), {}).graph
    assert set(first.hints) != set(second.hints)
    mine, other = (format_file(g)[1].partition(") {")[2] for g in (first, second))
    assert re.sub(r" +# .*", "", mine) == re.sub(r" +# .*", "", other).replace("%arg1", "%arg0")


TEXT = """# a dump
dump 1, level captured
sizes s0 = 3
where s0 >= 2
graph(
  $weight: f32[8, 4],
  %arg0: f32[s0, 4],
) {
  %0 = linear(%arg0, $weight) : f32[s0, 8]  # model.py:3
  [h.0]
  %1 = add(%0, 1.0) : f32[s0, 8]
  return [%1]
}
"""


def test_a_text_written_by_hand_is_a_graph() -> None:
    graph = read_graph(TEXT)
    verify(graph)
    weight, x = torch.randn(8, 4), torch.randn(5, 4)
    assert torch.equal(graph.module(weight, x)[0], x @ weight.mT + 1)


@pytest.mark.parametrize(
    ("old", "new", "line", "problem"),
    [
        ("dump 1", "dump 2", 2, "no dump of version 1"),
        ("level captured", "level finished", 2, "no dump of version 1"),
        ("dump 1, level captured\n", "", 2, "no dump of version 1"),
        ("sizes s0 = 3", "sizes s0 = three", 3, "invalid literal"),
        ("where s0 >= 2", "were s0 >= 2", 4, "expected sizes, where or graph"),
        ("%arg0: f32[s0, 4]", "%arg0: f32[s1, 4]", 7, "s1 is neither a value nor a size"),
        ("%arg0: f32[s0, 4]", "%arg0: float[s0, 4]", 7, "is no type"),
        ("%arg0:", "%arg0", 7, "expected an input"),
        ("%arg0: f32[s0, 4],\n", "%arg0: f32[s0, 4],\n  %arg0: f32[s0, 4],\n", 8, "stands twice"),
        ("linear(%arg0", "linaer(%arg0", 9, "there is no op linaer"),
        ("linear(%arg0, $weight)", "linear(%arg0, $wieght)", 9, r"\$wieght is not defined above"),
        ("linear(%arg0, $weight)", "linear(%arg0, $weight", 9, "expected a value|not closed"),
        ("linear(%arg0, $weight)", "linear($weight, %arg0, 3, 4)", 9, "no form of linear takes"),
        ("linear(%arg0, $weight)", "mm($weight, $weight)", 9, "cannot be applied"),
        (": f32[s0, 8]  # model", ": f64[s0, 8]  # model", 9, "written as torch.float64"),
        (": f32[s0, 8]  # model", ": f32[s0, 9]  # model", 9, r"written as torch.float32\[s0, 9\], but"),
        ("%1 = add", "%0 = add", 11, "%0 is defined twice"),
        ("add(%0, 1.0)", "add(%0, __import__('os'))", 11, "is no formula of sizes"),
        ("add(%0, 1.0)", "add(%0, s0.real)", 11, "is no formula of sizes"),
        ("  return [%1]\n", "", 12, "no `return`"),
        ("  return [%1]\n}\n", "", 12, "the file ends here, it is cut off"),
        ("return [%1]", "return [%7]", 12, "%7 is not defined above"),
        ("= add(", "= cached_attention(", 11, "graphs of a decoder cannot be read back"),
    ],
)  # fmt: skip
def test_a_line_that_is_wrong_is_named(old: str, new: str, line: int, problem: str) -> None:
    assert old in TEXT
    with pytest.raises(TextError, match=rf"(?s)^x\.txt, line {line}: .*({problem})"):
        read_graph(TEXT.replace(old, new, 1), "x.txt")


def test_a_graph_whose_sizes_data_decide_is_refused_with_that_reason() -> None:
    graph = capture(lambda x: x[x > 0] + 1, (X,), {}).graph
    with pytest.raises(TextError, match="data decide a size of its result"):
        read_graph(whole(graph))


@pytest.mark.parametrize("length", range(0, len(TEXT) - 2, 7))
def test_a_text_that_is_cut_anywhere_is_refused(length: int) -> None:
    with pytest.raises(TextError, match="line"):
        read_graph(TEXT[:length])


N = sympy.Symbol("n", integer=True, positive=True)


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        (torch_functions.ToFloat(N), 9.0),
        (torch_functions.OpaqueUnaryFn_sqrt(N), 3.0),
        (torch_functions.OpaqueUnaryFn_log2(N), 3.169925001442312),
        (torch_functions.FloorDiv(N, 2), 4),
        (torch_functions.Where(N > 8, 7, 1), 7),
    ],
)
def test_a_relation_holds_for_sizes_as_torch_computes_its_functions(formula: Any, value: float) -> None:
    assert holds(sympy.Ge(formula, value - 0.01), {"n": 9})
    assert not holds(sympy.Ge(formula, value + 0.01), {"n": 9})


HEADER = Path(__file__).parents[2] / "codegen" / "cpu" / "c" / "elements.h"
BYTES_IN_C = {
    "float": 4, "_Float16": 2, "uint16_t": 2, "int64_t": 8, "int32_t": 4, "int8_t": 1, "uint8_t": 1,
}  # fmt: skip


def test_every_dtype_is_found_by_its_names() -> None:
    assert all(NAMED[row.name] is row and getattr(torch, row.name) is dtype for dtype, row in DTYPES.items())
    short = [row.short for row in DTYPES.values() if row.short]
    assert len(set(short)) == len(short)


def test_elements_in_c_have_the_dtypes_bytes() -> None:
    assert all(BYTES_IN_C[row.c] == row.bytes for row in DTYPES.values() if row.c)


def test_elements_that_weights_and_caches_have_are_named_in_the_header() -> None:
    found = re.search(r"enum \{ NONE, (.*) \};", HEADER.read_text(encoding="utf-8"))
    assert found is not None
    assert sorted(found[1].split(", ")) == sorted(row.word for row in DTYPES.values() if row.word)
    assert all(DTYPES[dtype].word for dtype in (*FLOATS, *SCALED))


def test_kinds_are_those_of_the_scalar_form() -> None:
    assert {row.kind for row in DTYPES.values() if row.kind} == set(KINDS)
