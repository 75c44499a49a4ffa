"""Every kernel of the CPU against the reference: the same values, gradients and NaN patterns in
float64, and errors of the half types within twice those of the eager model."""

import math
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops.kernels import KERNELS

op = torch.ops.attngraph.attention.default
Reads = tuple[Tensor, ...]


def operands(
    B: int = 2, Hq: int = 2, Hkv: int = 2, Sq: int = 70, Skv: int = 70, D: int = 4, Dv: int = 4,
    dtype: torch.dtype = torch.float64, scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    shapes = ((B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv))
    q, k, v = (scale * torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def call(
    kernel: str, program: str, given: tuple[Tensor, ...], reads: Reads = (), sizes: tuple[int, ...] = (),
    through_lse: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Output, log-sum-exp and the gradients of every floating operand."""
    q, k, v = (t.detach().requires_grad_() for t in given)
    sources = [r.detach().requires_grad_(r.is_floating_point()) for r in reads]
    out, lse = op(q, k, v, sources, list(sizes), program, kernel)
    generator = torch.Generator().manual_seed(4)
    loss = (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
    if through_lse:
        loss = loss + (lse * torch.randn(lse.shape, generator=generator, dtype=torch.float64)).sum()
    inputs = [q, k, v, *(s for s in sources if s.requires_grad)]
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)]


def assert_as_reference(
    kernel: str, program: str, given: tuple[Tensor, ...], reads: Reads = (), sizes: tuple[int, ...] = (),
    through_lse: bool = True,
) -> None:  # fmt: skip
    names = ["out", "lse", "grad q", "grad k", "grad v", *(f"grad r{i}" for i, r in enumerate(reads))]
    expected = call("reference", program, given, reads, sizes, through_lse)
    for name, a, b in zip(
        names, call(kernel, program, given, reads, sizes, through_lse), expected, strict=False
    ):
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )


FLOOR = repr(torch.finfo(torch.float64).min)
PAD = torch.ones(2, 70, dtype=torch.bool)
PAD[0, 50:], PAD[1, :66] = False, False

CASES: dict[str, tuple[str, dict[str, int], Reads, tuple[int, ...]]] = {
    "plain": ("s = 0.5 * dot", {}, (), ()),
    "causal": ("s = 0.5 * dot; keep k <= q", {}, (), ()),
    "causal, unscaled": ("keep k <= q", {}, (), ()),
    "causal by division": ("s = dot / 2; keep k <= q", {}, (), ()),
    "causal, few queries": ("keep k <= q", {"Sq": 3}, (), ()),
    "causal, many queries": ("keep k <= q", {"Skv": 3}, (), ()),
    "cross": ("s = 0.5 * dot", {"Sq": 5, "Skv": 130}, (), ()),
    "grouped": ("keep k <= q", {"Hq": 6, "Hkv": 2}, (), ()),
    "multi-query": ("s = 0.25 * dot", {"Hq": 4, "Hkv": 1}, (), ()),
    "wide values": ("keep k <= q", {"Dv": 7}, (), ()),
    "decode": ("keep k <= q + n0", {"Sq": 1}, (), (69,)),
    "fill of -1e9": ("s = 0.5 * dot; keep k <= q else -1e9", {}, (), ()),
    "fill of finfo.min": (f"s = 0.5 * dot; keep k <= q else {FLOOR}", {}, (), ()),
    "fill of -1e9, grouped": ("s = 0.5 * dot; keep k <= q else -1e9", {"Hq": 4}, (), ()),
    "fill that leaks": ("s = 0.5 * dot; keep k <= q else -5", {}, (), ()),
    "fill above the scores": ("keep k <= q else 5", {}, (), ()),
    "fill relative to the score": ("keep k <= q else s - 5", {}, (), ()),
    "fill far below the score": ("keep k <= q else s - 10000", {}, (), ()),
    "fill that is read": ("keep k <= q else r0[h]", {}, (random(2),), ()),
    "fill where every row is filled": ("keep k < 0 else -1e9", {}, (), ()),
    "fill where some rows are filled": ("keep r0[b, q] else -1e9", {}, (PAD,), ()),
    "fill before a hard mask": ("keep k <= q else -1e9; keep k > q - 80", {}, (), ()),
    "hard mask, then a fill that uncovers": ("keep k < 64; keep k < 60 else -5", {}, (), ()),
    "hard mask, then a fill where undecided": ("keep k < 64; keep r0[b, k] else -5", {}, (PAD,), ()),
    "hard mask, then a fill of the score": ("keep k < 64; keep k < 60 else max(s, -5)", {}, (), ()),
    "hard mask, then a score": ("keep k <= q; s = max(s, -5)", {}, (), ()),
    "hard mask, then a positive score": ("keep k <= q; s = s * s * 0 + dot", {}, (), ()),
    "fill of the negated score": ("keep k < 64 else -1e9; keep k < 60 else -1e9 - s", {}, (), ()),
    "window": ("keep k <= q and k > q - 8", {}, (), ()),
    "window of n0": ("keep k <= q and q - k < n0", {}, (), (65,)),
    "chunks": ("keep q // 16 == k // 16", {}, (), ()),
    "dilated": ("keep (q - k) % 4 == 0 and k <= q", {}, (), ()),
    "a number as predicate": ("keep k - 64", {}, (), ()),
    "fractions": ("keep q % 63 * 0.5 % 1 <= 0 or k == 0", {}, (), ()),
    "padding": ("keep r0[b, k]", {}, (PAD,), ()),
    "padding and causal": ("keep k <= q; keep r0[b, k] else -1e9", {}, (PAD,), ()),
    "softcap": ("s = 5 * tanh(dot / 5); keep k <= q", {}, (), ()),
    "bias": ("s = dot + r0[b, h, q, k]", {}, (random(2, 2, 70, 70),), ()),
    "relative bias": ("s = dot + r0[h, k - q + 69]", {}, (random(2, 139),), ()),
    "slopes": ("s = dot + r0[h] * (k - q); keep k <= q", {}, (random(2),), ()),
    "a read of rank 0": ("s = dot * r0[]", {}, (random(),), ()),
    "sink": ("keep k <= q; sink r0[h]", {}, (random(2),), ()),
    "sink that dominates": ("keep k <= q else -50; sink 1000", {}, (), ()),
    "sink and nothing kept": ("keep false; sink 1", {}, (), ()),
    "dropout": ("p = where(0.1 <= random(r0[], b, h, q, k), p / 0.9, 0)", {}, (torch.tensor(2**32 - 5),), ()),
    "causal dropout": ("keep k <= q; p = where(0.1 <= random(5, b, h, q, k), p / 0.9, 0)", {}, (), ()),
    "rows without keys": ("keep k < q", {}, (), ()),
    "blocks without keys": ("keep k < q - 64", {}, (), ()),
    "rows without keys, NaN replaced": ("keep k < q; p = where(isnan(p), 0, p)", {}, (), ()),
    "rows without keys, mean instead": ("keep k < q; p = where(isnan(p), 1 / 70, p)", {}, (), ()),
    "nothing kept": ("keep k > 1000", {}, (), ()),
    "weights moved": ("keep k <= q; p = p + 0.01", {}, (), ()),
    "weights masked": ("p = where(k <= q, p, 0)", {}, (), ()),
    "weights read": ("keep k <= q; p = p * r0[q, k]", {}, (random(70, 70),), ()),
    "no keys": ("s = 0.5 * dot", {"Skv": 0}, (), ()),
    "no keys but a sink": ("sink 1", {"Skv": 0}, (), ()),
    "no queries": ("keep k <= q", {"Sq": 0}, (), ()),
    "no batch": ("keep k <= q", {"B": 0}, (), ()),
    "no width": ("keep k <= q", {"D": 0}, (), ()),
    "one key": ("keep k <= q", {"Skv": 1}, (), ()),
}


@pytest.mark.parametrize("name", list(CASES))
def test_tiled_equals_the_reference_with_gradients(name: str) -> None:
    program, shape, reads, sizes = CASES[name]
    assert_as_reference("cpu.tiled", program, operands(**shape), reads, sizes)


SERVED_BY_FLASH = [
    n
    for n, (p, s, _, _) in CASES.items()
    if KERNELS["cpu.flash"].refuse(parse(p), operands(**{**s, "B": 1, "Sq": 2, "Skv": 2})) is None
]


@pytest.mark.parametrize("name", SERVED_BY_FLASH)
def test_flash_equals_the_reference_with_gradients(name: str) -> None:
    program, shape, reads, sizes = CASES[name]
    assert_as_reference("cpu.flash", program, operands(**shape), reads, sizes, through_lse=False)
    assert_as_reference("cpu.flash", program, operands(**shape), reads, sizes, through_lse=True)


@pytest.mark.parametrize("height", [-1e4, 1e6])
def test_gradients_of_rows_whose_scores_are_all_far_from_zero(height: float) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 40, 16) for _ in range(4))
    q, k = q.round(), k.mul(4).round().div(4)  # float32 has their products exactly
    q[..., 0], k[..., 0] = height, 1.0
    program, results = parse("s = 0.5 * dot; keep k <= q"), []
    for name, dtype in (("cpu.flash", torch.float32), ("reference", torch.float64)):
        tensors, of_out = (q.to(dtype), k.to(dtype), v.to(dtype)), grad.to(dtype)
        out, lse = KERNELS[name].forward(program, tensors, (), ())
        of_lse = torch.zeros_like(lse)
        results.append(KERNELS[name].backward(program, tensors, (), (), (out, lse), (of_out, of_lse)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found[..., 1:].double(), wanted[..., 1:], rtol=1e-4, atol=1e-4)


def test_flash_serves_the_cases_that_it_is_for() -> None:
    assert {"plain", "causal", "grouped", "multi-query", "fill of -1e9", "fill that leaks"} <= set(
        SERVED_BY_FLASH
    )
    assert not {"window", "softcap", "sink", "dropout"} & set(SERVED_BY_FLASH)


@pytest.mark.parametrize("kernel", ["cpu.flash", "cpu.tiled"])
@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0, 300.0])
def test_a_fill_of_minus_ten_thousand_leaks_where_scores_are_large(kernel: str, scale: float) -> None:
    given = operands(scale=scale)
    assert_as_reference(kernel, "keep k <= q else -10000", given)
    hidden = call("reference", "keep k <= q", given)[0]
    if scale == 300:
        assert not torch.allclose(hidden, call(kernel, "keep k <= q else -10000", given)[0])


@pytest.mark.parametrize("kernel", ["cpu.flash", "cpu.tiled"])
@pytest.mark.parametrize("program", ["s = 0.5 * dot; keep k <= q", "s = 0.5 * dot", "keep k <= q else -1e9"])
@pytest.mark.parametrize(
    "layout", ["expanded batch", "expanded heads", "token-major", "reversed", "slice", "expanded width"]
)
def test_strides_do_not_matter(kernel: str, program: str, layout: str) -> None:
    q, k, v = operands()
    if layout == "expanded batch":
        k, v = k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)
    elif layout == "expanded heads":
        k, v = k[:, :1].expand(-1, 2, -1, -1), v[:, :1].expand(-1, 2, -1, -1)
    elif layout == "token-major":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif layout == "reversed":
        q, k, v = (t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for t in (q, k, v))
    elif layout == "slice":
        q, k, v = (torch.stack([t, -t], -1)[..., 0] for t in (q, k, v))
    else:
        q = q[..., :1].expand(-1, -1, -1, 4)
    assert_as_reference(kernel, program, (q, k, v), through_lse=False)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, fill: float, bias: Tensor | None) -> Tensor:
    """The textbook, in the operands' own dtype."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[3])
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, fill)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kernel", ["cpu.flash", "cpu.tiled", "reference"])
@pytest.mark.parametrize("name", ["plain", "causal", "soft", "grouped", "bias"])
def test_errors_are_at_most_twice_those_of_the_eager_model(
    name: str, kernel: str, dtype: torch.dtype
) -> None:
    q, k, v = operands(Hq=4, Hkv=2 if name == "grouped" else 4, Sq=96, Skv=96, D=32, Dv=32, dtype=dtype)
    fill = -1e4 if name == "soft" else -math.inf
    mask = None if name in ("plain", "bias") else torch.ones(96, 96, dtype=torch.bool).tril()
    bias = random(4, 96, 96).to(dtype) if name == "bias" else None
    program = f"s = {1 / math.sqrt(32)} * dot" + ("; s = s + r0[h, q, k]" if name == "bias" else "")
    program += "" if mask is None else f"; keep k <= q else {fill}"
    if name == "bias" and kernel == "cpu.flash":
        pytest.skip("flash serves no bias")
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    low = [t.clone().requires_grad_() for t in (q, k, v)]
    ours = [t.clone().requires_grad_() for t in (q, k, v)]
    true = eager(*exact, mask, fill, None if bias is None else bias.double())
    theirs = eager(*low, mask, fill, bias)
    found = op(*ours, [] if bias is None else [bias], [], program, kernel)[0]
    assert found.dtype == dtype
    weight = random(*true.shape).to(dtype)
    for result, inputs in ((true, exact), (theirs, low), (found, ours)):
        (result * weight.to(result.dtype)).sum().backward()
        assert all(t.grad is not None for t in inputs)
    eps = torch.finfo(dtype).eps
    atol = 4 * eps if dtype == torch.float32 else eps / 4
    for a, b, c in zip(
        [true, *(t.grad for t in exact)], [theirs, *(t.grad for t in low)], [found, *(t.grad for t in ours)],
        strict=True,
    ):  # fmt: skip
        assert float((c - a).abs().max()) <= 2 * float((b - a).abs().max()) + atol * float(a.abs().max())
        assert c.dtype == dtype


@pytest.mark.parametrize("kernel", ["cpu.flash", "cpu.tiled"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_nan_and_infinity_in_the_operands_come_out_where_the_reference_has_them(
    kernel: str, bad: float, place: str
) -> None:
    q, k, v = operands()
    {"q": q, "k": k, "v": v}[place][0, 1, 40, 2] = bad
    for program in ("keep k <= q", "s = 0.5 * dot", "keep k <= q else -1e9"):
        expected, found = (op(q, k, v, [], [], program, name)[0] for name in ("reference", kernel))
        assert torch.equal(expected.isnan(), found.isnan()), program


@given(data=st.data())
@settings(max_examples=80)
def test_tiled_equals_the_reference_on_random_programs(
    data: st.DataObject, language: types.SimpleNamespace
) -> None:
    """Forward only; more keys than one step, few queries."""
    program: ScoreProgram = data.draw(language.programs(1, masks=True))
    B, H, Sq, Skv = 1, 2, 66, 130
    q, k, v = operands(B, H, 1, Sq, Skv, 2, 2)
    reads = language.reads(B, H, Sq, Skv)
    found, expected = (
        KERNELS[n].forward(program, (q, k, v), reads, (100, 40)) for n in ("cpu.tiled", "reference")
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("program", ["keep k <= q", "keep k <= q and k > q - 40", "keep k <= q else -1e9"])
def test_batches_taken_apart_give_the_whole(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import attngraph.codegen.cpu.tiled as tiled

    monkeypatch.setattr(tiled, "SCORES", 1)
    assert_as_reference("cpu.tiled", program, operands(B=3))


@pytest.mark.parametrize("kernel", ["cpu.compiled", "cpu.flash", "cpu.tiled"])
@pytest.mark.parametrize("place", ["keys", "bias", "nowhere"])
def test_a_mask_that_is_added_lets_nan_through(kernel: str, place: str) -> None:
    q, k, v = operands()
    bias = torch.zeros(k.shape[2])
    if place == "keys":
        k[..., -1, :] = torch.nan
    elif place == "bias":
        bias[-1] = torch.nan
    if kernel == "cpu.flash":
        if place == "bias":
            pytest.skip("cpu.flash serves no bias")
        program, reads = "keep k <= q else s - inf", []
    else:
        program, reads = "s = dot + r0[k]; keep k <= q else s - inf", [bias]
    mine, reference = (
        KERNELS[n].forward(parse(program), (q, k, v), reads, ())[0] for n in (kernel, "reference")
    )
    assert torch.allclose(mine, reference, atol=1e-5, equal_nan=True)
    assert bool(reference.isnan().any()) == (place != "nowhere")
