"""Attention as other runtimes have it: the same numbers as the program's definition, or a reason."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attngraph
from attngraph.exporter.lower import PLAIN, SDPA, Lowering, Operands, Places
from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import ScoreProgram
from attngraph.meaning.masks.standard import NotStandard, standard_form

B, HQ, HKV, SQ, SK, D = 2, 4, 2, 5, 5, 8

STANDARD = [
    "",
    "s = 0.3 * dot",
    "s = dot / 4.0",
    "s = -(0.3 * dot)",
    "keep k <= q",
    "s = 0.3 * dot; keep k <= q and k > q - 2",
    "s = 0.3 * dot; keep r0[b, k] != 0",
    "s = 0.3 * dot; keep r0[b, k] != 0 else -3.4028234663852886e+38",
    "s = 0.3 * dot; keep r0[b, k] != 0 else -10000.0",
    "s = 0.3 * dot; keep r0[b, k] != 0 else s - 3.4028234663852886e+38",
    "s = 0.3 * dot; keep r0[b, k] != 0; p = where(isnan(p), 0.0, p)",
    "s = 0.3 * dot + r1[h, q, k]; keep r0[b, k] != 0; p = where(isnan(p), 0.0, p)",
    "s = 0.3 * dot + r1[h, q, k]",
    "s = (dot + r1[h, q, k]) * 0.3; keep k <= q",
    "s = 0.3 * dot - float(q - k) * 2.0 ** (-float(h)); keep k <= q",
    "s = 0.3 * dot; s = s * 0.5 + r1[h, q, k]",
    "keep k <= q; s = s * 0.5",
    "s = r2[h] * dot",
    "s = dot * (1.0 / float(q + 1)); keep k <= q",
    "s = 0.3 * dot; keep k <= q; sink r2[h]",
    "s = 0.3 * dot; sink r2[h]",
    "s = 0.3 * dot; keep r0[b, k] != 0; sink r2[h]",
    "s = 0.3 * dot; keep r0[b, k] != 0 else -1e9; sink r2[h]",
    "s = r1[h, q, k]; keep k <= q",
    "s = 0.3 * dot; p = p * r2[h]",
    "s = 0.3 * dot; keep k < n0",
    "keep k <= q else -1e9; keep r0[b, k] != 0 else -1e30",
    "keep r0[b, k] != 0 else -1e9; keep k <= q",
]
CAPPED = [
    "s = 5.0 * tanh(0.3 * dot / 5.0)",
    "s = 5.0 * tanh(0.06 * dot); keep k <= q",
    "s = 0.3 * dot; s = tanh(s / 5.0) * 5.0; keep k <= q and r0[b, k] != 0; p = where(isnan(p), 0.0, p)",
    "s = 5.0 * tanh(0.3 * dot / 5.0) + r1[h, q, k]",
]
OTHERS = {
    "s = dot * dot": "no multiple of the product",
    "s = r1[h, q, k] * dot": "depends on the key",
    "s = s + 0.5 * dot": "several places",
    "s = 0.3 * dot; keep k <= q else -5.0": "replaced by -5.0",
    "keep s > 0.0": "depends on the scores",
    "p = p * p": "weights are changed",
    "p = p * r1[h, q, k]": "weights are changed",
    "keep k <= q; s = tanh(s)": "tanh",
    "s = 0.3 * dot; keep k <= q else s + inf": "formula",
}


def operands(dtype: torch.dtype = torch.float64, keys: int = SK) -> Operands:
    q, k, v = (torch.randn(B, h, s, D, dtype=dtype) for h, s in ((HQ, SQ), (HKV, keys), (HKV, keys)))
    seen = torch.ones(B, keys, dtype=torch.int64)
    seen[0, :2] = 0
    seen[1] = 0  # nothing is seen
    return Operands(
        q, k, v, [seen, torch.randn(HQ, SQ, keys, dtype=dtype), torch.randn(HQ, dtype=dtype)], [3]
    )


def wanted(program: str, given: Operands) -> torch.Tensor:
    return attngraph.attention(
        given.q, given.k, given.v, program, *given.reads, sizes=given.sizes, kernel="reference"
    )


@pytest.mark.parametrize("program", STANDARD)
@pytest.mark.parametrize("way", [SDPA, PLAIN])
def test_standard_programs_are_written_as_torch_has_them(program: str, way: str) -> None:
    lowering, given_ = Lowering(way), operands()
    found = lowering.attention("a", parse(program), given_)[0]
    torch.testing.assert_close(found, wanted(program, given_), equal_nan=True)
    assert [a.how for a in lowering.found] == [way]


@pytest.mark.parametrize("program", CAPPED)
def test_torch_has_no_softcap_and_the_standard_has(program: str) -> None:
    lowering, given_ = Lowering(SDPA), operands()
    found = lowering.attention("a", parse(program), given_)[0]
    torch.testing.assert_close(found, wanted(program, given_), equal_nan=True)
    assert [a.how for a in lowering.found] == [PLAIN] and "tanh" in lowering.found[0].words
    form = standard_form(parse(program), torch.float32)
    assert form.softcap == 5.0 and form.scale == pytest.approx(0.3)


@pytest.mark.parametrize("program", OTHERS)
def test_other_programs_are_written_out_and_the_reason_is_told(program: str) -> None:
    lowering, given_ = Lowering(SDPA), operands()
    found = lowering.attention("a", parse(program), given_)[0]
    torch.testing.assert_close(found, wanted(program, given_), equal_nan=True)
    assert [a.how for a in lowering.found] == [PLAIN]
    assert OTHERS[program] in lowering.found[0].words
    with pytest.raises(NotStandard):
        standard_form(parse(program), torch.float32)


def test_the_causal_mask_is_the_operations_own() -> None:
    assert standard_form(parse("s = 0.3 * dot; keep q >= k"), torch.float32).causal
    for near in ("keep k < q", "keep k <= q + 1", "keep k <= q and k > q - 2", "keep k <= q else -1e9"):
        assert not standard_form(parse(near), torch.float32).causal, near


def test_a_fill_in_half_precision_is_not_a_mask() -> None:
    with pytest.raises(NotStandard, match="half precision"):
        standard_form(parse("keep k <= q else -65504.0"), torch.float16)


@given(data=st.data())
@settings(max_examples=60)
def test_any_program_means_the_same(language: Any, data: st.DataObject) -> None:
    """Random programs, of which some are standard."""
    program: ScoreProgram = data.draw(language.programs())
    given_ = operands()
    reads = language.reads(B, HQ, SQ, SK)
    given_ = Operands(given_.q, given_.k, given_.v, reads, [2, 3])
    expected = attngraph.attention(
        given_.q, given_.k, given_.v, program, *reads, sizes=given_.sizes, kernel="reference"
    )
    for way in (SDPA, PLAIN):
        found = Lowering(way).attention("a", program, given_)[0]
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    "program", ["s = 0.3 * dot; keep k <= q", "keep k > q - 3 and k <= q", "keep k <= q; sink r0[h]"]
)
@pytest.mark.parametrize("way", [SDPA, PLAIN])
def test_padded_rows_in_a_cache_are_as_each_alone(program: str, way: str) -> None:
    """Row 1 has two padded tokens before its own; positions count from its own first token."""
    past, new, skips = 3, 2, (0, 2)
    total = past + new
    q = torch.randn(2, HQ, new, D, dtype=torch.float64)
    k, v = (torch.randn(2, HKV, total, D, dtype=torch.float64) for _ in range(2))
    sink = torch.randn(HQ, dtype=torch.float64)
    pad = torch.tensor(skips).reshape(2, 1, 1, 1)
    at, keys = torch.arange(past, total).reshape(1, 1, new, 1), torch.arange(total).reshape(1, 1, 1, total)
    places = Places(
        (at - pad).clamp(min=0), (keys - pad).clamp(min=0), keys >= pad, (keys == at) & (at < pad)
    )
    given_ = Operands(q, k[:, :, past:], v[:, :, past:], [sink], [], (k[:, :, :past], v[:, :, :past]))
    found = Lowering(way).attention("a", parse(program), given_, places)[0]
    for row, skip in enumerate(skips):
        alone = torch.zeros(1, HQ, total - skip, D, dtype=torch.float64)
        alone[:, :, -new:] = q[row]
        expected = attngraph.attention(
            alone, k[row : row + 1, :, skip:], v[row : row + 1, :, skip:], program, sink, kernel="reference"
        )
        torch.testing.assert_close(found[row], expected[0, :, -new:])
