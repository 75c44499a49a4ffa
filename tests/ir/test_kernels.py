"""The kernels of the CPU that are written in PyTorch: errors within twice those of the eager model, rows
whose scores are far from zero, batches that are taken apart, added masks. What every kernel is held to,
program by program, is in tests/codegen/conformance."""

import math

import pytest
import torch
from torch import Tensor

from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import KERNELS

op = torch.ops.attngraph.attention.default


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


def results_and_gradients(kernel: str, program: str, given: tuple[Tensor, ...]) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of q, k and v."""
    q, k, v = (t.detach().requires_grad_() for t in given)
    out, lse = op(q, k, v, [], [], program, kernel)
    loss = (out * random(*out.shape)).sum() + (lse * random(*lse.shape)).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, [q, k, v])]


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


@pytest.mark.parametrize("program", ["keep k <= q", "keep k <= q and k > q - 40", "keep k <= q else -1e9"])
def test_batches_taken_apart_give_the_whole(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import attngraph.codegen.cpu.tiled as tiled

    monkeypatch.setattr(tiled, "SCORES", 1)
    found, expected = (
        results_and_gradients(name, program, operands(B=3)) for name in ("cpu.tiled", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


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
