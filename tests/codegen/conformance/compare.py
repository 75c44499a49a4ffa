"""The rule by which a kernel is right, the flash-attention rule: its error against the reference in float64
is at most a few times the error of the reference in the same dtype, plus rounding, and what is NaN there is
NaN here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from known_good import check
from torch import Tensor

from attngraph.ir.language import evaluate
from attngraph.ir.language.evaluate import Tile
from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops import kernels
from attngraph.ir.ops.kernels import KERNELS, Kernel

from .programs import Call

REFERENCE = KERNELS["reference"]
Results = tuple[Tensor, Tensor]


def double(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def in_double(call: Call) -> Call:
    q, k, v = double(call.operands)
    return Call(call.text, (q, k, v), double(call.reads), call.sizes)


def forward(kernel: Kernel, call: Call) -> Results:
    return kernel.forward(parse(call.text), call.operands, call.reads, call.sizes)


def backward(kernel: Kernel, call: Call, results: Results, grads: Results) -> list[Tensor | None]:
    return kernel.backward(parse(call.text), call.operands, call.reads, call.sizes, results, grads)


def largest_score(call: Call) -> float:
    """The largest finite score, with masks and without: any way of computing it rounds by its magnitude."""
    program, (q, k, _) = parse(call.text), call.operands
    if 0 in (*q.shape[:3], *k.shape[:3]):
        return 1.0
    dot = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    tile = Tile((0, q.shape[0]), (0, q.shape[1]), (0, q.shape[2]), (0, k.shape[2]))
    env = kernels.environment(tile, double(call.reads), call.sizes, q.double())
    unmasked = ScoreProgram(tuple(s for s in program.statements if not hasattr(s, "predicate")))
    both = (evaluate.scores(p, dot, env) for p in (program, unmasked))
    return max(float(s.nan_to_num(0, 0, 0).abs().max()) for s in both)


def largest(tensor: Tensor) -> float:
    return float(tensor.nan_to_num(0, 0, 0).abs().max()) if tensor.numel() else 0.0


def assert_near(
    mine: Tensor, usual: Tensor, wanted: Tensor, amplitude: float, name: str, same_nan: bool = True
) -> None:
    """At most twice the error of `usual`, where both are to be `wanted`, plus rounding."""
    assert (mine.dtype, mine.shape) == (usual.dtype, usual.shape), name
    assert not same_nan or torch.equal(mine.isnan(), usual.isnan()), f"{name}: NaN elsewhere"
    assert torch.equal(mine.isfinite(), usual.isfinite()), f"{name}: infinite elsewhere"
    usable = mine.isfinite() & wanted.isfinite()  # what is infinite in a narrow type is not in float64
    error, own = (largest((t.double() - wanted)[usable]) for t in (mine, usual))
    scale = largest(wanted[usable]) + (name == "lse")
    eps, inner = torch.finfo(mine.dtype).eps, torch.finfo(kernels.accumulation_dtype(mine.dtype)).eps
    allowed = 2 * own + (4 * eps + 32 * inner * amplitude) * scale
    assert error <= allowed, f"{name}: error {error}, allowed {allowed}"


def assert_results(
    kernel: Kernel, call: Call, has_lse_of_nothing: bool = True, needed: bool = False
) -> Results | None:
    """Output and log-sum-exp (that of rows which see no key, if it has one): at most twice the reference's
    own error. Returns them, if they are `needed`."""

    def compare(found: Results) -> None:
        own, exact = forward(REFERENCE, call), forward(REFERENCE, in_double(call))
        amplitude = largest_score(call)
        assert_near(found[0], own[0], exact[0], amplitude, "out")
        assert_near(found[1], own[1], exact[1], amplitude, "lse", has_lse_of_nothing)

    return check(lambda: forward(kernel, call), compare, needed)


def assert_gradients(
    kernel: Kernel, call: Call, results: Results | None, rounding: float, of_lse: float, same_nan: bool = True
) -> None:
    """Of q, k, v and all that is read: at most four times the reference's own error. `results`: None for the
    kernel's own. Without `same_nan` what is NaN in one of them is left out."""
    exact_call = in_double(call)
    own_results, exact_results = forward(REFERENCE, call), forward(REFERENCE, exact_call)
    grads = torch.randn_like(own_results[0]), of_lse * torch.randn_like(own_results[1])

    def compare(found: list[Tensor | None]) -> None:
        own = backward(REFERENCE, call, own_results, grads)
        exact = backward(REFERENCE, exact_call, exact_results, (grads[0].double(), grads[1].double()))
        for number, (mine, usual, wanted) in enumerate(zip(found, own, exact, strict=True)):
            name = f"gradient of {'qkv'[number] if number < 3 else f'r{number - 3}'}"
            assert (mine is None) == (usual is None), name
            if mine is None or usual is None or wanted is None:
                continue
            assert (mine.dtype, mine.shape) == (usual.dtype, usual.shape), name
            assert not same_nan or torch.equal(mine.isnan(), usual.isnan()), f"{name}: NaN elsewhere"
            error, allowed = (largest(t.double() - wanted) for t in (mine, usual))
            allowed = 4 * allowed + rounding * max(1.0, largest(wanted))
            assert error <= allowed, f"{name}: error {error}, allowed {allowed}"

    check(lambda: backward(kernel, call, results or forward(kernel, call), grads), compare)
