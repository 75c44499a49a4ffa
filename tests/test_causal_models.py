"""The benchmark of all causal language models shrinks a configuration by the names of its settings."""

from __future__ import annotations

from attngraph.benchmark.causal_models.shrink import ATTEMPTS, given_back, role, shrunk
from attngraph.benchmark.causal_models.table import table

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
    rows = [
        {"class": "A", "outcome": "equal"},
        {"class": "B", "outcome": "refused", "reason": "because | so"},
    ]
    page = table(rows, "5.0", 24)
    assert "| equal | 1 of 2 |" in page
    assert "| B | because \\| so |" in page
