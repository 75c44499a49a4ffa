"""Decoders of random models that see tokens far away; and what is noticed if the proof or its reach is
gone."""

from __future__ import annotations

from typing import Any

import pytest

from attngraph.fuzz import causal

NOTICED = range(40)


@pytest.mark.parametrize("seed", range(4))
def test_a_decoder_gives_what_the_model_gives_or_there_is_none(seed: int) -> None:
    wrong, _ = causal.check(seed)
    assert wrong == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_decoders_give_what_the_models_give(seed: int) -> None:
    wrong, _ = causal.check(seed)
    assert wrong == ""


def _first_wrong(seeds: Any) -> str:
    return next((wrong for wrong, _ in map(causal.check, seeds) if wrong), "")
