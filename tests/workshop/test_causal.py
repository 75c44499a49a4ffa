"""Decoders of random models that see tokens far away; and what is noticed if the proof or its reach is
gone."""

from __future__ import annotations

import pytest

from attngraph.meaning.tokens.looks_back import LooksBack
from attngraph.passes.insert_kv_cache import carry
from workshop.fuzz import causal


@pytest.mark.parametrize("seed", range(4))
def test_a_decoder_gives_what_the_model_gives_or_there_is_none(seed: int) -> None:
    wrong, _ = causal.check(seed)
    assert wrong == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_decoders_give_what_the_models_give(seed: int) -> None:
    wrong, _ = causal.check(seed)
    assert wrong == ""


@pytest.mark.parametrize("seed", [541, 694])
def test_the_search_notices_that_nothing_is_shown(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LooksBack, "require", lambda *_: None)
    assert "is off by" in causal.check(seed)[0]


@pytest.mark.parametrize("seed", [431, 2363])
def test_the_search_notices_that_sums_are_tried_on_few_tokens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carry, "reach", lambda *_: 0)
    assert "is off by" in causal.check(seed)[0]


@pytest.mark.parametrize("seed", [541, 694, 431, 2363, 5109, 5184, 5384])
def test_with_the_proof_these_are_right(seed: int) -> None:
    assert causal.check(seed)[0] == ""
