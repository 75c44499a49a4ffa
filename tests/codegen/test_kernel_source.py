"""What kernels say they compile for a call, with tensors that hold nothing and without what would run it."""

import ast

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from attngraph.codegen.cpu import compiled
from attngraph.codegen.triton import launch
from attngraph.ir.kernels import KERNELS, Operands
from attngraph.ir.parser import parse

TEXT = "s = 0.125 * dot + r0[h] * (k - q); keep k <= q"


def fake(
    device: str = "cpu", dtype: torch.dtype = torch.float16, length: int = 8
) -> tuple[Operands, list[Tensor]]:
    with FakeTensorMode():
        q, k = (torch.empty(2, heads, length, 64, dtype=dtype, device=device) for heads in (4, 2))
        return (q, k, k), [torch.empty(4, device=device)]


def said(kernel: str, text: str, operands: Operands, reads: list[Tensor]) -> str:
    return KERNELS[kernel].source(parse(text), operands, reads)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_triton_says_the_module_that_is_launched(device: str) -> None:
    operands, reads = fake(device)
    source = said("triton.forward", TEXT, operands, reads)
    functions = [f.name for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)]
    assert functions[-1] == "causal_attention"
    assert all(f"#     {line}" in source for line in str(parse(TEXT)).splitlines())
    assert source == launch.emit(launch.plan_call(parse(TEXT), operands, reads, ())).source


def test_c_is_said_whatever_the_size_of_the_call() -> None:
    operands, reads = fake(dtype=torch.bfloat16)
    source = said("cpu.compiled", TEXT, operands, reads)
    assert "#define BFLOAT16" in source and "attngraph_attend" in source
    plan = compiled.Plan(parse(TEXT).without_scale, torch.bfloat16, (torch.float32,))
    assert source == compiled.source.write(plan).text


def test_where_nothing_is_compiled_nothing_is_said() -> None:
    operands, reads = fake()
    assert {k: said(k, TEXT, operands, reads) for k in ("cpu.flash", "cpu.tiled", "reference")} == {
        "cpu.flash": "", "cpu.tiled": "", "reference": "",
    }  # fmt: skip
    double, nothing = fake(dtype=torch.float64)[0], fake(length=0)[0]
    assert said("triton.forward", TEXT, double, reads) == said("cpu.compiled", TEXT, double, reads) == ""
    assert said("triton.forward", TEXT, nothing, reads) == ""
    assert said("triton.forward", "p = exp(p)", operands, reads) == ""
    assert said("triton.forward", TEXT, operands, [reads[0].to(torch.int8)]) == ""
    assert said("cpu.compiled", TEXT, operands, [reads[0].to(torch.int8)]) == ""
