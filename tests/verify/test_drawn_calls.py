"""Calls that `attngraph.verify` tries: masks hide, positions count, and what is hidden is not compared."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.api.verify import calls as drawn

X, ALL = torch.randn(2, 9, 8), torch.ones(2, 9, dtype=torch.bool)


def attend(x: Tensor, seen: Tensor, low: float = -1e9) -> Tensor:
    return (x @ x.mT).masked_fill(~seen.bool()[:, None], low).softmax(-1) @ x


def with_numbers(x: Tensor, mask: Tensor) -> Tensor:
    return (x @ x.mT + mask).softmax(-1) @ x


def at(x: Tensor, places: Tensor) -> Tensor:
    return x * places[..., None].to(x.dtype).sin()


COUNTED = torch.arange(9).expand(2, 9)
FAULTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "another of two masks": (lambda x, a, b: attend(x, a), lambda x, a, b: attend(x, b), (X, ALL, ALL)),
    "a mask of ones dropped": (attend, lambda x, a: attend(x, ALL[:1, :1]), (X, ALL.long())),
    "a mask of numbers dropped": (
        with_numbers, lambda x, m: attend(x, ALL[:1, :1]), (X, torch.zeros(9, 9)),
    ),
    "positions made up": (at, lambda x, p: at(x, torch.arange(p.shape[1])), (X, COUNTED)),
    "padding taken to be at the end": (
        attend, lambda x, a: attend(x, torch.arange(a.shape[1]) < a.sum(1, keepdim=True)), (X, ALL),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_the_values_of_the_example_do_not_show_is_noticed(name: str) -> None:
    reference, candidate, inputs = FAULTS[name]
    verdict = attngraph.verify(reference, candidate, inputs, budget=5)
    assert verdict.status == "differs" and verdict.differences[0].kind == "values", str(verdict)
    assert attngraph.verify(reference, reference, inputs, budget=1)


def test_masks_of_numbers_that_hide_with_infinity_stay_masks() -> None:
    mask = torch.zeros(9, 9).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)
    assert attngraph.verify(with_numbers, with_numbers, (X, mask), budget=2)
    assert not attngraph.verify(with_numbers, lambda x, m: with_numbers(x, m.tril()), (X, mask), budget=2)
    longer = drawn.like(mask, [5, 5], "")
    assert torch.equal(longer == 0, torch.ones(5, 5).tril().bool()) and bool((longer <= 0).all())


def test_results_of_hidden_tokens_are_not_compared_and_that_is_said() -> None:
    """Causal attention of tokens padded at the beginning: what these get themselves means nothing."""

    def causal(low: float) -> Callable[[Tensor, Tensor], Tensor]:
        def run(x: Tensor, seen: Tensor) -> Tensor:
            keep = seen[:, None] & torch.ones(x.shape[1], x.shape[1]).tril().bool()
            return (x @ x.mT).masked_fill(~keep, low).softmax(-1).nan_to_num() @ x

        return run

    verdict = attngraph.verify(causal(-1e9), causal(-torch.inf), (X, ALL), budget=10)
    assert verdict and "whose own results are not compared" in str(verdict), str(verdict)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_hidden_tokens_at_the_end_of_a_causal_window_are_hidden(scale: float) -> None:
    """No real token sees them, masked or not; those beyond the window see none that is real. So it is where
    one score outweighs the others."""
    x = scale * X

    def windowed(low: float, also: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
        def run(x: Tensor, seen: Tensor) -> Tensor:
            band = torch.ones(x.shape[1], x.shape[1]).tril().triu(-1).bool()
            s = (x @ x.mT).masked_fill(~(seen[:, None].bool() & band), low)
            return s.softmax(-1).nan_to_num() @ x * (1 + also)

        return run

    verdict = attngraph.verify(windowed(-1e9), windowed(-torch.inf), (x, ALL.long()), budget=10)
    assert verdict and "whose own results are not compared" in str(verdict), str(verdict)
    assert not attngraph.verify(windowed(-1e9), windowed(-torch.inf, 1e-3), (x, ALL.long()), budget=10)


def test_a_sequence_of_one_token_is_not_hidden() -> None:
    assert all(drawn.like(ALL, [2, 1], manner).all() for manner in drawn.HIDING)
    assert not drawn.like(ALL, [2, 5], drawn.HIDING[2])[1].any()


def test_what_is_finite_in_the_dtypes_that_are_given_is_compared_in_these() -> None:
    """A fill that float32 cannot hold hides whole rows in float64 alone."""

    def attend(x: Tensor, seen: Tensor, scale: float = 1.0) -> Tensor:
        s = (x @ x.mT * scale).masked_fill(~seen[:, None].bool(), torch.finfo(x.dtype).min)
        p = s.softmax(-1, dtype=torch.float32).to(x.dtype)
        return (p @ x).cumsum(1)

    def other(x: Tensor, seen: Tensor) -> Tensor:
        s = (x @ x.mT).masked_fill(~seen[:, None].bool(), -1e30)
        return (s.softmax(-1) @ x).cumsum(1)

    assert attngraph.verify(other, attend, (X, ALL.long()), budget=10)


def test_tokens_with_another_flag_that_are_seen_are_compared() -> None:
    """A flag that hides nothing: an error at these tokens alone counts."""
    flags = ALL.clone()
    flags[:, 3] = False
    verdict = attngraph.verify(
        lambda x, f: x.cumsum(1) * 1.0, lambda x, f: x.cumsum(1) * (1 + 0.1 * ~f[..., None]), (X, flags)
    )
    assert verdict.status == "differs"


def test_positions_and_what_is_in_order_stay_so() -> None:
    assert drawn.like(COUNTED, [3, 5], "").tolist() == [[0, 1, 2, 3, 4]] * 3
    moved, anew = (drawn.like(COUNTED, [3, 6], manner) for manner in drawn.COUNTING)
    assert bool((moved.diff(dim=-1) == 1).all()) and bool((moved[:, 0] > 0).all())
    assert anew[0].tolist() == [0, 1, 2, 3, 0, 1]
    ordered = drawn.like(torch.tensor([0, 4, 9]), [20], "")
    assert bool((ordered.diff() >= 0).all()) and ordered.unique().numel() > 1


def test_a_dropped_argument_of_one_value_is_noticed() -> None:
    assert not attngraph.verify(lambda x, s: x * s, lambda x, s: x, (X, torch.ones(2, 9, 1)), budget=2)
    assert attngraph.verify(nn.Identity(), nn.Identity(), (torch.tensor(True),), gradients=False, budget=1)


def test_arguments_of_pieces_are_not_those_of_the_call() -> None:
    """Pieces of a model that is not captured whole have tensors of their own in the places of arguments."""

    def in_pieces(x: Tensor, a: Tensor) -> Tensor:
        y = attend(x, a)
        if x.sum().item() > 1e9:
            y = y + 1
        return attend(y, a)

    verdict = attngraph.verify(in_pieces, in_pieces, (X, ALL), budget=2)
    assert verdict and "2 attention(s) read tensors that are not known to be the same" in str(verdict)


def test_documents_that_do_not_see_each_other_are_not_hidden() -> None:
    """An error in one of two documents alone counts, as does one where nothing is hidden."""

    def packed(x: Tensor, documents: Tensor) -> Tensor:
        same = documents[:, None] == documents[:, :, None]
        return (x @ x.mT).masked_fill(~same, -torch.inf).softmax(-1) @ x

    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]] * 2)
    for wrong in (0, 1):
        verdict = attngraph.verify(
            packed,
            lambda x, d, w=wrong: packed(x, d) * (1 + 0.1 * (d == w))[..., None],
            (X, documents),
            budget=5,
        )
        assert verdict.status == "differs", wrong
    for scale in (0.5, 1.0):
        verdict = attngraph.verify(
            attend,
            lambda x, m, s=scale: attend(x, m) * torch.where(m, s, 1.5 - s)[..., None],
            (X, ALL),
            budget=5,
        )
        assert verdict.status == ("differs" if scale == 0.5 else "equal"), str(verdict)


def test_weights_that_are_not_known_to_be_the_same_are_not_made_smaller() -> None:
    model = nn.Linear(8, 8)
    closed = attngraph.verify(
        model, lambda x: x @ model.weight.mT.to(x.dtype) + model.bias.to(x.dtype), (X,), budget=2
    )
    assert closed and closed.tried > 1, str(closed)


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x).sin())
        return found


def test_weights_that_one_side_has_twice_are_made_smaller_on_both() -> None:
    for tied in (True, False):
        verdict = attngraph.verify(Tied(True), Tied(tied), (X,), budget=2, gradients=False)
        assert verdict and verdict.tried > 1, str(verdict)
