"""Kernels of token programs in order, compiled ahead of time. `interpreted/` tests what they compute."""

from pathlib import Path
from typing import Any

import pytest

from attngraph.codegen.triton import device, store, tokens
from attngraph.ir.language.token_program import parse

pytestmark = [
    pytest.mark.skipif(device.no_triton() is not None, reason="needs triton"),
    pytest.mark.skipif(device.is_interpreted(), reason="compiles nothing in the interpreter"),
]
NORM = """r0[t, 8, 16]
r1[16]
r2[i0 < 8] = sum[j < 16] r0[t, i0, j] * r0[t, i0, j]
r3[i0 < 8, i1 < 16] = tanh(r0[t, i0, i1] * rsqrt(r2[i0] / 16 + 1e-05)) * r1[i1]
r4[i0 < 8] = amax[j < 16] r3[i0, j]
return r3[t, 8, 16], r4[t, 8]
in order"""
TARGETS = (("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64))


def _compiled(kernel: Any, types: dict[str, str], known: dict[str, Any], target: tuple[Any, ...]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in known.items()}
    source = ASTSource(kernel, signature, values)
    return triton.compile(source, target=GPUTarget(*target), options={"num_warps": 4})


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "directory", lambda: tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "compiled"))


@pytest.mark.parametrize("target", TARGETS)
def test_what_lies_between_products_compiles(target: tuple[Any, ...]) -> None:
    assert [stage.is_product for stage in tokens.stages(parse(NORM))] == [False]
    module = store.import_source(tokens.emitted(NORM), "tokens")
    types = {n: "i32" if "stride" in n else "*fp32" for n in module.stage0.arg_names}
    assert _compiled(module.stage0, types, {}, target).asm


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "i8"])
def test_products_compile(dtype: str, target: tuple[Any, ...]) -> None:
    from attngraph.codegen.triton.kernels import product

    has_scales = dtype == "i8"
    known = {
        "TURNED": False, "SCALED": has_scales, "ZEROS": False, "SHORT": dtype == "bf16", "ROWS": product.ROWS,
        "COLUMNS": product.COLUMNS, "AT_ONCE": product.AT_ONCE, "zeros": None,
        **({} if has_scales else {"scales": None}),
    }  # fmt: skip
    types = {
        "left": "*fp32",
        "weight": f"*{dtype}",
        "out": "*fp32",
        **({"scales": "*fp32"} if has_scales else {}),
    }
    types |= dict.fromkeys(("tokens", "depth", "width", "group"), "i32")
    found = _compiled(product.multiply, types, known, target)
    if target[0] == "cuda":
        assert ("mma.sync" in found.asm["ptx"]) == (dtype == "bf16")
