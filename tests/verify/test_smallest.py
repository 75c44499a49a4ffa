"""The smallest call at which two sides differ: told, as data, and to be called again."""

from pathlib import Path

import torch
from torch import Tensor, nn

import attngraph
from attngraph.api.verify.verdict import CODES


def attend(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ k


def test_tokens_rows_and_heads_are_as_few_as_still_differ() -> None:
    def wrong(q: Tensor, k: Tensor) -> Tensor:
        found = attend(q, k)
        return found * 1.01 if q.shape[1] > 2 and k.shape[2] > 5 else found

    inputs = {"q": torch.randn(3, 4, 9, 8), "k": torch.randn(3, 4, 11, 8)}
    verdict = attngraph.verify(attend, wrong, inputs, budget=20)
    (difference,) = verdict.differences
    assert difference.smallest == ("float32 [1, 3, 1, 8]", "float32 [1, 3, 6, 8]"), str(verdict)
    assert "the smallest call found at which they differ: float32 [1, 3, 1, 8]" in str(verdict)
    assert verdict.json()["differences"][0]["smallest"] == difference.smallest
    again = attngraph.verify(attend, wrong, verdict.inputs, budget=20)
    assert again.differences[0].smallest == difference.smallest
    assert torch.equal(verdict.inputs["q"], inputs["q"][:1, :3, :1])


def test_a_mask_stays_one_and_another_kind_of_difference_is_not_followed() -> None:
    def plain(x: Tensor, seen: Tensor) -> Tensor:
        return (x @ x.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ x

    def wrong(x: Tensor, seen: Tensor) -> Tensor:
        if x.shape[1] == 1:
            raise ValueError("one token")
        return plain(x, seen) if x.shape[1] < 4 else plain(x, seen.roll(1, 0))

    inputs = torch.randn(2, 7, 8), torch.ones(7, 7, dtype=torch.bool).tril()
    (difference,) = attngraph.verify(plain, wrong, inputs, budget=20).differences
    assert difference.code == "values" and difference.smallest == ("float32 [1, 4, 8]", "bool [4, 4]")


def test_no_time_is_taken_beyond_the_budget_and_the_first_call_is_the_smallest_then() -> None:
    verdict = attngraph.verify(torch.sin, torch.cos, (torch.randn(5, 3),), budget=0)
    assert verdict.differences[0].smallest == ("float32 [5, 3]",)
    assert isinstance(verdict.inputs, tuple)


def test_every_difference_has_a_code_that_is_in_the_list() -> None:
    def refuses(x: Tensor) -> Tensor:
        raise ValueError("never")

    x = (torch.randn(2, 3),)
    found = {
        attngraph.verify(torch.sin, other, x, budget=1).differences[0].code
        for other in (
            torch.cos,
            refuses,
            lambda x: (x, x),
            lambda x: x[:1].sin(),
            lambda x: (x / 0).sin(),
            lambda x: x.detach().sin(),
        )
    }
    found.add(attngraph.verify(refuses, torch.sin, x).differences[0].code)
    assert found == {
        "values", "candidate-refuses", "number-of-results", "shape", "not-finite", "gradients",
        "reference-refuses",
    } and found <= {*CODES}  # fmt: skip


def test_rows_and_tokens_that_are_as_many_are_cut_apart() -> None:
    inputs = (torch.randn(4, 4, 8),)
    verdict = attngraph.verify(lambda x: x + 0.0, lambda x: x * (1.0 + (x.shape[1] > 2)), inputs, budget=20)
    assert verdict.differences[0].smallest == ("float32 [1, 3, 8]",)


def test_the_page_for_agents_says_what_to_do_about_every_code() -> None:
    page = (Path(attngraph.__file__).parent.parent / "docs" / "SKILL.md").read_text("utf-8")
    rows = " ".join(line.partition(" | ")[0] for line in page.splitlines() if line.startswith("| `"))
    assert not [code for code in CODES if f"`{code}`" not in rows]


class Norm(nn.Module):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.weights, self.epsilon = nn.Linear(8, 8, bias=False), epsilon

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.weights(x)
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.epsilon)


def test_weights_stay_as_small_as_they_were_while_a_call_is_cut() -> None:
    verdict = attngraph.verify(Norm(1e-12), Norm(1.1e-12), (torch.randn(3, 5, 8),), budget=20)
    values, setting = verdict.differences
    assert values.about.endswith("float32 [3, 5, 8], numbers as small as 1e-3"), str(verdict)
    assert values.smallest == ("float32 [1, 1, 8]",)
    assert setting.code == "setting" and "epsilon is 1e-12 in the reference" in setting.about


def test_a_narrower_dtype_shows_at_the_smallest_call() -> None:
    def narrow(q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).bfloat16().softmax(-1).to(k.dtype) @ k

    verdict = attngraph.verify(attend, narrow, (torch.randn(3, 5, 8), torch.randn(3, 7, 8)), budget=20)
    (difference,) = (d for d in verdict.differences if d.kind == "values")
    assert difference.code == "rounds-narrower"
    assert difference.smallest == ("float32 [1, 1, 8]", "float32 [1, 1, 8]")
