"""Sums that a decoder carries, against the op's own operations in float64."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.codegen.triton import sums
from attngraph.codegen.triton.decode import FEW
from attngraph.ir.ops.declare import RUNNERS
from attngraph.ir.ops.running_sum import running_sum
from attngraph.models.recurrent_mixers import DeltaRule, GatedLinearAttention, MixerConfig

KINDS = ("a vector", "plain", "one decay", "a decay for each element", "delta rule")


def operands(lengths: tuple[int, ...], kind: str, width: int, dtype: torch.dtype) -> list[Any]:
    """The op's arguments without `inclusive`; queries are shared by all heads, keys lie in another order,
    values are a part of something wider."""
    torch.manual_seed(0)
    n, heads, depth = sum(lengths), 3, 1 if kind == "a vector" else 6
    q = k = decay = left = right = None
    if kind != "a vector":
        q, k = torch.randn(n, 1, depth).expand(n, heads, depth), torch.randn(depth, n, heads).permute(1, 2, 0)
    if kind in ("one decay", "a decay for each element"):
        decay = torch.rand(n, heads, 1 if kind == "one decay" else depth)
    if kind == "delta rule":
        left, right = (torch.randn(n, heads, 2, depth).tanh() / 3 for _ in range(2))
    v, state = torch.randn(n, heads, width + 3)[..., 3:], torch.randn(len(lengths), heads, depth, width)
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    given = [None if t is None else t.to(dtype) for t in (q, k, v, decay)]
    return [*given, state, starts, *(None if t is None else t.to(dtype) for t in (left, right))]


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (7, 0, 3), (0, FEW)])
@pytest.mark.parametrize("width", [1, 70])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("carried", [torch.float64, torch.float32])
@pytest.mark.parametrize("less_one", [False, True])
def test_running_sums(
    lengths: tuple[int, ...], width: int, kind: str, inclusive: bool, dtype: torch.dtype,
    carried: torch.dtype, less_one: bool,
) -> None:  # fmt: skip
    given = operands(lengths, kind, width, dtype)
    given[4] = given[4].to(carried)
    if given[3] is not None and less_one:
        given[3] = given[3] - 1
    arranged = (*given[:6], inclusive, *given[6:], less_one)
    found = sums.run_sums(*arranged)
    assert found is not None
    wide = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in arranged]
    wanted = running_sum(*wide)  # type: ignore[arg-type]
    off = 2e-5 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(found[0].double(), wanted[0], atol=off, rtol=off)
    torch.testing.assert_close(found[1].double(), wanted[1], atol=2e-5, rtol=2e-5)


def test_what_its_kernel_does_not_serve_is_left_to_pytorch() -> None:
    def run(given: list[Any]) -> object:
        return sums.run_sums(*given[:6], True, *given[6:])

    assert run(operands((FEW + 1,), "plain", 4, torch.float32)) is None
    assert run(operands((1,), "plain", 4, torch.float64)) is None
    mixed = operands((1,), "plain", 4, torch.float16)
    assert run([mixed[0].float(), *mixed[1:]]) is None
    deep, matrix = torch.randn(1, 1, 300), torch.randn(1, 1, 300, 300)
    assert run([deep, deep, deep, None, matrix, torch.tensor([0, 1]), None, None]) is None


@pytest.mark.parametrize("mixer", [DeltaRule, GatedLinearAttention])
def test_a_decoder_by_this_kernel(mixer: type[torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of few tokens, and one token after the other, against the whole sequence. The first of these
    steps runs this kernel; later ones may be recorded, and are then C."""
    torch.manual_seed(0)
    model, x = mixer(MixerConfig(width=32)).eval(), torch.randn(2, 9, 32)
    served: list[sums.SumsPlan] = []
    real = sums.launch_sums
    monkeypatch.setattr(sums, "launch_sums", lambda p, *rest: (served.append(p), real(p, *rest))[1])
    monkeypatch.setitem(RUNNERS, "running_sum", [sums.run_sums])
    decoder = attngraph.compile(model, cache=True)
    out, state = decoder.prefill(x[:, :6])
    served.clear()
    found = [out]
    for t in range(6, 9):
        found.append(decoder.decode(x[:, t : t + 1], state))
    assert served
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found, 1), model(x), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_in_order_chunks_of_any_length_have_the_same_bits(kind: str) -> None:
    length = 2 * FEW + 3
    q, k, v, decay, state, _, left, right = operands((length,), kind, 9, torch.float32)

    def run(state: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
        def some(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[first:end]

        starts = torch.tensor([0, end - first])
        found = sums.run_sums(
            some(q), some(k), v[first:end], some(decay), state, starts, True, some(left), some(right),
            in_order=True,
        )  # fmt: skip
        assert found is not None
        return found

    whole, after = run(state, 0, length)
    parts = []
    for first, end in itertools.pairwise((0, 1, 20, length)):
        part, state = run(state, first, end)
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole) and torch.equal(state, after)
