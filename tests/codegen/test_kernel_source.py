"""What kernels say they compile for a call, with tensors that hold nothing and without what would run it."""

import ast

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from attngraph.codegen.cpu import compiled
from attngraph.codegen.triton import device, launch
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.cached_attention import source_for_short_queries
from attngraph.ir.ops.kernels import KERNELS, Operands

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
    assert functions[-1] == "causal_biased_attention"
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


def over_a_cache(device: str, by: str = "", text: str = TEXT, latent: bool = False) -> tuple[str, str]:
    with FakeTensorMode():
        q = torch.empty(1, 4, 3, 64, dtype=torch.bfloat16, device=device)
        keys = torch.empty(9, 2, 16, 64, dtype=torch.bfloat16, device=device)
        values = keys[..., :48] if latent else torch.empty_like(keys)
        reads = [torch.empty(4, device=device)]
    return source_for_short_queries(parse(text), q, (keys, values), reads, by)


@pytest.mark.skipif(device.no_triton() is not None, reason="needs triton to be chosen")
def test_over_a_cache_triton_says_both_of_its_kernels() -> None:
    name, source = over_a_cache("cuda")
    functions = [f.name for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)]
    assert name == "triton.decode" and functions[-2:] == ["decode_causal_biased_attention", "join_parts"]
    assert "value its first 48" in over_a_cache("cuda", latent=True)[1]
    assert "value its first" not in source


def test_over_a_cache_on_the_cpu_c_is_said() -> None:
    name, source = over_a_cache("cpu")
    assert name == "cpu.decode" and "attngraph_decode" in source and "#define BFLOAT16" in source


def test_over_a_cache_nothing_is_said_where_nothing_is_compiled() -> None:
    assert over_a_cache("cuda", "reference") == over_a_cache("cuda", "cpu") == ("", "")
    assert over_a_cache("cuda", text="p = p * dot") == over_a_cache("cpu", text="p = p * dot") == ("", "")
