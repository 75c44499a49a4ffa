"""Gradients by compiled C against float64 autograd of the reference: programs, reads, NaN patterns, dtypes,
layouts, threads, memory; what is left to PyTorch's operations, and that this is told."""

import functools
import math
import types
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attngraph.codegen.cpu import backward, library, soft
from attngraph.codegen.cpu.call import Run
from attngraph.codegen.scalar import read_gradients
from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops import attention as ops
from attngraph.ir.ops.kernels import KERNELS, Operands

Reads = tuple[Tensor, ...] | list[Tensor]
REFERENCE = KERNELS["reference"]
LOWEST = -3.4028234663852886e38


pytestmark = pytest.mark.usefixtures("compiled_quickly")


def operands(
    B: int = 2, Hq: int = 4, Hkv: int = 2, Sq: int = 101, Skv: int = 131, D: int = 20, Dv: int = 12,
    dtype: torch.dtype = torch.float32,
) -> Operands:  # fmt: skip
    q, k, v = (
        torch.randn(shape).to(dtype) for shape in ((B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv))
    )
    return q, k, v


def double(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def check(
    program: str | ScoreProgram, given: tuple[Tensor, Tensor, Tensor], reads: Reads = (),
    sizes: Sequence[int] = (), rounding: float = 1e-5,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients are as near to float64 as the reference's in the same dtype, four times at most plus
    rounding, and NaN where these are."""
    parsed = parse(program) if isinstance(program, str) else program
    reads, kernel = list(reads), KERNELS["cpu.compiled"]
    results = REFERENCE.forward(parsed, given, reads, sizes)
    grads = torch.randn_like(results[0]), 0.3 * torch.randn_like(results[1])
    found = kernel.backward(parsed, given, reads, sizes, results, grads)
    eager = REFERENCE.backward(parsed, given, reads, sizes, results, grads)
    q, k, v, *others = double((*given, *reads))
    exact = REFERENCE.forward(parsed, (q, k, v), others, sizes)
    wanted = REFERENCE.backward(
        parsed, (q, k, v), others, sizes, exact, (grads[0].double(), grads[1].double())
    )
    for number, (mine, own, theirs) in enumerate(zip(found, eager, wanted, strict=True)):
        assert (mine is None) == (own is None)
        if mine is None or own is None or theirs is None:
            continue
        assert mine.dtype == own.dtype and mine.shape == own.shape
        assert torch.equal(mine.isnan(), own.isnan()), f"{number}: NaN elsewhere\n{parsed}"
        error, usual = ((t.double() - theirs).nan_to_num().abs().amax().item() for t in (mine, own))
        allowed = 4 * usual + rounding * max(1.0, theirs.nan_to_num().abs().amax().item())
        assert error <= allowed, f"{number}: error {error}, the reference's {usual}\n{parsed}"
    return found


@functools.cache
def masks() -> dict[str, Tensor]:
    padding = torch.ones(2, 131, dtype=torch.bool)
    padding[0, 100:], padding[1, :66] = False, False
    documents = torch.tensor([0] * 30 + [1] * 70 + [2] * 31).expand(2, 131)
    empty = torch.zeros(2, 131, dtype=torch.bool)
    empty[0, 70:90] = True
    return {"padding": padding, "documents": documents, "empty": empty, "seed": torch.tensor(2**32 - 5)}


PROGRAMS: dict[str, tuple[str, dict[str, int], tuple[str, ...], tuple[int, ...]]] = {
    "plain": ("s = 0.25 * dot", {}, (), ()),
    "causal": ("s = 0.25 * dot; keep k <= q", {}, (), ()),
    "causal by division": ("s = dot / 3; keep k <= q + 30", {}, (), ()),
    "aligned at the end": ("keep k <= q + n0", {"Sq": 50, "Skv": 200}, (), (150,)),
    "equal heads": ("keep k <= q", {"Hq": 2}, (), ()),
    "one key head": ("s = 0.25 * dot", {"Hkv": 1}, (), ()),
    "one query": ("keep k <= q + n0", {"Sq": 1}, (), (129,)),
    "one key": ("keep k <= q", {"Skv": 1}, (), ()),
    "one of each": ("", {"Sq": 1, "Skv": 1}, (), ()),
    "width 1": ("keep k <= q", {"D": 1, "Dv": 1}, (), ()),
    "width 64": ("s = 0.125 * dot; keep k <= q", {"D": 64, "Dv": 64}, (), ()),
    "width 128, values 70": ("s = 0.08 * dot; keep k <= q", {"D": 128, "Dv": 70}, (), ()),
    "whole blocks": ("keep k <= q", {"Sq": 96, "Skv": 128}, (), ()),
    "a token more than whole blocks": ("keep k <= q", {"Sq": 97, "Skv": 129}, (), ()),
    "window": ("keep k <= q and k > q - 8", {}, (), ()),
    "window and the first keys": ("keep k <= q and (q - k < 16 or k < 4)", {}, (), ()),
    "chunks": ("keep q // 16 == k // 16", {}, (), ()),
    "heads with masks of their own": ("keep k <= q and q - k < 16 * (h + 1)", {}, (), ()),
    "padding": ("keep r0[b, k]", {}, ("padding",), ()),
    "documents": ("keep k <= q and r0[b, q] == r0[b, k]", {}, ("documents",), ()),
    "an empty batch entry": ("keep r0[b, k]", {}, ("empty",), ()),
    "an empty batch entry, filled": ("keep r0[b, k] else -1e9", {}, ("empty",), ()),
    "rows without keys": ("keep k < q - 9", {}, (), ()),
    "blocks without keys": ("keep k < q - 64", {}, (), ()),
    "rows without keys, weights replaced": ("keep k < q - 9; p = where(isnan(p), 0, p)", {}, (), ()),
    "nothing kept": ("keep k > 1000", {}, (), ()),
    "fill of -1e9": ("s = 0.5 * dot; keep k < q - 9 else -1e9", {}, (), ()),
    "fill of finfo.min": (f"s = 0.5 * dot; keep k < q - 9 else {LOWEST!r}", {}, (), ()),
    "added finfo.min": (f"s = 0.5 * dot; keep k < q - 9 else s - {-LOWEST!r}", {}, (), ()),
    "fill that leaks": ("s = 0.5 * dot; keep k <= q else -5", {}, (), ()),
    "fill relative to the score": ("keep k <= q else s - 5", {}, (), ()),
    "fill of a larger multiple": ("s = 0.2 * dot; keep k <= q else 2 * s - 3; s = 1.5 * s", {}, (), ()),
    "hard mask, then a score": ("keep k <= q; s = max(s, -5)", {}, (), ()),
    "softcap": ("s = 5 * tanh(dot / 5); keep k <= q", {}, (), ()),
    "score over score": ("s = dot ** 2 / 9 + exp(s / 9); keep k <= q", {}, (), ()),
    "functions": ("s = sin(dot) + log(1.5 + cos(s)) + erf(s / 2) + sigmoid(dot) * abs(dot)", {}, (), ()),
    "slopes of the head's number": ("s = dot - 2 ** (-h - 1) * abs(k - q)", {}, (), ()),
    "sink": ("keep k <= q; sink 0.5", {}, (), ()),
    "sink and nothing kept": ("keep k < q - 9; sink 1", {}, (), ()),
    "dropout": ("p = where(0.1 <= random(r0[], b, h, q, k), p / 0.9, 0)", {}, ("seed",), ()),
    "causal dropout": ("keep k <= q; p = where(0.1 <= random(5, b, h, q, k), p / 0.9, 0)", {}, (), ()),
    "weights masked": ("p = where(k <= q, 2 * p, 0)", {}, (), ()),
    "far below zero": ("s = dot - 1e30", {}, (), ()),
    "large scores": ("s = 300 * dot; keep k <= q", {}, (), ()),
    "unequal scores": ("s = dot - 3 * k", {}, (), ()),
    "scores of NaN": ("s = where(k == q and q > 90, nan, dot)", {}, (), ()),
    "scores of infinity": ("s = where(k == q, inf, dot)", {}, (), ()),
}  # fmt: skip


QUICK = frozenset({
    "causal", "aligned at the end", "one query", "width 128, values 70", "documents", "softcap", "sink",
    "an empty batch entry, filled", "rows without keys", "rows without keys, weights replaced",
    "fill of finfo.min", "added finfo.min", "fill of a larger multiple", "causal dropout", "far below zero",
    "scores of NaN", "biases of heads", "by distance", "sink of each row", "gates of pairs",
    "fill that is read", "several statements",
})  # fmt: skip
"""The cases of every run; the others are run with the slow tests."""


def cases(names: Iterable[str]) -> list[ParameterSet]:
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", cases(PROGRAMS))
def test_gradients_are_those_of_the_reference(name: str, served: None) -> None:
    program, shape, reads, sizes = PROGRAMS[name]
    # Scores of 300 times a dot have digits of their own: rounding is that of their magnitude.
    rounding = 1e-3 if name == "large scores" else 1e-5
    check(program, operands(**shape), [masks()[read] for read in reads], sizes, rounding)


READING: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "bias": ("s = 0.3 * dot + r0[b, h, q, k]", ((2, 4, 101, 131),)),
    "bias of all batches": ("s = 0.3 * dot + r0[h, q, k]; keep k <= q", ((4, 101, 131),)),
    "biases that are multiplied": ("s = 0.3 * dot + r0[b, q, k] * r1[q, k]", ((2, 101, 131), (101, 131))),
    "slopes": ("s = 0.3 * dot + r0[h] * (k - q); keep k <= q", ((4,),)),
    "scales": ("s = dot * r0[h]; keep k <= q", ((4,),)),
    "bias of keys": ("s = 0.3 * dot + r0[b, k]; keep q - k < 9", ((2, 131),)),
    "biases of heads": ("s = 0.3 * dot + r0[h, k] + r1[q, h]", ((4, 131), (101, 4))),
    "by distance": ("s = 0.3 * dot + r0[k - q + n0, h]; keep k <= q", ((231, 4),)),
    "by a distance in range": ("s = 0.3 * dot + r0[b, min(abs(k - q), 12)]", ((2, 13),)),
    "by blocks": ("s = 0.3 * dot + r0[h, q // 16, k % 4]", ((4, 7, 4),)),
    "one number": ("s = 0.3 * dot * r0[]; s = s + r0[]", ((),)),
    "sink": ("s = 0.3 * dot; sink r0[h]; keep k <= q", ((4,),)),
    "sink of each row": ("s = dot * r1[]; keep k < q - 9; sink r0[b, q] + r1[]", ((2, 101), ())),
    "gates of heads": ("keep k <= q - 6; p = p * r0[h]", ((4,),)),
    "gates of keys": ("keep k <= q - 6; p = p * sigmoid(r0[b, k])", ((2, 131),)),
    "gates of pairs": ("keep k <= q; p = p * r0[q, k]", ((101, 131),)),
    "gates where NaN was replaced": ("keep k < q - 6; p = where(isnan(p), 0, p); p = p * r0[h]", ((4,),)),
    "fill that is read": ("s = 4 * tanh((dot + r0[h, k]) / 4); keep k <= q else r1[h] - 3", ((4, 131), (4,))),
    "several statements": ("s = r0[b, q] * 2 + max(dot, r1[k]); s = 0.1 * s + dot * r1[k] ** 2; keep k <= q",
                           ((2, 101), (131,))),
    "nothing is kept": ("keep k > 1000; s = s + r0[h]", ((4,),)),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(READING))
def test_gradients_of_what_scores_read(name: str, served: None) -> None:
    text, shapes = READING[name]
    reads = [torch.randn(shape) for shape in shapes]
    if name == "nothing is kept":  # the reference has NaN in no other place
        results = KERNELS["cpu.compiled"].forward(parse(text), operands(), reads, ())
        assert bool(results[0].isnan().all())
    check(text, operands(), reads, (100,))


@pytest.mark.parametrize("height", [-1e6, 1e4, 1e6])
def test_sinks_beside_scores_far_from_zero_have_their_gradients(height: float, served: None) -> None:
    """Of scores that float32 has exactly, where a log-sum-exp in float32 says nothing of the sum."""
    q, k, v = operands()
    given, sinks = (q.mul(2).round(), k.mul(4).round().div(4), v), torch.tensor([0.0, 1.0, 2.5, -1.0])
    check(f"s = 0.25 * dot + {height!r}; sink r0[h] + {height!r}", given, [sinks])


def test_a_table_read_at_places_that_are_read(served: None) -> None:
    tables = [
        torch.randn(4, 7),
        torch.randint(0, 7, (231,)),
        torch.randn(9, 4),
        torch.randint(0, 9, (101, 131)),
    ]
    check("s = 0.3 * dot + r0[h, r1[k - q + n0]] + r2[r3[q, k], h]", operands(), tables, (100,))


def test_pairs_are_summed_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch, served: None) -> None:
    monkeypatch.setattr(read_gradients, "PAIRS_AT_ONCE", 1)
    for name in ("bias", "bias of all batches", "by distance", "gates of pairs"):
        text, shapes = READING[name]
        check(text, operands(), [torch.randn(shape) for shape in shapes], (100,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", cases(["causal", "padding", "softcap", "rows without keys", "dropout"]))
def test_half_types_are_computed_in_float32(name: str, dtype: torch.dtype, served: None) -> None:
    program, shape, reads, sizes = PROGRAMS[name]
    check(program, operands(**shape, dtype=dtype), [masks()[read] for read in reads], sizes, 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reads_of_half_types_have_gradients_of_theirs(dtype: torch.dtype, served: None) -> None:
    reads = [torch.randn(4, 131).to(dtype), torch.randn(4).to(dtype)]
    found = check("s = 0.3 * dot + r0[h, k]; sink r1[h]", operands(), reads, (), 2e-2)
    assert [g.dtype for g in found[3:] if g is not None] == [dtype, dtype]


def test_strides_do_not_matter(lay_out: Callable[[Operands], Operands], served: None) -> None:
    check("s = 0.5 * dot; keep k <= q + 30", lay_out(operands(Dv=20)))


@pytest.mark.parametrize("place", ["q", "k", "v"])
@pytest.mark.parametrize("program", ["keep k <= q", "s = 0.5 * dot", "keep k <= q else -1e9"])
def test_nan_in_the_operands_comes_out_where_the_reference_has_it(
    place: str, program: str, served: None
) -> None:
    q, k, v = operands(Sq=60, Skv=60)
    {"q": q, "k": k, "v": v}[place][0, 1, 40, 2] = math.nan
    check(program, (q, k, v))


def gradients(program: str, given: tuple[Tensor, ...], reads: Reads = ()) -> list[Tensor | None]:
    parsed, kernel = parse(program), KERNELS["cpu.compiled"]
    q, k, v = given
    results = kernel.forward(parsed, (q, k, v), list(reads), ())
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in results]
    return kernel.backward(parsed, (q, k, v), list(reads), (), results, (grads[0], grads[1]))


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("heads", [1, 4])
def test_the_number_of_threads_changes_nothing(threads: int, heads: int, served: None) -> None:
    program = "s = 0.3 * dot + r0[h] * (k - q) + r1[h, k] + r2[r3[q, k]]; keep k <= q and q - k < 200"
    given = operands(1, heads, max(1, heads // 2), 400, 400)
    reads = [torch.randn(heads), torch.randn(heads, 400), torch.randn(5), torch.randint(0, 5, (400, 400))]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = gradients(program, given, reads)
        torch.set_num_threads(threads)
        for _ in range(3):
            found = gradients(program, given, reads)
            for mine, same in zip(found, expected, strict=True):
                assert (mine is None) == (same is None)
                assert mine is None or same is None or torch.equal(mine, same)
    finally:
        torch.set_num_threads(before)


def test_hidden_blocks_are_not_looked_at(served: None) -> None:
    """A NaN among keys that a mask hides is not met, where whole blocks are hidden."""
    q, k, v = operands(Sq=200, Skv=200)
    k[:, :, 128:], v[:, :, 128:] = math.nan, math.nan
    for program, reads in (("keep k < 128", ()), ("keep k < r0[b]", (torch.tensor([128, 64]),))):
        found = gradients(program, (q, k, v), reads)
        assert all(bool(g.isfinite().all()) for g in found if g is not None)


def test_blocks_are_hidden_by_whatever_a_mask_reads(served: None) -> None:
    """Tables read at places that are read: the library looks at the elements, forward and backward."""
    q, k, v = operands(Sq=200, Skv=200)
    k[:, :, 128:], v[:, :, 128:] = math.nan, math.nan
    kinds = torch.tensor([1] * 100 + [0] * 28 + [2] * 72)
    for text in ("keep r1[r0[k]]", "keep k < q + 300; keep r1[r0[k]]; s = 0.5 * s; keep r1[r0[k]]"):
        reads = [kinds, torch.tensor([True, True, False])]
        out = KERNELS["cpu.compiled"].forward(parse(text), (q, k, v), reads, ())[0]
        found = gradients(text, (q, k, v), reads)
        assert all(bool(t.isfinite().all()) for t in (out, *found) if t is not None)


def test_memory_grows_as_the_tokens_do(monkeypatch: pytest.MonkeyPatch, served: None) -> None:
    """All tensors that a backward pass asks for, in bytes: twice the tokens need twice as much, apart from
    what does not grow and from the map of blocks, one byte each."""
    asked: list[int] = []
    floats, empty = Run.floats, torch.empty

    def noted_floats(run: Run, count: int) -> int:
        asked.append(4 * count)
        return floats(run, count)

    def noted_empty(*size: int, **options: torch.dtype) -> Tensor:
        found = empty(*size, **options)
        asked.append(found.nbytes)
        return found

    sizes = []
    for tokens in (512, 1024, 2048):
        given = operands(1, 2, 1, tokens, tokens, 8, 8)
        with monkeypatch.context() as patch:
            patch.setattr(Run, "floats", noted_floats)
            patch.setattr(torch, "empty", noted_empty)
            asked.clear()
            gradients("s = 0.3 * dot + r0[k]; keep k <= q", given, [torch.randn(tokens)])
        sizes.append(sum(asked))
    assert sizes[2] - sizes[1] < 2.2 * (sizes[1] - sizes[0])


def test_what_a_finite_fill_hides_is_left_out_where_it_has_no_weight(
    monkeypatch: pytest.MonkeyPatch, served: None
) -> None:
    """Seen by a bound of the scores that is too small: then a fill that would leak does not."""
    given = operands(Sq=200, Skv=200)
    exact = gradients("keep k <= q else -1e4", given)
    monkeypatch.setattr(soft, "largest_score", lambda *_: 1e-3)
    torch.testing.assert_close(gradients("keep k <= q else -1e4", given), exact, rtol=0, atol=0)
    leaking = gradients("keep k <= q else -120", given)
    whole = [g.clone() for g in exact[:3] if g is not None]
    for mine, hard in zip(leaking[:3], whole, strict=True):
        torch.testing.assert_close(mine, hard, rtol=1e-4, atol=1e-4)


def test_gradients_that_nobody_wants_are_not_computed(monkeypatch: pytest.MonkeyPatch, served: None) -> None:
    asked: list[int] = []
    run = backward.team.run

    def noted(function: object, call: object, members: int) -> None:
        asked.append(backward.Gradients.from_address(call.gradients).wanted if call.gradients else 0)  # type: ignore[attr-defined]
        run(function, call, members)  # type: ignore[arg-type]

    monkeypatch.setattr(backward.team, "run", noted)
    expected = [
        (True, True, True, 7),
        (True, False, False, 1),
        (False, False, True, 4),
        (False, True, False, 2),
    ]
    for *wanted, bits in expected:
        tensors = [t.requires_grad_(want) for t, want in zip(operands(), wanted, strict=True)]
        bias = torch.randn(131)
        ops.attention(
            *tensors, "s = 0.3 * dot + r0[k]; keep k <= q", bias, kernel="cpu.compiled"
        ).sum().backward()
        assert asked == [0, bits], "the forward pass, then the backward pass"
        asked.clear()
        assert [t.grad is not None for t in tensors] == wanted
    bias.requires_grad_()
    q, k, v = operands()
    ops.attention(q, k, v, "s = 0.3 * dot + r0[k]; keep k <= q", bias, kernel="cpu.compiled").sum().backward()
    assert asked == [0, 0]
    assert bias.grad is not None and bool(bias.grad.any())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("keep k <= q; p = p * p", "weights that are not a multiple"),
        ("s = dot + r0[int(min(abs(dot), 5)), q]", "read where a score says"),
    ],
)  # fmt: skip
def test_what_the_library_has_no_gradients_for_is_left_and_told(text: str, reason: str) -> None:
    program, reads = parse(text), [torch.randn(101, 101)]
    found = library.library(backward.plan_gradients(program, operands(), reads))
    assert isinstance(found, str) and reason in found
    check(text, operands(), reads)
    (remark,) = KERNELS["cpu.compiled"].remarks(program)
    assert (
        remark.startswith("its gradients are computed by PyTorch's operations, in blocks")
        and reason in remark
    )


def test_an_index_out_of_range_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    program, given, reads = parse("s = dot + r0[k - q + 130]"), operands(), [torch.randn(262)]
    results = KERNELS["cpu.compiled"].forward(program, given, reads, ())
    with pytest.raises(IndexError, match="reads place"):
        KERNELS["cpu.compiled"].backward(program, given, [reads[0][:200]], (), results, results)


def random_programs(data: st.DataObject, language: types.SimpleNamespace) -> None:
    B, H, Sq, Skv = 1, 2, 66, 130
    program = data.draw(language.programs(1, masks=True))
    given, reads = operands(B, H, 1, Sq, Skv, 2, 2), language.reads(B, H, Sq, Skv, torch.float32)
    check(program, given, reads, (100, 40), 1e-4)


@given(data=st.data())
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_gradients_of_random_programs_are_those_of_the_reference(
    data: st.DataObject, language: types.SimpleNamespace
) -> None:
    random_programs(data, language)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_gradients_of_many_random_programs_are_those_of_the_reference(
    data: st.DataObject, language: types.SimpleNamespace
) -> None:
    random_programs(data, language)
