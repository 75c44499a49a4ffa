"""Every kernel computes every program as the reference does in float64, forward and backward, or says why
not.

A kernel is a line of `kernels.py`, a program one of `programs.py`, and `compare.py` holds the rule. Golden
files hold which programs a kernel refuses, and whose gradients it leaves to PyTorch's operations, with the
reasons.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import assume, given, settings
from known_good import check
from torch import Tensor

from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops.kernels import Kernel, Operands, accumulation_dtype

from .compare import (
    REFERENCE,
    assert_gradients,
    assert_near,
    assert_results,
    forward,
    in_double,
    largest_score,
)  # fmt: skip
from .kernels import DECODERS, SUBJECTS, Decoder, Subject
from .paging import Paged
from .programs import CASES, CORE, IN_OTHER_DTYPES, Call


def refusal(subject: Subject, name: str, dtype: torch.dtype) -> str | None:
    return None if subject.device != "cpu" else CASES[name].refusal(subject.kernel(), subject.shape, dtype)


def pairs(direction: str) -> list[ParameterSet]:
    """A kernel, a program and a dtype that it serves; where it takes long, most are slow tests."""
    found = []
    for subject in SUBJECTS.values():
        for dtype in subject.dtypes:
            is_first = dtype is subject.dtypes[0]
            others = IN_OTHER_DTYPES[direction]
            often = {*CORE, *others} if is_first else others[:1]
            for name in CASES if is_first else others:
                if refusal(subject, name, dtype) is None:
                    marks = [pytest.mark.gpu] if subject.device != "cpu" else []
                    marks += [pytest.mark.slow] if direction in subject.slow and name not in often else []
                    words = f"{subject.name}-{name}-{str(dtype)[6:]}"
                    found.append(pytest.param(subject, name, dtype, id=words, marks=marks))
    return found


@pytest.fixture
def noted(subject: Subject, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls that the kernel leaves to another one."""
    if subject.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU that PyTorch can use")
    for name in subject.fixtures:
        request.getfixturevalue(name)
    torch.manual_seed(0)
    return subject.prepare(monkeypatch)


@pytest.fixture
def kernel(subject: Subject, noted: list[object]) -> Kernel:
    return subject.kernel()


@pytest.mark.parametrize(("subject", "name", "dtype"), pairs("forward"))
def test_results_are_those_of_the_reference(
    subject: Subject, name: str, dtype: torch.dtype, kernel: Kernel, noted: list[object]
) -> None:
    call = CASES[name].of(subject.shape, dtype, subject.device)
    assert_results(kernel, call, subject.has_lse_of_nothing)
    has_wide_reads = any(read.dtype is torch.float64 for read in call.reads)
    assert call.is_empty or has_wide_reads or not noted


@pytest.mark.parametrize(("subject", "name", "dtype"), pairs("backward"))
def test_gradients_are_those_of_the_reference(
    subject: Subject, name: str, dtype: torch.dtype, kernel: Kernel, noted: list[object]
) -> None:
    call = CASES[name].of(subject.shape, dtype, subject.device)
    # Scores of 300 times a dot have digits of their own: rounding is that of their magnitude.
    rounding = subject.allowed(dtype) * (100 if name == "large scores" else 1)
    for of_lse in subject.of_lse:
        assert_gradients(kernel, call, None, rounding, of_lse, name not in subject.unpromised)
    assert subject.left(call) or not noted


ON_THE_CPU = pytest.mark.parametrize("subject", [s for s in SUBJECTS.values() if s.device == "cpu"], ids=str)


@ON_THE_CPU
def test_what_a_kernel_refuses_it_refuses_for_the_reason_written_down(
    subject: Subject, kernel: Kernel, golden: Callable[..., None]
) -> None:
    lines = []
    for name, case in CASES.items():
        dtype = subject.dtypes[0]
        reason = refusal(subject, name, dtype)
        if reason is not None:
            lines.append(f"{name}: {reason}")
        elif left := subject.left(case.of(subject.shape, dtype)):
            lines.append(f"{name}: its gradients are left to PyTorch's operations: {left}")
    golden(f"{subject.name}.txt", "\n".join(lines) + "\n")


@ON_THE_CPU
@pytest.mark.parametrize("name", ["causal", "scaled", "fill that leaks"])
def test_strides_do_not_matter(
    subject: Subject, name: str, kernel: Kernel, lay_out: Callable[[Operands], Operands]
) -> None:
    call = CASES[name].of(dataclasses.replace(subject.shape, Dv=subject.shape.D), subject.dtypes[0])
    call = dataclasses.replace(call, operands=lay_out(call.operands))
    assert_results(kernel, call, subject.has_lse_of_nothing)
    if name == "causal":
        assert_gradients(kernel, call, None, subject.allowed(subject.dtypes[0]), 0.3)


