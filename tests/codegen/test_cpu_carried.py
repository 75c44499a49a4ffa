"""`cpu.carried`: running sums and windows of tokens by C, against float64, and in recorded steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attngraph
from attngraph.codegen.cpu.carried import run_last_tokens, run_sums
from attngraph.codegen.cpu.record.recording import Recording
from attngraph.ir.ops.history import last_tokens
from attngraph.ir.ops.running_sum import running_sum
from tests.cache.small import by_steps

LENGTHS = [(1,), (1, 1, 1), (7, 0, 3), (0, 40)]


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("width", [1, 5, 64, 100])
@pytest.mark.parametrize("kind", ["a vector", "plain", "one decay", "a decay for each digit", "delta rule"])
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("carried", [torch.float64, torch.float32])
@pytest.mark.parametrize("less_one", [False, True])
def test_running_sums(
    lengths: tuple[int, ...], width: int, kind: str, inclusive: bool, carried: torch.dtype, less_one: bool
) -> None:
    torch.manual_seed(0)
    n, heads, depth = sum(lengths), 3, 1 if kind == "a vector" else 6
    q = k = decay = left = right = None
    if kind != "a vector":
        q, k = torch.randn(n, 1, depth).expand(n, heads, depth), torch.randn(depth, n, heads).permute(1, 2, 0)
    if kind in ("one decay", "a decay for each digit"):
        decay = torch.rand(n, heads, 1 if kind == "one decay" else depth)
    if kind == "delta rule":
        left, right = (torch.randn(n, heads, 2, depth).tanh() / 3 for _ in range(2))
    v, state = torch.randn(n, heads, width + 3)[..., 3:], torch.randn(len(lengths), heads, depth, width)
    if decay is not None and less_one:
        decay = decay - 1
    given = (q, k, v, decay, state.to(carried), starts_of(lengths), inclusive, left, right, less_one)
    found = run_sums(*given)
    assert found is not None
    wide: list[Any] = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in given]
    for own, wanted in zip(found, running_sum(*wide), strict=True):
        torch.testing.assert_close(own.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("first", [0, 1, 9])
@pytest.mark.parametrize(("row_dim", "dim"), [(0, 1), (0, 2), (1, 0)])
def test_windows(lengths: tuple[int, ...], first: int, row_dim: int, dim: int) -> None:
    """Pages of 4 tokens in a ring: a row's tokens lie at their place modulo the tokens of its pages."""
    torch.manual_seed(0)
    rows, back, page, columns = len(lengths), 3, 4, 2
    starts = starts_of(lengths)
    row = torch.repeat_interleave(torch.arange(rows), torch.tensor(lengths))
    place = torch.arange(len(row)) + (row + 1) * back
    inner = (5, 6)
    store, new = torch.randn(rows * columns, page, *inner), torch.randn(1, len(row), *inner)
    arranged = [t.movedim((0, 1), (row_dim, dim)).contiguous() for t in (store, new)]
    table = torch.randperm(rows * columns).view(rows, columns)
    rest = (table, starts, torch.full((rows,), first), place, row_dim, dim, back)
    found = run_last_tokens(*arranged, *rest)
    assert found is not None
    wanted = last_tokens(*(t.double() for t in arranged), *rest)
    assert wanted.shape == (len(row), back + 1, *inner)
    torch.testing.assert_close(found, wanted.float(), atol=0, rtol=0)


def test_other_dtypes_are_left_to_pytorch() -> None:
    v, state = torch.randn(1, 2, 4, dtype=torch.bfloat16), torch.randn(1, 2, 1, 4)
    assert run_sums(None, None, v, None, state, torch.tensor([0, 1]), True, None, None) is None


class Mixer(nn.Module):
    """A causal convolution and a decayed sum."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(30, width), nn.Linear(width, 1)
        self.convolve = nn.Conv1d(width, width, 4, groups=width, padding=3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = functional.silu(self.convolve(x.mT)[..., : ids.shape[1]]).mT
        log_decay = functional.logsigmoid(self.gate(x)).cumsum(1)
        kept = (log_decay - log_decay.mT).tril().exp().tril()
        return (x + kept @ x) @ self.embed.weight.T


def test_a_recorded_step_reads_and_writes_what_is_carried_where_it_lies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States of earlier steps stay as they were: a step is repeated from a copy, and gives the same."""
    served: list[int] = []
    run = Recording.run

    def counted(self: Any, inputs: Any) -> Any:
        served.append(len(self.carries))
        return run(self, inputs)

    monkeypatch.setattr(Recording, "run", counted)
    torch.manual_seed(0)
    model = Mixer().eval()
    ids = torch.randint(0, 30, (2, 14))
    decoder = attngraph.compile(model, cache=True)
    with torch.no_grad():
        whole = model(ids)
        logits, state = decoder.prefill(ids[:, :5])
        torch.testing.assert_close(logits, whole[:, :5])
        for t in range(5, 14):
            before = state.copy()
            found = decoder.decode(ids[:, t : t + 1], state).clone()
            torch.testing.assert_close(found, whole[:, t : t + 1])
            torch.testing.assert_close(decoder.decode(ids[:, t : t + 1], before), found, atol=0, rtol=0)
    assert served and set(served) == {1}


def targets_of(model: nn.Module) -> set[str]:
    decoder = attngraph.compile(model.eval(), cache=True)
    ids = torch.randint(0, 30, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(by_steps(decoder, ids, 6)[0], model(ids))
    (step,) = decoder._derived.all()
    return {str(n.target) for n in step.graph.graph.nodes if n.op == "call_function"}


class Window(nn.Module):
    """A causal convolution, or a shift by a token."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.out = kind, nn.Embedding(30, 24), nn.Linear(24, 30)
        groups = 1 if kind == "all channels" else 4 if kind == "groups" else 24
        dilation = 3 if kind == "dilated" else 1
        self.convolve = nn.Conv1d(24, 24, 3, groups=groups, dilation=dilation, padding=2 * dilation)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.kind == "a shift":
            mixed = x.sigmoid() * functional.pad(x, (0, 0, 1, 0))[:, :-1]
        else:
            mixed = self.convolve(x.mT)[..., : ids.shape[1]].mT
        return self.out(functional.gelu(x + mixed))


@pytest.mark.parametrize("kind", ["each channel", "dilated", "groups", "all channels", "a shift"])
def test_windows_are_part_of_token_programs(kind: str) -> None:
    left = targets_of(Window(kind))
    assert "attngraph.last_tokens.default" in left
    assert not {t for t in left if "with_earlier" in t or "conv1d" in t}, left
