"""Loops over tokens run by C, against PyTorch's steps in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attngraph.codegen.cpu import loops
from attngraph.codegen.cpu.native import Chain
from attngraph.ir.ops import loop

CELL = r"r0[t, 5]\nr1[t, 5]\nr2[5, 5]\nr3[i0 < 5] = r1[t, i0]\nr4[i0 < 5] = sum[j < 5] r3[j] * r2[i0, j]"
CELL += r"\nr5[i0 < 5] = tanh(r4[i0] + r0[t, i0])\nreturn r5[t, 5]"
BEGIN = r"r0[t, 5]\nr1[i0 < 5] = tanh(r0[t, i0]) + 0.5\nreturn r1[t, 5]"


def program(results: str, begin: str) -> str:
    """A cell of a token, what is carried, and a weight."""
    return (
        f"begin:\n    v0 = attngraph.token_program.default([t0], '{BEGIN}')\n    return {begin}\n"
        f"step:\n    v0 = attngraph.token_program.default([t0, c0, s0], '{CELL}')\n    return {results}"
    )


PROGRAMS = {
    "the result is handed on": program("v0[0], v0[0]", "v0[0], v0[0]"),
    "two are handed on": program("v0[0], v0[0], c0", "v0[0], v0[0], t0"),
    "the result is what was handed on": program("c0, v0[0]", "t0, v0[0]"),
    "the token is handed on": program("v0[0], c1, t0", "v0[0], v0[0], t0"),
}
ROWS = {
    "one row": ([7], [4]),
    "a prompt": ([9], [0]),
    "rows of several lengths, some of which begin": ([3, 0, 6, 1, 6, 2], [0, 4, 2, 0, 0, 7]),
    "rows that only begin": ([1, 1], [0, 0]),
    "more rows than are taken at once": ([1 + n % 3 for n in range(45)], [n % 2 for n in range(45)]),
}


def called(text: str, tokens: Tensor, weight: Tensor, carried: list[Tensor], rows: str) -> list[Tensor]:
    lengths, seen = ROWS[rows]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return loop.loop([tokens], [weight], carried, starts, torch.tensor(seen), text)  # type: ignore[no-any-return]


def given(text: str, rows: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths, _ = ROWS[rows]
    handed = len(loops.parse(text).step.graph.output_node().args[0]) - 1  # type: ignore[arg-type]
    carried = [torch.randn(len(lengths), 5, generator=generator) for _ in range(handed)]
    return torch.randn(sum(lengths), 5, generator=generator), torch.randn(5, 5, generator=generator), carried


@pytest.fixture
def compiled() -> None:
    if loops._code() is None:
        pytest.skip("no compiler")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_are_those_of_pytorch(
    name: str, rows: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, taken = PROGRAMS[name], list[int]()
    tokens, weight, carried = given(text, rows)
    kept = [c.clone() for c in carried]
    wanted = called(text, tokens.double(), weight.double(), [c.double() for c in carried], rows)
    run = loops._Call.run

    def watched(self: loops._Call, code: object, shared: list[Tensor]) -> Tensor | None:
        found = run(self, code, shared)
        taken.append(0 if found is None else len(found))
        return found

    monkeypatch.setattr(loops._Call, "run", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = called(text, tokens, weight, carried, rows)
    finally:
        torch.set_num_threads(before)
    lengths, seen = ROWS[rows]
    assert sum(taken) == sum(n - (not s) * (n > 0) for n, s in zip(lengths, seen, strict=True))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(kept, carried, strict=True)), "a call changes nothing"


@pytest.mark.usefixtures("compiled")
def test_threads_share_the_depth_of_a_steps_products() -> None:
    """A weight `[in, out]` whose columns are few for a thread: sums of parts of the depth need their room in
    every step."""
    wide = CELL.replace("5", "160").replace("r2[i0, j]", "r2[j, i0]").replace("r160", "r5")
    begin = BEGIN.replace("5]", "160]")
    text = program("v0[0], v0[0]", "v0[0], v0[0]").replace(CELL, wide).replace(BEGIN, begin)
    tokens, weight, carried = torch.randn(7, 160), torch.randn(160, 160) / 12, torch.randn(1, 160)
    wanted = called(text, tokens.double(), weight.double(), [carried.double()], "one row")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = called(text, tokens, weight, [carried], "one row")
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_step_of_each_row_is_a_link(name: str) -> None:
    """Its results are those of the operation, and again where they are written to new memory."""
    text = PROGRAMS[name]
    tokens, weight, carried = torch.randn(3, 5), torch.randn(5, 5), [torch.randn(3, 5) for _ in range(2)]
    carried = carried[: len(loops.parse(text).step.graph.output_node().args[0]) - 1]  # type: ignore[arg-type]
    starts, first = torch.arange(4), torch.tensor([1, 5, 2])
    wanted = loop.loop([tokens], [weight], carried, starts, first, text)
    link = loops.step_of([tokens], [weight], carried, starts, first, text)
    assert link is not None
    chain = Chain([link])
    assert chain.run()
    for one, other in zip(link.results, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert link.renew is not None
    renewed = [link.renew(number) for number in range(len(wanted))]
    for result in link.results:
        if not any(result is t for t in (tokens, *carried)):
            result.fill_(torch.nan)
    assert chain.run()
    for own, new, other in zip(link.results, renewed, wanted, strict=True):
        torch.testing.assert_close(own if new is None else new, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("compiled")
def test_a_link_is_not_valid_where_a_row_begins_or_has_another_number_of_tokens() -> None:
    text = PROGRAMS["the result is handed on"]
    starts, first = torch.arange(4), torch.tensor([1, 5, 2])
    link = loops.step_of([torch.randn(3, 5)], [torch.randn(5, 5)], [torch.randn(3, 5)], starts, first, text)
    assert link is not None
    chain = Chain([link])
    for begins, seen, is_valid in (
        ([0, 1, 2, 3], [1, 5, 2], True),
        ([0, 1, 2, 3], [1, 0, 2], False),
        ([0, 2, 2, 3], [1, 5, 2], False),
        ([0, 1, 2, 3], [3, 1, 1], True),
    ):
        starts.copy_(torch.tensor(begins))
        first.copy_(torch.tensor(seen))
        assert chain.run() is is_valid


@pytest.mark.usefixtures("compiled")
def test_tensors_are_read_where_they_lie() -> None:
    text, rows = PROGRAMS["two are handed on"], "rows of several lengths, some of which begin"
    tokens, weight, carried = given(text, rows)
    wanted = called(text, tokens, weight, carried, rows)
    apart = torch.stack([tokens, tokens], 2)[:, :, 1]
    turned = [c.T.contiguous().T for c in carried]
    for one, other in zip(called(text, apart, weight.T.contiguous().T, turned, rows), wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("compiled")
def test_values_of_16_bits_are_computed_in_32() -> None:
    short = PROGRAMS["the result is handed on"]
    for size in ("r0[t, 5]", "r1[t, 5]", "r2[5, 5]"):
        short = short.replace(size + r"\n", size + r" bfloat16\n")
    short = short.replace(r"return r5[t, 5]", r"return r5[t, 5] bfloat16")
    short = short.replace(r"return r1[t, 5]", r"return r1[t, 5] bfloat16")
    tokens, weight, carried = (given(short, "one row")[0].bfloat16(), *given(short, "one row")[1:])
    carried, weight = [c.bfloat16() for c in carried], weight.bfloat16()
    assert (
        loops.run_steps(short, [tokens], [weight], [c.clone() for c in carried], [0], [7], None) is not None
    )
    wanted = called(short, tokens.double(), weight.double(), [c.double() for c in carried], "one row")
    found = called(short, tokens, weight, carried, "one row")
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, rtol=0.03, atol=0.03)


def test_a_step_with_other_operations_is_left_to_pytorch() -> None:
    text = PROGRAMS["the result is handed on"].replace(
        "return v0[0], v0[0]", "v1 = aten.sort.default(v0[0])\n    return v1[0], v0[0]"
    )
    assert loops.whole_step(PROGRAMS["the result is handed on"]) is not None
    assert loops.whole_step(text) is None
    tokens, weight, carried = given(text, "a prompt")
    found = called(text, tokens, weight, carried, "a prompt")
    wanted = called(text, tokens.double(), weight.double(), [c.double() for c in carried], "a prompt")
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=1e-5)
