"""Gradients by compiled C beyond what `conformance` holds every kernel to: large scores, reads of reads and
of half types, NaN in operands, threads, memory; what is left to PyTorch's operations, and that this is told.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.codegen.cpu import call, compiled, soft
from attngraph.codegen.cpu.call import Run
from attngraph.codegen.scalar import read_gradients
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import KERNELS, Operands

from .conformance.compare import REFERENCE, assert_gradients, forward
from .conformance.compare import backward as gradients_of
from .conformance.kernels import SUBJECTS
from .conformance.programs import CASES, Call

Reads = tuple[Tensor, ...] | list[Tensor]
pytestmark = pytest.mark.usefixtures("compiled_at_any_size")


def operands(
    B: int = 2, Hq: int = 4, Hkv: int = 2, Sq: int = 101, Skv: int = 131, D: int = 20, Dv: int = 12,
    dtype: torch.dtype = torch.float32,
) -> Operands:  # fmt: skip
    q, k, v = (
        torch.randn(shape).to(dtype) for shape in ((B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv))
    )
    return q, k, v


def check(
    program: str, operands: Operands, reads: Reads = (), sizes: Sequence[int] = (), rounding: float = 1e-5
) -> None:
    """Gradients given the reference's results are those of the reference."""
    call = Call(program, operands, list(reads), list(sizes))
    assert_gradients(KERNELS["cpu.compiled"], call, forward(REFERENCE, call), rounding, 0.3)


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
    subject = SUBJECTS["cpu.compiled"]
    for name in ("bias", "bias of all batches", "by distance", "gates of pairs"):
        call = CASES[name].of(subject.shape, torch.float32)
        check(call.text, call.operands, call.reads, call.sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reads_of_half_types_have_gradients_of_theirs(dtype: torch.dtype, served: None) -> None:
    reads = [torch.randn(4, 131).to(dtype), torch.randn(4).to(dtype)]
    text, given = "s = 0.3 * dot + r0[h, k]; sink r1[h]", operands()
    check(text, given, reads, (), 2e-2)
    call = Call(text, given, reads, [])
    results = forward(REFERENCE, call)
    found = gradients_of(KERNELS["cpu.compiled"], call, results, results)
    assert [g.dtype for g in found[3:] if g is not None] == [dtype, dtype]


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
    expected = gradients(program, given, reads)
    torch.set_num_threads(threads)
    for _ in range(3):
        found = gradients(program, given, reads)
        for mine, same in zip(found, expected, strict=True):
            assert (mine is None) == (same is None)
            assert mine is None or same is None or torch.equal(mine, same)


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
    run = compiled.native.run

    def noted(function: object, call: object, members: int) -> None:
        asked.append(compiled.Gradients.from_address(call.gradients).wanted if call.gradients else 0)  # type: ignore[attr-defined]
        run(function, call, members)  # type: ignore[arg-type]

    monkeypatch.setattr(compiled.native, "run", noted)
    expected = [
        (True, True, True, 7),
        (True, False, False, 1),
        (False, False, True, 4),
        (False, True, False, 2),
    ]
    for *wanted, bits in expected:
        tensors = [t.requires_grad_(want) for t, want in zip(operands(), wanted, strict=True)]
        bias = torch.randn(131)
        attngraph.attention(
            *tensors, "s = 0.3 * dot + r0[k]; keep k <= q", bias, kernel="cpu.compiled"
        ).sum().backward()
        assert asked == [0, bits], "the forward pass, then the backward pass"
        asked.clear()
        assert [t.grad is not None for t in tensors] == wanted
    bias.requires_grad_()
    q, k, v = operands()
    attngraph.attention(
        q, k, v, "s = 0.3 * dot + r0[k]; keep k <= q", bias, kernel="cpu.compiled"
    ).sum().backward()
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
    found = call.library(compiled.plan_gradients(program, operands(), reads))
    assert isinstance(found, str) and reason in found
    check(text, operands(), reads)
    (remark,) = (r for r in KERNELS["cpu.compiled"].remarks(program) if "the C compiler took" not in r)
    assert (
        remark.startswith("its gradients are computed by PyTorch's operations, in blocks")
        and reason in remark
    )


def test_an_index_out_of_range_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    program, given, reads = parse("s = dot + r0[k - q + 130]"), operands(), [torch.randn(262)]
    results = KERNELS["cpu.compiled"].forward(program, given, reads, ())
    with pytest.raises(IndexError, match="reads place"):
        KERNELS["cpu.compiled"].backward(program, given, [reads[0][:200]], (), results, results)
