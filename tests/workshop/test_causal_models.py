"""The benchmark of all causal language models shrinks a configuration by the names of its settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workshop.bench.stock.decoders import NEW, VOCABULARY, compared, decided_by_length, page, prompts
from workshop.bench.stock.shrink import ATTEMPTS, given_back, role, shrunk

LARGE = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 64,
    "num_experts_per_tok": 8, "pad_token_id": 31999, "eos_token_id": 2, "rms_norm_eps": 1e-5,
    "layer_types": ["sliding", "sliding", "sliding", "full"] * 8, "is_decoder": False, "adapter": 4096,
    "rope_parameters": {"rope_theta": 1e4, "mrope_section": [16, 24, 24]},
}  # fmt: skip


def test_settings_that_belong_together_stay_consistent() -> None:
    small = shrunk(LARGE, ATTEMPTS[0])
    assert small["hidden_size"] == small["num_attention_heads"] * small["head_dim"]
    assert small["num_attention_heads"] % small["num_key_value_heads"] == 0
    assert small["layer_types"] == ["sliding", "full"], "one layer of each kind"
    assert small["num_hidden_layers"] == 2
    assert small["adapter"] == small["hidden_size"], "a number that equals a replaced one follows it"
    assert sum(small["rope_parameters"]["mrope_section"]) == small["head_dim"] // 2
    assert small["num_experts_per_tok"] <= small["num_experts"]
    assert max(small["pad_token_id"], small["eos_token_id"]) < small["vocab_size"]
    assert small["pad_token_id"] != small["eos_token_id"] == 2
    assert small["is_decoder"] is True
    assert small["rms_norm_eps"] == LARGE["rms_norm_eps"]


def test_a_setting_can_be_given_back_alone() -> None:
    small = shrunk(LARGE, ATTEMPTS[0])
    back = given_back(small, LARGE, ("head_dim",))
    assert back["head_dim"] == 128
    assert {n for n in back if back[n] != small[n]} == {"head_dim"}


def test_a_name_that_tells_nothing_has_no_role() -> None:
    assert role("num_experts_per_token") == "chosen"
    assert role("eos_token_id") == "token"
    assert role("rope_theta") == ""


def test_the_table_counts_every_class_and_keeps_the_reasons() -> None:
    rows = [{"cell": "A", "outcome": "equal"}, {"cell": "B", "outcome": "refused", "reason": "because | so"}]
    text = page(rows, "5.0")
    assert "| equal | 1 of 2 |" in text
    assert "| B | because \\| so |" in text


class Logits:
    """A model: a token's successor is drawn from its number; `odd_at`, by how many tokens there are too."""

    def __init__(self, odd_at: int | None = None, only: int | None = None) -> None:
        self.odd_at, self.only = odd_at, only

    def __call__(self, input_ids: Tensor) -> Any:
        following = (input_ids * 7 + 3) % VOCABULARY
        is_odd = self.only is None or int(input_ids[0, 0]) == self.only
        if self.odd_at is not None and is_odd and input_ids.shape[1] > self.odd_at:
            following[:, 2] += input_ids.shape[1] % 2
        return SimpleNamespace(
            logits=torch.nn.functional.one_hot(following % VOCABULARY, VOCABULARY).double()
        )


class Decoded:
    """A decoder that computes each token once. `wrong`: it adds one to the last token."""

    def __init__(self, wrong: bool = False) -> None:
        self.wrong = wrong

    def generate(self, ids: Tensor, new: int) -> Tensor:
        for _ in range(new):
            ids = torch.cat([ids, (ids[:, -1:] * 7 + 3) % VOCABULARY], 1)
        return torch.cat([ids[:, :-1], ids[:, -1:] + self.wrong], 1)


def test_a_model_whose_logits_depend_on_how_many_tokens_follow_is_undecided() -> None:
    sequence = prompts()
    assert decided_by_length(Logits(), sequence) is None
    assert decided_by_length(Logits(odd_at=4), sequence) == (
        "token 2 has other logits in a sequence of 3 than in one of 7"
    )


@pytest.mark.parametrize("odd_at", [None, 10])
def test_tokens_that_differ_are_wrong_unless_the_models_own_are_undecided(odd_at: int | None) -> None:
    model: Any = Logits(odd_at)
    right, wrong = (compared(model, Decoded(w)) for w in (False, True))  # type: ignore[arg-type]
    assert right["outcome"] == "equal"
    if odd_at is None:
        assert wrong == {"outcome": "wrong", "reason": f"{NEW - 1} tokens are equal, then not"}
    else:
        assert wrong["outcome"] == "undecided"
        assert "token 2 has other logits" in wrong["reason"]


def test_other_prompts_are_taken_where_the_first_are_undecided() -> None:
    model: Any = Logits(odd_at=10, only=int(prompts(1)[0, 0]))

    class WrongAtFirst(Decoded):
        def generate(self, ids: Tensor, new: int) -> Tensor:
            self.wrong = bool(torch.equal(ids, prompts(1)))
            return super().generate(ids, new)

    row = compared(model, WrongAtFirst())  # type: ignore[arg-type]
    assert row["outcome"] == "equal"
    assert len(row["undecided"]) == 1
    text = page([{"cell": "A", **row}], "5.0")
    assert "undecided there (it chooses among equal scores): A." in text