@ON_THE_CPU
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2], ids="qkv")
def test_nan_and_infinity_in_the_operands_come_out_where_the_reference_has_them(
    subject: Subject, bad: float, place: int, kernel: Kernel
) -> None:
    """In few tokens, so that no key is in a block which its mask hides: that one need not be read."""
    tokens = min(subject.shape.N, 60)
    shape = dataclasses.replace(subject.shape, N=tokens, Sq=tokens, Skv=tokens)
    for name in ("causal", "scaled", "fill of -1e9", "softcap"):
        if refusal(subject, name, subject.dtypes[0]) is None:
            call = CASES[name].of(shape, subject.dtypes[0])
            call.operands[place][0, -1, 2 * tokens // 3, 2] = bad
            expected, found = (forward(k, call)[0] for k in (REFERENCE, kernel))
            assert torch.equal(expected.isnan(), found.isnan()), name


@ON_THE_CPU
@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0, 300.0])
def test_a_fill_of_minus_ten_thousand_leaks_where_scores_are_large(
    subject: Subject, scale: float, kernel: Kernel
) -> None:
    q, k, v = CASES["causal, unscaled"].of(subject.shape, subject.dtypes[0]).operands
    call = Call("keep k <= q else -10000", (scale * q, scale * k, v), [], [])
    found = assert_results(kernel, call, subject.has_lse_of_nothing, needed=True)
    hidden = forward(REFERENCE, dataclasses.replace(call, text="keep k <= q"))
    if scale == 300:
        assert not torch.allclose(hidden[0], found[0])


def over_a_cache() -> list[ParameterSet]:
    """A decoder, and a program whose queries and keys are the same tokens."""
    return [
        pytest.param(d, n, id=f"{d}-{n}", marks=[pytest.mark.slow] if d.slow and n not in CORE else [])
        for d in DECODERS
        for n, case in CASES.items()
        if not {"B", "Sq", "Skv"} & case.shape.keys()
    ]


@pytest.mark.parametrize(("decoder", "name"), over_a_cache())
@pytest.mark.parametrize("page", [3, 24])
def test_new_tokens_over_a_cache_get_what_they_get_in_whole_sequences(
    decoder: Decoder, name: str, page: int, request: pytest.FixtureRequest
) -> None:
    """Over pages of a few tokens, and of more than a kernel reads side by side."""
    for fixture in decoder.fixtures:
        request.getfixturevalue(fixture)
    call, tokens = CASES[name].of(decoder.shape, torch.float32), decoder.shape.N
    paged = Paged(*call.operands[1:], [(tokens - 1, 1), (tokens - 3, 3)], page)

    def compare(found: Tensor | None) -> None:
        assert (found is None) == (name in decoder.refuses)
        if found is not None:
            own, wanted = (paged.packed(forward(REFERENCE, c)[0]) for c in (call, in_double(call)))
            assert_near(found, own, wanted, largest_score(call), "out")

    check(lambda: decoder.attend(call, paged), compare)


def agree_on_random_programs(subject: Subject, kernel: Kernel, language: Any, many: bool) -> None:
    forwards, backwards = (n * (40 if many else 1) for n in subject.examples)
    shape, dtype = dataclasses.replace(subject.shape, **subject.random), subject.dtypes[0]
    operands = CASES["plain"].of(shape, dtype).operands
    reads = language.reads(shape.B, shape.Hq, shape.Sq, shape.Skv, accumulation_dtype(dtype))

    @settings(max_examples=forwards)
    @given(language.programs(1, masks=True))
    def results(program: ScoreProgram) -> None:
        assume(kernel.refuse(program, operands) is None)
        assert_results(kernel, Call(program.text, operands, reads, [100, 40]), subject.has_lse_of_nothing)

    @settings(max_examples=backwards)
    @given(language.programs(1, masks=True))
    def gradients(program: ScoreProgram) -> None:
        assume(kernel.refuse(program, operands) is None)
        call = Call(program.text, operands, reads, [100, 40])
        assume(subject.left(call) is None)
        assert_gradients(kernel, call, None, 10 * subject.allowed(dtype), 0.3)

    results()
    gradients()


RANDOM = pytest.mark.parametrize("subject", [s for s in SUBJECTS.values() if s.examples], ids=str)


@RANDOM
def test_random_programs_agree(subject: Subject, kernel: Kernel, language: Any) -> None:
    agree_on_random_programs(subject, kernel, language, many=False)


@pytest.mark.slow
@RANDOM
def test_many_random_programs_agree(subject: Subject, kernel: Kernel, language: Any) -> None:
    agree_on_random_programs(subject, kernel, language, many=True)
