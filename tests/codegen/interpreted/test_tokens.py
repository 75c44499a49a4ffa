"""Token programs in order, by their kernels: the reference's results, and the same bits in any company."""

import pytest
import torch

from attngraph.codegen.triton.tokens import TOKENS
from attngraph.ir.language.token_program import parse
from attngraph.ir.ops.token_program import reference

NORM = """
r0[t, 8, 16]
r1[16]
r2[i0 < 8] = sum[j < 16] r0[t, i0, j] * r0[t, i0, j]
r3[i0 < 8, i1 < 16] = r0[t, i0, i1] * rsqrt(r2[i0] / 16 + 1e-05) * r1[i1]
r4[i0 < 128] = where(i0 % 16 < 8, -r3[i0 // 16, i0 % 16 + 8], r3[i0 // 16, i0 % 16 - 8])
return r4[t, 128], r3[t, 8, 16], r2[8, t]"""
SHARES = """
r0[t, 3000]
r1[] = amax[j < 3000] r0[t, j]
r2[] = sum[j < 3000] exp(r0[t, j] - r1[])
r3[] = log(r2[])
return r1[t], r3[t]"""
LAYER = """
r0[1, t, 70]
r1[130, 70]
r2[130]
r3[130, 70]
r4[70, 130]
r5[] = sum[j < 70] r0[0, t, j] * r0[0, t, j]
r6[i0 < 70] = r0[0, t, i0] * rsqrt(r5[] / 70 + 1e-06)
r7[i0 < 130] = sum[j < 70] r6[j] * r1[i0, j]
r8[i0 < 130] = sum[j < 70] r6[j] * r3[i0, j]
r9[i0 < 130] = (r7[i0] + r2[i0]) / (1.0 + exp(-r7[i0] - r2[i0])) * r8[i0]
r10[i0 < 70] = sum[j < 130] r9[j] * r4[i0, j]
r11[i0 < 70] = r10[i0] + r0[0, t, i0]
return r11[1, t, 70], r8[t, 130]"""
INTEGERS = """
r0[t, 64]
r1[48, 64] int8
r2[48, 2]
r3[48, 2] int8
r4[i0 < 64] = r0[t, i0] * 0.01
r5[i0 < 48] = sum[j < 64] r4[j] * ((float(r1[i0, j]) - float(r3[i0, j // 32])) * r2[i0, j // 32])
return r5[t, 48]"""


def _given(text: str, tokens: int) -> list[torch.Tensor]:
    generator, given = torch.Generator().manual_seed(tokens), []
    for about in parse(text).given:
        shape = [tokens if n is None else n for n in about.shape]
        dtype = getattr(torch, about.dtype)
        if dtype.is_floating_point:
            made = torch.randn(shape, generator=generator) / (1 if about.token_dim is not None else 8)
        else:
            made = torch.randint(-128, 128, shape, generator=generator)
        given.append(made.to(dtype))
    return given


BEYOND = """
r0[t, 5]
r1[] = sum[j < 12] where(j < 5, r0[t, j], 0.5)
r2[i0 < 9] = where(i0 < 5, r0[t, i0], r1[])
return r2[t, 9]"""


@pytest.mark.parametrize("text", [NORM, SHARES, LAYER, INTEGERS, BEYOND])
def test_programs_agree_with_the_reference_in_any_company(text: str) -> None:
    program, given = parse(text), _given(text, 37)
    found = TOKENS.run(f"{text}\nin order", given)
    wanted = reference(program, [t.double() if t.is_floating_point() else t for t in given])
    assert found is not None
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    for first, count in ((0, 1), (5, 20), (36, 1)):
        some = [
            t if about.token_dim is None else t.narrow(about.token_dim, first, count)
            for t, about in zip(given, program.given, strict=True)
        ]
        alone = TOKENS.run(f"{text}\nin order", some)
        assert alone is not None
        for one, other, result in zip(alone, found, program.results, strict=True):
            assert torch.equal(one, other.narrow(result.token_dim, first, count))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_16_bits_are_multiplied_as_pytorch_does(dtype: str) -> None:
    text = (
        f"r0[t, 70] {dtype}\nr1[40, 70] {dtype}\nr2[i0 < 70] = r0[t, i0] * 1.0\n"
        "r3[i0 < 40] = sum[j < 70] r2[j] * r1[i0, j]\n"
        f"return r3[t, 40] {dtype}"
    )
    x, weight = _given(text, 21)
    found = TOKENS.run(f"{text}\nin order", [x, weight])
    assert found is not None
    torch.testing.assert_close(found[0], (x.double() @ weight.double().T).to(x.dtype))


def test_an_unknown_number_stays_one_in_a_maximum() -> None:
    x = torch.randn(2, 3000)
    x[0, 7] = float("nan")
    found = TOKENS.run(f"{SHARES}\nin order", [x])
    assert found is not None and found[0].isnan().tolist() == [True, False]


def test_what_has_no_order_is_left_to_others() -> None:
    assert TOKENS.run(NORM, _given(NORM, 3)) is None
    packed = "r0[t, 32]\nr1[8, 32] int4 low first by 1\nr2[i0 < 32] = r0[t, i0] * 1.0\n"
    packed += "r3[i0 < 8] = sum[j < 32] r2[j] * float(r1[i0, j])\nreturn r3[t, 8]"
    assert TOKENS.source(parse(packed)) == ""
