"""What is carried over 100,000 tokens is no further from float64 than twice what the model itself is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir.ops.declare import RUNNERS
from attngraph.ir.ops.loop import running_fold
from attngraph.ir.ops.running_sum import running_sum

pytestmark = pytest.mark.usefixtures("graphs_of_this_run")

VOCABULARY, WIDTH, LAST, CHUNK = 61, 4, 60, 10_000
EPS = 2e-7


class Layer(nn.Module):
    """A model of one layer. `mixed` takes three projections of the tokens, and how many of the last queries
    are wanted: what is quadratic is computed for these alone, where many tokens are."""

    def __init__(self, mixed: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.embed, self.into = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head, self.mixed = nn.Linear(WIDTH, VOCABULARY), mixed

    def forward(self, ids: Tensor, last: int = 0) -> Tensor:
        q, k, v = self.into(self.embed(ids)).chunk(3, -1)
        return self.head(self.mixed(q, k, v, last))


def counted(x: Tensor) -> Tensor:
    return torch.arange(1, x.shape[1] + 1)[:, None]


def mean(q: Tensor, k: Tensor, v: Tensor, last: int) -> Tensor:
    return v.cumsum(1) / counted(v)


def variance(q: Tensor, k: Tensor, v: Tensor, last: int) -> Tensor:
    return ((v + 3) ** 2).cumsum(1) / counted(v) - ((v + 3).cumsum(1) / counted(v)) ** 2


def linear(q: Tensor, k: Tensor, v: Tensor, last: int) -> Tensor:
    states = (k[..., :, None] * v[..., None, :]).cumsum(1)
    return (q[..., None, :] @ states).squeeze(-2) / counted(v)


def normalised(q: Tensor, k: Tensor, v: Tensor, last: int) -> Tensor:
    q, k = q.exp(), k.exp()
    states = (k[..., :, None] * v[..., None, :]).cumsum(1)
    return (q[..., None, :] @ states).squeeze(-2) / (q * k.cumsum(1)).sum(-1, keepdim=True)


def _apart(k: Tensor, last: int) -> Tensor:
    place = torch.arange(k.shape[1], dtype=k.dtype)
    return place[-last:, None] - place


def products(q: Tensor, k: Tensor, v: Tensor, last: int) -> Tensor:
    return ((q[:, -last:] @ k.mT) * (_apart(k, last) >= 0)) @ v / 1000


def exponential(q: Tensor, k: Tensor, v: Tensor, last: int) -> Tensor:
    return torch.exp(-0.0005 * _apart(k, last)).masked_fill(_apart(k, last) < 0, 0) @ v / 1000


def gated(q: Tensor, k: Tensor, v: Tensor, last: int) -> Tensor:
    total = nn.functional.logsigmoid(k[..., :1] + 7).cumsum(1)
    decays = torch.exp((total[:, -last:] - total.mT).masked_fill(_apart(k, last) < 0, -torch.inf))
    return ((q[:, -last:] @ k.mT) * decays) @ v / 100


def attention(q: Tensor, k: Tensor, v: Tensor, last: int) -> Tensor:
    return (q[:, -last:] @ k.mT).masked_fill(_apart(k, last) < 0, -torch.inf).softmax(-1) @ v


def maximum(q: Tensor, k: Tensor, v: Tensor, last: int) -> Tensor:
    return v.cummax(1).values


def convolution(q: Tensor, k: Tensor, v: Tensor, last: int) -> Tensor:
    return sum(nn.functional.pad(v, (0, 0, n, 0))[:, : v.shape[1]] / (n + 1) for n in range(4))  # type: ignore[return-value]


LONG = 100_000
KINDS = {
    mean: LONG, variance: LONG, linear: LONG, normalised: LONG, products: LONG, exponential: LONG, gated:
    LONG, maximum: LONG, convolution: LONG, attention: 10_000,
}  # fmt: skip


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max())


@pytest.mark.parametrize("mixed", KINDS)
def test_a_decoders_error_stays_the_models_own(mixed: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, count = Layer(mixed).eval(), KINDS[mixed]
    ids = torch.randint(0, VOCABULARY, (1, count))
    with torch.no_grad():
        eager = model(ids, LAST)[:, -LAST:]
        exact = model.double()(ids, LAST)[:, -LAST:]
        decoder = attngraph.compile(model.float(), cache=True)
        _, state = decoder.prefill(ids[:, :9])
        for at in range(9, count - LAST, CHUNK):
            decoder.decode(ids[:, at : min(at + CHUNK, count - LAST)], state)
        steps = [decoder.decode(ids[:, n : n + 1], state) for n in range(count - LAST, count)]
    bound = 2 * error(eager, exact) + EPS * float(exact.abs().max())
    assert error(torch.cat(steps, 1), exact) <= bound


@pytest.mark.parametrize("together", [1, 3000])
@pytest.mark.parametrize("less_one", [False, True])
def test_sums_by_pytorchs_operations(together: int, less_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RUNNERS, "running_sum", [])
    count = LONG if together > 1 else 12_000
    torch.manual_seed(0)
    q, k, v = torch.rand(3, count, 1, 3).unbind()
    decay = -torch.rand(count, 1, 1) * 1e-4 if less_one else None
    beside = True, None, None, less_one

    def run(dtype: torch.dtype, together: int) -> Tensor:
        """The result of the last token."""
        state = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
        for at in range(0, count, together):
            parts = [None if t is None else t[at : at + together].to(dtype) for t in (q, k, v, decay)]
            starts = torch.tensor([0, min(together, count - at)])
            found, state = running_sum(*parts, state, starts, *beside)
        return found[-1]

    wanted = run(torch.float64, count)
    assert error(run(torch.float32, together), wanted) <= 2 * EPS * float(wanted.abs().max())


@pytest.mark.parametrize("how", ["prod", "logsumexp"])
def test_products_and_log_sum_exps_step_by_step(how: str) -> None:
    count = 20_000
    x = torch.rand(count, 4, generator=torch.Generator().manual_seed(0)) * 1e-3 + (how == "prod")
    state, starts = torch.zeros(1, 4, dtype=torch.float64), torch.tensor([0, 1])
    for n in range(count):
        found, state = running_fold(x[n : n + 1], state, starts, torch.tensor([n]), how)
    wanted = x.double().cumprod(0)[-1] if how == "prod" else x.double().logsumexp(0)
    assert error(found[0], wanted) <= EPS * float(wanted.abs().max())
